"""Layouts: which layers are a stage, which ranks hold it, and what it may keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain

from scheduler.ir.actions import Action, Kind

PLACEMENTS = ("eager", "bubble", "aligned")
REDUCTIONS = ("scatter", "masters")


@dataclass(frozen=True)
class Layout:
    """The part of a pipeline program that is not an order of actions.

    ``cuts[s]``: the first layer of stage s. ``ranks[s]``: the ranks that hold it, in the order of their rows.
    ``versions`` and ``activations``: how many weight versions, and micro-batches between forward and
    backward, each stage is allowed to keep. ``reduction``: ``scatter`` (RS, step on a shard, AG) or
    ``masters`` (sum on each host's first rank, all-reduce among those, broadcast, full step). ``recompute``:
    stages that keep only their input and repeat the forward. ``memory``: bytes allowed per rank.
    """

    cuts: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    microbatches: int
    versions: tuple[int, ...]
    activations: tuple[int, ...]
    placement: str = "bubble"
    reduction: str = "scatter"
    recompute: tuple[bool, ...] = ()
    memory: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"a pipeline needs at least 1 micro-batch, got {self.microbatches}")
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"there is no placement {self.placement!r}; the placements are {', '.join(PLACEMENTS)}"
            )
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"there is no reduction {self.reduction!r}; the reductions are {', '.join(REDUCTIONS)}"
            )
        if not self.recompute:
            object.__setattr__(self, "recompute", (False,) * self.stages)
        for name in ("ranks", "versions", "activations", "recompute"):
            if len(getattr(self, name)) != self.stages:
                raise ValueError(
                    f"{name} must have one entry for each of the {self.stages} stages,"
                    f" got {len(getattr(self, name))}"
                )
        if self.memory is not None and len(self.memory) != self.world:
            raise ValueError(f"memory must have an entry for each of {self.world} ranks: {self.memory}")
        if list(self.cuts) != sorted(set(self.cuts)) or self.cuts[:1] != (0,):
            raise ValueError(f"cuts must start with layer 0 and rise, got {list(self.cuts)}")
        held = set(chain.from_iterable(self.ranks))
        if held != set(range(len(held))) or not all(self.ranks):
            raise ValueError(f"every stage needs ranks, numbered from 0 without gaps; got {self.ranks}")
        if sum(map(len, set(self.ranks))) != len(held):
            raise ValueError(f"two stages may share all of their ranks or none, got {self.ranks}")

    @property
    def stages(self) -> int:
        return len(self.cuts)

    @property
    def world(self) -> int:
        return len(set(chain.from_iterable(self.ranks)))

    @property
    def positions(self) -> int:
        """How many ranks one replica of the whole model spans."""
        return len(set(self.ranks))

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds."""
        return tuple(stage for stage, ranks in enumerate(self.ranks) if rank in ranks)

    def replicas(self, stage: int) -> int:
        return len(self.ranks[stage])

    def layers(self, stage: int, total: int) -> range:
        """The layers of a stage in a model of ``total`` layers."""
        return range(self.cuts[stage], (*self.cuts, total)[stage + 1])

    def overlaps(self, stage: int, rank: int, other: int) -> dict[int, float]:
        """The ranks of stage ``other`` that share rows with ``rank`` of ``stage``, and which part of a
        micro-batch they share.
        """
        mine = self.ranks[stage].index(rank)
        shares = _shares(mine, self.replicas(stage), self.replicas(other))
        return {self.ranks[other][number]: share for number, share in shares}


@lru_cache(maxsize=4096)
def _shares(number: int, replicas: int, others: int) -> tuple[tuple[int, float], ...]:
    """Which of ``others`` replicas share rows with this one, and how many; in fractions, because equal
    borders must be equal.
    """
    first, last = Fraction(number, replicas), Fraction(number + 1, replicas)
    shares = []
    for other in range(others):
        common = min(last, Fraction(other + 1, others)) - max(first, Fraction(other, others))
        if common > 0:
            shares.append((other, float(common)))
    return tuple(shares)


def is_token(action: Action, layout: Layout) -> bool:
    """Whether a message carries no data but the news that a backward has ended."""
    return action.kind in (Kind.SENDF, Kind.RECVF) and action.index >= layout.microbatches


def stages_in(layout: Layout, layers: Iterable[int], total: int) -> set[int]:
    """The stages that hold these layers."""
    wanted = set(layers)
    return {stage for stage in range(layout.stages) if wanted & set(layout.layers(stage, total))}
