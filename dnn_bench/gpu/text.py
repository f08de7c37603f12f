"""The figures of ``python -m dnn_bench gpu`` as the Markdown of docs/gpu.md, each beside its goal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dnn_bench.command_line import markdown as table

BANDWIDTH, ONE_WORKER, HOST_SECONDS, MEMORY = 0.90, 1.01, 20e-6, 1.02
TO_BOUND, TO_SIMULATOR = 1.05, 0.05
RIVALS = ("pipedap", "dear", "bytescheduler", "wfbp")

Report = dict[str, Any]
Cells = tuple[str, ...]


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
    ratio = row["wrapped"] / row["plain"]
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
