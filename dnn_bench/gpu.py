"""`python -m dnn_bench gpu`: the figures of docs/gpu.md, measured here, with what they were measured on."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commsched as hvd
from comm_core.cuda import BucketCopy, one_after_another
from comm_core.cuda.launchers import launcher_for
from commsched.optimizer.whole_step import OptimizerView
from dnn_bench import models
from dnn_bench.baselines.trainer import Job
from dnn_bench.command_line import markdown as table
from dnn_bench.command_line import numbers, one_line_errors, parser
from dnn_bench.emulate import Emulation, all_policies, check_device, link_of
from scheduler.ir.inputs import read_json, reading
from scheduler.ir.link import Link

# Goals.
BANDWIDTH, ONE_WORKER, HOST_SECONDS, MEMORY = 0.90, 1.01, 20e-6, 1.02
TO_BOUND, TO_SIMULATOR = 1.05, 0.05
RIVALS = ("pipedap", "dear", "bytescheduler", "wfbp")

Report = dict[str, Any]
Cells = tuple[str, ...]

PARTS = ("kernels", "steps", "cost", "memory", "emulate")
Rows = list[dict[str, Any]]


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser("gpu", __doc__)
    add = command.add_argument
    add("--parts", default=",".join(PARTS), help="parts to measure")
    add("--device", default="cuda", help="cuda; cpu runs the same code, its figures mean nothing")
    add("--kernel-models", default="resnet50,bert_large,gpt2", help="models of `kernels`")
    add("--step-models", default="resnet50,bert_base,gpt2", help="models of the other parts")
    add("--networks", default="10gbe,25gbe,100gib", help="networks of `emulate`")
    add("--ranks", default="8,64", help="ranks of `emulate`")
    add("--batch-size", type=int, default=0, help="samples (default: the model's usual number)")
    add("--iterations", type=int, default=30, help="timed iterations")
    add("--json", type=Path, default=Path("gpu.json"), help="file of the figures")
    return command.parse_args(arguments)


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
        before: dict[str, Any] = read_json(file)
        same = {key: value for key, value in here.items() if key != "when"}
        with reading(f"{file} holds no earlier figures, move it away"):
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
    if part == "kernels":
        for model in options.kernel_models.split(","):
            yield packing_rows(model, torch.device(options.device), options.iterations)
        return
    for model in options.step_models.split(","):
        job = Job(model, options.batch_size, device=options.device)
        if part == "emulate":
            yield from emulated(job, options)
        else:
            yield [{"model": model, **MEASURES[part](job, options.iterations)}]


def emulated(job: Job, options: argparse.Namespace) -> Iterator[Rows]:
    for network in options.networks.split(","):
        for ranks in numbers("--ranks", options.ranks, least=2):
            emulation = Emulation(job, link_of(network, ranks), ranks, 5, options.iterations)
            yield [{"network": network, **emulation.outcome(all_policies())}]


def markdown(report: Report) -> str:
    where = report["environment"]
    head = [
        f"Measured {where['when']} on {where['device']}: torch {where['torch']}, CUDA {where['cuda']},"
        f" kernels {where['kernels']}; `python -m dnn_bench gpu`.",
    ]
    if where["device"] == "CPU":
        head.append("**These figures mean nothing:** a CPU has run what is made for a GPU, to test it.")
    return "\n\n".join(head + [section(part, report[part]) for part in SECTIONS if part in report]) + "\n"


def section(part: str, rows: Sequence[Report]) -> str:
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


# -- costs: packing gradients, steps with one worker, host time, memory --------------------------------------

WARM_UP = 3
PAIRS = 7
FREE = Link(0.0, 1e-15)  # a network that costs nothing: what is left is commsched's own
Figures = dict[str, float]


class HostTime:
    """Seconds spent in some functions, without the time of excluded calls inside; nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0

    def counting(self, act: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        """The same function, its time added; with ``sign=-1`` taken off where it is part of a counted one."""

        def timed(*arguments: Any, **options: Any) -> Any:
            if (self._inside > 0) == (sign > 0):
                return act(*arguments, **options)
            self._inside += sign
            start = time.perf_counter()
            try:
                return act(*arguments, **options)
            finally:
                self.seconds += sign * (time.perf_counter() - start)
                self._inside -= sign

        return timed


@contextmanager
def timed_host(optimizer: Any) -> Iterator[HostTime]:
    """Counts what commsched does in hooks, ``step()`` and ``zero_grad()``; not the optimizer's arithmetic,
    which the plain loop has too.
    """
    clock, session, step = HostTime(), optimizer._session, OptimizerView.step
    for owner, name in (
        (session.hooks, "before_forward"),
        (session.round, "end_of_backward"),
        (optimizer, "step"),
        (optimizer, "zero_grad"),
    ):
        setattr(owner, name, clock.counting(getattr(owner, name)))
    for param in session.round.params:
        hooks = param._post_accumulate_grad_hooks
        hooks.update({key: clock.counting(hook) for key, hook in hooks.items()})
    optimizer._update = clock.counting(optimizer._update, sign=-1)
    OptimizerView.step = clock.counting(step, sign=-1)  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        OptimizerView.step = step  # type: ignore[method-assign]


def own_cost(job: Job, iterations: int) -> Figures:
    """Host seconds per bucket, with 2 ranks over a network that costs nothing."""
    emulation = Emulation(job, FREE, 2, warmup=3, iterations=9)
    profile = emulation.profile()
    with emulation.wrapped("dear", profile) as (module, optimizer):
        emulation.time(module, optimizer, emulation.warmup)
        plan = hvd.explain(optimizer, show=False)
        assert plan is not None  # there are two ranks
        with timed_host(optimizer) as clock:
            emulation.time(module, optimizer, 0)
        buckets = len(plan.buckets)
        return {"buckets": buckets, "per_bucket": clock.seconds / emulation.iterations / buckets}


def one_worker(job: Job, iterations: int) -> Figures:
    """Seconds per iteration with one worker, and the median ratio: a slow moment affects one pair."""
    emulation = Emulation(job, FREE, 2, warmup=3, iterations=iterations)

    def wrapped() -> float:
        module = job.build_model()
        optimizer = hvd.DistributedOptimizer(
            job.build_optimizer(module.parameters()), module.named_parameters(), model=module
        )
        return emulation.time(module, optimizer, emulation.warmup)

    hvd.init()
    pairs: list[tuple[float, float]] = []
    for turn in range(PAIRS):
        if turn % 2:
            ours, plain = wrapped(), emulation.plain()
        else:
            plain, ours = emulation.plain(), wrapped()
        pairs.append((plain, ours))
    plain, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"plain": plain, "wrapped": ours, "ratio": statistics.median(b / a for a, b in pairs)}


def memory(job: Job, iterations: int) -> Figures:
    """Peak bytes of the plain loop, of DDP with ``gradient_as_bucket_view`` (one rank), of commsched."""
    emulation = Emulation(job, FREE, 2, warmup=3, iterations=1)
    profile = emulation.profile()

    def ddp() -> None:
        backend = "nccl" if job.device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        module = job.build_model()
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
        emulation.time(wrapped, job.build_optimizer(module.parameters()), emulation.warmup)
        dist.destroy_process_group()  # which keeps the buckets

    def commsched() -> None:
        with emulation.wrapped("dear", profile) as (module, optimizer):
            emulation.time(module, optimizer, emulation.warmup)

    acts = {"plain": emulation.plain, "wrapped": commsched, "ddp": ddp}
    return {name: _peak(job.device, act) for name, act in acts.items()}


def _peak(device: str, act: Callable[[], object]) -> int:
    """Most bytes at once, of all tensors; 0 on a CPU, whose allocator does not tell."""
    if not device.startswith("cuda"):
        act()
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    act()
    return int(torch.cuda.max_memory_allocated())


MEASURES: dict[str, Callable[[Job, int], Figures]] = {"steps": one_worker, "cost": own_cost, "memory": memory}


def tensors_of(model: str, device: torch.device) -> list[torch.Tensor]:
    """Random gradients in the sizes of a model's parameters."""
    with torch.device("meta"):
        sizes = [p.numel() for p in models.build(model).parameters()]
    generator = torch.Generator(device).manual_seed(1)
    return [torch.randn(size, generator=generator, device=device) for size in sizes]


def packing_rows(model: str, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Measure every way to pack. The result of each kernel is checked before it is timed.

    ``bytes`` are read and written by one call; ``to_copy`` is its bandwidth over a plain copy's.
    """
    tensors = tensors_of(model, device)
    total = sum(t.numel() for t in tensors)
    flat, other = (torch.zeros(total, device=device) for _ in range(2))
    half = torch.empty_like(flat, dtype=torch.bfloat16)
    sizes = [t.numel() for t in tensors]
    views, halves = flat.split(sizes), half.split(sizes)
    ways: list[tuple[str, Callable[[], object], int]] = [
        ("copy of the whole", lambda: other.copy_(flat), 8),
        ("pack to float32", _packing(tensors, flat), 8),
        ("pack to bfloat16", _packing(tensors, half), 6),
        ("torch._foreach_copy_", lambda: torch._foreach_copy_(views, tensors), 8),
        ("torch._foreach_copy_ to bfloat16", lambda: torch._foreach_copy_(halves, tensors), 6),
        ("torch.cat", lambda: torch.cat(tensors, out=flat), 8),
        ("torch._chunk_cat, of FSDP2", lambda: torch._chunk_cat(tensors, 0, 1, out=flat.view(1, -1)), 8),
    ]
    rows: list[dict[str, Any]] = []
    for what, act, moved in ways:
        seconds, size = seconds_of(act, device, repeats), moved * total
        copy = rows[0] if rows else {"bytes": size, "seconds": seconds}
        to_copy = (size / seconds) / (copy["bytes"] / copy["seconds"])
        row = {"model": model, "what": what, "seconds": seconds, "bytes": size, "to_copy": to_copy}
        rows.append(row)
    return rows


def _packing(tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> Callable[[], object]:
    """A call that packs, after one whose result was right."""
    copy = BucketCopy(one_after_another([t.numel() for t in tensors]), bucket, len(tensors), torch.float32)
    copy.pack(tensors, 0.5)
    wanted = (torch.cat(list(tensors)) * 0.5).to(bucket.dtype)
    if not torch.equal(bucket, wanted):
        worst = (bucket.float() - wanted.float()).abs().max().item()
        raise ValueError(f"packing to {bucket.dtype} is wrong by up to {worst}; nothing was timed")
    return lambda: copy.pack(tensors, 0.5)


def seconds_of(act: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of the repetitions, after some that do not count."""
    for _ in range(WARM_UP):
        act()
    if device.type != "cuda":
        return statistics.median(timeit.repeat(act, number=1, repeat=repeats))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        act()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:], strict=False))
