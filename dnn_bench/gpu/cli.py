"""`python -m dnn_bench gpu`: the figures of docs/gpu.md, measured here, with what they were measured on."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from comm_core.cuda.launchers import launcher_for
from dnn_bench.baselines.job import Job
from dnn_bench.command_line import one_line_errors, parser
from dnn_bench.emulate.cli import Emulation, all_policies, link_of
from dnn_bench.emulate.network import check_device
from dnn_bench.gpu import cost, kernels
from dnn_bench.gpu.text import markdown, section

PARTS = ("kernels", "steps", "cost", "memory", "emulate")
Rows = list[dict[str, Any]]


def parse(arguments: list[str]) -> argparse.Namespace:
    given = parser("gpu", __doc__)
    given.add_argument("--parts", default=",".join(PARTS), help="parts to measure")
    text = "cuda; cpu runs the same code, its figures mean nothing"
    given.add_argument("--device", default="cuda", help=text)
    given.add_argument("--kernel-models", default="resnet50,bert_large,gpt2", help="models of `kernels`")
    given.add_argument("--step-models", default="resnet50,bert_base,gpt2", help="models of the other parts")
    given.add_argument("--networks", default="10gbe,25gbe,100gib", help="networks of `emulate`")
    given.add_argument("--ranks", default="8,64", help="ranks of `emulate`")
    given.add_argument(
        "--batch-size", type=int, default=0, help="samples (default: the model's usual number)"
    )
    given.add_argument("--iterations", type=int, default=30, help="timed iterations")
    given.add_argument("--json", type=Path, default=Path("gpu.json"), help="file of the figures")
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
            yield kernels.rows(model, torch.device(options.device), options.iterations)
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
