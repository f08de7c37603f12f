"""The preemptive bound: what no order, no buckets and no splitting of a data-parallel step can beat, start-up
costs not counted.

Everything layers ``0..m`` send, reduce-scatter and all-gather, has to pass the link between the end of
``B(m)`` (nothing of it is ready before) and the start of ``F(m)`` of the next iteration (all of it is
needed by then)::

      B(L-1) ... B(m) | B(m-1) ... B(0)  F(0) ... F(m-1) | F(m) ... F(L-1)
                      |<------ wire(0..m) must fit ----->|

That window holds the compute of the layers below ``m``. Whatever does not fit is exposed::

    exposed >= max over m of  wire(0..m) - compute(0..m-1)

This is the value of preemptive earliest-due-date (an AG is due when its forward starts, an RS earlier by
its AG), since releases and due dates are nested: with tensors cut small, no start-up cost and free
preemption it is reached, so it is the best bound that ignores start-up. ``startup_bound`` counts the
start-ups too.
"""

from __future__ import annotations

import numpy as np

from scheduler.bounds.window import Window, compute_seconds
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile


def lower_bound(
    profile: Profile, link: Link, *, gather: str = "gradients", early_step: bool = False, ranks: int = 2
) -> float:
    """Seconds per iteration that no schedule beats, start-up costs not counted."""
    window = Window.of(profile)
    exposed = float(np.max(2 * link.beta * window.upto - window.below))
    if gather == "parameters" and not early_step:
        exposed = max(exposed, window.late(Link(0.0, link.beta)))
    return max(compute_seconds(profile, gather), profile.compute + exposed)
