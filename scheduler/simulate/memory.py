"""Peak memory of a program, derived from its compute order."""

from __future__ import annotations

from scheduler.ir.actions import Kind
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, Program
from scheduler.simulate.pipeline_memory import memory_by_rank


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
