"""Building blocks of generators: sequences of (stage, micro-batch), and two ways to interleave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.ir.actions import Action, Kind

Item = tuple[int, int]
"""Stage and micro-batch."""

Order = tuple[Action, ...]
"""The computations of one rank in one period."""


def one_stage(stage: int, microbatches: int) -> list[Item]:
    return [(stage, microbatch) for microbatch in range(microbatches)]


def lead(positions: int, stage: int, hop: int) -> int:
    """How many micro-batches a stage runs ahead: ``hop`` for every stage after it."""
    if hop < 1:
        raise ValueError(f"a stage must run at least 1 micro-batch ahead of the next one, got hop={hop}")
    return hop * (positions - 1 - stage)


def blocks(microbatches: int, size: int) -> list[range]:
    """Split micro-batches into blocks of at least ``size`` (or one block), of nearly equal sizes, larger ones
    first. A smaller block would reach the last rank before the first rank is free for its next stage.
    """
    count = max(1, microbatches // size)
    small, larger = divmod(microbatches, count)
    bounds = [number * small + min(number, larger) for number in range(count + 1)]
    return [range(low, high) for low, high in zip(bounds, bounds[1:], strict=False)]


def block_by_block(stages: Sequence[int], groups: Sequence[range]) -> list[Item]:
    """Run each block of micro-batches through all stages of a rank before the next block."""
    return [(stage, microbatch) for block in groups for stage in stages for microbatch in block]


def flushed(forward: Sequence[Item], backward: Sequence[Item], ahead: int) -> Order:
    """``ahead`` forwards, then forward and backward in turn, then the backwards left: nothing is under way
    between two periods.
    """
    actions = [_compute(Kind.F, item) for item in forward[:ahead]]
    for number, item in enumerate(backward):
        actions += [_compute(Kind.F, next_) for next_ in forward[ahead + number : ahead + number + 1]]
        actions.append(_compute(Kind.B, item))
    return tuple(actions)


def endless(
    forward: Sequence[Item], backward: Sequence[Item], ahead: int, version: Mapping[int, int]
) -> Order:
    """Alternate forward and backward without a flush, forwards ``ahead`` of backwards; ``version`` is the
    weight version of each stage, relative to the period.
    """
    actions = []
    for number, item in enumerate(backward):
        shift, position = divmod(number + ahead, len(forward))
        actions.append(_compute(Kind.F, forward[position], version[forward[position][0]], shift))
        actions.append(_compute(Kind.B, item, version[item[0]]))
    return tuple(actions)


def _compute(kind: Kind, item: Item, version: int = 0, shift: int = 0) -> Action:
    return Action(kind, item[1], item[0], version or None, shift=shift)
