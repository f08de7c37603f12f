"""Which part of a halo's time interiors hide: as measured, and as the simulator predicts."""

import pytest

from dnn_bench.spatial.halo import judged

HALO = 68e-3, 68e-3


def judge(compute: tuple[float, float], border: float) -> dict[str, float]:
    waited = compute[0] + HALO[0], compute[1] + HALO[1]
    return judged(
        {"halo": HALO, "compute": compute, "overlapped": compute, "waiting": waited}, [10**6] * 2, border
    )


def test_a_large_interior_hides_the_halo() -> None:
    found = judge((0.1, 0.3), 0.05)
    assert found["hidden"] == 1.0 and found["predicted"] == pytest.approx(1.0) and found["large_enough"]


def test_a_small_interior_hides_as_much_as_it_is_long() -> None:
    """The prediction of two hosts at 250 Mbit/s in docs/results/halo.csv."""
    found = judge((20e-3, 65e-3), 0.4)
    assert found["predicted"] == pytest.approx((12e-3 + 39e-3) / sum(HALO)) and not found["large_enough"]
