"""Measure a DDP script and predict what it would cost with commsched, smaller messages and faster links."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from commsched.cli.options import console, table

if TYPE_CHECKING:
    from commsched.advise.forecast import Forecast


def add_advise_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "ranks to start on this host (default: its number of GPUs, else 2); not under torchrun"
    add("--nproc-per-node", type=int, metavar="N", help=text)
    add("--steps", type=int, default=10, metavar="N", help="timed steps of DDP")
    add("--output", "-o", metavar="FILE", help="write the table and a picture to FILE (.html, .svg)")
    add("--json", action="store_true", help="print one JSON object (times in seconds)")
    add("script", help="a training script for torchrun that uses DistributedDataParallel")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run_advise(arguments: argparse.Namespace) -> None:
    if arguments.steps < 3:
        raise ValueError(f"--steps must be at least 3, got {arguments.steps}")
    if not Path(arguments.script).is_file():
        raise ValueError(f"there is no script {arguments.script}")
    if arguments.output and Path(arguments.output).suffix not in (".html", ".svg"):
        raise ValueError(f"--output must end in .html or .svg, got {arguments.output}")
    if "RANK" in os.environ:
        _run_rank(arguments)
    else:
        _start_ranks(arguments)


def _start_ranks(arguments: argparse.Namespace) -> None:
    """Run this command again under torchrun, on this host."""
    count = arguments.nproc_per_node or _usual_ranks()
    if count < 2:
        raise ValueError(f"--nproc-per-node must be at least 2, got {count}: one rank communicates nothing")
    given = ["--steps", str(arguments.steps)]
    given += ["--output", arguments.output] if arguments.output else []
    given += ["--json"] if arguments.json else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [*launcher, "-m", "commsched", "advise", *given, arguments.script, *arguments.arguments]
    status = subprocess.run(command).returncode
    if status:
        raise SystemExit(status)


def _usual_ranks() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.device_count() > 1 else 2


def _run_rank(arguments: argparse.Namespace) -> None:
    import commsched
    from commsched.advise.forecast import forecast
    from commsched.advise.measuring import measure

    # With --json, stdout carries nothing but the object.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        measured = measure(arguments.script, arguments.arguments, arguments.steps)
    commsched.shutdown()
    if measured is None:
        return
    result = forecast(measured)
    _report(result, arguments)


def _report(found: Forecast, arguments: argparse.Namespace) -> None:
    from commsched.advise import forecast

    if arguments.output:
        draw = forecast.page if arguments.output.endswith(".html") else forecast.picture
        Path(arguments.output).write_text(draw(found))
    if arguments.json:
        print(json.dumps(found.to_dict()))
        return
    out = console()
    columns = ["", "step", "exposed", "of now", "# compute  . exposed"]
    out.print(forecast.facts(found), markup=False, highlight=False)
    out.print(table("what a step costs", columns, forecast.text_rows(found)))
    if arguments.output:
        out.print(f"written to {arguments.output}", markup=False)
