"""Halos and gradients on the wire: no gradient chunk starts while a halo waits, no byte comes unexpected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dnn_bench.cluster import Cluster
from tests.support.launch import PATIENCE, ROOT, run_ranks
from tests.support.needs import needs, needs_root
from tests.support.spatial_traffic import COUNTED, events, program, violations

pytestmark = pytest.mark.dist
RANKS = 2


def check(trace: Path, contended: bool) -> None:
    held_back = 0.0
    for rank in range(RANKS):
        halos, chunks = events(trace, rank)
        assert len(halos) > 100 and len(chunks) > 100, (len(halos), len(chunks))
        assert all(chunk["args"]["bytes"] <= 256 << 10 for chunk in chunks)
        assert violations(halos, chunks) == []
        times = sorted(halo["dur"] / 1e3 for halo in halos)
        print(f"rank {rank}: half of the halos within {times[len(times) // 2]:.1f} ms", end=", ")
        print(f"nine of ten within {times[len(times) * 9 // 10]:.1f} ms")
        held_back = max(held_back, *(chunk["args"]["waited_ms"] for chunk in chunks))
    if contended:
        assert held_back > 1, "no chunk ever had to wait, so nothing was tested"


def test_no_gradient_chunk_starts_while_a_halo_waits(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    run_ranks(program(), RANKS, env={"COMMSCHED_TIMELINE": str(trace)}, check=True)
    check(trace, contended=False)


def on_slow_hosts(folder: Path, text: str, env: dict[str, str]) -> None:
    script = folder / "train.py"
    script.write_text(text)
    with Cluster(RANKS, "250mbit", ssh=False) as cluster:
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        processes = cluster.launch([sys.executable, str(script)], env)
        assert [process.wait(PATIENCE) for process in processes] == [0] * RANKS


@pytest.mark.root
@needs_root
@needs("ip", "tc")
def test_no_gradient_chunk_starts_while_a_halo_waits_on_a_slow_link(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    on_slow_hosts(tmp_path, program(steps=12), {"COMMSCHED_TIMELINE": str(trace)})
    check(trace, contended=True)


@pytest.mark.root
@needs_root
@needs("ip", "tc")
def test_what_leaves_a_host_is_what_explain_says(tmp_path: Path) -> None:
    on_slow_hosts(tmp_path, COUNTED, {})
