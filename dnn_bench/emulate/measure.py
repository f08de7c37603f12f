"""One model, one emulated network, one policy after the other."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

import commsched as hvd
from dnn_bench.baselines.job import Job
from dnn_bench.emulate.network import emulated_backend, emulated_ranks
from scheduler import policies
from scheduler.bounds import lower_bound, startup_bound
from scheduler.ir.link import Link, Network
from scheduler.ir.profile import Profile
from scheduler.simulate.simulator import simulate

DDP = "ddp-like"  # buckets as wfbp's, and nothing of the step before all gradients are there
LEARNING_ITERATIONS = 6  # until "auto" has its profile


# Networks by name: seconds to start one message (assumptions), seconds per byte (the standards' rates).
WIRES = {
    "1gbe": Link(30e-6, 8 / 1e9),
    "10gbe": Link(20e-6, 8 / 10e9),
    "25gbe": Link(15e-6, 8 / 25e9),
    "100gib": Link(3e-6, 8 / 100e9),
    "nvlink": Link(1e-6, 1 / 450e9),
}


def link_of(network: str, ranks: int, algorithm: str = "ring") -> Link:
    """What one RS or AG costs on ``ranks`` ranks; ``network`` is a name or ``alpha=SECONDS,beta=SECONDS``."""
    name = network.lower().replace("-", "")
    if name not in WIRES and "=" not in name:
        raise ValueError(
            f"there is no network {network!r}; the networks are {', '.join(WIRES)}, or alpha=...,beta=..."
        )
    if ranks < 2:
        raise ValueError(f"a network joins at least 2 ranks, got {ranks}")
    wire = WIRES[name] if name in WIRES else Link.parse(network)
    return Network.flat(wire, ranks, algorithm).link()


class Emulation:
    """Trains one model on one device, again and again."""

    def __init__(self, job: Job, link: Link, ranks: int, warmup: int, iterations: int) -> None:
        self.job, self.link, self.ranks = job, link, ranks
        self.warmup, self.iterations = warmup, iterations
        self.batch = job.local_batch(0)

    def plain(self) -> float:
        model = self.job.build_model()
        return self.time(model, self.job.build_optimizer(model.parameters()), self.warmup)

    def profile(self) -> Profile:
        """The model's times on this device, as the optimizer measures them."""
        with self.wrapped("sequential", None) as (model, optimizer):
            for _ in range(LEARNING_ITERATIONS):
                self._iteration(model, optimizer)
            found: Profile = optimizer.profile()
            return found

    def row(self, policy: str, profile: Profile) -> dict[str, Any]:
        """One policy: emulated and simulated seconds per iteration."""
        schedule = "wfbp" if policy == DDP else "optimal" if policy == "auto" else policy
        with self.wrapped(schedule, profile) as (model, optimizer):
            measured = self.time(model, optimizer, self.warmup, synchronous=policy == DDP)
            plan = hvd.explain(optimizer, show=False)
        assert plan is not None  # there are several ranks
        simulated = simulate(plan.program, plan.profile, self.link).period
        return {"policy": policy, "measured": measured, "simulated": simulated, "buckets": len(plan.buckets)}

    def outcome(self, names: Sequence[str]) -> dict[str, Any]:
        """The figures of these policies, and of one iteration without any communication (`compute`)."""
        compute, profile = self.plain(), self.profile()
        cuda = self.job.device.startswith("cuda")
        return {
            "emulated": True,
            "model": self.job.model,
            "device": torch.cuda.get_device_name(self.job.device) if cuda else "CPU",
            "ranks": self.ranks,
            "link": self.link.to_dict(),
            "compute": compute,
            "bound": lower_bound(profile, self.link),
            "startup_bound": startup_bound(profile, self.link),
            "rows": [self.row(name, profile) for name in names],
        }

    @contextmanager
    def wrapped(self, schedule: str, profile: Profile | None) -> Iterator[tuple[Any, Any]]:
        """A new model, and an optimizer over the emulated network."""
        model = self.job.build_model()
        optimizer: Any = hvd.DistributedOptimizer(
            self.job.build_optimizer(model.parameters()),
            model.named_parameters(),
            process_set=emulated_ranks(self.ranks),
            model=model,
            schedule=schedule,
            profile=profile,
            transport=emulated_backend(self.job.device, self.link, self.ranks),  # type: ignore[arg-type]
        )
        try:
            yield model, optimizer
        finally:
            optimizer.close()
            self._wait()

    def _iteration(self, model: Any, optimizer: Any, synchronous: bool = False) -> None:
        inputs, targets = self.batch
        optimizer.zero_grad()
        self.job.loss(model(inputs), targets).backward()
        if not synchronous:
            optimizer.step()
            return
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    def time(self, model: Any, optimizer: Any, warmup: int, synchronous: bool = False) -> float:
        """The median over thirds of the run, so that one disturbance does not decide."""
        for _ in range(warmup):
            self._iteration(model, optimizer, synchronous)
        each = max(1, self.iterations // 3)
        times = []
        for _ in range(3):
            self._wait()
            start = perf_counter()
            for _ in range(each):
                self._iteration(model, optimizer, synchronous)
            self._wait()
            times.append((perf_counter() - start) / each)
        return statistics.median(times)

    def _wait(self) -> None:
        if self.job.device.startswith("cuda"):
            torch.cuda.synchronize()


def all_policies() -> list[str]:
    return ["auto", *(name for name in policies.names() if name != "optimal"), DDP]
