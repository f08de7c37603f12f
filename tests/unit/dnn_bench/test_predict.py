"""Bounds and predictions come from what was timed in every repetition; what makes them doubtful is said."""

import pytest

from dnn_bench import baselines
from dnn_bench.runner.results import Row, bounds_of, doubts, fit_link, merge_profiles, predictions, scaling
from scheduler.bounds import lower_bound
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile

SIZES = (2**19, 2**20, 3 * 2**19, 2**21, 2**22)
ALPHA, BETA = 1e-3, 2e-8


def timed(slower: float = 1.0) -> list[tuple[int, float]]:
    return [(size, slower * (ALPHA + BETA * size)) for size in SIZES]


def row(name: str, seconds: float, kind: str = "commsched", sent: float = 100.0) -> Row:
    searches = baselines.get(name).searches
    return Row(name, kind, repetitions=[[{"iterations": [seconds], "sent": sent}]], searches=searches)


def test_a_repetition_in_which_the_machine_was_elsewhere_does_not_slow_the_link() -> None:
    """The link was timed once, in a tenth of a second per size. On four hosts that shared two processors it
    came out a third too slow at times, and with it a "lower bound" that schedules went below.
    """
    slow = [(size, seconds * (3 if size == 2**20 else 1.5)) for size, seconds in timed()]
    link = fit_link([[timed(), timed()], [slow, timed()], [timed(0.9), timed()]])
    assert (link.alpha, link.beta) == pytest.approx((ALPHA, BETA))
    assert link.error < 1e-6


def test_a_collective_ends_with_its_last_rank() -> None:
    assert fit_link([[timed(), timed(1.5)]]).beta == pytest.approx(1.5 * BETA)


def profile(forward: float, backward: float, update: float = 1e-9) -> dict[str, object]:
    layers = (Layer("a", forward, backward, 100), Layer("b", 2 * forward, 2 * backward, 300))
    return Profile("m", layers, update, "here").to_dict()


def test_profiles_are_the_slowest_ranks_and_medians_over_repetitions() -> None:
    slow = [profile(50.0, 50.0, 1e-7)] * 2
    merged = merge_profiles([[profile(1.0, 2.0), profile(3.0, 4.0)], slow, [profile(2.0, 3.5)] * 2])
    assert [(layer.forward, layer.backward) for layer in merged.layers] == [(3.0, 4.0), (6.0, 8.0)]
    assert merged.update_per_byte == pytest.approx(1e-9)
    assert [layer.bytes for layer in merged.layers] == [100, 300]


def test_ranks_that_share_a_hosts_processors_count_together() -> None:
    """Two ranks shared one core and were timed at 0.9 and 1.1 of what both take in turn. With the slower
    rank's times, a "lower bound" lay above a measured step.
    """
    ranks = [profile(1.8, 3.6), profile(2.2, 4.4), profile(1.9, 3.9), profile(1.9, 3.9)]
    merged = merge_profiles([ranks], per_host=2)
    assert [(layer.forward, layer.backward) for layer in merged.layers] == [(2.0, 4.0), (4.0, 8.0)]
    link = Link(0.0, 0.01)
    assert bounds_of([ranks], [ranks], link, 2) == [lower_bound(merged, link)]
    assert bounds_of([ranks], [ranks], link, 2) < bounds_of([ranks], [ranks], link)


def test_faster_than_the_lower_bound_is_said() -> None:
    link = Link(0.0, BETA, "measured", 0.02)
    limit, near, over = row("wire", 0.5, "limit"), row("dear", 0.97), row("wfbp", 0.8)
    (line,) = doubts(link, {"commsched": 1.0}, [limit, near, over])
    assert line.startswith("wfbp is 20% faster than the lower bound")
    by_rows = row("wfbp", 0.8, sent=10.0)
    assert doubts(link, {"commsched": 1.0}, [limit, by_rows]) == [], "it sends fewer bytes"
    assert doubts(link, {"commsched": 1.0}, [limit, row("auto", 0.8)]) == [], (
        "the bound is for whole gradients"
    )
    other_optimizer = row("wfbp", 0.8)
    other_optimizer.changes = {"momentum": 0.0}
    assert doubts(link, {"commsched": 1.0}, [limit, other_optimizer]) == []


def test_a_link_that_fits_no_line_is_said() -> None:
    (line,) = doubts(Link(0.0, BETA, "measured", 0.23), {"commsched": 1.0}, [row("auto", 1.1)])
    assert "scatter by 23%" in line and "more repetitions" in line
    assert doubts(Link(0.0, BETA, "measured", 0.08), {"commsched": 1.0}, [row("auto", 1.1)]) == []


def test_ranks_predict_themselves_and_the_link_between_hosts_predicts_nobody() -> None:
    """With two ranks a host, named policies were predicted from the link between hosts alone."""
    rows = [row("dear", 1.0), row("wfbp", 1.0)]
    rows[0].predicted = 7.0
    measured = {"local": [[profile(1.0, 2.0)] * 4], "floor": [], "wire": [[timed()] * 4]}
    found = predictions(measured, rows, 4, per_host=2)
    assert [each.predicted for each in rows] == [7.0, None]
    assert found["bound"] > 0 and found["scaling"] == {}


def test_more_ranks_use_the_exchange_that_the_engine_takes() -> None:
    """4 MB without compute in one bucket; direct starts once, a ring, beyond 8 ranks, ranks - 1 times."""
    layers = (Layer("a", 0.0, 0.0, 2_000_000), Layer("b", 0.0, 0.0, 2_000_000))
    curve = dict(scaling("sequential", Profile("m", layers), Link(ALPHA, BETA), 2))
    for ranks, starts in ((2, 1), (8, 1), (16, 15), (32, 31)):
        once = starts * ALPHA + 2 * BETA * (ranks - 1) / ranks * 4_000_000
        assert curve[ranks] == pytest.approx(2 * once), ranks
