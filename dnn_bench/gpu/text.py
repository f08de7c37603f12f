"""The figures of ``python -m dnn_bench gpu`` as the Markdown of docs/gpu.md, each beside its goal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
    return "\n\n".join(head + [_PARTS[part](report[part]) for part in _PARTS if part in report]) + "\n"


def _table(title: str, columns: Cells, rows: Iterable[Cells]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _kernels(rows: Sequence[Report]) -> str:
    cells = []
    for row in rows:
        ours = row["what"].startswith("pack ")
        rate = f"{row['bytes'] / row['seconds'] / 1e9:.0f}"
        verdict = _verdict(row["to_copy"] >= BANDWIDTH) if ours else ""
        cells.append(
            (row["model"], row["what"], f"{row['seconds'] * 1e3:.3f}", rate, f"{row['to_copy']:.2f}", verdict)
        )
    columns = ("tensors of", "what", "ms", "GB/s", "of a copy's", f"goal {BANDWIDTH:.2f}")
    return _table("Kernels", columns, cells)


def _steps(rows: Sequence[Report]) -> str:
    cells = []
    for row in rows:
        ratio = row["wrapped"] / row["plain"]
        times = f"{row['plain'] * 1e3:.2f}", f"{row['wrapped'] * 1e3:.2f}"
        cells.append((row["model"], *times, f"{ratio:.4f}", _verdict(ratio <= ONE_WORKER)))
    columns = ("model", "plain ms", "wrapped ms", "ratio", f"goal {ONE_WORKER}")
    return _table("One worker", columns, cells)


def _cost(rows: Sequence[Report]) -> str:
    cells = [
        (
            row["model"],
            str(row["buckets"]),
            f"{row['per_bucket'] * 1e6:.1f}",
            _verdict(row["per_bucket"] < HOST_SECONDS),
        )
        for row in rows
    ]
    columns = ("model", "buckets", "host us per bucket", f"goal {HOST_SECONDS * 1e6:.0f}")
    return _table(
        "Host time of hooks, packing and waits (EMULATED network that costs nothing)", columns, cells
    )


def _memory(rows: Sequence[Report]) -> str:
    cells = []
    for row in rows:
        sizes = [f"{row[name] / 1e6:.0f}" for name in ("plain", "ddp", "wrapped")]
        measured = row["ddp"] > 0  # only a GPU's allocator tells
        ratio = f"{row['wrapped'] / row['ddp']:.3f}" if measured else "-"
        verdict = _verdict(row["wrapped"] <= MEMORY * row["ddp"]) if measured else "not measured"
        cells.append((row["model"], *sizes, ratio, verdict))
    columns = ("model", "plain peak MB", "DDP", "commsched", "commsched / DDP", f"goal {MEMORY}")
    return _table("Peak memory", columns, cells)


def _emulate(outcomes: Sequence[Report]) -> str:
    cells = [_emulated(outcome) for outcome in outcomes]
    columns = (
        *("model", "network", "ranks", "compute ms", "auto ms", "/bound", "/start-up bound"),
        f"goal {TO_BOUND}",
        *(f"{rival} / auto (simulated)" for rival in RIVALS),
        f"ahead as simulated, within {TO_SIMULATOR:.0%}",
    )
    return _table("EMULATED networks", columns, cells)


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


_PARTS: dict[str, Callable[[Sequence[Report]], str]] = {
    "kernels": _kernels,
    "steps": _steps,
    "cost": _cost,
    "memory": _memory,
    "emulate": _emulate,
}
