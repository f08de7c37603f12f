"""The generators of schedules: what each position computes in one period, from GPipe to bundles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.ir.actions import Action, Kind

# -- building blocks of generators: sequences of (stage, micro-batch), and two ways to interleave them -------

Item = tuple[int, int]
"""Stage and micro-batch."""

Order = tuple[Action, ...]
"""The computations of one rank in one period."""


def by_stage(stages: int, microbatches: int) -> list[list[Item]]:
    """For positions of one stage each: every micro-batch in turn."""
    return [[(stage, microbatch) for microbatch in range(microbatches)] for stage in range(stages)]


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


# -- GPipe: all forwards, then all backwards. Simple, but every micro-batch's activations live at once -------


def gpipe(positions: int, microbatches: int) -> list[Order]:
    return [flushed(items, items, ahead=microbatches) for items in by_stage(positions, microbatches)]


# -- 1F1B: a stage runs only as many forwards ahead as it takes to reach the last stage ----------------------

# With ``hop`` 1 a message is on the critical path of every micro-batch; with 2 it can travel
# during a computation, and a stage keeps up to twice as many activations.


def one_f_one_b(positions: int, microbatches: int, hop: int = 1) -> list[Order]:
    return [
        flushed(items, items, min(lead(positions, stage, hop), microbatches))
        for stage, items in enumerate(by_stage(positions, microbatches))
    ]


# -- interleaved 1F1B ----------------------------------------------------------------------------------------

# A rank holds ``virtual`` stages, ``positions`` apart, which divides the bubble by their
# number.


def interleaved(positions: int, microbatches: int, virtual: int = 2) -> list[Order]:
    if virtual < 1:
        raise ValueError(f"interleaved needs at least 1 stage on each rank, got virtual={virtual}")
    groups = blocks(microbatches, positions)
    orders = []
    for position in range(positions):
        stages = [position + chunk * positions for chunk in range(virtual)]
        forward = block_by_block(stages, groups)
        backward = block_by_block(stages[::-1], groups)
        # Two slots for every rank after this one, so that the next chunk of a block arrives before its turn.
        ahead = (virtual - 1) * len(groups[0]) + 2 * (positions - 1 - position)
        orders.append(flushed(forward, backward, min(ahead, len(forward))))
    return orders


# -- zero bubble (ZB-H1) -------------------------------------------------------------------------------------

# 1F1B with the backward in two parts. Only B, which the stage before waits for, is
# urgent; W, the weight gradient, fills the gaps.


def zero_bubble(positions: int, microbatches: int) -> list[Order]:
    return [_with_weights(order, stage) for stage, order in enumerate(one_f_one_b(positions, microbatches))]


def _with_weights(order: Order, late: int) -> Order:
    """Insert each W ``late`` micro-batches after its B: late stages run B first and have memory for waiting
    W.
    """
    weights = [replace(action, kind=Kind.W) for action in order if action.kind is Kind.B]
    actions, done = [], 0
    for action in order:
        actions.append(action)
        if action.kind is Kind.B:
            if done >= late:
                actions.append(weights[done - late])
            done += 1
    return (*actions, *weights[max(0, done - late) :])


# -- PipeDream: 1F1B that never drains; weight stashing gives each backward the weights of its forward -------

# Stage s of S runs S-1-s micro-batches ahead. With one micro-batch per step it keeps S-s versions and its
# gradient is S-1-s steps old; with M of them, ceil((S-1-s) / M) steps.


def pipedream(positions: int, microbatches: int = 1) -> list[Order]:
    orders = []
    for stage, items in enumerate(by_stage(positions, microbatches)):
        ahead = positions - 1 - stage
        orders.append(endless(items, items, ahead, {stage: -ahead // microbatches}))
    return orders


# -- PipeDream-2BW -------------------------------------------------------------------------------------------

# Micro-batches of one step share a version, and every stage's gradient is one step old. Two
# versions at every stage. ``hop`` as in 1F1B.


def two_bw(positions: int, microbatches: int, hop: int = 1) -> list[Order]:
    orders = []
    for stage, items in enumerate(by_stage(positions, microbatches)):
        # More than one period ahead, a forward would need a version that does not exist yet.
        ahead = min(lead(positions, stage, hop), microbatches)
        orders.append(endless(items, items, ahead, {stage: -1}))
    return orders


# -- WPipe: two groups of stages on each rank; only the first group's gradient is one step old ---------------

# Rank s holds stage s (group G0) and s+S (G1). A block of micro-batches goes forward through G0, then G1, and
# backward through G1, then G0. The next block's G0 forwards run beside this one's G0 backwards, so G0 needs
# two versions; G1 is at rest between its blocks, so it can step at once and needs one.


def wpipe(positions: int, microbatches: int) -> list[Order]:
    groups = blocks(microbatches, positions)
    first, last = len(groups[0]), len(groups[-1])
    orders = []
    for position in range(positions):
        stages = [position, position + positions]
        forward = block_by_block(stages, groups)
        backward = block_by_block(stages[::-1], groups)
        # With a larger lead, a forward of G1 would run before the STEP whose weights it needs.
        ahead = min(first + positions - 1 - position, first + last)
        orders.append(endless(forward, backward, ahead, {stages[0]: -1, stages[1]: 0}))
    return orders


# -- AshPipe: PipeDream's order with one micro-batch per step, and stages replicated as each one needs -------

# Replicas split every minibatch by rows; neighbouring stages may have different numbers of them. The gradient
# goes upstream before it is reduced (placement ``bubble``). ``recompute`` belongs to the layout.


def ashpipe(positions: int, microbatches: int = 1) -> list[Order]:
    if microbatches != 1:
        raise ValueError(
            f"ashpipe steps after every minibatch and does not divide it, got {microbatches} micro-batches;"
            " use microbatches=1, or pipedream or 2bw"
        )
    return pipedream(positions)


# -- bundles: a front and a rear sub-model, one batch in flight; every host runs a bundle of its own ---------

# A host may have several fronts and rears (shape 4,2: outputs are gathered, concatenated and split again,
# which is what unequal replica counts do). Gradients are summed on the host's first rank of each sub-model,
# reduced among those, and broadcast back (``reduction="masters"``). One position is data parallelism alone.


def bundle(positions: int = 2, microbatches: int = 1) -> list[Order]:
    if microbatches != 1 or positions not in (1, 2):
        raise ValueError(
            "a bundle has a front and a rear (or is one model) and one batch in flight; got"
            f" {positions} sub-models and {microbatches} micro-batches"
        )
    return gpipe(positions, 1)


def bundle_ranks(hosts: int, shape: Sequence[int] = (1, 1)) -> tuple[tuple[int, ...], ...]:
    """The ranks of each sub-model, for ``hosts`` hosts of ``sum(shape)`` ranks each: a host's fronts first,
    then its rears. Rows follow the hosts, so no tensor of a bundle leaves its host.
    """
    if hosts < 1 or not 1 <= len(shape) <= 2 or min(shape) < 1:
        raise ValueError(
            f"bundles need a host, and a front and a rear on it; got {hosts} hosts, shape {shape}"
        )
    each = sum(shape)
    first = [0, *shape][: len(shape)]
    return tuple(
        tuple(host * each + start + number for host in range(hosts) for number in range(count))
        for start, count in zip(first, shape, strict=True)
    )


def bundle_ranks_across(hosts: int, each: int) -> tuple[tuple[int, ...], ...]:
    """`bundle_ranks` for fronts on the first half of the hosts, rears on the others, ``each`` on a host."""
    if hosts < 2 or hosts % 2 or each < 1:
        raise ValueError(
            f"fronts and rears on different hosts need an even number of hosts; got {hosts} hosts of {each}"
            " ranks"
        )
    half = hosts // 2 * each
    return tuple(range(half)), tuple(range(half, 2 * half))
