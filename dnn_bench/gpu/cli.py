"""`python -m dnn_bench gpu`: the figures of docs/gpu.md, measured here, with what they were measured on."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from comm_core.cuda.launchers import launcher_for
from dnn_bench.baselines.job import Job
from dnn_bench.emulate.cli import table as emulated_table
from dnn_bench.emulate.cli import to_dict as emulated_dict
from dnn_bench.emulate.measure import Emulation, all_policies
from dnn_bench.emulate.networks import link_of
from dnn_bench.gpu import cost, kernels, steps
from dnn_bench.gpu.text import markdown

PARTS = ("kernels", "steps", "cost", "memory", "emulate")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dnn_bench gpu", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure (default: %(default)s)")
    parser.add_argument(
        "--device",
        default="cuda",
        help="cuda; cpu runs the same code, its figures mean nothing (default: %(default)s)",
    )
    parser.add_argument("--kernel-models", default="resnet50,bert_large,gpt2")
    parser.add_argument("--step-models", default="resnet50,bert_base,gpt2")
    parser.add_argument("--networks", default="10gbe,25gbe,100gib")
    parser.add_argument("--ranks", default="8,64")
    parser.add_argument("--batch-size", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    return parser.parse_args(arguments)


def environment(device: str) -> dict[str, Any]:
    launcher = launcher_for(torch.device(device))
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernels": launcher.name if launcher else "torch",
    }


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    parts = options.parts.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        print(
            f"dnn_bench gpu: there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}",
            file=sys.stderr,
        )
        return 2
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("dnn_bench gpu: there is no CUDA device here; these figures need one", file=sys.stderr)
        return 2
    console, report = Console(), _begun(options.json, environment(options.device))
    console.print(report["environment"])
    for part in parts:
        for rows in _MEASURE[part](options, console):
            report[part] = _merged(report.get(part, []), rows)
            # What there is, should the next one fail or the time be over.
            options.json.write_text(json.dumps(report, indent=1) + "\n")
            options.json.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))
    return 0


def _begun(file: Path, here: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run on the same machine has left in the file; it is measured anew only where asked
    for.
    """
    if file.exists():
        before: dict[str, Any] = json.loads(file.read_text())
        same = {key: value for key, value in here.items() if key != "when"}
        if same.items() <= before["environment"].items():
            return {**before, "environment": here}
    return {"environment": here}


Rows = Iterator[list[dict[str, Any]]]


def _merged(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured for other models, networks and ranks stays."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("model", "what", "network", "ranks"))

    measured = {key(row) for row in now}
    return [row for row in before if key(row) not in measured] + now


def _kernels(options: argparse.Namespace, console: Console) -> Rows:
    for model in options.kernel_models.split(","):
        rows = kernels.rows(model, torch.device(options.device), options.iterations)
        cells = [
            (r.what, f"{r.seconds * 1e3:.3f}", f"{r.bytes / r.seconds / 1e9:.0f}", f"{r.to_copy:.2f}")
            for r in rows
        ]
        _show(console, f"{model}: all gradients at once", ("what", "ms", "GB/s", "of a copy's"), cells)
        yield [asdict(row) for row in rows]


def _steps(options: argparse.Namespace, console: Console) -> Rows:
    rows = [
        steps.one_worker(model, options.device, options.iterations, options.batch_size)
        for model in options.step_models.split(",")
    ]
    cells = [
        (r.model, f"{r.plain * 1e3:.2f}", f"{r.wrapped * 1e3:.2f}", f"{r.wrapped / r.plain:.4f}")
        for r in rows
    ]
    _show(console, "one worker", ("model", "plain ms", "wrapped ms", "ratio"), cells)
    yield [asdict(row) for row in rows]


def _cost(options: argparse.Namespace, console: Console) -> Rows:
    models = options.step_models.split(",")
    rows = [cost.own_cost(model, options.device, options.batch_size) for model in models]
    cells = [(r.model, str(r.buckets), f"{r.per_bucket * 1e6:.1f}") for r in rows]
    columns = ("model", "buckets", "host us per bucket")
    _show(console, "own cost, EMULATED network that costs nothing", columns, cells)
    yield [asdict(row) for row in rows]


def _memory(options: argparse.Namespace, console: Console) -> Rows:
    models = options.step_models.split(",")
    rows = [cost.memory(model, options.device, options.batch_size) for model in models]
    cells = [(r.model, *(f"{size / 1e6:.0f}" for size in (r.plain, r.ddp, r.wrapped))) for r in rows]
    _show(console, "peak memory", ("model", "plain MB", "DDP MB", "commsched MB"), cells)
    yield [asdict(row) for row in rows]


def _emulate(options: argparse.Namespace, console: Console) -> Rows:
    for model in options.step_models.split(","):
        for network in options.networks.split(","):
            for ranks in map(int, options.ranks.split(",")):
                job = Job(model, options.batch_size, device=options.device)
                emulation = Emulation(job, link_of(network, ranks), ranks, 5, options.iterations)
                outcome = emulation.outcome(all_policies())
                console.print(emulated_table(outcome, network))
                yield [{"network": network, **emulated_dict(outcome)}]


_MEASURE = {"kernels": _kernels, "steps": _steps, "cost": _cost, "memory": _memory, "emulate": _emulate}


def _show(console: Console, title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
