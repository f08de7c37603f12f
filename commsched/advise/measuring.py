"""The measurement of one script on all of its ranks: layers and DDP by hooks, the link by timed messages."""

from __future__ import annotations

import functools
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import commsched
from commsched.advise.forecast import Measurement, Times, slowdown_of
from commsched.backends import backend_for
from commsched.backends.interface import Backend
from commsched.collectives.job import global_process_set, local_size
from commsched.devices import device_of
from commsched.optimizer.hooks import forward_order, owners
from commsched.optimizer.measuring import Sample, Watch, across_ranks, combine, iteration_times
from commsched.optimizer.planner import Model, TimedLink
from commsched.process.network import HeldPort
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
    shares, free, by_rank = zip(*backend.ranks.all_values((busy, _has_free_cores(), operations)), strict=True)
    slowdown = slowdown_of(shares, backend.device.type != "cpu" or all(free))
    return timed.refined(by_rank), slowdown


def _has_free_cores() -> bool:
    """Return whether this host has a core for each rank's communication beside those that compute."""
    return len(os.sched_getaffinity(0)) >= local_size() * (torch.get_num_threads() + 1)


# -- runs a script and times the layers of its DDP model, by hooks; the script's files stay as they are ------

WARM_UP = 2  # DDP arranges its buckets anew after the first step
ALONE = 4  # steps without communication, of which the first is ignored
FEWEST = 3


class Enough(BaseException):
    """Ends the script. A BaseException: ``except Exception`` in the script must not catch it."""


class Observation:
    """One rank's times of a DDP model: ``steps`` with DDP's all-reduces, then a few without."""

    def __init__(self, ddp: DistributedDataParallel, steps: int) -> None:
        self._ddp, self._steps = ddp, steps
        named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
        self.names = tuple(name for name, _ in named)
        self.params = [p for _, p in named]
        self._ids = {id(p) for p in self.params}
        self._owners = owners(self.params, ddp.module)
        self._used: list[int] = []
        self._device = device_of(self.params[0].device)
        self._watches: list[Watch] = []
        self._queued = False
        for number, (module, mine) in enumerate(self._owners):
            module.register_forward_pre_hook(functools.partial(self._on_forward, number, mine))
        for i, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(functools.partial(self._on_grad, i))
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._begin()

    # -- what the samples say --------------------------------------------------------------------------------

    @property
    def order(self) -> list[int]:
        return forward_order(self._used, len(self.params))

    def figures(self) -> tuple[float, float, Sample]:
        """Return the seconds of a step, DDP's wait in it, and the layers' times without communication."""
        done = [watch.moments() for watch in self._watches if watch.has("end")]
        with_ddp, alone = done[WARM_UP : WARM_UP + self._steps], done[WARM_UP + self._steps + 1 :]
        if len(with_ddp) < FEWEST:
            raise ValueError(
                f"the script ended after {len(done)} optimizer steps of its DDP model, and advise needs at"
                f" least {WARM_UP + FEWEST}; give it more data or more steps"
            )
        for seen in done:
            if "reduced" in seen.marks:
                seen.waits.append((seen.marks["backward_end"], seen.marks["reduced"]))
        order = self.order
        samples = [
            iteration_times(seen.without(seen.waits), self._owners, order) for seen in alone or with_ddp
        ]
        complete = [sample for sample in samples if sample is not None]
        if not complete:
            raise ValueError(
                "no forward, backward and optimizer step of the DDP model was seen in one step; advise needs"
                " a script that calls the model, backward() and step() of a torch optimizer"
            )
        step = median(seen.marks["end"] - seen.marks["begin"] for seen in with_ddp)
        waited = median(sum(end - start for start, end in seen.waits) for seen in with_ddp)
        return step, waited, combine(complete)

    # -- hooks -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._watch = Watch(lambda: self._device.record(self._device.current()), self._device.moment)
        self._watch.mark("begin")
        self._watches.append(self._watch)

    def _on_forward(self, number: int, params: tuple[int, ...], module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._watch.forward(number)
            if len(self._watches) == 1:
                self._used.extend(params)

    def _on_grad(self, i: int, param: torch.Tensor) -> None:
        self._watch.grad(i)
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Runs before DDP's own callback, which waits for the all-reduces; the lambda runs after it."""
        self._queued = False
        self._watch.mark("backward_end")
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._watch.mark("reduced"))

    def _is_mine(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_mine(optimizer):
            self._watch.mark("enter")
            self._watch.mark("step")

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_mine(optimizer):
            return
        self._watch.mark("end")
        done = len(self._watches)
        if done == WARM_UP + self._steps + ALONE:
            raise Enough
        # The models of the ranks drift apart from here on; the script ends before it can use them.
        self._ddp.require_backward_grad_sync = done < WARM_UP + self._steps
        self._begin()


def observe(script: str, arguments: list[str], steps: int) -> Observation:
    """Run a script until its DDP model has made enough steps; return what was seen."""
    observations: list[Observation] = []

    def made(ddp: DistributedDataParallel) -> None:
        if not observations:
            _join_commsched(ddp)
            observations.append(Observation(ddp, steps))

    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with _constructor_observed(made):
        try:
            runpy.run_path(script, run_name="__main__")
        except Enough:
            pass
        except SystemExit as exit:
            if exit.code:
                raise
    if not observations:
        raise ValueError(
            f"{script} made no torch.nn.parallel.DistributedDataParallel; advise needs a script that trains"
            " with DDP"
        )
    return observations[0]


@contextmanager
def _constructor_observed(made: Callable[[DistributedDataParallel], None]) -> Iterator[None]:
    """Within this context, call ``made`` with every DDP model that is constructed."""
    plain = DistributedDataParallel.__init__

    @functools.wraps(plain)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        made(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = plain  # type: ignore[method-assign]


def _join_commsched(ddp: DistributedDataParallel) -> None:
    """Start commsched's runtime beside the script's group, which may hold the launcher's port. Collective."""
    with HeldPort() as port:
        contact: list[Any] = [(os.environ.get("MASTER_ADDR", "127.0.0.1"), port.number)]
        dist.broadcast_object_list(contact, src=0)
        os.environ["COMMSCHED_MASTER_ADDR"], os.environ["COMMSCHED_MASTER_PORT"] = map(str, contact[0])
        commsched.init()
