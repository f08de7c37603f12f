"""The figures of ``python -m dnn_bench gpu``: host time as it is counted, and the text for docs/gpu.md."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dnn_bench import gpu
from dnn_bench.gpu import markdown

WHERE = {
    "when": "2030-01-01T00:00+00:00",
    "device": "GPU",
    "torch": "9",
    "cuda": "99",
    "python": "3",
    "kernels": "built",
}


def kernel(what: str, to_copy: float) -> dict[str, Any]:
    return {"model": "gpt2", "what": what, "seconds": 1e-3, "bytes": 2 * 10**9, "to_copy": to_copy}


def outcome(bound: float, startup: float, wfbp: float) -> dict[str, Any]:
    times = {"auto": (0.105, 0.1), "pipedap": (0.21, 0.2), "dear": (0.21, 0.2), "bytescheduler": (0.21, 0.2)}
    rows = [{"policy": p, "measured": m, "simulated": s} for p, (m, s) in times.items()]
    rows.append({"policy": "wfbp", "measured": wfbp, "simulated": 0.2})
    return {
        "model": "gpt2",
        "network": "10gbe",
        "ranks": 8,
        "compute": 0.09,
        "bound": bound,
        "startup_bound": startup,
        "rows": rows,
    }


REPORT = {
    "environment": WHERE,
    "kernels": [
        kernel("pack to float32", 0.9),
        kernel("pack to bfloat16", 0.89),
        kernel("torch.cat", 0.5),
    ],
    "steps": [
        {"model": "gpt2", "plain": 0.1, "wrapped": 0.101, "ratio": 1.01},
        {"model": "bert", "plain": 0.1, "wrapped": 0.102, "ratio": 1.02},
    ],
    "cost": [
        {"model": "gpt2", "buckets": 7, "per_bucket": 19.9e-6},
        {"model": "bert", "buckets": 7, "per_bucket": 2e-5},
    ],
    "memory": [
        {"model": "gpt2", "plain": 9e9, "ddp": 10e9, "wrapped": 10.2e9},
        {"model": "bert", "plain": 9e9, "ddp": 10e9, "wrapped": 10.3e9},
        {"model": "on a CPU", "plain": 0, "ddp": 0, "wrapped": 0},
    ],
    "emulate": [outcome(0.1, 0.1, 0.21), outcome(0.09, 0.1, 0.21), outcome(0.09, 0.09, 0.25)],
}

ROWS = """
| gpt2 | pack to float32 | 1.000 | 2000 | 0.90 | met |
| gpt2 | pack to bfloat16 | 1.000 | 2000 | 0.89 | **missed** |
| gpt2 | torch.cat | 1.000 | 2000 | 0.50 |  |
| gpt2 | 100.00 | 101.00 | 1.0100 | met |
| bert | 100.00 | 102.00 | 1.0200 | **missed** |
| gpt2 | 7 | 19.9 | met |
| bert | 7 | 20.0 | **missed** |
| gpt2 | 9000 | 10000 | 10200 | 1.020 | met |
| bert | 9000 | 10000 | 10300 | 1.030 | **missed** |
| on a CPU | 0 | 0 | 0 | - | not measured |
"""


def test_every_goal_stands_beside_its_figure() -> None:
    text = markdown(REPORT)
    assert text.startswith("Measured 2030-01-01T00:00+00:00 on GPU: torch 9, CUDA 99, kernels built;")
    for row in ROWS.strip().splitlines():
        assert row in text.splitlines(), row
    emulated = [
        line for line in text.splitlines() if line.startswith("| gpt2 | 10gbe | 8 | 90.00 | 105.00 |")
    ]
    rest = "2.000 (2.000) | 2.000 (2.000) | 2.000 (2.000) | "
    head = "| gpt2 | 10gbe | 8 | 90.00 | 105.00 | "
    assert emulated == [
        head + "1.050 | 1.050 | met | " + rest + "2.000 (2.000) | met |",
        head + "1.167 | 1.050 | met but for start-up | " + rest + "2.000 (2.000) | met |",
        head + "1.167 | 1.167 | **missed** | " + rest + "2.381 (2.000) | **missed** |",
    ]


def test_what_was_not_measured_is_left_out() -> None:
    text = markdown({"environment": WHERE, "cost": REPORT["cost"]})
    assert "Host time" in text and "Kernels" not in text and "Peak memory" not in text


def test_host_time_counts_nested_calls_once_and_leaves_arithmetic_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    clock = gpu.HostTime()
    arithmetic, inner = clock.counting(lambda: spend(10.0), sign=-1), clock.counting(lambda: spend(1.0))

    def outer() -> None:
        spend(2.0)
        inner()
        arithmetic()

    clock.counting(outer)()
    assert clock.seconds == 3.0
    arithmetic()  # by itself: not commsched's, and not taken off
    spend(100.0)
    assert clock.seconds == 3.0
    inner()
    assert clock.seconds == 4.0


def test_a_later_run_keeps_the_parts_that_it_does_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    measured = dict(REPORT)
    monkeypatch.setattr(gpu, "measured", lambda part, options: [measured[part]])
    for part in ("kernels", "steps"):
        assert gpu.main(["--device", "cpu", "--parts", part, "--json", str(file)]) == 0
    assert json.loads(file.read_text()).keys() == {"environment", "kernels", "steps"}
    text = file.with_suffix(".md").read_text()
    assert "### Kernels" in text and "### One worker" in text and text in capsys.readouterr().out
    again = [{"model": "bert", "plain": 0.2, "wrapped": 0.2, "ratio": 1.0}]
    measured["steps"] = again
    assert gpu.main(["--device", "cpu", "--parts", "steps", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["steps"] == [REPORT["steps"][0], *again]
    other = json.loads(file.read_text())
    other["environment"]["device"] = "another GPU"
    file.write_text(json.dumps(other))
    assert gpu.main(["--device", "cpu", "--parts", "steps", "--json", str(file)]) == 0
    assert json.loads(file.read_text()).keys() == {"environment", "steps"}
