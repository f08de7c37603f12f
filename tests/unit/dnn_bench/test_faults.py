"""What `python -m dnn_bench faults` finds in the notes of ranks: here of three that train in one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dnn_bench.faults import KINDS, Fault, Job, Member, Outcome, draw, judge, names, summary
from dnn_bench.runner.elastic_worker import Training, digest, values

SIZE = 3
Notes = list[dict[str, Any]]


def trained(steps: int = 70) -> tuple[Job, Notes]:
    """A job and the notes of its ranks: three epochs of the data, and from step 40 another one of the job."""
    options = argparse.Namespace(seed=1, hosts=SIZE, per_host=1, patience=1)
    job = Job(None, 1, Path(), options)  # type: ignore[arg-type]
    training = Training(**job.training)
    model, (inputs, targets) = training.model(), training.data()
    optimizer, clock, notes, left, data = training.make_optimizer(model), count(1.0), [], [], -1
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
            own = {"values": values(model)} if step % 10 == rank == 0 else {}
            notes.append(noted(clock, rank, "done", epoch, step, **facts, **own))
    return job, notes


def noted(clock: Any, rank: int, what: str, epoch: str, step: int, **facts: Any) -> dict[str, Any]:
    at = next(clock)
    return {"what": what, "at": at, "rank": rank, "epoch": epoch, "step": step, "place": f"host{rank}-0"} | (
        facts | {"pid": rank + 1}
    )


def judged(change: Callable[[Notes], object] = lambda notes: None) -> list[Outcome]:
    """Two faults, one before the notes and one in the second epoch of the job."""
    job, notes = trained()
    change(notes)
    for note in notes:
        job.take(note)
    second = next(note["at"] for note in notes if note["epoch"] == "b")
    outcomes = [Outcome(fault, 1, at) for fault, at in zip(draw(1, 2, ["kill"]), (0.5, second))]
    judge(job, outcomes)
    return outcomes


def test_a_job_without_a_fault() -> None:
    assert not any(outcome.is_wrong for outcome in judged())


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
