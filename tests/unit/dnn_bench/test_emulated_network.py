"""The emulated network: its costs, its thread, and the two commands on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from dnn_bench import emulate
from dnn_bench import gpu as gpu_cli
from dnn_bench.emulate import WIRES, HostLink, OneProcess, all_policies, emulated_ranks, link_of
from dnn_bench.models import build
from scheduler.ir.link import Link


def test_networks_by_name() -> None:
    ten = link_of("10gbe", 64)
    assert ten.alpha == pytest.approx(63 * 20e-6) and ten.beta == pytest.approx(63 / 64 * 0.8e-9)
    assert link_of("100-GIB", 2).beta == pytest.approx(0.5 * 0.08e-9)
    assert link_of("10gbe", 8, "direct").alpha == pytest.approx(20e-6)
    assert link_of("alpha=1e-3,beta=1e-9", 2).alpha == pytest.approx(1e-3)
    for name in WIRES:
        assert link_of(name, 8).beta > 0
    with pytest.raises(ValueError, match="no network '40gbe'; the networks are 1gbe"):
        link_of("40gbe", 8)
    with pytest.raises(ValueError, match="at least 2 ranks, got 1"):
        link_of("10gbe", 1)


def test_collectives_take_the_links_time_and_sum_over_equal_ranks() -> None:
    host = HostLink(OneProcess(emulated_ranks(3)), Link(0.05, 1e-6))
    bucket, shard = torch.ones(1002), torch.zeros(334)  # 4008 bytes: 54 ms
    start = time.monotonic()
    host.scatter_sum(bucket, shard, "reduce-scatter")
    host.gather(shard, bucket, "all-gather")
    assert time.monotonic() - start >= 0.108
    assert bucket.tolist() == [3.0] * 1002


@pytest.mark.thorough
def test_every_policy_on_a_small_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "emulated.json"
    words = "--model mlp_tiny --batch-size 8 --network alpha=1e-4,beta=1e-8 --ranks 2 --device cpu"
    assert emulate.main([*words.split(), "--warmup", "1", "--iterations", "3", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("EMULATED: mlp_tiny on CPU") and "ddp-like" in shown
    found = json.loads(file.read_text())
    assert found["emulated"] is True
    assert [row["policy"] for row in found["rows"]] == all_policies()
    sizes = [p.numel() * p.element_size() for p in build("mlp_tiny").parameters()]
    travels = 2 * link_of("alpha=1e-4,beta=1e-8", 2).beta * sum(sizes)
    for row in found["rows"]:
        # The link is what takes time here, and no simulation is faster than the bound. An iteration may be
        # measured short where the one before it was long: what it takes depends on the machine's other work.
        assert row["simulated"] >= 0.999 * found["bound"] and found["bound"] > travels, row
        assert row["measured"] > 0.5 * travels, row


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda"], "there is no CUDA device here; --device cpu runs the same"),
        (
            ["--device", "cpu", "--policies", "best"],
            "unknown policy 'best'; choose of: auto, sequential",
        ),
        (["--network", "token-ring"], "there is no network 'token-ring'"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert emulate.main(["--model", "mlp_tiny", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_benchmark_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    words = "--device cpu --kernel-models mlp_tiny --step-models mlp_tiny --networks nvlink --ranks 2"
    assert gpu_cli.main([*words.split(), "--batch-size", "4", "--iterations", "3", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["environment"]["device"] == "CPU"
    kernels = {row["what"] for row in found["kernels"]}
    assert {
        "pack to float32",
        "pack to bfloat16",
        "torch._foreach_copy_",
        "torch._chunk_cat, of FSDP2",
    } <= kernels
    assert found["steps"][0]["wrapped"] > 0 and found["cost"][0]["buckets"] > 0
    assert found["cost"][0]["per_bucket"] > 0 and found["memory"][0]["ddp"] == 0
    assert "EMULATED networks" in file.with_suffix(".md").read_text()
    assert len(found["emulate"][0]["rows"]) == len(all_policies())
    assert "EMULATED" in capsys.readouterr().out


def test_the_benchmark_says_that_it_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_cli.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert gpu_cli.main(["--parts", "kernels,speed"]) == 2
    assert "no part 'speed'; the parts are kernels, steps, cost, memory, emulate" in capsys.readouterr().err
