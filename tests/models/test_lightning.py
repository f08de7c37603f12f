"""Lightning's Trainer and Fabric with ``strategy="commsched"`` give what ``"ddp"`` gives."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commsched.process.network import HeldPort
from tests.support.documented_commands import blocks
from tests.support.launch import clean_environment

pytestmark = [pytest.mark.models, pytest.mark.trainers]
PROGRAMS = Path(__file__).with_name("programs")
DDP = "ddp_find_unused_parameters_true"
SHARDS = {"gather": "parameters"}
PLAIN = {"transport": "plain"}
Run = dict[str, Any]


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], env=clean_environment(variables), **pipe)


def finish(process: subprocess.Popen[str], status: int | None = 0, timeout: float = 800.0) -> str:
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == status if status is not None else process.returncode, output[-4000:]
    return output


def torchrun(port: int, ranks: int, nodes: int = 1, node: int = 0) -> list[str]:
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    counts = ["--nproc-per-node", str(ranks), "--nnodes", str(nodes), "--node-rank", str(node)]
    return ["-m", "torch.distributed.run", *counts, *where]


def pair(
    folder: Path, name: str, job: str = "classifier", ours: tuple[Run, ...] = ({},), **more: Any
) -> list[Run]:
    """One run with DDP, then one with each of these options of the strategy."""
    run = {"job": job, **more}
    stock = "ddp" if job == "fabric" else DDP
    return [{**run, "strategy": stock, "folder": str(folder / name / "ddp")}] + [
        {**run, "strategy": "commsched", "options": options, "folder": str(folder / name / str(number))}
        for number, options in enumerate(ours)
    ]


def results(run: Run, ranks: int) -> list[Run]:
    return [torch.load(Path(run["folder"]) / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def differences(stock: Run, ours: Run, ranks: int, tolerance: float) -> list[str]:
    """Losses, metrics, gradient norms, parameters and buffers of every rank that are not DDP's."""
    wrong = []
    for rank, (a, b) in enumerate(zip(results(stock, ranks), results(ours, ranks), strict=True)):
        numbers = {"losses": (a["losses"], b["losses"]), "norms": (a.get("norms"), b.get("norms"))}
        numbers |= {name: ([value], [b["logged"][name]]) for name, value in a.get("logged", {}).items()}
        for name, (theirs, mine) in numbers.items():
            far = max((abs(x - y) for x, y in zip(theirs or [], mine or [], strict=True)), default=0.0)
            if not far <= tolerance:
                wrong.append(f"{ours['folder']}, rank {rank}: {name} differ by {far}")
        for name, value in a["state"].items():
            far = (value.double() - b["state"][name].double()).abs().max().item() if value.numel() else 0.0
            if not far <= tolerance or math.isnan(far):
                wrong.append(f"{ours['folder']}, rank {rank}: {name} differs by {far}")
    return wrong


def run_all(runs: list[Run], folder: Path, launcher: list[str]) -> None:
    file = folder / "runs.json"
    file.write_text(json.dumps(runs))
    finish(start([*launcher, str(PROGRAMS / "lightning_jobs.py"), str(file)]))


def compare(runs: list[Run], ranks: int, tolerance: float) -> None:
    wrong, stock = [], runs[0]
    for run in runs:
        if run["strategy"] != "commsched":
            stock = run
        else:
            shards = run["options"].get("gather") == "parameters"  # sums and norms in another order
            wrong += differences(stock, run, ranks, max(tolerance, 1e-6 if shards else 0.0))
    assert not wrong, "\n".join(wrong)


def test_two_ranks_give_the_bits_of_ddp(tmp_path: Path) -> None:
    """Under Lightning's own launcher, one run after the other in the same processes."""
    both = ({}, SHARDS)
    all_three = (*both, PLAIN)
    adam = {"optimizer": "adam"}
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    accumulate = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    runs = [
        *pair(tmp_path, "plain", ours=({}, {"schedule": "dear"}, {"transport": "ring"}), module=adam),
        *pair(tmp_path, "accumulate", ours=all_three, trainer=accumulate, norms=True),
        *pair(tmp_path, "by value", ours=all_three, trainer=by_value),
        *pair(tmp_path, "early", ours=({**SHARDS, "early_step": True},), module=adam),
        *pair(tmp_path, "bfloat16", ours=both, trainer={"precision": "bf16-mixed"}),
        *pair(tmp_path, "all bfloat16", ours=both, trainer={"precision": "bf16-true"}, module=adam),
        *pair(tmp_path, "scaler", ours=all_three, trainer={"gradient_clip_val": 0.3}, scaler=True),
        *pair(tmp_path, "float64", trainer={"precision": "64-true"}, module={"dropout": 0.5}),
        *pair(tmp_path, "lbfgs", module={"optimizer": "lbfgs"}),
        *pair(tmp_path, "gan", "gan", ours=all_three, manual_clip=True),
        *pair(tmp_path, "fabric", "fabric", ours=all_three, accumulate=3, max_norm=0.1),
        *pair(tmp_path, "fabric by value", "fabric", fabric={"precision": "bf16-mixed"}, clip_val=0.01),
    ]
    run_all(runs, tmp_path, [])
    compare(runs, 2, 0.0)
    planned_and_hidden([results(runs[1], 2)[rank]["seen"] for rank in range(2)])


def planned_and_hidden(seen: list[Run]) -> None:
    """The stock trainer's closure leaves all-gathers and updates for the next forward."""
    for one in seen:
        assert one["policy"] == "optimal" and one["source"].startswith("measured in this run")
        assert {"RS", "AG"} <= set(one["operations"])
    assert sum(any(one["pending"]) for one in seen), [one["pending"] for one in seen]


def test_three_ranks_under_torchrun(tmp_path: Path) -> None:
    """DDP adds three ranks' gradients in another order."""
    three: Run = {"trainer": {"devices": 3}, "fabric": {"devices": 3}}
    runs = [
        *pair(tmp_path, "classifier", ours=({}, SHARDS), **three),
        *pair(tmp_path, "gan", "gan", **three),
        *pair(tmp_path, "fabric", "fabric", **three),
    ]
    port = HeldPort()
    run_all(runs, tmp_path, torchrun(port.number, 3))
    compare(runs, 3, 1e-6)


def test_checkpoints_of_each_resume_under_the_other(tmp_path: Path) -> None:
    four, adam = {"max_epochs": 4}, {"optimizer": "adam"}
    whole = pair(tmp_path, "whole", trainer=four, module=adam)
    halves = pair(tmp_path, "half", ours=({}, SHARDS), trainer={"max_epochs": 2}, module=adam)
    resumed = []
    for half in halves:
        saved = f"{half['folder']}/last.ckpt"
        for run in pair(Path(half["folder"]), "resumed", ours=({}, SHARDS), trainer=four, module=adam):
            resumed.append({**run, "resume": saved})
    run_all([*whole, *halves, *resumed], tmp_path, [])
    wrong = [text for run in [whole[1], *resumed] for text in tail(whole[0], run)]
    assert not wrong, "\n".join(wrong)


def tail(whole: Run, resumed: Run) -> list[str]:
    """Differences at the end; the first epochs' losses are those of the run that made the checkpoint."""
    wrong = []
    for rank, (a, b) in enumerate(zip(results(whole, 2), results(resumed, 2), strict=True)):
        far = max(abs(x - y) for x, y in zip(a["losses"][-12:], b["losses"][-12:], strict=True))
        apart = [k for k, v in a["state"].items() if (v - b["state"][k]).abs().max() > 1e-6]
        if far > 1e-6 or apart:
            wrong.append(f"{resumed['folder']}, rank {rank}: losses differ by {far}; {apart}")
    return wrong


@pytest.mark.parametrize("check", ["around_training", "whole_batches", "finetuning", "one_device"])
def test_check(check: str) -> None:
    finish(start([str(PROGRAMS / "lightning_checks.py"), check]))


def test_two_nodes() -> None:
    port, program = HeldPort(), [str(PROGRAMS / "lightning_checks.py"), "around_training"]
    nodes = [start([*torchrun(port.number, 1, 2, node), *program], RANKS="1", NODES="2") for node in range(2)]
    for node in nodes:
        finish(node)


@pytest.mark.parametrize("where", ["forward", "update"])
def test_a_failing_rank_ends_the_others(where: str) -> None:
    output = finish(start([str(PROGRAMS / "lightning_checks.py"), "failing_rank", where]), status=None)
    assert "this rank fails on purpose" in output
    failed, *ended = map(float, re.findall(r"(?:failed|ended) at (\S+)", output))
    assert ended and max(ended) - failed < 60, output[-3000:]


@pytest.mark.parametrize("number", range(2))
def test_the_page_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    page = [
        b.text for b in blocks(False) if b.page == "docs/integrations.md" and "commsched.lightning" in b.text
    ]
    script = tmp_path / "script.py"
    script.write_text(page[number])
    finish(start([str(script)]))
