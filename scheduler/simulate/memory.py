"""Peak memory of a program, derived from its compute order."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.ir.actions import Action, Kind
from scheduler.ir.layout import Layout
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, Program
from scheduler.ir.unroll import unroll
from scheduler.ir.weight_versions import moments, settled
from scheduler.simulate.durations import Stage, stages_of


def peak_memory(program: Program, profile: Profile) -> int:
    """The peak bytes of parameters, gradients and activations on one rank.

    A forward keeps its activations until its backward; a backward makes its gradients, which live until the
    next forward that uses the parameters (the last moment at which their bucket is gathered and the update
    made). Optimizer state is not counted. For a program with stages: the peak of the rank that holds most.
    """
    if program.pipeline is not None:
        return max(memory_by_rank(program, profile))
    layers = profile.layers
    # The kernel starts with the backward: all activations are alive.
    live = sum(layer.activation_bytes for layer in layers)
    peak = live
    for action in program.lanes().get(COMPUTE_LANE, ()):
        if action.kind is Kind.B:
            live += layers[action.index].bytes
            peak = max(peak, live)
            live -= layers[action.index].activation_bytes
        elif action.kind is Kind.F:
            live += layers[action.index].activation_bytes
            peak = max(peak, live)
            live -= layers[action.index].bytes
    return profile.total_bytes + peak


def memory_by_rank(program: Program, profile: Profile) -> tuple[int, ...]:
    """The peak bytes of each rank: all live weight versions, one gradient, and the activations between
    forward and backward. Optimizer state and buffers of messages are not counted.
    """
    layout = program.layout
    stages = stages_of(profile, layout)
    lanes = unroll(program, settled(program), (COMPUTE_LANE,))
    return tuple(
        round(max(_bytes(layout, stages, rank, lanes[rank][COMPUTE_LANE]), default=0))
        for rank in range(layout.world)
    )


def _bytes(
    layout: Layout, stages: tuple[Stage, ...], rank: int, order: tuple[Action, ...]
) -> Iterator[float]:
    held = layout.held_by(rank)
    runs = {stage: moments(order, stage) for stage in held}
    resting = {stage: float(stage_bytes(stages[stage], 1, 0)) for stage in held}
    for action in order:
        if action.stage not in runs:
            continue
        cost, share = stages[action.stage], 1 / len(layout.ranks[action.stage])
        moment = next(runs[action.stage])
        working = cost.working * share if action.kind is Kind.B else 0.0
        others = sum(size for stage, size in resting.items() if stage != action.stage)
        yield others + working + stage_bytes(cost, moment.versions, moment.activations, share)
        resting[action.stage] = stage_bytes(cost, moment.versions_after, moment.activations_after, share)


def stage_bytes(stage: Stage, versions: int, activations: int, share: float = 1.0) -> float:
    """Bytes of one stage on one rank for these numbers of weight versions and micro-batches, with the
    gradient.
    """
    return stage.bytes * (versions + 1) + stage.kept * activations * share
