"""Plan files: the cuts, replicas and ranks of a pipeline, its predicted times, and the model it is for."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import ClassVar

from scheduler.ir.codec import JsonFile
from scheduler.ir.inputs import Microbatches
from scheduler.ir.layout import Placement, Samples, Tiles


@dataclass(frozen=True)
class PipelinePlan(JsonFile):
    """A pipeline for one model. ``sizes``: weight bytes of its layers, by which the model is recognised.
    ``cuts``: each stage's first layer. ``devices``: the cluster's device of each rank. ``period``: seconds
    per step as simulated; ``bottleneck``: of the slowest stage (both 0 where nothing was simulated);
    ``memory``: bytes by rank, without optimizer state. ``replicas`` and ``rank_map`` (the ranks, by default
    numbered one after the other) are those of each position: stage s is at position s modulo their number.
    ``tiles``: the grid of each position, None for samples; empty where none is on tiles.
    """

    HASHED: ClassVar[bool] = True

    model: str
    sizes: tuple[int, ...]
    schedule: str
    microbatches: Microbatches
    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    recompute: tuple[bool, ...]
    placement: str
    devices: tuple[int, ...]
    period: float
    bottleneck: float
    memory: tuple[int, ...]
    rank_map: tuple[tuple[int, ...], ...] = ()
    tiles: tuple[Tiles | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("sizes", "cuts", "replicas", "recompute", "devices", "memory"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        ranks = sum(self.replicas)
        if not self.replicas or len(self.cuts) % len(self.replicas):
            raise ValueError(
                f"field 'replicas' must have {len(self.cuts)} entries, or a divisor of that (positions that"
                f" hold several stages), got {len(self.replicas)}"
            )
        for name, wanted in (("recompute", len(self.cuts)), ("devices", ranks), ("memory", ranks)):
            if len(getattr(self, name)) != wanted:
                raise ValueError(f"field {name!r} must have {wanted} entries, got {len(getattr(self, name))}")
        tiles = tuple(grid.size if grid else count for grid, count in zip(self.tiles, self.replicas))
        if self.tiles and (tiles != self.replicas or len(self.tiles) != len(tiles)):
            raise ValueError(
                f"field 'tiles' must have, for each of the replicas {list(self.replicas)}, a grid of as many"
                f" tiles or null, got {self.tiles}"
            )
        ends = list(accumulate(self.replicas, initial=0))
        held = tuple(map(tuple, self.rank_map)) or tuple(tuple(range(*pair)) for pair in pairwise(ends))
        object.__setattr__(self, "rank_map", held)
        if tuple(map(len, held)) != self.replicas or sorted(chain.from_iterable(held)) != list(range(ranks)):
            raise ValueError(
                f"field 'rank_map' must give the stages {list(self.replicas)} ranks, each of 0 to {ranks - 1}"
                f" once, got {[list(row) for row in held]}"
            )

    @property
    def placements(self) -> list[Placement] | None:
        """Of each position, where some are on tiles."""
        pairs = zip(self.tiles, self.replicas, strict=True)
        return [grid or Samples(count) for grid, count in pairs] if self.tiles else None

    @property
    def ranks(self) -> int:
        return sum(self.replicas)

    def check_model(self, sizes: tuple[int, ...] | list[int]) -> None:
        """Raises ``ValueError`` unless a model has the layers that this plan was made for."""
        if len(sizes) != len(self.sizes):
            raise ValueError(
                f"the plan is for {self.model!r} of {len(self.sizes)} layers, this model has {len(sizes)};"
                " profile this model and make a plan for it"
            )
        for layer, (has, needs) in enumerate(zip(sizes, self.sizes, strict=True)):
            if has != needs:
                raise ValueError(
                    f"the plan is for {self.model!r}, whose layer {layer} has {needs} bytes; this model's has"
                    f" {has}; profile this model and make a plan for it"
                )

    def after(self, nodes: int) -> PipelinePlan:
        """The plan without the first ``nodes`` nodes of the first stage."""
        cuts = (0, *(cut - nodes for cut in self.cuts[1:]))
        return replace(self, sizes=self.sizes[nodes:], cuts=cuts)

    def on(self, sizes: tuple[int, ...] | list[int]) -> PipelinePlan:
        """The same stages of a model whose layers are coarser than the plan's, as where the plan counts the
        nodes of a graph.txt. Weights decide: each stage keeps its own, and nodes without weights at the start
        of a stage go to the stage before.
        """
        if len(sizes) >= len(self.sizes):
            self.check_model(sizes)
            return self
        before, mine = (list(accumulate(each, initial=0)) for each in (self.sizes, sizes))
        if before[-1] != mine[-1] or not set(mine) <= set(before):
            self.check_model(sizes)
        cuts = [0]
        for stage, cut in enumerate(self.cuts[1:], 1):
            layer = bisect_right(mine, before[cut]) - 1
            if mine[layer] != before[cut]:
                raise ValueError(
                    f"stage {stage} of the plan starts inside layer {layer} of this model: before it are"
                    f" {before[cut]:,} bytes of weights, before the layer {mine[layer]:,}; cut between"
                    " layers, or let the model be cut inside this module (inside=)"
                )
            if layer in (cuts[-1], len(sizes)):
                empty = stage if layer == len(sizes) else stage - 1
                raise ValueError(
                    f"stage {empty} of the plan has no weights, so no layer of this model (a module with"
                    " weights and what follows it) is in it; give its nodes to a neighbouring stage"
                )
            cuts.append(layer)
        return replace(self, sizes=tuple(sizes), cuts=tuple(cuts))
