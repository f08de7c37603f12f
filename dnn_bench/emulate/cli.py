"""`python -m dnn_bench emulate`: every policy over a modelled network, with the real compute of one
device.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dnn_bench import models
from dnn_bench.baselines.job import Job
from dnn_bench.emulate.measure import Emulation, Outcome, all_policies
from dnn_bench.emulate.networks import WIRES, link_of
from dnn_bench.emulate.wire import device_for


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dnn_bench emulate",
        description="EMULATED: one device computes, and each collective keeps the communication stream busy"
        " for as long as the network would. Prints measured and simulated times and the lower bound.",
    )
    parser.add_argument("--model", default="bert_base", help=f"one of {', '.join(models.names())}")
    parser.add_argument(
        "--network", default="10gbe", help=f"{', '.join(WIRES)}, or alpha=SECONDS,beta=SECONDS/BYTE"
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--algorithm", default="ring", choices=("ring", "direct", "hierarchical"))
    parser.add_argument("--policies", default="", help="policies, separated by commas (default: all)")
    parser.add_argument(
        "--device", default="cuda", help="cuda, or cpu: the CPU's compute under a thread's timer"
    )
    parser.add_argument("--batch-size", type=int, default=0)
    parser.add_argument("--seq-len", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        link = link_of(options.network, options.ranks, options.algorithm)
        getattr(
            device_for(options.device), "close", lambda: None
        )()  # an error now, not after a model is built
        shape = {"seq_len": options.seq_len} if options.seq_len else {}
        job = Job(options.model, options.batch_size, shape, device=options.device)
        names = options.policies.split(",") if options.policies else all_policies()
        unknown = sorted(set(names) - set(all_policies()))
        if unknown:
            raise ValueError(
                f"there is no policy {unknown[0]!r}; the policies are {', '.join(all_policies())}"
            )
        outcome = Emulation(job, link, options.ranks, options.warmup, options.iterations).outcome(names)
    except ValueError as error:
        print(f"dnn_bench emulate: {error}", file=sys.stderr)
        return 2
    Console().print(table(outcome, options.network))
    if options.json:
        options.json.write_text(json.dumps(to_dict(outcome), indent=1) + "\n")
    return 0


def table(outcome: Outcome, network: str) -> Table:
    """Milliseconds per iteration; ratios are to the lower bound."""
    title = (
        f"EMULATED: {outcome.model} on {outcome.device}, {network}, {outcome.ranks} ranks (alpha"
        f" {outcome.link.alpha * 1e6:.0f} us, {outcome.link.beta * 1e9:.3f} ns per byte)\n"
        f"compute {outcome.compute * 1e3:.2f} ms, lower bound {outcome.bound * 1e3:.2f} ms,"
        f" with start-up {outcome.startup_bound * 1e3:.2f} ms"
    )
    found = Table(title=title, title_justify="left")
    for column in (
        "policy",
        "emulated ms",
        "simulated ms",
        "emulated/simulated",
        "/bound",
        "/start-up bound",
        "buckets",
    ):
        found.add_column(column, justify="left" if column == "policy" else "right")
    for row in outcome.rows:
        found.add_row(
            row.policy,
            f"{row.measured * 1e3:.2f}",
            f"{row.simulated * 1e3:.2f}",
            f"{row.measured / row.simulated:.3f}",
            f"{row.measured / outcome.bound:.3f}",
            f"{row.measured / outcome.startup_bound:.3f}",
            str(row.buckets),
        )
    return found


def to_dict(outcome: Outcome) -> dict[str, object]:
    return {
        "emulated": True,
        "model": outcome.model,
        "device": outcome.device,
        "ranks": outcome.ranks,
        "link": outcome.link.to_dict(),
        "compute": outcome.compute,
        "bound": outcome.bound,
        "startup_bound": outcome.startup_bound,
        "rows": [row.to_dict() for row in outcome.rows],
    }
