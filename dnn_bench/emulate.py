"""`python -m dnn_bench emulate`: every policy over a modelled network, with one device's compute."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import comm_core
import commsched as hvd
from comm_core.cuda.launchers import launcher_for
from commsched.backends.cpu import EngineBackend
from commsched.backends.cuda import StreamBackend
from commsched.backends.interface import Backend
from commsched.backends.ranks import Ranks
from commsched.devices import CudaDevice
from commsched.env import settings
from dnn_bench.baselines.trainer import Job
from dnn_bench.command_line import add_job, chosen, one_line_errors, parser, shape_of, table
from scheduler import policies
from scheduler.bounds import lower_bound, startup_bound
from scheduler.ir.actions import Kind
from scheduler.ir.link import ALGORITHMS, Level, Link, network_link
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
    return network_link([Level(ranks, wire.alpha, wire.beta)], algorithm)


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
            return optimizer.profile()

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


def parse(arguments: list[str]) -> argparse.Namespace:
    given = parser(
        "emulate",
        "EMULATED: one device computes, and each collective keeps the communication stream busy for as long "
        "as the network would. Prints measured and simulated times and the lower bound.",
    )
    add_job(given, model="bert_base", baseline="")
    text = f"{', '.join(WIRES)}, or alpha=SECONDS,beta=SECONDS/BYTE"
    given.add_argument("--network", default="10gbe", help=text)
    given.add_argument("--ranks", type=int, default=64, help="ranks of the network")
    given.add_argument("--algorithm", default="ring", choices=[*ALGORITHMS], help="how collectives are made")
    given.add_argument("--policies", default="", help="policies, separated by commas (default: all)")
    text = "cuda, or cpu: the CPU's compute under a thread's timer"
    given.add_argument("--device", default="cuda", help=text)
    given.add_argument("--warmup", type=int, default=5, help="untimed iterations")
    given.add_argument("--iterations", type=int, default=30, help="timed iterations")
    given.add_argument("--json", type=Path, help="also write the figures to this file")
    return given.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    link = link_of(options.network, options.ranks, options.algorithm)
    check_device(options.device)
    names = chosen("policy", options.policies, all_policies()) or all_policies()
    job = Job(options.model, options.batch_size, shape_of(options), device=options.device)
    outcome = Emulation(job, link, options.ranks, options.warmup, options.iterations).outcome(names)
    Console().print(emulated_table(outcome, options.network))
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return 0


def emulated_table(outcome: dict[str, Any], network: str) -> Table:
    """Milliseconds per iteration; ratios are to the lower bound."""
    link, bound, startup = outcome["link"], outcome["bound"], outcome["startup_bound"]
    title = (
        f"EMULATED: {outcome['model']} on {outcome['device']}, {network}, {outcome['ranks']} ranks (alpha"
        f" {link['alpha'] * 1e6:.0f} us, {link['beta'] * 1e9:.3f} ns per byte)\n"
        f"compute {outcome['compute'] * 1e3:.2f} ms, lower bound {bound * 1e3:.2f} ms,"
        f" with start-up {startup * 1e3:.2f} ms"
    )
    ratios = ("emulated/simulated", "/bound", "/start-up bound")
    found = table(title, ("policy", "emulated ms", "simulated ms", *ratios, "buckets"), ["policy"])
    for row in outcome["rows"]:
        measured, simulated = row["measured"], row["simulated"]
        times = f"{measured * 1e3:.2f}", f"{simulated * 1e3:.2f}"
        over = (f"{measured / other:.3f}" for other in (simulated, bound, startup))
        found.add_row(row["policy"], *times, *over, str(row["buckets"]))
    return found


# -- the backend of an optimizer that trains alone as if with many ranks: this process answers for them ------

# Exchanges take the time of a link and move this process's bytes in its own memory.


def emulated_ranks(size: int) -> Any:
    """A process set of so many ranks, this process being the first."""
    facts = {"process_set_id": None, "ranks": None}  # no launcher knows them
    return SimpleNamespace(**facts, size=lambda: size, rank=lambda: 0, included=lambda: True)


class OneProcess(Ranks):
    """Ranks that all have this process's values, so they always agree."""

    def __init__(self, process_set: Any) -> None:
        super().__init__(process_set)
        self.own = slice(0, self.size)

    def arrive(self, has_joined: bool, seconds: float = math.inf) -> Future[bool]:
        all_here: Future[bool] = Future()
        all_here.set_result(False)
        return all_here

    def all_values(self, value: Any) -> list[Any]:
        return [value] * self.size

    def agree(self, what: str, value: str, advice: str) -> None:
        pass


class HostLink:
    """The exchange of the CPU's engine: every rank has the values and the shard of this one."""

    def __init__(self, ranks: Ranks, link: Link | None) -> None:
        self.rank, self.size, self._link = ranks.rank, ranks.size, link

    def scatter_sum(self, full: torch.Tensor, shard: torch.Tensor, name: str) -> None:
        self._take(Kind.RS, full)
        torch.mul(full[: shard.numel()], self.size, out=shard)

    def gather(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        self._take(Kind.AG, full)
        full.view(self.size, -1).copy_(shard)

    def sum(self, full: torch.Tensor, name: str) -> None:
        self._take(Kind.AR, full)
        full.mul_(self.size)

    def _take(self, kind: Kind, full: torch.Tensor) -> None:
        if self._link is not None:
            time.sleep(self._link.cost(kind, full.nbytes))


class DeviceLink:
    """The exchange of a GPU: it holds its communication stream for the link's time."""

    name, scales = "EMULATED", False

    def __init__(self, device: CudaDevice, link: Link, ranks: int) -> None:
        self._device, self._link, self._ranks = device, link, ranks
        self._launcher = launcher_for(device.device)
        self._landing: dict[int, torch.Tensor] = {}

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None:
        self._hold(Kind.RS, bucket)
        bucket.mul_(self._ranks)

    def all_gather(self, bucket: torch.Tensor) -> None:
        self._hold(Kind.AG, bucket)
        landing = self._landing.get(bucket.data_ptr())
        if landing is None or landing.shape != bucket.shape:
            landing = self._landing[bucket.data_ptr()] = torch.empty_like(bucket)
        landing.copy_(bucket)

    def all_to_all(self, received: torch.Tensor, message: torch.Tensor) -> None:
        self._hold(Kind.RS, message)
        received.view(self._ranks, -1).copy_(message.view(self._ranks, -1)[0])  # every rank has sent the same

    def _hold(self, kind: Kind, bucket: torch.Tensor) -> None:
        seconds, device = self._link.cost(kind, bucket.nbytes), self._device
        if self._launcher is not None:
            number, stream = int(device.device.index or 0), device.current().cuda_stream
            self._launcher.launch("hold", number, 1, (round(seconds * 1e9),), stream)
        else:
            # Cycles of a clock that changes: coarse, but there without nvcc and CuPy.
            rate = torch.cuda.get_device_properties(device.device).clock_rate * 1e3
            torch.cuda._sleep(round(seconds * rate))

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def emulated_backend(name: str, link: Link, size: int) -> Backend:
    """The backend of a device over this link, for ``transport=``. On a GPU, flags take no time."""
    ranks = OneProcess(emulated_ranks(size))
    timeout, cuda = settings().timeout, name.startswith("cuda")
    host = HostLink(ranks, None if cuda else link)
    engine = EngineBackend(ranks, "EMULATED", comm_core.PythonTransport(host), timeout)
    if not cuda:
        return engine
    device = CudaDevice(torch.device(name))
    return StreamBackend(engine, device, DeviceLink(device, link, size), timeout=timeout)


def check_device(name: str) -> None:
    """``ValueError`` for a CUDA device where there is none."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            "there is no CUDA device here; --device cpu runs the same with the CPU's compute and timer"
        )
