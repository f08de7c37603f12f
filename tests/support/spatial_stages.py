"""Five SGD steps of a model in stages, on the ranks that a case names and in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched import spatial
from commsched.pipeline.build import bare_profile
from commsched.pipeline.chain import Chain
from commsched.pipeline.messages import Fabric
from dnn_bench.spatial.models import MODELS, cut_stages, target_of
from scheduler.ir.layout import Placement
from scheduler.ir.program import Program
from scheduler.pipelines import generate

# Layers, filters, samples of a micro-batch, height and width, cells.
SIZES = {
    "resnet": (18, 4, (3, 44, 52)),
    "amoebanet": (3, 4, (3, 38, 34)),
    "unet": (2, 4, (3, 21, 26)),
}
CELLS = {"resnet": 10, "amoebanet": 7, "unet": 6}
# How many cells run on whole images in a pipeline: U-Net's skips cross the cut, AmoebaNet's two values do.
TAILS = {"resnet": 4, "amoebanet": 3, "unet": 3}
STEPS = 5
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Case:
    """``tail``: cells that run on whole images, on ``share`` ranks; 0: everything runs on tiles."""

    model: str
    grid: tuple[int, int]
    tail: int = 0
    share: int = 1
    replicas: int = 1
    mirrored: bool = False
    microbatches: int = 1
    samples: int = 1
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        return (self.grid[0] * self.grid[1] + (self.share if self.tail else 0)) * self.replicas

    @property
    def count(self) -> int:
        """Micro-batches of all replicas."""
        return self.replicas * (1 + self.mirrored) * self.microbatches

    @property
    def placements(self) -> list[Placement]:
        tiles = spatial.Tiles(self.grid)
        return [tiles, spatial.Samples(self.share)] if self.tail else [tiles]

    def program(self, stages: Sequence[nn.Module]) -> Program:
        """The program that the ranks run, made without them."""
        chain, cuts = Chain(stages, elements=True), range(len(stages))
        return generate(
            self.schedule,
            len(stages),
            self.microbatches,
            replicas=self.replicas,
            placements=self.placements,
            mirrored=self.mirrored,
            profile=bare_profile(chain, "stages", cuts),
            cuts=cuts,
        )

    def build(self) -> tuple[list[nn.Module], Tensor, Tensor]:
        """Stages in float64 with a batch, the same on every call."""
        layers, filters, image = SIZES[self.model]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            cells = MODELS[self.model](layers, filters, 3)
            assert len(cells) == CELLS[self.model]
            balance = [len(cells) - self.tail, self.tail] if self.tail else [len(cells)]
            stages = [stage.double() for stage in cut_stages(cells, balance)]
            shape = (self.count * self.samples, *image)
            images = torch.randn(shape).double()
            target = target_of(self.model, shape, 3, torch.Generator().manual_seed(1))
        return stages, images, target


def with_schedules(cases: Iterable[Case]) -> list[Case]:
    """Every case with every schedule."""
    return [replace(case, schedule=schedule) for case in cases for schedule in SCHEDULES]


PIPELINES = with_schedules(
    [
        Case("resnet", (2, 1), TAILS["resnet"], microbatches=3, mirrored=True),
        Case("unet", (1, 2), TAILS["unet"], microbatches=2),
        Case("amoebanet", (2, 1), TAILS["amoebanet"], mirrored=True),
    ]
)
SHARES = with_schedules(
    [
        # Only the head is shared: statistics stay whole.
        Case("resnet", (1, 2), 1, share=2, microbatches=2, samples=2),
        Case("amoebanet", (1, 2), replicas=2, microbatches=2),
        Case("unet", (2, 1), replicas=2, mirrored=True),
    ]
)
GRIDS = ((1, 4), (4, 1), (2, 2), (3, 2))
MIRRORED = (False, True)


def with_a_pipeline(grid: tuple[int, int]) -> list[Case]:
    models = product(CELLS, MIRRORED)
    return with_schedules(Case(n, grid, TAILS[n], microbatches=2, mirrored=m) for n, m in models)


def with_replicas(grid: tuple[int, int]) -> list[Case]:
    return with_schedules(Case(n, grid, replicas=2, mirrored=m) for n, m in product(CELLS, MIRRORED))


def with_everything(name: str) -> list[Case]:
    """A pipeline, replicas and mirrored replicas at once."""
    # Statistics over few pixels of one sample would blow rounding up over so many micro-batches.
    return with_schedules(
        [Case(name, (2, 2), TAILS[name], replicas=2, mirrored=True, microbatches=2, samples=2)]
    )


def every_case() -> Iterator[Case]:
    yield from (*PIPELINES, *SHARES)
    for grid in GRIDS:
        yield from (*with_a_pipeline(grid), *with_replicas(grid))
    for name in CELLS:
        yield from with_everything(name)


def reference(case: Case, stages: list[nn.Module], images: Tensor, target: Tensor) -> list[float]:
    """Losses of the steps in this process; each micro-batch has batch statistics of its own."""
    model = nn.Sequential(*stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part, labels in zip(images.chunk(case.count), target.chunk(case.count)):
            loss = F.cross_entropy(model(part), labels) / case.count
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def check(case: Case, fabric: Fabric | None = None) -> None:
    """On the case's ranks, after ``commsched.init()`` or with a fabric: the program is the case's, and losses
    and parameters are those of one process.
    """
    stages, images, target = case.build()
    plain = copy.deepcopy(stages)
    expected = reference(case, plain, images, target)
    trainer = spatial.Hybrid(
        stages,
        case.placements,
        loss=F.cross_entropy,
        microbatches=case.microbatches,
        replicas=case.replicas,
        mirrored=case.mirrored,
        schedule=case.schedule,
        timeout=100,
        fabric=fabric,
    )
    assert trainer.program == case.program(stages)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(trainer.step(images, target))
        optimizer.step()
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
    held = trainer.held
    for number in held:
        _compare(case, dict(stages[number].named_parameters()), dict(plain[number].named_parameters()))
    if not case.mirrored and case.replicas == 1:  # buffers are those of all micro-batches
        for number in held:
            _compare(case, dict(stages[number].named_buffers()), dict(plain[number].named_buffers()))
        model = nn.Sequential(*plain).eval()
        with torch.no_grad():
            parts = zip(images.chunk(case.count), target.chunk(case.count))
            whole = sum(F.cross_entropy(model(x), y).item() for x, y in parts) / case.count
        assert abs(trainer.evaluate(images, target) - whole) < 1e-10, case
    trainer.close()


def _compare(case: Case, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        if not torch.allclose(value, expected[name], rtol=0, atol=1e-10):
            raise AssertionError(f"{case}: {name} differs by {(value - expected[name]).abs().max()}")
