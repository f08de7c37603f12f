"""``spatial.Hybrid``: a pipeline whose layers are stages and whose gradients are added to the caller's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched import spatial
from commsched.pipeline import Chain
from scheduler.ir.actions import HALOS
from scheduler.ir.layout import Placement
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate
from tests.support.pipeline_runs import on_threads
from tests.support.spatial_stages import every_case

TILES, ONE, TWO = spatial.Tiles((1, 2)), spatial.Samples(), spatial.Samples(2)


def stages(norm: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    between = nn.BatchNorm2d(4, momentum=0.5) if norm else nn.ReLU()
    layers: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), between),
        nn.Sequential(nn.Conv2d(4, 5, 3, 2, 1), nn.Tanh()),
        nn.Sequential(nn.Conv2d(5, 5, 3), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)),
    ]
    return [layer.double() for layer in layers]


def batch(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, 11, 14, generator=dice).double(), torch.randint(3, (rows,), generator=dice)


def joined(layers: list[nn.Module]) -> list[nn.Module]:
    return [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]


CASES: list[tuple[str, list[Placement], dict[str, Any]]] = [
    ("1f1b", [TILES, ONE], {}),
    ("gpipe", [TILES, TWO], {}),
    ("zero_bubble", [TILES, ONE], {"mirrored": True}),
    ("interleaved", [TILES, ONE], {"virtual": 2}),
]


@pytest.mark.parametrize(("schedule", "placements", "options"), CASES, ids=[case[0] for case in CASES])
def test_gradients_of_uneven_batches_are_added_to_the_callers(
    schedule: str, placements: list[Placement], options: dict[str, Any]
) -> None:
    """13 and 7 samples do not divide by the micro-batches, nor these by the ranks that share samples."""
    start = stages() if schedule == "interleaved" else joined(stages())
    plain = nn.Sequential(*copy.deepcopy(start))
    expected = []
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    for rows in (13, 7):
        images, target = batch(rows)
        loss = F.cross_entropy(plain(images), target)
        loss.backward()
        expected.append(loss.item())

    def work(fabric: Any) -> Any:
        mine = copy.deepcopy(start)
        trainer = spatial.Hybrid(
            mine,
            placements,
            loss=F.cross_entropy,
            microbatches=3 - options.get("mirrored", 0),
            schedule=schedule,
            fabric=fabric,
            **options,
        )
        validate(trainer.program)
        for parameter in trainer.parameters():
            parameter.grad = torch.ones_like(parameter)
        losses = [trainer.step(*batch(rows)) for rows in (13, 7)]
        grads = {number: [p.grad for p in mine[number].parameters()] for number in trainer.held}
        trainer.close()
        return losses, grads

    seen = set()
    for losses, grads in on_threads(sum(placement.size for placement in placements), work):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
        for number, found in grads.items():
            seen.add(number)
            wanted = [p.grad for p in plain[number].parameters()]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert seen == set(range(len(start)))


@pytest.mark.thorough
def test_the_programs_of_all_cases_are_valid_and_simulated() -> None:
    """The ranks of tests/dist run these very programs (tests/support/spatial_stages.py)."""
    for case in every_case():
        layers = case.build()[0]
        program = case.program(layers)
        validate(program)
        times = tuple(Layer(str(number), 1.0, 2.0, 400) for number in range(len(layers)))
        result = simulate(program, Profile("stages", times), Link(1e-3, 1e-6))
        halos = {event.name for event in result.timeline if event.action.kind in HALOS}
        assert result.period > 0 and len(halos) == 2 * case.microbatches * (1 + case.mirrored)


def test_each_direction_has_its_own_statistics() -> None:
    """A rank is a tile of both: with one set of buffers, tiles of a replica would differ in evaluation."""
    start, placements = joined(stages(norm=True)), [spatial.Tiles((1, 3)), ONE]
    images, target = batch(4)
    ways = [nn.Sequential(*copy.deepcopy(start)) for _ in range(2)]
    evaluated = 0.0
    for number, plain in enumerate(ways):
        for image in images[2 * number : 2 * number + 2]:
            plain(image[None])
        plain.eval()
        half = slice(2 * number, 2 * number + 2)
        evaluated += F.cross_entropy(plain(images[half]), target[half]).item() / 2

    def work(fabric: Any) -> float:
        trainer = spatial.Hybrid(
            copy.deepcopy(start),
            placements,
            loss=F.cross_entropy,
            microbatches=2,
            mirrored=True,
            fabric=fabric,
        )
        trainer.step(images, target)
        value = trainer.evaluate(images, target)
        trainer.close()
        return value

    torch.testing.assert_close(on_threads(4, work), [evaluated] * 4, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mirrored", [False, True])
def test_stages_of_a_factory_are_made_where_they_are(mirrored: bool) -> None:
    images, target = batch(8)

    def trained(fabric: Any, made: Any) -> tuple[float, list[Tensor], int]:
        trainer = spatial.Hybrid(
            made, [TILES, ONE], loss=F.cross_entropy, microbatches=2, mirrored=mirrored, fabric=fabric
        )
        loss = trainer.step(images, target)
        elsewhere = [p for stage in trainer.stages for p in stage.parameters() if p.is_meta]
        return loss, [p.grad for p in trainer.parameters() if p.grad is not None], len(elsewhere)

    # Copies: threads that seeded torch's one generator at the same time would start with other weights.
    given = stages()
    whole = on_threads(3, lambda fabric: trained(fabric, joined(copy.deepcopy(given))))
    parts = on_threads(3, lambda fabric: trained(fabric, lambda: joined(stages())))
    for (loss, grads, _), (part_loss, part_grads, elsewhere) in zip(whole, parts, strict=True):
        assert loss == part_loss and len(grads) == len(part_grads)
        assert all(map(torch.equal, grads, part_grads))
        assert mirrored or elsewhere


def test_elements_of_a_list_are_layers() -> None:
    layers = [*joined(stages()), nn.Flatten(), nn.Sequential(nn.ReLU())]
    assert Chain(layers, elements=True).names == ("0", "1", "2", "3")
    assert len(Chain(layers)) == 4  # of the four modules with parameters inside


@pytest.mark.parametrize(
    ("count", "placements", "options", "said"),
    [
        (1, [TILES, ONE], {}, r"runs 2 stages on 2 placements, got 1 stages, 2 placements"),
        (2, [ONE, ONE], {"schedule": "interleaved"}, r"runs 4 stages on 2 placements, got 2 stages"),
        (2, [ONE, ONE], {"schedule": "2bw"}, r"begins a step before .* use a schedule like 1f1b"),
        (2, [ONE, ONE], {"microbatches": 4}, r"3 rows in 4 micro-batches leave 0 for 1 replicas"),
    ],
)
def test_what_cannot_be_is_refused(
    count: int, placements: list[Placement], options: dict[str, Any], said: str
) -> None:
    def work(fabric: Any) -> None:
        parts = joined(stages())[:count]
        spatial.Hybrid(parts, placements, loss=F.cross_entropy, fabric=fabric, **options).step(*batch(3))

    with pytest.raises(ValueError, match=said):
        on_threads(sum(placement.size for placement in placements), work)
