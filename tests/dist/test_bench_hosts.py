"""A comparison over emulated hosts: the link is measured, and every launcher's ranks find each other."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dnn_bench import baselines, suite
from dnn_bench.baselines.trainer import Job
from dnn_bench.cluster import Cluster
from dnn_bench.launch import Hosts
from dnn_bench.rank_environment import environment
from dnn_bench.runner import results
from dnn_bench.runner.compare import Comparison, Effort
from tests.support.launch import PATIENCE
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


def test_two_ranks_a_host_send_no_more_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The floor, our schedules in two tiers, and HSDP; DDP's ring sends a half more."""
    report, rows = measured("local", "floor", "wire", "ddp", "hsdp", "hsdp_keep", "dear", per_host=2)
    assert (report["place"]["ranks"], report["place"]["hosts"], report["place"]["per_host"]) == (4, 2, 2)
    for name in ("floor", "wire", "dear", "hsdp", "hsdp_keep"):
        assert 0.9 * GRADIENTS < rows[name]["sent"] < 1.15 * GRADIENTS, name
    assert 1.4 * GRADIENTS < rows["ddp"]["sent"] < 1.75 * GRADIENTS
    results.show(report)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if re.match(r"\W*ddp ", line))
    assert f" {rows['ddp']['sent'] / 1e6:.1f} " in line
    # Half of the gradients cross each card twice, however many ranks a host has.
    assert rows["dear"]["predicted"] > 0.8 * GRADIENTS / RATE


@pytest.mark.slow
@needs_horovod
@needs("sshd", "ssh")
@pytest.mark.parametrize("per_host, share", [(1, 1.0), (2, 1.5)])
def test_horovod_is_started_over_ssh(per_host: int, share: float) -> None:
    """Its rings know no hosts."""
    sent = measured("horovod", per_host=per_host)[1]["horovod"]["sent"]
    assert 0.9 * share * GRADIENTS < sent < 1.15 * share * GRADIENTS


def test_a_suite_of_two_ranks_a_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--models", "mlp_tiny", "--hosts", "2", "--per-host", "2", "--ratios", "1"]
    effort = ["--baseline", "ddp,dear", "--schedule", "dear", "--reps", "1", "--iters", "2"]
    assert suite.main([*shape, *effort, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert path.name == "mlp_tiny_2x2hosts_1.json" and report["place"]["ranks"] == 4
    sent = {row["name"]: row["sent"] for row in report["baselines"] if "sent" in row}
    shown = [f"{sent[name] / 1e6:.1f}" for name in ("wire", "dear", "ddp")]
    link = report["place"]["links"][0]
    wanted = f"| mlp_tiny | 2x2 | 1 | {link} | {shown[0]} | {shown[1]} | {shown[2]} |  | {shown[2]} |  |"
    assert wanted in capsys.readouterr().out.splitlines()


def test_the_doctor_draws_the_ranks_by_host() -> None:
    """Every rank connects to the others as a script's would."""
    command = [sys.executable, "-m", "commsched", "doctor", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with Cluster(2, "unlimited", ssh=False) as cluster:
        variables = cluster.rank_variables(per_host=2)
        doctors = [
            cluster.run(rank // 2, command, own | environment(), **pipes)
            for rank, own in enumerate(variables)
        ]
        texts = [doctor.communicate(timeout=PATIENCE)[0] for doctor in doctors]
    for rank, text in enumerate(texts):
        (found,) = (finding for finding in json.loads(text) if finding["check"] == "ranks")
        drawn = "host 0 [0 1], host 1 [2 3]; transport tiers"
        assert (found["level"], found["found"]) == ("ok", f"rank {rank} of 4 (torchrun): {drawn}"), text


def test_one_process_sends_nothing_and_nothing_beats_the_link(rows: dict[str, Any]) -> None:
    assert rows["local"]["sent"] < 0.05 * GRADIENTS
    # A busy machine takes longer than the link; nothing is faster. A rested link passes 256 KiB at once.
    assert rows["wire"]["time"] * RATE > 0.8 * GRADIENTS


@pytest.mark.bench
def test_times_and_bound_are_those_of_the_link() -> None:
    report, rows = measured("local", "floor", "wire")
    assert rows["wire"]["time"] * RATE < 1.5 * GRADIENTS
    assert rows["wire"]["utilisation"] > 0.6
    # Of a reduce-scatter among two, half of the message crosses the link.
    assert report["link"]["beta"] == pytest.approx(0.5 / RATE, rel=0.2)
    assert report["bound"] == pytest.approx(GRADIENTS / RATE, rel=0.35)
