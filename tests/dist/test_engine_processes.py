"""The engine between real processes: right sums, and an end with a reason when a rank fails."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.launch import PATIENCE, RankResult, run_ranks, start_ranks

pytestmark = pytest.mark.dist

PROGRAM = Path(__file__).with_name("programs") / "engine_ranks.py"
TRANSPORTS = ["tcp", "tcp-ring", "python"]


def failed_after(result: RankResult) -> float:
    found = re.search(r"after=([\d.]+)", result.stdout)
    assert found, f"rank {result.rank} did not fail:\n{result.stdout}{result.stderr}"
    return float(found[1])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_transport_sums(size: int) -> None:
    for result in run_ranks(PROGRAM, size, ["train", ",".join(TRANSPORTS)], check=True):
        assert result.stdout == "right\n" * len(TRANSPORTS)


@pytest.mark.parametrize("transport", ["tcp", "tcp-ring"])
def test_a_killed_rank_ends_the_others_with_a_reason(transport: str) -> None:
    with start_ranks(PROGRAM, 3, ["endless", transport]) as ranks:
        for rank in range(3):
            ranks.wait_for_output(rank, "running")
        ranks.kill(1)
        results = ranks.wait()
    for result in (results[0], results[2]):
        assert result.returncode == 0, result.stderr
        failed_after(result)
        assert "peer_lost" in result.stdout or "timeout" in result.stdout
        assert re.search(r"(RS|AG|AR) of bucket \d \(bucket\d\) in step \d+ failed", result.stdout)
    if transport == "tcp":
        assert all("peer_lost peer=1" in results[rank].stdout for rank in (0, 2))


def test_forked_children_end_without_harm_and_hide_no_death() -> None:
    """A child that ended shut its parent's connections down. One that lived on kept them open, and no rank
    noticed the death of the rank that had forked it."""
    with start_ranks(PROGRAM, 3, ["forks", "tcp"]) as ranks:
        for rank in (0, 2):
            ranks.processes[rank].wait(PATIENCE)
        child = int(re.findall(r"child=(\d+)", ranks.output(1))[0])
        os.kill(child, signal.SIGKILL)  # it was still there
        results = ranks.wait()
    for result in results:
        assert "usage peer=-1" in result.stdout and "this process was forked" in result.stdout, result.stderr
    for rank in (0, 2):
        assert "peer_lost peer=1" in results[rank].stdout, results[rank].stdout + results[rank].stderr


@pytest.mark.parametrize("transport", ["tcp", "tcp-ring"])
def test_a_rank_that_takes_fewer_steps_is_named_within_the_time_out(transport: str) -> None:
    *others, _ = run_ranks(PROGRAM, 2, ["fewer", transport], check=True)
    for result in others:
        assert "timeout peer=1 name=bucket3" in result.stdout
        assert failed_after(result) > 14


@pytest.mark.parametrize("transport", ["tcp", "tcp-ring"])
def test_another_plan_is_an_error_on_every_rank(transport: str) -> None:
    results = run_ranks(PROGRAM, 3, ["plans", transport], check=True)
    for result in results:
        failed_after(result)
    if transport == "tcp":
        assert "do all ranks run the same plan?" in "".join(result.stdout for result in results)


@pytest.mark.parametrize("transport", ["tcp", "python"])
def test_a_process_ends_although_its_engine_was_not_closed(transport: str) -> None:
    for result in run_ranks(PROGRAM, 2, ["unclosed", transport]):
        assert result.stdout == "end\n"
        assert result.returncode == 0, result.stderr
