"""How long a benchmark trains before it measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dnn_bench import synthetic
from dnn_bench.runner import compare
from dnn_bench.runner.measure import settle


@pytest.mark.parametrize(
    ("least", "settled_after", "done"), [(3, 0, 3), (1, 7, 7), (9, 7, 9), (1, 1000, 400)]
)
def test_until_the_plan_is_found(least: int, settled_after: int, done: int) -> None:
    steps: list[Any] = []
    trainer: Any = SimpleNamespace(
        rank=1,
        job=SimpleNamespace(local_batch=lambda rank: ("inputs", rank)),
        iteration=lambda *batch: steps.append(batch),
        is_settled=lambda: steps.count(("inputs", 1)) >= settled_after,
        finish=lambda: steps.append("finished"),
    )
    assert settle(trainer, least) is (settled_after <= done)  # else a comparison tells its doubt
    assert steps == [("inputs", 1)] * done + ["finished"]


@pytest.mark.parametrize("settled_after", [0, 25, 10_000])
def test_synthetic_times_no_step_that_searches(settled_after: int) -> None:
    """Its rates were those of steps in which plans were searched and tried."""
    done: list[int] = []
    trainer: Any = SimpleNamespace(
        rank=0, size=2,
        job=SimpleNamespace(model="mlp", rank_batch=8, device="cpu", local_batch=lambda rank: ()),
        ranks=SimpleNamespace(allgather_object=lambda value: [value, value]),
        iteration=lambda *batch: done.append(1), is_settled=lambda: len(done) >= settled_after,
        finish=lambda: None,
    )  # fmt: skip
    said: list[str] = []
    options = synthetic.parse(["--num-warmup-batches", "10", "--num-iters", "2"])
    synthetic.benchmark(trainer, options, said.append)
    assert len(done) == min(400, max(10, settled_after)) + 2
    assert ("still searched or tried" in "".join(said)) is (settled_after > 400)


class Ranks:
    """Ranks that settle after so many iterations, each of which takes so many seconds."""

    def __init__(self, settled_after: int, seconds: float) -> None:
        self.settled_after, self.seconds, self.now, self.done = settled_after, seconds, 0.0, 0
        self.longest = 0.0

    def call(self, command: str, least: int, most: int) -> list[bool]:
        assert command == "settle"
        steps = max(least, min(most, self.settled_after - self.done))
        self.done += steps
        self.now += steps * self.seconds
        self.longest = max(self.longest, steps * self.seconds)
        return [self.done >= self.settled_after] * 2


@pytest.mark.parametrize(
    ("least", "settled_after", "seconds", "done", "settles"),
    [
        (1, 7, 1.0, 7, True),
        (40, 0, 1.0, 40, True),
        (1, 10_000, 0.1, 400, False),
        (1, 10_000, 5.0, 80, False),
    ],
)
def test_a_baseline_that_does_not_settle_in_time_is_timed_with_a_doubt(
    monkeypatch: pytest.MonkeyPatch, least: int, settled_after: int, seconds: float, done: int, settles: bool
) -> None:
    """It had failed: its ranks did not answer while they trained 400 slow iterations."""
    ranks = Ranks(settled_after, seconds)
    monkeypatch.setattr(compare.time, "monotonic", lambda: ranks.now)
    assert compare.settled(ranks, least) is settles  # type: ignore[arg-type]
    assert ranks.done == done and ranks.longest <= 100
