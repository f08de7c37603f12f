"""A model in stages, the first ones on tiles and the rest on whole images, with replicas and micro-batches.

    trainer = spatial.Hybrid(stages, [spatial.Tiles((2, 2)), spatial.Samples()], loss=F.cross_entropy)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    loss = trainer.step(images, target)       # gradients are whole, the same on all ranks of a stage
    optimizer.step()

``mirrored=True`` adds a second replica on the same ranks in opposite order (GEMS), so that a rank with little
to do in one replica has much to do in the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from commsched.pipeline.api import Pipeline
from commsched.pipeline.chain import Chain
from commsched.pipeline.fabric import DistFabric, Fabric
from commsched.pipeline.factory import Make
from commsched.pipeline.origin import WeightSource
from commsched.pipeline.stage import Loss
from commsched.pipeline.terms import Count
from scheduler.ir.layout import Placement
from scheduler.ir.program import Program
from scheduler.pipelines.build import orders_of, stage_count


class Hybrid:
    """Trains ``stages`` (modules that take and return a tensor or a tuple of them) where ``placements`` say.

    A `Pipeline` whose layers are the stages and whose optimizer is the caller's. Every rank makes the same
    one. ``replicas`` share the samples of a batch on ranks of their own; a step takes ``microbatches``
    micro-batches (twice as many with ``mirrored``), which all replicas of one direction share. Samples need
    not divide evenly: each counts alike. ``schedule`` is a synchronous one of ``scheduler.pipelines`` and
    ``options`` are its own; ``virtual=2`` of ``interleaved`` puts stage ``s + len(placements)`` where stage
    ``s`` is. ``loss(output, target)`` is a mean over samples, or with ``count`` a sum over terms.
    ``stages`` may be a function that makes them, and ``weights`` may be read: see `Pipeline`. Needs
    ``commsched.init()``, or a ``fabric``.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | Make,
        placements: Sequence[Placement],
        *,
        loss: Loss,
        count: Count | None = None,
        microbatches: int = 1,
        replicas: int = 1,
        mirrored: bool = False,
        schedule: str = "1f1b",
        overlap: str = "auto",
        fuse_halo: int | str = "auto",
        weights: WeightSource | None = None,
        timeout: float = 60.0,
        fabric: Fabric | None = None,
        **options: Any,
    ) -> None:
        needed = stage_count(orders_of(schedule, len(placements), microbatches, options)) if placements else 0
        chain = Chain(stages, elements=True, weights=weights)
        self.stages = [stage for stage in chain.model._modules.values() if stage is not None]
        if len(self.stages) != needed or not needed:
            raise ValueError(
                f"every stage needs a placement: schedule {schedule!r} runs {needed} stages on"
                f" {len(placements)} placements, got {len(self.stages)} stages, {len(placements)} placements;"
                " pass one placement for each stage (interleaved: for each of the first stages)"
            )
        self.pipeline = Pipeline(
            chain,
            schedule,
            microbatches,
            (len(placements), replicas),
            loss=loss,
            count=count,
            optimizer=None,
            cuts=range(needed),
            placements=placements,
            mirrored=mirrored,
            tile_options={"overlap": overlap, "fuse_halo": fuse_halo},
            fabric=DistFabric(timeout) if fabric is None else fabric,
            **options,
        )

    @property
    def program(self) -> Program:
        """Every rank's actions in their order: what the simulator times and the validator checks."""
        return self.pipeline.program

    @property
    def held(self) -> list[int]:
        """The stages that this rank computes."""
        return sorted(self.pipeline.stages)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the stages that this rank holds."""
        yield from dict.fromkeys(p for number in self.held for p in self.stages[number].parameters())

    def train(self, mode: bool = True) -> None:
        for stage in self.pipeline.stages.values():
            for module in stage.modules:
                module.train(mode)

    def step(self, images: Tensor, target: Tensor) -> float:
        """Forward and backward of a batch that every rank has; the mean loss. Gradients are added to
        ``.grad`` as the sum over tiles, samples and replicas, the same on all ranks that hold a stage.
        """
        loss = self.pipeline.step((images, target))
        assert loss is not None  # synchronous schedules end each step in its own iteration
        return loss

    def evaluate(self, images: Tensor, target: Tensor) -> float:
        """The mean loss in eval mode, without gradients."""
        return self.pipeline.evaluate((images, target))

    def close(self) -> None:
        """Ends the connections that sum gradients."""
        self.pipeline.close()
