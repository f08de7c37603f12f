"""Two pipelines timed in turn: the ratio, and how sure it is."""

from __future__ import annotations

import math

import pytest

from dnn_bench.pipeline.worker import PipelineResult, Ratio


def test_drift_of_the_machine_cancels() -> None:
    ratio = Ratio.of([2.0, 20.0, 2.0], [1.0, 10.0, 1.0])
    assert ratio == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("count", [6, 7, 8, 15, 25, 60, 61, 100, 400])
def test_the_bounds_hold_the_true_median_in_95_of_100_cases(count: int) -> None:
    ratio = Ratio.of([float(n) for n in range(count)], [1.0] * count)
    outside = int(ratio.low)
    assert ratio.high == count - 1 - outside
    # They miss it where at most so many of the ratios fall on one side of it.
    missed = 2 * sum(math.comb(count, k) for k in range(outside + 1)) / 2**count
    assert missed <= 0.05
    assert count > 100 or missed > 0.005, "bounds could be closer"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_ratios_are_all_shown(count: int) -> None:
    ratio = Ratio.of([float(n) for n in range(count)], [1.0] * count)
    assert (ratio.low, ratio.high) == (0.0, count - 1.0)


def test_it_is_told_with_its_bounds() -> None:
    result = PipelineResult("bert_tiny", "1f1b", (0, 0), 0.5, 0.5, 0.2, 0.2, 0.9, 32, [1.0])
    result.peer, result.ratio = 0.6, Ratio.of([1.2, 1.1, 1.3], [1.0, 1.0, 1.0])
    assert "600.00 ms: 1.200 (1.100 to 1.300) times its throughput" in result.described()
