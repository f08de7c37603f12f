"""Ranks that stay from one comparison to the next, peers that are given up, and memory that is short."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from dnn_bench import baselines
from dnn_bench.baselines import Baseline
from dnn_bench.baselines.trainer import Job, estimate
from dnn_bench.launch import ThisMachine
from dnn_bench.runner import compare as module
from dnn_bench.runner.compare import Comparison, Effort
from dnn_bench.runner.sets import Crew

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
JOB = Job("mlp_tiny", batch=32)
RANKS = 2


class Steps(list[str]):
    def begin(self, total: int) -> None:
        self.total = total

    def step(self, what: str) -> None:
        self.append(what)

    def more(self, what: str) -> None:
        pass


def entries(*names: str) -> list[Baseline]:
    return [baselines.get(name) for name in names]


def compare(wanted: list[Baseline], effort: Effort, crew: Crew | None = None) -> tuple[dict[str, Any], Steps]:
    steps = Steps()
    report = Comparison(JOB, ThisMachine(RANKS), wanted, effort, steps, crew=crew).run()
    return {"": report, **{row["name"]: row for row in report["baselines"]}}, steps


def test_peers_stay_and_policies_start_anew() -> None:
    effort = Effort(1, 1, trace="none")
    with Crew() as crew:
        first, steps = compare(entries("local", "ddp", "auto"), effort, crew)
        assert [name for name in ("local", "ddp", "auto") if name in crew] == ["local", "ddp"]
        pids = crew.ranks(baselines.get("ddp"), JOB, ThisMachine(RANKS)).pids
        ranks = [psutil.Process(pid) for pid in pids]
        second, again = compare(entries("local", "ddp", "auto"), effort, crew)
    assert [step for step in steps if "ddp" in step] == ["starting ddp", "checking ddp", "timing ddp"]
    assert [step for step in again if "timing" not in step] == ["starting auto", "checking auto"]
    assert len(again) == again.total
    assert second["ddp"]["status"] == "ok" and second["ddp"]["error"] == first["ddp"]["error"]
    assert not any(rank.is_running() for rank in ranks), "another process with the same number does not count"


def test_a_peer_whose_operations_were_recorded_starts_anew() -> None:
    """DDP's hook can be registered once and stays: the next comparison failed there, and timed the hook."""
    effort = Effort(1, 1, trace="all")
    with Crew() as crew:
        for _ in range(2):
            found, steps = compare(entries("local", "ddp"), effort, crew)
            assert found["ddp"]["status"] == "ok", found["ddp"]["reason"]
            assert found["ddp"]["trace"]["operations"] and "starting ddp" in steps
            assert "local" in crew and "ddp" not in crew


def test_a_tuned_peer_far_behind_is_given_up() -> None:
    """Here whatever is slower at all."""
    slow = baselines.get("ddp_0.001mb")
    found, _ = compare([*entries("ddp"), slow], Effort(4, 2, trace="none", give_up=1e-9))
    assert len(found["ddp"]["times"]) == 4  # as it comes: never given up
    assert len(found[slow.name]["times"]) == 2
    assert found[slow.name]["reason"].startswith("timed 2 times only, at ")
    assert found[slow.name]["status"] == "ok"


def test_short_memory_lets_only_the_best_tuned_peer_in(monkeypatch: pytest.MonkeyPatch) -> None:
    need = estimate(JOB)
    room = RANKS * (3.5 * need.rank() + need.rank(32) - need.rank()) / module.MEMORY_SHARE
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=room))
    wanted = entries("local", "ddp", "ddp_1mb", "ddp_4mb")
    found, steps = compare(wanted, Effort(3, 1, trace="none", give_up=1e9))
    timed = [step.removeprefix("timing ") for step in steps if step.startswith("timing")]
    assert timed[:4] == ["ddp_1mb", "ddp_4mb"] * 2
    best = timed[-1]
    assert best in ("ddp_1mb", "ddp_4mb") and timed[4:] == ["local", "ddp", best] * 3
    other = ({"ddp_1mb", "ddp_4mb"} - {best}).pop()
    assert found[other]["reason"].startswith("timed apart, at ") and len(found[best]["times"]) == 3
    assert [row["name"] for row in found[""]["baselines"]] == [entry.name for entry in wanted]
    assert found[""]["effort"]["interleaved"] is True


def test_memory_for_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    room = RANKS * 1.1 * estimate(JOB).rank(32)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=room))
    found, steps = compare(entries("local", "ddp"), Effort(2, 1, trace="none"))
    assert [step for step in steps if step.startswith("timing")] == ["timing local"] * 2 + ["timing ddp"] * 2
    assert found[""]["effort"]["interleaved"] is False
