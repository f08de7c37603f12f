"""Weight versions of a pipeline program: which one each micro-batch computes with, and how many are alive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.ir.actions import COMPUTE, Action, Kind
from scheduler.ir.program import COMPUTE_LANE, Program
from scheduler.ir.unroll import depth, unroll, version


def delays(program: Program) -> tuple[int, ...]:
    """By stage, how many steps old the gradients are that a STEP applies, once the pipeline is full.

    If micro-batches of one period differ (no generator makes such programs), the oldest counts.
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


@dataclass(frozen=True, slots=True)
class Moment:
    """Versions and activations of one stage that are alive during one action, and after it."""

    action: Action
    stage: int
    versions: int
    activations: int
    versions_after: int
    activations_after: int


def moments(order: tuple[Action, ...], stage: int) -> Iterator[Moment]:
    """Count a stage's live versions and activations at each action of an unrolled compute lane.

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
        # Replicas mostly have the same order: walk each distinct order once.
        different = {orders[rank] for rank in layout.members(stage)}
        found = [moment for order in different for moment in moments(order, stage)]
        versions.append(max((moment.versions for moment in found), default=1))
        activations.append(max((moment.activations for moment in found), default=0))
    return tuple(versions), tuple(activations)


def settled(program: Program) -> int:
    """A number of periods that is enough for a run to fill, repeat its kernel at rest, and drain."""
    return depth(program) + max(delays(program), default=0) + 2
