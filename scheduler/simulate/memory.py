"""Peak memory of a program, by the order in which it computes."""

from __future__ import annotations

from scheduler.ir.actions import Kind
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, Program
from scheduler.simulate.pipeline_memory import memory_by_rank


def peak_memory(program: Program, profile: Profile) -> int:
    """Bytes of parameters, gradients and activations that one rank holds at the worst moment.

    A forward keeps its activations until its backward; a backward makes its gradients, which live until the
    next forward that uses the parameters (the last moment at which their bucket is gathered and the update
    made). Optimizer state is not counted. Of a program with stages: what the fullest rank holds.
    """
    if program.pipeline is not None:
        return max(memory_by_rank(program, profile))
    layers = profile.layers
    live = sum(layer.activation_bytes for layer in layers)  # the kernel starts behind the forward
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
