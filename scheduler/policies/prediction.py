"""The simulated times of a data-parallel program, beside those of DDP and of the best possible schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.bounds import lower_bound
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.policies.problem import Problem
from scheduler.policies.wfbp import wfbp
from scheduler.simulate.simulator import Result, simulate


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and of it those that no compute hides; ``bound``: no schedule takes less."""

    period: float
    exposed: float
    utilisation: float
    bound: float
    ddp_period: float
    ddp_exposed: float


def predict(program: Program, profile: Profile, link: Link, dense: Profile | None = None) -> Prediction:
    """Return the simulated times of ``program``, and of DDP on the same profile and link.

    ``dense``: the profile with the bytes that DDP sends, where ``program`` sends fewer.
    """
    ours, ddp = simulate(program, profile, link), simulate_ddp(dense or profile, link, program.ranks)
    bound = lower_bound(
        profile, link, gather=program.gather, early_step=program.early_step, ranks=program.ranks
    )
    return Prediction(ours.period, ours.exposed, ours.link_utilisation, bound, ddp.period, ddp.exposed)


def simulate_ddp(profile: Profile, link: Link, ranks: int, slowdown: float = 0.0) -> Result:
    """Simulate torch's DDP: buckets of 25 MiB, all-reduced under the backward; the optimizer waits for all.

    Messages of `wfbp` pass the link in backward order, so the first layer's gradients arrive last. The
    compute before that layer moves behind their arrival: it belongs to the optimizer and to the next batch.
    """
    first = next((i for i, layer in enumerate(profile.layers) if layer.bytes), 0)
    before = sum(layer.forward for layer in profile.layers[:first])
    layers = [replace(layer, forward=0.0) for layer in profile.layers[:first]] + list(profile.layers[first:])
    layers[first] = replace(layers[first], forward=layers[first].forward + before)
    waiting = replace(profile, layers=tuple(layers))
    return simulate(wfbp(Problem(waiting, link, ranks=ranks)), waiting, link, slowdown=slowdown)
