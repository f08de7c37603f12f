"""``commsched.metrics`` of a training run: over HTTP, in lines, as scalars and as the page shows."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from commsched.process.network import HeldPort
from tests.support.documented_commands import blocks
from tests.support.launch import RankResult, run_ranks

pytestmark = pytest.mark.dist
RANKS = 2


def train() -> None:
    import json
    import os
    import urllib.request
    from types import SimpleNamespace

    import torch

    import commsched as hvd
    from tests.support import late_ranks

    model, optimizer = late_ranks.train(24, late=lambda step: 1)
    model(torch.randn(8, 64))  # completes the last step, so that no figure changes from here on
    if hvd.rank() == 0:  # alone: the other rank does not call it
        written = {}
        writer = SimpleNamespace(add_scalar=lambda name, value, step: written.update({name: value}))
        exec(os.environ["SNIPPET"], {"hvd": hvd, "optimizer": optimizer, "writer": writer, "step": 24})
        found = hvd.metrics(optimizer)
        assert found == hvd.explain(optimizer, show=False).metrics
        print("scalars", json.dumps(written))
        print("figures", json.dumps(found.to_dict()))
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile as seen:
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        model(torch.randn(8, 64))
    names = {event.key for event in seen.key_averages() if event.key.startswith("commsched wait")}
    print("ranges", json.dumps(sorted(names)))
    port = os.environ.get("COMMSCHED_METRICS_PORT")
    if port:
        address = f"http://127.0.0.1:{int(port) + hvd.local_rank()}/metrics"
        print("page", json.dumps(urllib.request.urlopen(address, timeout=60).read().decode()))
        optimizer.close()
        try:
            urllib.request.urlopen(address, timeout=60)
        except OSError:
            print("closed")
    hvd.shutdown()


@contextmanager
def two_ports() -> Iterator[int]:
    """The first of two neighbouring ports that no other process is given (`HeldPort`)."""
    while True:
        with HeldPort() as first, socket.socket() as second:
            second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                second.bind(("127.0.0.1", first.number + 1))
            except OSError:
                continue
            yield first.number
            return


@pytest.fixture(scope="module")
def ranks() -> list[RankResult]:
    shown = [block.text for block in blocks(docstrings=False) if block.page == "docs/optimizer.md"]
    (snippet,) = [text for text in shown if "log_metrics" in text]
    with two_ports() as port:
        served = {"COMMSCHED_METRICS_PORT": str(port)} if find_spec("prometheus_client") else {}
        return run_ranks(
            train, RANKS, env={"SNIPPET": snippet, "COMMSCHED_LOG_EVERY": "8", **served}, check=True
        )


def told(rank: RankResult) -> dict[str, str]:
    return {line.split()[0]: line.partition(" ")[2] for line in rank.stdout.splitlines() if line.split()}


def test_the_figures_of_a_run(ranks: list[RankResult]) -> None:
    lines, first = ranks[0].stdout.splitlines(), told(ranks[0])
    figures, scalars = json.loads(first["figures"]), json.loads(first["scalars"])
    assert figures["step"] > 0.1 and figures["exposed"] > 0.05 and figures["bytes"] > 4 * 6 * 64 * 65
    waits = figures["waits"]
    assert len(waits) == RANKS and waits[0] > max(0.05, waits[1]), "the other rank's wait is known here"
    assert figures["predicted_step"] > 0 and figures["ddp_exposed"] >= 0 and figures["link_rate"] > 0
    assert scalars["commsched/exposed"] == figures["exposed"] and "policy optimal" in ranks[0].stdout
    assert any(line.startswith("commsched: step ") and "exposed communication" in line for line in lines)
    assert "commsched: step" not in ranks[1].stdout
    assert "commsched wait flags" in json.loads(first["ranges"])


def test_every_rank_serves_its_own_figures(ranks: list[RankResult]) -> None:
    pytest.importorskip("prometheus_client")
    for number, rank in enumerate(ranks):
        page = json.loads(told(rank)["page"])
        for name in ("exposed_seconds", "step_seconds", "bytes_per_step", "wait_of_rank_1_seconds"):
            assert f'commsched_{name}{{optimizer="0",rank="{number}"}}' in page
        assert "closed" in told(rank), "closed with the optimizer"
