"""The sentences of `python -m dnn_bench first`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from dnn_bench import first
from dnn_bench.cluster import ClusterError


def row(name: str, *times: float) -> dict[str, Any]:
    middle = sorted(times)[len(times) // 2]
    return {
        "name": name,
        "status": "ok",
        "time": middle,
        "low": min(times),
        "high": max(times),
        "times": list(times),
    }


def report(*ours: float) -> dict[str, Any]:
    rows = [row("local", 0.3, 0.33, 0.3), row("ddp", 0.6, 0.6, 0.6), row("ddp_4mb", 0.5, 0.45, 0.48)]
    return {"baselines": [*rows, row("auto", *ours)], "doubts": ["a doubt"]}


def test_three_sentences_with_ranges() -> None:
    assert first.answer(report(0.4, 0.4, 0.4)) == [
        "This network costs 50% (45% to 50%) of a step: DDP takes 600 ms (600 to 600), "
        "and 300 ms (300 to 330) without communication.",
        "The best ordinary way, DDP with buckets of 4 MB, takes 480 ms (450 to 500) per step.",
        "commsched takes 400 ms (400 to 400) per step: 1.20 (1.12 to 1.25) times as fast.",
        "a doubt",
    ]


def test_the_longest_of_the_first_steps() -> None:
    assert first.first_steps([0.1, 0.5, 0.1], [0.1, 0.25, 0.1, 0.1]) == (
        "Of its first 4 steps, in which it measures and plans, the longest takes 250 ms, 2.50 times DDP's"
        " median of 100 ms: 100 250 100 100."
    )


@pytest.mark.parametrize(
    ("times", "end"),
    [
        ((0.4, 0.5, 0.4), "1.20 (0.90 to 1.25) times as fast, no clear difference."),
        ((0.6, 0.6, 0.6), "0.80 (0.75 to 0.83) times as fast, that is, slower."),
    ],
)
def test_a_gain_is_only_claimed_where_every_repetition_shows_it(times: tuple[float, ...], end: str) -> None:
    assert first.answer(report(*times))[2].endswith(end)


def test_a_baseline_that_failed_leaves_no_answer() -> None:
    rows = report(0.4, 0.4, 0.4)
    rows["baselines"][1] = {"name": "ddp", "status": "failed", "reason": "a rank died"}
    assert first.answer(rows) == ["No answer: ddp could not be measured.", "ddp: a rank died"]


def test_ctrl_c_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It went on with the first steps, or ended with an error about the numbers of repetitions."""
    stopped = {**report(0.4, 0.4), "interrupted": True}
    monkeypatch.setattr("dnn_bench.runner.compare.compare", lambda *_: stopped)
    monkeypatch.setattr("dnn_bench.runner.sets.asked", lambda *_: pytest.fail("it goes on"))
    assert first.main(["--local", "--html", str(tmp_path / "x.html")]) == 130
    assert capsys.readouterr().err == ""


def test_without_root_the_loopback_is_used_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: object) -> None:
        raise ClusterError("an emulated cluster needs root")

    monkeypatch.setattr("dnn_bench.first.Cluster.start", refused)
    with first.place_of(Namespace(local=False, link="1gbit")) as (place, network):
        assert place.describe() == {"kind": "this machine", "ranks": 2, "rate": None}
    assert "loopback of this machine" in network and "needs root" in network


def test_a_wrong_link_is_an_error_for_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    assert first.main(["--link", "fast", "--html", "/tmp/x.html"]) == 2
    assert "250mbit" in capsys.readouterr().err
