"""What `python -m dnn_bench faults` finds in the notes of ranks: here of three that train in one process."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dnn_bench.faults import (
    KINDS,
    STRANGER,
    Fault,
    Job,
    Member,
    Outcome,
    draw,
    judge,
    lose,
    names,
    parse,
    report,
    summary,
)  # fmt: skip
from dnn_bench.runner.elastic_worker import Training, digest, values
from tests.support.needs import needs_root

SIZE = 3
Notes = list[dict[str, Any]]


def trained(steps: int = 70, begin: float = 1.0) -> tuple[Job, Notes]:
    """A job and the notes of its ranks: three epochs of the data, and from step 40 another one of the job."""
    options = argparse.Namespace(seed=1, hosts=SIZE, per_host=1, patience=1)
    job = Job(None, 1, Path(), options)  # type: ignore[arg-type]
    training = Training(**job.training)
    model, (inputs, targets) = training.model(), training.data()
    optimizer, clock, notes, left, data = training.make_optimizer(model), count(begin), [], [], -1
    for step in range(steps):
        epoch = "a" if step < 40 else "b"
        if step in (0, 40):
            runs = [["a", 0, 40]] if step else []
            notes += [noted(clock, r, "begin", epoch, step, size=SIZE, runs=runs) for r in range(SIZE)]
        if not left:
            left, data = list(range(training.samples)), data + 1
        batch, left = left[: 4 * SIZE], left[4 * SIZE :]
        optimizer.zero_grad()
        for rank in range(SIZE):
            mine = batch[rank::SIZE]
            notes.append(noted(clock, rank, "use", epoch, step, data=data, indices=mine))
            if mine:
                loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
                (loss * len(mine) / len(batch)).backward()
        optimizer.step()
        facts = {"digest": digest(model)}
        for rank in range(SIZE):
            own = {"values": values(model)} if step % 10 == rank == 0 or step == 62 else {}
            notes.append(noted(clock, rank, "done", epoch, step, **facts, **own))
    return job, notes


def noted(clock: Any, rank: int, what: str, epoch: str, step: int, **facts: Any) -> dict[str, Any]:
    at = next(clock)
    return {"what": what, "at": at, "rank": rank, "epoch": epoch, "step": step, "place": f"host{rank}-0"} | (
        facts | {"pid": rank + 1}
    )


def judged(
    change: Callable[[Notes], object] = lambda notes: None, steps: int = 70, over: float = float("inf")
) -> list[Outcome]:
    """Two faults, one before the notes (until `over`) and one in the second epoch of the job."""
    job, notes = trained(steps)
    change(notes)
    for note in notes:
        job.take(note)
    second = next(note["at"] for note in notes if note.get("epoch") == "b")
    outcomes = [Outcome(fault, 1, at) for fault, at in zip(draw(1, 2, ["kill"]), (0.5, second))]
    outcomes[0].over = over
    judge(job, outcomes)
    return outcomes


def test_a_job_without_a_fault() -> None:
    assert not any(outcome.is_wrong for outcome in judged())


def test_an_error_between_two_faults() -> None:
    """A rank that a fault has harmed late was found by nobody: the next fault came on top."""

    def fail(notes: Notes) -> None:
        for at, kind in ((1.5, "CommError"), (9.5, "HostsUpdatedInterrupt"), (10.5, "CommError")):
            notes.append({"what": "error", "at": at, "rank": 1, "kind": kind, "text": f"at {at}", "pid": 2})

    first, second = judged(fail, over=10.0)
    assert first.problems == ["no rank was lost, and rank 1 raised at 10.5"] and not second.is_wrong


def ended(change: Callable[[Notes], object] = lambda notes: None) -> list[Outcome]:
    """A job that ends in order after three epochs of the data."""

    def end(notes: Notes) -> None:
        last = one(notes, "done", 62)
        facts = {"runs": [["a", 0, 40], ["b", 40, 63]], "digest": last["digest"], "values": last["values"]}
        notes[:] = [note for note in notes if note["step"] < 63]
        notes += [{**last, "what": "end", "rank": rank, "step": 63, **facts} for rank in range(SIZE)]
        change(notes)

    return judged(end, steps=64)


def test_a_job_that_ends_in_order() -> None:
    assert not any(outcome.is_wrong for outcome in ended())


def test_a_sample_that_no_step_of_the_last_epoch_has_used() -> None:
    first, second = ended(lambda notes: one(notes, "use", 61)["indices"].pop())
    assert (first.lost, second.lost, second.doubled) == (0, 1, 0)
    assert "after step 62 a parameter is" in second.problems[0], "the end's values are looked at, too"


def test_an_epoch_of_the_data_that_is_left_out() -> None:
    def skip(notes: Notes) -> None:
        for note in notes:
            note |= {"data": note["data"] + 1} if note.get("data", 0) > 0 else {}

    first, second = ended(skip)
    assert first.lost == Training(0).samples and not second.is_wrong


def test_ranks_that_end_with_other_steps_or_parameters() -> None:
    for change in ({"runs": [["a", 0, 63]]}, {"digest": "0"}):
        first, second = ended(lambda notes, change=change: notes[-1].update(change))  # type: ignore[misc]
        assert (
            second.problems == ["the ranks end with other steps, or other parameters"] and not first.is_wrong
        )


def inflicted(kind: str, change: Callable[[Notes, int], object]) -> Outcome:
    """The outcome of a fault that kills a process, rank 1's, if the ranks then note this."""
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            job, notes = trained(begin=time.monotonic() + 5)
            job.process = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
            pids = {0: 10**7, 1: process.pid, 2: 10**7 + 2}  # more than Linux gives
            members = [Member(rank, f"host{rank}-0", pid) for rank, pid in pids.items()]
            for note in notes:
                note["pid"] = {**pids, 1: 10**7 + 1}[note["rank"]]
            error = {"what": "error", "at": notes[0]["at"], "kind": "CommError", "text": "rank 1 is lost"}
            notes += [{**error, "rank": rank, "pid": pids[rank]} for rank in (0, 2)]
            change(notes, process.pid)
            for note in notes:
                job.take(note)
            outcome = Outcome(Fault(0, kind, 0.4, 0.0, 0.0, 0.0), 1)
            lose(job, outcome, members)
            return outcome
        finally:
            process.kill()


def begun(notes: Notes, rank: int) -> dict[str, Any]:
    return next(note for note in notes if note["what"] == "begin" and note["rank"] == rank)


def test_a_rank_that_is_lost() -> None:
    outcome = inflicted("kill", lambda notes, pid: None)
    assert not outcome.is_wrong and outcome.named and outcome.target == "rank 1"


def test_a_fault_that_has_not_come() -> None:
    outcome = inflicted("kill", lambda notes, pid: begun(notes, 1).update(pid=pid))
    assert outcome.problems == ["the fault has not come: the process that was rank 1 trains on"]


def test_a_rank_that_is_lost_without_need() -> None:
    outcome = inflicted("kill", lambda notes, pid: begun(notes, 2).update(pid=1))
    assert set(outcome.problems) == {"the process that was rank 2 is lost without need"}


def test_an_error_that_does_not_name_the_lost_rank() -> None:
    for change in ({"text": "rank 0 is lost"}, {"what": "other"}):
        outcome = inflicted("kill", lambda notes, pid, change=change: notes[-1].update(change))  # type: ignore[misc]
        assert "every rank left must raise an error that names rank 1" in outcome.problems[0]


def test_stacks_are_asked_of_the_job_alone(tmp_path: Path) -> None:
    """A rank had ended, and another program had its number: the signal ended that."""
    (tmp_path / "output").touch()
    job = Job(None, 1, tmp_path, argparse.Namespace(seed=1, hosts=SIZE, per_host=1, patience=1))  # type: ignore[arg-type]
    with subprocess.Popen(["sleep", "100"]) as other:
        job.notes["hello"] += [{"pid": other.pid}, {"pid": 10**7}]
        job.stacks()
        assert other.poll() is None
        other.kill()


@needs_root
def test_a_stranger_that_reaches_no_port() -> None:
    command = ["unshare", "--net", sys.executable, "-c", STRANGER, "garbage", "1"]
    assert subprocess.run(command, timeout=60).returncode == 1


def one(notes: Notes, what: str, step: int, rank: int = 1) -> dict[str, Any]:
    return next(n for n in notes if n["what"] == what and n["step"] == step and n["rank"] == rank)


def test_a_sample_that_no_step_has_used() -> None:
    first, second = judged(lambda notes: one(notes, "use", 5)["indices"].pop())
    assert (first.lost, first.doubled, second.lost) == (1, 0, 0)
    assert "after step 10 a parameter is" in first.problems[0]


def test_a_sample_that_two_steps_have_used() -> None:
    first, second = judged(lambda notes: one(notes, "use", 45)["indices"].append(3))
    assert (first.doubled, second.doubled, second.lost) == (0, 1, 0)
    assert "after step 50 a parameter is" in second.problems[0]


def test_parameters_that_differ_between_ranks() -> None:
    first, second = judged(lambda notes: one(notes, "done", 41).update(digest="0"))
    assert not first.is_wrong and "parameters differ after step 41" in second.problems[0]


def test_parameters_that_are_not_those_of_one_process() -> None:
    """The bound follows from rounding, so that a change of 1e-8 is found."""

    def change(notes: Notes) -> None:
        one(notes, "done", 60, 0)["values"][7] *= 1 + 1e-8

    first, second = judged(change)
    assert not first.is_wrong and "after step 60 a parameter is" in second.problems[0]


def test_a_step_that_is_missing() -> None:
    def shift(notes: Notes) -> None:
        for note in notes:
            if note["what"] == "begin" and note["epoch"] == "b":
                note["runs"] = [["a", 0, 39]]

    first, second = judged(shift)
    assert not first.is_wrong and "step 40 of epoch b follows 39 steps" in second.problems[0]


def test_a_seed_draws_the_same_faults_and_as_many_of_each_kind() -> None:
    faults = draw(3, 2 * len(KINDS), list(KINDS))
    assert faults == draw(3, 2 * len(KINDS), list(KINDS)) != draw(4, 2 * len(KINDS), list(KINDS))
    assert {kind: sum(fault.kind == kind for fault in faults) for kind in KINDS} == dict.fromkeys(KINDS, 2)
    assert [fault.kind for fault in draw(3, 2, ["stop"])] == ["stop", "stop"]


@pytest.mark.parametrize(
    ("text", "rank", "named"),
    [
        ("the connection to rank 2 is lost", 2, True),
        ("rank 1 gave up: the connection to rank 12 is lost", 2, False),
        ("ranks [0, 2] did not connect", 2, True),
        ("nothing came from ranks [1] within 2 s", 2, False),
    ],
)
def test_the_ranks_that_an_error_names(text: str, rank: int, named: bool) -> None:
    assert names(text, [Member(rank, "host0-0", 1)]) is named


def test_the_table_tells_hangs() -> None:
    fault = Fault(0, "stop", 0.0, 0.0, 0.0, 0.0)
    rows = summary(
        [Outcome(fault, 1, seen=10.0, again=11.0), Outcome(fault, 1, hung=True, problems=["hang"])]
    )
    assert [row["kind"] for row in rows] == ["stop"]
    assert (rows[0]["count"], rows[0]["hangs"], rows[0]["seen_max"], rows[0]["whole_max"]) == (2, 1, 10.0, "")


def test_the_command_of_a_table_makes_it_again(tmp_path: Path) -> None:
    shape = {"hosts": 3, "per_host": 2, "faults": 1, "seed": 5, "only": "stop", "patience": 240.0}
    outcome = Outcome(Fault(0, "stop", 0.0, 0.0, 0.0, 0.0), 1, seen=10.0, again=11.0, whole=12.0)
    report([outcome], argparse.Namespace(output=tmp_path, **shape))
    (line,) = [x for x in (tmp_path / "faults.csv").read_text().splitlines() if x.startswith("# command: ")]
    again = parse(line.partition("dnn_bench faults ")[2].split())
    assert vars(again) == {**shape, "output": None}
