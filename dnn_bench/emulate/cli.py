"""`python -m dnn_bench emulate`: every policy over a modelled network, with one device's compute."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import commsched as hvd
from dnn_bench.baselines.trainer import Job
from dnn_bench.command_line import add_job, chosen, one_line_errors, parser, shape_of, table
from dnn_bench.emulate.network import check_device, emulated_backend, emulated_ranks
from scheduler import policies
from scheduler.bounds import lower_bound, startup_bound
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
