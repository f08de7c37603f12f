"""Pipelines with stages on tiles, replicas and mirrored replicas, against one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from commsched.pipeline import Chain, Pipeline
from scheduler.ir.layout import Placement, Samples, Tiles
from scheduler.ir.link import Cluster, Link
from scheduler.ir.profile import Layer, Profile
from scheduler.pipelines.partition import partition
from scheduler.validate import validate
from tests.support.pipeline_runs import momentum, on_threads

CASES: list[Sequence[Placement]] = [
    (Tiles((2, 2)), Samples()),
    (Tiles((1, 2)), Tiles((2, 1)), Samples(2)),
    (Samples(), Tiles((1, 3))),
]


def model() -> nn.Sequential:
    """Convolutions, then a head: the last stage may run on tiles too, as its pooling is replicated."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))
    layers = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Conv2d(4, 5, 3, 2, 1),
        nn.Sequential(nn.Conv2d(5, 5, 3), head),
    ]
    return nn.Sequential(*layers).double()


def data(rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    dice = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 2, 13, 16, generator=dice).double(), torch.randint(3, (rows,), generator=dice))
        for _ in range(3)
    ]


def one_process(rows: int) -> tuple[list[float], dict[str, torch.Tensor], float]:
    plain, losses = model(), []
    optimizer = momentum(list(plain.parameters()))
    for images, target in data(rows):
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(images), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    images, target = data(rows)[0]
    return losses, plain.state_dict(), F.cross_entropy(plain(images), target).item()


@pytest.mark.few
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("placements", CASES)
@pytest.mark.parametrize("outside", [False, True])
def test_tiles_are_one_process(
    placements: Sequence[Placement], schedule: str, mirrored: bool, outside: bool
) -> None:
    """``outside``: the caller's optimizer steps with the gradients that the pipeline leaves."""
    rows, replicas = 13, 1
    expected, state, evaluated = one_process(rows)
    start, batches = model(), data(rows)  # not on the threads, which share one random generator

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(start),
            schedule,
            2,
            (len(placements), replicas),
            loss=F.cross_entropy,
            optimizer=None if outside else momentum,
            cuts=range(len(placements)),
            placements=placements,
            mirrored=mirrored,
            bucket_bytes=256,
            fabric=fabric,
        )
        validate(pipeline.program)
        optimizer = momentum(list(pipeline.parameters())) if outside else None
        losses = []
        for batch in data(rows):
            losses.append(pipeline.step(batch))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        found = losses, pipeline.state_dict(), pipeline.evaluate(batches[0])
        pipeline.close()
        return found

    for losses, weights, value in on_threads(sum(each.size for each in placements), work):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(value, evaluated, rtol=0, atol=1e-10)
        for name, tensor in state.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-10)


def test_a_training_goes_on_with_other_tiles() -> None:
    """``training_state`` from stages on tiles to a mirrored pipeline, and to other tiles: one process."""
    losses, state, _ = one_process(13)
    start, batches = model(), data(13)
    layouts: list[Any] = [
        {"placements": (Tiles((1, 2)), Samples(2)), "cuts": (0, 2)},
        {"mesh": (2, 1), "mirrored": True},
        {"placements": (Samples(), Tiles((1, 3))), "cuts": (0, 1)},
    ]

    def work(kept: Any, batch: Any, layout: Any, fabric: Any) -> Any:
        common: Any = {"loss": F.cross_entropy, "optimizer": momentum, "bucket_bytes": 256, "fabric": fabric}
        pipeline = Pipeline(copy.deepcopy(start), "gpipe", 2, **layout, **common)
        if kept is not None:
            pipeline.load_training_state(kept)
        found = pipeline.step(batch), pipeline.training_state()
        pipeline.close()
        return found

    kept: Any = None
    for number, (size, layout) in enumerate(zip((4, 2, 4), layouts, strict=True)):
        for loss, now in on_threads(size, partial(work, kept, batches[number], layout)):
            torch.testing.assert_close(loss, losses[number], rtol=0, atol=1e-10)
            left = now
        kept = left
    torch.testing.assert_close(kept["model"], dict(state), rtol=0, atol=1e-10)


def test_a_plan_with_tiles_is_one_process(tmp_path: Path) -> None:
    """The planner's cuts for given placements, through a file."""
    expected, state, _ = one_process(6)
    start, batches = model(), data(6)
    chain = Chain(start)
    outputs = [96, 96, 2_000_000, 96]
    layers = tuple(Layer(n, 1e-3, 2e-3, s, a) for n, s, a in zip(chain.names, chain.sizes, outputs))
    cluster = Cluster.flat(5, Link(1e-6, 1e-8))
    placements = [Tiles((2, 2)), Samples()]
    plan = partition(Profile("net", layers), cluster, "1f1b", microbatches=2, placements=placements)
    assert plan.cuts == (0, 2)  # the third convolution's layer pools its whole output
    plan.save(tmp_path / "plan.json")

    def work(fabric: Any) -> Any:
        plan = tmp_path / "plan.json"
        pipeline = Pipeline(
            copy.deepcopy(start), loss=F.cross_entropy, optimizer=momentum, fabric=fabric, plan=plan
        )
        losses = [pipeline.step(batch) for batch in batches]
        weights = pipeline.state_dict()
        pipeline.close()
        return losses, weights

    for losses, weights in on_threads(5, work):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
        for name, tensor in state.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-10)
