"""What a pipeline program means: which weights each micro-batch sees, and what must be kept for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.ir.actions import COMPUTE, Action, Kind
from scheduler.ir.program import COMPUTE_LANE, Program
from scheduler.ir.unroll import depth, unroll, version

Use = tuple[int, int, int]
"""Stage, micro-batch and period."""


def delays(program: Program) -> tuple[int, ...]:
    """The delay vector: by stage, how many steps old the gradient is that it applies, once settled.

    Where the micro-batches of a period differ (no generator does that), the oldest counts.
    """
    layout = program.pipeline
    if layout is None:
        return (0,)
    found = [0] * layout.stages
    for lanes in program.kernel:
        for action in lanes.get(COMPUTE_LANE, ()):
            if action.kind in (Kind.B, Kind.W) and action.stage is not None:
                found[action.stage] = max(found[action.stage], -(action.version or 0))
    return tuple(found)


def version_map(program: Program, periods: int) -> dict[Use, int]:
    """The version that each (stage, micro-batch, period) computes with in a run of so many periods; version v
    is the weights after v steps.
    """
    found: dict[Use, int] = {}
    for lanes in unroll(program, periods):
        for action in lanes[COMPUTE_LANE]:
            if action.kind is Kind.F and action.stage is not None:
                found[action.stage, action.index, action.shift] = version(action)
    return found


@dataclass(frozen=True, slots=True)
class Moment:
    """What one rank keeps of one stage while an action runs, and when it has ended."""

    action: Action
    stage: int
    versions: int
    activations: int
    versions_after: int
    activations_after: int


def moments(order: tuple[Action, ...], stage: int) -> Iterator[Moment]:
    """A stage's versions and activations at every action of an unrolled compute lane.

    A version lives from the step that makes it to its last use; a step may write into the buffer of a version
    that nothing needs any more. Activations live from the forward to the last use by B or W.
    """
    mine = [action for action in order if action.stage == stage]
    last_use: dict[int, int] = {}
    last_read: dict[tuple[int, int], int] = {}
    for place, action in enumerate(mine):
        if action.kind in COMPUTE:
            last_use[version(action)] = place
            last_read[action.index, action.shift] = place
    newest, made, kept = 0, {0}, set[tuple[int, int]]()
    for place, action in enumerate(mine):
        key = action.index, action.shift
        if action.kind is Kind.F:
            kept.add(key)
        elif action.kind is Kind.STEP:
            before, newest = newest, max(newest, action.shift + 1)
            made.add(action.shift + 1)
            for number in (before, action.shift + 1):
                if number != newest and last_use.get(number, -1) < place:
                    made.discard(number)
        during = len(made), len(kept)
        if action.kind in COMPUTE:
            if last_read[key] == place:
                kept.discard(key)
            used = version(action)
            if used != newest and last_use[used] == place:
                made.discard(used)
        yield Moment(action, stage, *during, len(made), len(kept))


def live(program: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The most weight versions, and micro-batches with activations, that each stage keeps at once."""
    layout = program.pipeline
    assert layout is not None
    orders = [lanes[COMPUTE_LANE] for lanes in unroll(program, settled(program), (COMPUTE_LANE,))]
    versions, activations = [], []
    for stage in range(layout.stages):
        # Replicas mostly do the same: each order is looked at once.
        different = {orders[rank] for rank in layout.members(stage)}
        found = [moment for order in different for moment in moments(order, stage)]
        versions.append(max((moment.versions for moment in found), default=1))
        activations.append(max((moment.activations for moment in found), default=0))
    return tuple(versions), tuple(activations)


def settled(program: Program) -> int:
    """Periods of a run that has shown everything there is: fill, kernels at rest, drain."""
    return depth(program) + max(delays(program), default=0) + 2
