"""How long a benchmark trains before it measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
