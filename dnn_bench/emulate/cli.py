"""`python -m dnn_bench emulate`: every policy over a modelled network, with one device's compute."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dnn_bench.baselines.job import Job
from dnn_bench.command_line import add_job, chosen, one_line_errors, parser, shape_of, table
from dnn_bench.emulate.measure import WIRES, Emulation, all_policies, link_of
from dnn_bench.emulate.network import check_device


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
    algorithms = ("ring", "direct", "hierarchical")
    given.add_argument("--algorithm", default="ring", choices=algorithms, help="how collectives are made")
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
