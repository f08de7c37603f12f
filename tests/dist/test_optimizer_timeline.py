"""``COMMSCHED_TIMELINE`` of a training run: what each rank computed, waited for and sent, in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import run_ranks

pytestmark = pytest.mark.dist
RANKS = 2


def train() -> None:
    import time

    import torch
    from torch import nn

    import commsched as hvd

    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), named_parameters=model.named_parameters()
    )
    for step in range(12):
        if hvd.rank() == step % 2:
            time.sleep(0.1)  # the other one has to wait for this rank's gradients
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(optimizer.profile().source)
    hvd.shutdown()


def test_one_file_with_every_ranks_phases_operations_and_waits(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
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
