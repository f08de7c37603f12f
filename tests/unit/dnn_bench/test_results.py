"""Figures from raw measurements, on numbers that can be checked by hand."""

import pytest

from dnn_bench.runner.results import FAILED, WRONG, Row, disturbances, paired_ratio, split, summarise


def block(*seconds: float, cpu: float = 0.5, sent: float = 1000.0) -> dict[str, object]:
    return {
        "iterations": list(seconds), "forward": 0.1, "backward": 0.2, "step": 0.1, "cpu": cpu, "sent": sent,
        "memory": 10**8,
    }  # fmt: skip


def row(name: str, *times: float, kind: str = "peer", cpu: float = 0.5) -> Row:
    """Two ranks that take equally long; one iteration per repetition."""
    return Row(name, kind, repetitions=[[block(t, cpu=cpu), block(t, cpu=cpu)] for t in times])


def by_name(rows: list[Row], **options: object) -> dict[str, dict[str, object]]:
    given = {"samples": 100, "bounds": [], "rate": None, **options}
    return {entry["name"]: entry for entry in summarise(rows, **given)}  # type: ignore[arg-type]


def test_a_repetition_is_the_mean_over_iterations_and_ranks() -> None:
    both = Row(
        "x", "peer", repetitions=[[block(1.0, 2.0), block(2.0, 5.0)], [block(4.0, 4.0), block(4.0, 4.0)]]
    )
    assert both.times == [2.5, 4.0]


def test_a_limit_is_its_slowest_rank_s() -> None:
    """On two cores of which one was a quarter slower, schedules seemed to be far above a floor that was the
    mean of both: they wait for the slower one.
    """
    floor = Row("floor", "limit", repetitions=[[block(1.0, 1.0), block(1.5, 1.1)]])
    assert floor.by_rank == [[1.0, 1.3]]
    assert floor.times == [1.3]


def test_time_taken_by_other_machines_is_said() -> None:
    quiet, robbed = row("ddp", 1.0, 1.0), row("auto", 1.0, 1.0, kind="commsched")
    quiet.stolen, robbed.stolen = [0.0, 0.04], [0.01, 0.31]
    (line,) = disturbances([quiet, robbed])
    assert "31% of the processors' time while auto was timed" in line and "9.0% on average" in line
    wire = row("wire", 1.0, 1.0, kind="limit")
    wire.stolen = [0.2, 0.18]
    assert disturbances([quiet]) == disturbances([]) == disturbances([wire]) == []
    assert by_name([robbed])["auto"]["stolen"] == [0.01, 0.31]


def test_time_is_the_median_over_repetitions_and_the_spread_its_extremes() -> None:
    entry = by_name([row("ddp", 3.0, 1.0, 2.0, 10.0, 2.5)])["ddp"]
    assert (entry["time"], entry["low"], entry["high"]) == (2.5, 1.0, 10.0)
    assert entry["throughput"] == 40.0


def test_time_is_split_into_compute_overhead_and_exposed_communication() -> None:
    local, floor, ddp = row("local", 1.0), row("floor", 1.2), row("ddp", 2.0)
    assert split(ddp, local, floor) == pytest.approx({"compute": 1.0, "overhead": 0.2, "exposed": 0.8})
    assert split(floor, local, floor) == pytest.approx({"compute": 1.0, "overhead": 0.2, "exposed": 0.0})
    assert split(local, local, floor) == {"compute": 1.0, "overhead": 0.0, "exposed": 0.0}
    fast = row("fast", 0.9)
    assert split(fast, local, floor) == pytest.approx({"compute": 0.9, "overhead": 0.0, "exposed": 0.0})
    assert split(ddp, None, floor) == {"compute": None, "overhead": None, "exposed": None}


def test_ratios_are_paired_so_that_drift_cancels() -> None:
    slow_machine_in_the_middle = paired_ratio(row("a", 2.0, 20.0, 2.0), row("b", 1.0, 10.0, 1.0))
    assert slow_machine_in_the_middle == 2.0
    assert paired_ratio(row("a", 1.0), None) is None


def test_the_best_peer_is_the_fastest_within_repetitions() -> None:
    """The one that was given up after two repetitions, of which the second was slow, had a larger median."""
    ours = row("auto", 1.0, 10.0, kind="commsched")
    rows = [row("ddp", 2.0, 20.0, 2.0, 2.0), row("ddp_4mb", 1.5, 15.0), ours]
    assert by_name(rows)["auto"]["best_peer"] == "ddp_4mb"


def test_the_best_peer_is_no_limit_and_none_of_ours() -> None:
    rows = [
        row("local", 0.1, kind="limit"),
        row("auto", 0.5, kind="commsched"),
        row("ddp", 2.0),
        row("horovod", 1.0),
    ]
    found = by_name(rows)
    assert {entry["best_peer"] for entry in found.values()} == {"horovod"}
    assert found["auto"]["to_best_peer"] == 0.5


def test_the_limit_is_the_larger_of_floor_and_bound() -> None:
    rows = [row("floor", 1.0, kind="limit"), row("ddp", 3.0)]
    assert by_name(rows, bounds=[1.5])["ddp"]["to_limit"] == 2.0
    assert by_name(rows, bounds=[0.5])["ddp"]["to_limit"] == 3.0
    assert by_name(rows)["ddp"]["to_limit"] == 3.0
    assert by_name(rows[1:], bounds=[1.5])["ddp"]["to_limit"] == 2.0
    assert by_name(rows[1:])["ddp"]["to_limit"] is None


def test_the_limit_is_that_of_the_repetition() -> None:
    """On a machine half as fast in two of three repetitions, a schedule seemed to be at 0.5 of a limit or at
    twice one, whichever was timed in a slow one more often.
    """
    rows = [row("floor", 1.0, 1.9, 1.0, kind="limit"), row("auto", 1.1, 2.2, 2.2, kind="commsched")]
    assert by_name(rows, bounds=[1.0, 2.0, 2.0])["auto"]["to_limit"] == pytest.approx(1.1)


def test_link_utilisation_and_communication_cpu() -> None:
    rows = [row("local", 1.0, kind="limit", cpu=0.9), row("ddp", 2.0, cpu=1.3)]
    found = by_name(rows, rate=1000.0)
    assert found["ddp"]["utilisation"] == 0.5
    assert found["ddp"]["communication_cpu"] == pytest.approx(0.4)


def test_wrong_and_failed_rows_have_no_times_and_are_nobodys_yardstick() -> None:
    wrong, failed, good = row("fast_but_wrong", 0.1), row("died", 0.2), row("ddp", 1.0)
    wrong.status, failed.status = WRONG, FAILED
    found = by_name([wrong, failed, good])
    assert "time" not in found["fast_but_wrong"] and "time" not in found["died"]
    assert found["ddp"]["best_peer"] == "ddp"
