"""``COMMSCHED_TIMELINE`` of a training run: what each rank computed, waited for and sent, in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import run_ranks

pytestmark = pytest.mark.dist
RANKS = 2


def train() -> None:
    import commsched as hvd
    from tests.support import late_ranks

    _, optimizer = late_ranks.train(12, late=lambda step: step % 2)
    print(*optimizer.profile().source.split(", ")[:2], sep=", ")
    hvd.shutdown()


def test_one_file_with_every_ranks_phases_operations_and_waits(tmp_path: Path) -> None:
    trace = tmp_path / "made" / "for it" / "trace.json"  # in a folder that nobody else makes
    ranks = run_ranks(train, RANKS, env={"COMMSCHED_TIMELINE": str(trace)}, check=True)
    assert [rank.stdout.strip() for rank in ranks] == ["measured in this run, beside the traffic"] * RANKS
    found = json.loads(trace.read_text())
    events = found["traceEvents"] if isinstance(found, dict) else found
    spans = [event for event in events if event["ph"] == "X"]
    for rank in range(RANKS):
        mine = [event for event in spans if event["pid"] == rank]
        names = {event["name"] for event in mine}
        assert {"forward", "backward", "step()", "wait"} <= names
        sent = [event for event in mine if event["name"][:2] in ("RS", "AG")]
        assert {event["name"][:2] for event in sent} == {"RS", "AG"}
        assert all(event["args"]["bytes"] > 0 and event["args"]["waited_ms"] >= 0 for event in sent)
        assert {event["args"]["step"] for event in sent} >= set(range(2, 11))
        assert max(event["dur"] for event in mine if event["name"] == "wait") > 5e3, "microseconds"
