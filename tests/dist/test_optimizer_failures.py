"""A rank that dies, skips, hangs or differs: every other rank ends in time with an error that says what and
who.
"""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from commsched.env import Settings
from tests.support.launch import PATIENCE, run_ranks, start_ranks
from tests.support.shared_memory import nothing_left_in_shared_memory

pytestmark = pytest.mark.dist

PROGRAM = Path(__file__).with_name("programs") / "optimizer_failures.py"
# A rank that is lost is noticed without any time-out: this one no test reaches.
PATIENT = {"COMMSCHED_TIMEOUT": "900"}
# For a rank that only waits, with time enough for others that are slow.
WAITING = {"COMMSCHED_TIMEOUT": "20"}


@dataclass
class End:
    """How a rank ended: its exit code, with what CommError ("" for none), what it could save, its stderr."""

    code: int
    message: str
    saved: str
    stderr: str


def end_of(text: str, code: int, stderr: str) -> End:
    match = re.search(r"^CommError: (.*)", text, re.DOTALL | re.MULTILINE)
    saved = re.search(r"^saved (.*)$", text, re.MULTILINE)
    return End(code, match.group(1) if match else "", saved.group(1) if saved else "", stderr)


def run(what: str, ranks: int) -> list[End]:
    return [end_of(r.stdout, r.returncode, r.stderr) for r in run_ranks(PROGRAM, ranks, [what], PATIENT)]


def run_until_others_end(what: str, ranks: int) -> list[End]:
    """Rank 1 does not end: only the others are waited for."""
    with start_ranks(PROGRAM, ranks, [what], WAITING) as started:
        codes = [process.wait(PATIENCE) for rank, process in enumerate(started.processes) if rank != 1]
        assert set(codes) == {3}, started.report()
        return [end_of(started.output(rank), 3, "") for rank in range(ranks)]


@pytest.mark.parametrize(
    "what, ranks",
    [
        ("killed in the backward while deferred", 3),
        ("killed in the forward while deferred", 2),
        ("parameters gathered", 2),
        ("killed before the first step", 2),
        ("killed before it agrees on a plan", 2),
        pytest.param("killed in the backward", 2, marks=pytest.mark.slow),
        pytest.param("killed in the backward", 3, marks=pytest.mark.slow),
        pytest.param("killed in the backward while deferred", 4, marks=pytest.mark.slow),
        pytest.param("killed in the forward while deferred", 3, marks=pytest.mark.slow),
        pytest.param("parameters gathered", 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_all_others(what: str, ranks: int) -> None:
    ends = run(what, ranks)
    assert ends[1].code == -9
    for rank in set(range(ranks)) - {1}:
        assert ends[rank].code == 3 and ends[rank].message, f"rank {rank}\n{ends[rank].stderr}"
        assert "rank 1" in ends[rank].message, ends[rank].message
        if not what.startswith("killed before"):
            assert "bucket" in ends[rank].message, ends[rank].message
            saved = "model" if what == "parameters gathered" else "model and optimizer"
            assert ends[rank].saved == saved, ends[rank]


def test_a_rank_is_missed_although_its_data_workers_live_on() -> None:
    """Forked workers kept the dead rank's connections open, so nobody noticed its death."""
    with start_ranks(PROGRAM, 2, ["killed in the backward with workers"], PATIENT) as started:
        started.processes[0].wait(PATIENCE)
        workers = re.findall(r"workers=\[(\d+), (\d+)\]", started.output(1))[0]
        for worker in workers:
            os.kill(int(worker), signal.SIGKILL)  # they were still there
        first, second = started.wait()
    assert second.returncode == -signal.SIGKILL
    end = end_of(first.stdout, first.returncode, first.stderr)
    assert end.code == 3 and "rank 1" in end.message and "bucket" in end.message, end


def test_a_step_left_out_on_one_rank_is_told_at_the_next_backward() -> None:
    for end in run("skips a step", 3):
        assert end.code == 3, end.stderr
        assert "ranks 0, 2 called step() and rank 1 did not" in end.message, end.message


@pytest.mark.parametrize("what", ["does not come", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_is_an_error_in_time(what: str) -> None:
    ends = run_until_others_end(what, 3)
    for rank in (0, 2):
        assert re.search(r"bucket \d+|flags", ends[rank].message), ends[rank].message
        assert "rank 1" in ends[rank].message, ends[rank].message


def test_ctrl_c_ends_the_wait_for_a_rank_that_does_not_come() -> None:
    """It was noticed when the wait ended, after the time-out, which no test reaches."""
    soon = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2"}
    with (
        nothing_left_in_shared_memory(),
        start_ranks(PROGRAM, 2, ["does not come"], PATIENT | soon) as started,
    ):
        deadline = time.monotonic() + PATIENCE
        while "rank 0 has waited 2 s for rank 1 in" not in started.output(0, "stderr"):
            assert time.monotonic() < deadline, started.report()
            time.sleep(0.1)
        started.kill(0, signal.SIGINT)
        assert started.processes[0].wait(PATIENCE) == -signal.SIGINT, started.report()
        assert "KeyboardInterrupt" in started.output(0, "stderr") and "CommError" not in started.output(0)


def test_a_rank_that_does_not_agree_on_a_plan_is_named() -> None:
    for rank, end in enumerate(run_until_others_end("never agrees on a plan", 3)):
        expected = f"rank {rank} has waited 20 s (COMMSCHED_TIMEOUT) for rank 1 to agree on a plan"
        assert rank == 1 or expected in end.message, end.message


def test_a_rank_that_evaluates_is_waited_for_and_named() -> None:
    """After 300 s it was an error, although rank 0 of many scripts evaluates alone for longer."""
    first, second = run_ranks(PROGRAM, 2, ["comes late"], WAITING)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    told = r"rank 0 has waited 2 s for rank 1 in (RS|AR) of bucket \d+ \(step 11, .*\); it waits 20 s"
    assert len(re.findall(told, first.stderr)) == 1, first.stderr
    assert Settings().timeout == 1800 and Settings().warning == 30


def test_an_exception_on_one_rank_ends_the_others() -> None:
    ends = run("an exception", 3)
    assert ends[1].code == 1 and "the data of rank 1" in ends[1].stderr
    for rank in (0, 2):
        assert ends[rank].code == 3 and "rank 1" in ends[rank].message, ends[rank]


@pytest.mark.parametrize(
    "what, ranks, who",
    [
        ("another model", 3, "the model's parameters"),
        pytest.param("one parameter less", 2, "the model's parameters", marks=pytest.mark.slow),
        ("another schedule", 2, "the arguments of DistributedOptimizer"),
    ],
)
def test_what_differs_is_told_on_every_rank(what: str, ranks: int, who: str) -> None:
    for end in run(what, ranks):
        assert end.code == 3, end.stderr
        assert f"{who} must be the same on all ranks" in end.message, end.message
        assert "rank 1 has" in end.message, end.message


def test_an_engine_with_another_plan_is_an_error_and_no_wrong_sum() -> None:
    for end in run("another plan", 2):
        assert end.code == 3, end.stderr
        assert "bucket" in end.message and "rank" in end.message, end.message
