"""A comparison over emulated hosts: the link is measured, and every launcher's ranks find each other."""

import os
import shutil
from typing import Any

import pytest

from dnn_bench import baselines
from dnn_bench.baselines.trainer import Job
from dnn_bench.cluster import Cluster
from dnn_bench.runner.compare import Comparison, Effort
from dnn_bench.launch import Hosts
from tests.support.needs import needs, needs_horovod, needs_root

pytestmark = [
    pytest.mark.dist,
    pytest.mark.root,
    needs_root,
    needs("ip", "tc"),
]
RATE = 100e6 / 8


class Silent:
    def begin(self, total: int) -> None:
        pass

    def step(self, what: str) -> None:
        pass

    def more(self, what: str) -> None:
        pass


def measured(*names: str, per_host: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report, and its rows by name."""
    job, effort = Job("mlp_tiny", batch=32), Effort(repetitions=1, iterations=3, trace="none")
    with Cluster(2, "100mbit") as cluster:
        place, entries = Hosts(cluster, per_host=per_host), [baselines.get(name) for name in names]
        report = Comparison(job, place, entries, effort, Silent()).run()
    rows = {row["name"]: row for row in report["baselines"]}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(names, "ok")
    return report, rows


GRADIENTS = 4 * (8 * (256 * 256 + 256) + 2570)


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    return measured("local", "floor", "wire")[1]


@pytest.mark.parametrize("name", ["floor", "wire"])
def test_link_bytes_are_those_of_the_link(rows: dict[str, Any], name: str) -> None:
    # An all-reduce among two sends as much as there is; some is queued when it is counted.
    assert 0.9 * GRADIENTS < rows[name]["sent"] < 1.15 * GRADIENTS


def test_two_ranks_a_host_send_no_more_than_one() -> None:
    """The floor, and our schedules in two tiers; DDP's ring sends a half more."""
    report, rows = measured("local", "floor", "wire", "dear", per_host=2)
    assert (report["place"]["ranks"], report["place"]["hosts"], report["place"]["per_host"]) == (4, 2, 2)
    for name in ("floor", "wire", "dear"):
        assert 0.9 * GRADIENTS < rows[name]["sent"] < 1.15 * GRADIENTS, name
    # Half of the gradients cross each card twice, however many ranks a host has.
    assert rows["dear"]["predicted"] > 0.8 * GRADIENTS / RATE


@pytest.mark.slow
@needs_horovod
@needs("sshd", "ssh")
def test_horovod_is_started_over_ssh() -> None:
    assert 0.9 * GRADIENTS < measured("horovod")[1]["horovod"]["sent"] < 1.15 * GRADIENTS


def test_one_process_sends_nothing_and_nothing_beats_the_link(rows: dict[str, Any]) -> None:
    assert rows["local"]["sent"] < 0.05 * GRADIENTS
    # A busy machine takes longer than the link, nothing is faster. A rested link lets 256 KiB through at once.
    assert rows["wire"]["time"] * RATE > 0.8 * GRADIENTS


@pytest.mark.bench
def test_times_and_bound_are_those_of_the_link() -> None:
    report, rows = measured("local", "floor", "wire")
    assert rows["wire"]["time"] * RATE < 1.5 * GRADIENTS
    assert rows["wire"]["utilisation"] > 0.6
    # Of a reduce-scatter among two, half of the message crosses the link.
    assert report["link"]["beta"] == pytest.approx(0.5 / RATE, rel=0.2)
    assert report["bound"] == pytest.approx(GRADIENTS / RATE, rel=0.35)
