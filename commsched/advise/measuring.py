"""The measurement of one script on all of its ranks: layers and DDP by hooks, the link by timed messages."""

from __future__ import annotations

import os
import time

import torch

from commsched.advise.forecast import Measurement, Times, slowdown_of
from commsched.advise.observation import observe
from commsched.backends import backend_for
from commsched.backends.interface import Backend
from commsched.collectives.initialization import local_size
from commsched.collectives.process_sets import global_process_set
from commsched.optimizer.measuring import across_ranks
from commsched.optimizer.planner import Model, TimedLink
from scheduler.ir.link import Link

# Larger messages show the link's rate; none may take longer than this many seconds.
_LARGE = (2 << 20, 4 << 20, 8 << 20)
_LONGEST = 2.0


def measure(script: str, arguments: list[str], steps: int) -> Measurement | None:
    """Run the script on this rank and measure it; returns the measurement on rank 0, None on the others."""
    observation = observe(script, arguments, steps)
    step, exposed, sample = observation.figures()
    params = observation.params
    model = Model.of(params, observation.names)
    backend = backend_for(params, None, global_process_set)
    try:
        ranks = backend.ranks
        link, slowdown = _link(backend, sum(model.bytes(i) for i in range(len(params))))
        rows = ranks.all_values((step, exposed, sample))
        order = ranks.share(observation.order)
    finally:
        backend.close()
    if ranks.rank != 0:
        return None
    mean = [sum(row[column] for row in rows) / len(rows) for column in (0, 1)]
    profile = model.profile(order, across_ranks([row[2] for row in rows], order), "measured in the script")
    sizes = model.itemsizes
    itemsizes = (1, *(sizes[i] for i in order))  # the first layer is the time between two steps
    now = Times(mean[0], mean[1])
    return Measurement(script, ranks.size, steps, profile, itemsizes, link, slowdown, now)


def _link(backend: Backend, model_bytes: int) -> tuple[Link, float]:
    """Return the link as commsched measures it, and how much its messages slow the compute down."""
    timed = TimedLink(backend, model_bytes)
    first = timed.link
    sizes = [size for size in _LARGE if size <= max(model_bytes, _LARGE[0])]
    sizes = [size for size in sizes if first.alpha + first.beta * size < _LONGEST] or [1 << 18]
    wall, used = time.monotonic(), time.process_time()
    operations = [(size, backend.exchange_seconds(size)) for size in sizes]
    busy = (time.process_time() - used) / (time.monotonic() - wall)
    shares = backend.ranks.all_values((busy, _has_free_cores()))
    on_gpu = backend.device.type != "cpu"
    slowdown = slowdown_of([share for share, _ in shares], on_gpu or all(free for _, free in shares))
    return timed.refined(operations), slowdown


def _has_free_cores() -> bool:
    """Return whether this host has a core for each rank's communication beside those that compute."""
    return len(os.sched_getaffinity(0)) >= local_size() * (torch.get_num_threads() + 1)
