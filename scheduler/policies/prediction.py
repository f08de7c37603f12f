"""Predict the step of a data-parallel program, and make plans and predictions in a child process."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, replace
from typing import Any

from scheduler import policies
from scheduler.bounds import lower_bound
from scheduler.ir.link import Link, TwoTierLink
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.policies.problem import Problem
from scheduler.policies.published import wfbp
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


def predict(
    program: Program,
    profile: Profile,
    link: Link,
    dense: Profile | None = None,
    uncompressed: Link | None = None,
) -> Prediction:
    """Return the simulated times of ``program``, and of DDP on the same profile and link.

    ``dense``: the profile with the bytes that DDP sends, where ``program`` sends fewer. ``uncompressed``: the
    link for gradients in their own type, where those of ``program`` travel in another.
    """
    ours = simulate(program, profile, link)
    ddp = simulate_ddp(dense or profile, uncompressed or link, program.ranks)
    bound = lower_bound(profile, link, gather=program.gather, early_step=program.early_step)
    return Prediction(ours.period, ours.exposed, ours.link_utilisation, bound, ddp.period, ddp.exposed)


def simulate_ddp(profile: Profile, link: Link, ranks: int, slowdown: float = 0.0) -> Result:
    """Simulate torch's DDP: buckets of 25 MiB, all-reduced under the backward; the optimizer waits for all.

    With several ranks a host, all-reduces are one ring through all ranks, which sends more between hosts than
    two tiers do.

    Messages of `wfbp` pass the link in backward order, so the first layer's gradients arrive last. The
    compute before that layer moves after their arrival: it belongs to the optimizer and to the next batch.
    """
    first = next((i for i, layer in enumerate(profile.layers) if layer.bytes), 0)
    before = sum(layer.forward for layer in profile.layers[:first])
    layers = [replace(layer, forward=0.0) for layer in profile.layers[:first]] + list(profile.layers[first:])
    layers[first] = replace(layers[first], forward=layers[first].forward + before)
    waiting = replace(profile, layers=tuple(layers))
    ring = link.as_ring() if isinstance(link, TwoTierLink) else link
    return simulate(wfbp(Problem(waiting, ring, ranks=ranks)), waiting, ring, slowdown=slowdown)


# -- plans and predictions in a child process ----------------------------------------------------------------

# A training process should not keep the 120 MB that numba takes. The parent pickles ("plan", profile, link,
# policy, options) or ("predict", program, profile, link, dense, uncompressed) to stdin. The answer on stdout
# is a pickled ``Program``, ``Prediction`` or ``ValueError``.


def serve() -> None:
    """Read one request from stdin and write its answer to stdout."""
    task, *arguments = pickle.load(sys.stdin.buffer)
    answer: Any
    try:
        answer = _plan(*arguments) if task == "plan" else predict(*arguments)
    except ValueError as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)


def _plan(profile: Any, link: Any, policy: str, options: dict[str, Any]) -> Any:
    return policies.plan(profile, link, policy, **options)
