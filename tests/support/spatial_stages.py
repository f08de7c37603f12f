"""Five SGD steps of a model in stages, on the ranks that a case names and in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched import spatial
from commsched.pipeline.fabric import Fabric
from dnn_bench.spatial.models import MODELS, cut_stages, target_of
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate

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
    fuse_halo: int | str = "off"
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        return (self.grid[0] * self.grid[1] + (self.share if self.tail else 0)) * self.replicas

    @property
    def count(self) -> int:
        """Micro-batches of all replicas."""
        return self.replicas * (1 + self.mirrored) * self.microbatches

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
    """On the case's ranks, after ``commsched.init()`` or with a fabric: the program is valid and can be
    simulated, and losses and parameters are those of one process.
    """
    stages, images, target = case.build()
    plain = copy.deepcopy(stages)
    expected = reference(case, plain, images, target)
    tail: list[spatial.Samples] = [spatial.Samples(case.share)] if case.tail else []
    trainer = spatial.Hybrid(
        stages,
        [spatial.Tiles(case.grid), *tail],
        loss=F.cross_entropy,
        microbatches=case.microbatches,
        replicas=case.replicas,
        mirrored=case.mirrored,
        fuse_halo=case.fuse_halo,
        schedule=case.schedule,
        timeout=100,
        fabric=fabric,
    )
    validate(trainer.program)
    if trainer.pipeline.rank == 0:
        layers = tuple(Layer(str(n), 1.0, 2.0, 400) for n in range(len(stages)))
        assert simulate(trainer.program, Profile("stages", layers), Link(1e-3, 1e-6)).period > 0
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
