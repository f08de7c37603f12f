"""`python -m dnn_bench gpu`: the figures of docs/gpu.md, measured here, with what they were measured on."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from comm_core.cuda.launchers import launcher_for
from dnn_bench.baselines.trainer import Job
from dnn_bench.command_line import markdown as table
from dnn_bench.command_line import one_line_errors, parser
from dnn_bench.emulate.cli import Emulation, all_policies, link_of
from dnn_bench.emulate.network import check_device
from dnn_bench.gpu import cost

# Goals.
BANDWIDTH, ONE_WORKER, HOST_SECONDS, MEMORY = 0.90, 1.01, 20e-6, 1.02
TO_BOUND, TO_SIMULATOR = 1.05, 0.05
RIVALS = ("pipedap", "dear", "bytescheduler", "wfbp")

Report = dict[str, Any]
Cells = tuple[str, ...]

PARTS = ("kernels", "steps", "cost", "memory", "emulate")
Rows = list[dict[str, Any]]


def parse(arguments: list[str]) -> argparse.Namespace:
    given = parser("gpu", __doc__)
    add = given.add_argument
    add("--parts", default=",".join(PARTS), help="parts to measure")
    text = "cuda; cpu runs the same code, its figures mean nothing"
    add("--device", default="cuda", help=text)
    add("--kernel-models", default="resnet50,bert_large,gpt2", help="models of `kernels`")
    add("--step-models", default="resnet50,bert_base,gpt2", help="models of the other parts")
    add("--networks", default="10gbe,25gbe,100gib", help="networks of `emulate`")
    add("--ranks", default="8,64", help="ranks of `emulate`")
    add("--batch-size", type=int, default=0, help="samples (default: the model's usual number)")
    add("--iterations", type=int, default=30, help="timed iterations")
    add("--json", type=Path, default=Path("gpu.json"), help="file of the figures")
    return given.parse_args(arguments)


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


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ValueError(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    check_device(options.device)
    report = begun(options.json, environment(options.device))
    for part in parts:
        for rows in measured(part, options):
            print(section(part, rows), flush=True)
            report[part] = merged(report.get(part, []), rows)
            # Keep the figures so far: a later part may fail.
            options.json.write_text(json.dumps(report, indent=1) + "\n")
            options.json.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))
    return 0


def begun(file: Path, here: dict[str, Any]) -> dict[str, Any]:
    """The file's figures if it comes from the same machine and versions; otherwise an empty report."""
    if file.exists():
        before: dict[str, Any] = json.loads(file.read_text())
        same = {key: value for key, value in here.items() if key != "when"}
        if same.items() <= before["environment"].items():
            return {**before, "environment": here}
    return {"environment": here}


def merged(before: Rows, now: Rows) -> Rows:
    """The new rows, and the old ones of other models, networks and ranks."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("model", "what", "network", "ranks"))

    new = {key(row) for row in now}
    return [row for row in before if key(row) not in new] + now


def measured(part: str, options: argparse.Namespace) -> Iterator[Rows]:
    """Measure a part, model by model."""
    if part == "kernels":
        for model in options.kernel_models.split(","):
            yield cost.packing_rows(model, torch.device(options.device), options.iterations)
        return
    for model in options.step_models.split(","):
        job = Job(model, options.batch_size, device=options.device)
        if part == "emulate":
            yield from emulated(job, options)
        else:
            yield [{"model": model, **cost.MEASURES[part](job, options.iterations)}]


def emulated(job: Job, options: argparse.Namespace) -> Iterator[Rows]:
    for network in options.networks.split(","):
        for ranks in map(int, options.ranks.split(",")):
            emulation = Emulation(job, link_of(network, ranks), ranks, 5, options.iterations)
            yield [{"network": network, **emulation.outcome(all_policies())}]


def markdown(report: Report) -> str:
    """The measured parts as Markdown."""
    where = report["environment"]
    head = [
        f"Measured {where['when']} on {where['device']}: torch {where['torch']}, CUDA {where['cuda']},"
        f" kernels {where['kernels']}; `python -m dnn_bench gpu`.",
    ]
    if where["device"] == "CPU":
        head.append("**These figures mean nothing:** a CPU has run what is made for a GPU, to test it.")
    return "\n\n".join(head + [section(part, report[part]) for part in SECTIONS if part in report]) + "\n"


def section(part: str, rows: Sequence[Report]) -> str:
    """A part's title and table."""
    title, columns, cells = SECTIONS[part]
    return f"### {title}\n\n{table(columns, map(cells, rows))}"


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _kernels(row: Report) -> Cells:
    rate = f"{row['bytes'] / row['seconds'] / 1e9:.0f}"
    verdict = _verdict(row["to_copy"] >= BANDWIDTH) if row["what"].startswith("pack ") else ""
    return row["model"], row["what"], f"{row['seconds'] * 1e3:.3f}", rate, f"{row['to_copy']:.2f}", verdict


def _steps(row: Report) -> Cells:
    ratio = row["ratio"]
    times = f"{row['plain'] * 1e3:.2f}", f"{row['wrapped'] * 1e3:.2f}"
    return row["model"], *times, f"{ratio:.4f}", _verdict(ratio <= ONE_WORKER)


def _cost(row: Report) -> Cells:
    seconds = row["per_bucket"]
    return row["model"], str(row["buckets"]), f"{seconds * 1e6:.1f}", _verdict(seconds < HOST_SECONDS)


def _memory(row: Report) -> Cells:
    sizes = [f"{row[name] / 1e6:.0f}" for name in ("plain", "ddp", "wrapped")]
    if not row["ddp"]:  # a CPU's allocator does not tell
        return row["model"], *sizes, "-", "not measured"
    ratio = row["wrapped"] / row["ddp"]
    return row["model"], *sizes, f"{ratio:.3f}", _verdict(ratio <= MEMORY)


def _emulated(outcome: Report) -> Cells:
    rows = {row["policy"]: row for row in outcome["rows"]}
    auto = rows["auto"]
    to_bound, to_startup = (auto["measured"] / outcome[name] for name in ("bound", "startup_bound"))
    ahead, as_simulated = [], True
    for rival in RIVALS:
        found, wanted = (rows[rival][kind] / auto[kind] for kind in ("measured", "simulated"))
        ahead.append(f"{found:.3f} ({wanted:.3f})")
        as_simulated &= abs(found / wanted - 1) <= TO_SIMULATOR
    return (
        outcome["model"],
        outcome["network"],
        str(outcome["ranks"]),
        f"{outcome['compute'] * 1e3:.2f}",
        f"{auto['measured'] * 1e3:.2f}",
        f"{to_bound:.3f}",
        f"{to_startup:.3f}",
        _reached(to_bound, to_startup),
        *ahead,
        _verdict(as_simulated),
    )


def _reached(to_bound: float, to_startup: float) -> str:
    """The lower bound knows no start-up cost: where that alone is above the goal, the other bound counts."""
    if to_bound <= TO_BOUND:
        return "met"
    return "met but for start-up" if to_startup <= TO_BOUND else _verdict(False)


# By part: title, columns, and the cells of a row.
SECTIONS: dict[str, tuple[str, Cells, Callable[[Report], Cells]]] = {
    "kernels": (
        "Kernels",
        ("tensors of", "what", "ms", "GB/s", "of a copy's", f"goal {BANDWIDTH:.2f}"),
        _kernels,
    ),
    "steps": ("One worker", ("model", "plain ms", "wrapped ms", "ratio", f"goal {ONE_WORKER}"), _steps),
    "cost": (
        "Host time of hooks, packing and waits (EMULATED network that costs nothing)",
        ("model", "buckets", "host us per bucket", f"goal {HOST_SECONDS * 1e6:.0f}"),
        _cost,
    ),
    "memory": (
        "Peak memory",
        ("model", "plain peak MB", "DDP", "commsched", "commsched / DDP", f"goal {MEMORY}"),
        _memory,
    ),
    "emulate": (
        "EMULATED networks",
        (
            *("model", "network", "ranks", "compute ms", "auto ms", "/bound", "/start-up bound"),
            f"goal {TO_BOUND}",
            *(f"{rival} / auto (simulated)" for rival in RIVALS),
            f"ahead as simulated, within {TO_SIMULATOR:.0%}",
        ),
        _emulated,
    ),
}
