"""Elastic training on emulated hosts under faults of a seed: `python -m dnn_bench faults`, as root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dnn_bench.cluster import Cluster, namespaces
from dnn_bench.faults import Fault, Job, Outcome, judge, parse
from tests.support.needs import needs, needs_horovod, needs_root

pytestmark = [
    pytest.mark.dist,
    pytest.mark.root,
    needs_root,
    needs_horovod,
    needs("ip", "tc", "sshd", "ssh"),
]


@pytest.fixture(autouse=True)
def plans_beside_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would wait for rank 0's search at the begin of each epoch, as tests elsewhere want it."""
    monkeypatch.setenv("COMMSCHED_WAIT_FOR_PLAN", "")


EIGHT = "kill,rank0,two,recovery,back,disk,skip,lr"


def run(folder: Path, *options: str, timeout: float) -> dict[str, dict[str, int]]:
    """Run the command; return the row of each kind. Every process, namespace and mount must be gone."""
    command = [sys.executable, "-m", "dnn_bench", "faults", "--output", str(folder / "output"), *options]
    (folder / "temporary").mkdir()
    env = {**os.environ, "TMPDIR": str(folder / "temporary")}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ran:
        shown = ran.communicate(timeout=timeout)[0]
    assert ran.returncode == 0, shown
    assert not [name for name in namespaces() if name.startswith(f"csb-{ran.pid}-")]
    assert str(folder) not in Path("/proc/self/mounts").read_text()
    assert not list((folder / "temporary").glob("faults-*"))
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if str(folder / "temporary") in " ".join(line or ())]
    outcomes = json.loads((folder / "output" / "faults.json").read_text())["outcomes"]
    return {outcome["fault"]["kind"]: outcome for outcome in outcomes}


def test_eight_faults(tmp_path: Path) -> None:
    outcomes = run(tmp_path, "--faults", "8", "--only", EIGHT, timeout=550)
    assert sorted(outcomes) == sorted(EIGHT.split(","))
    assert outcomes["lr"]["ended"] and outcomes["kill"]["size"] == 2 and outcomes["two"]["size"] == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost_at_once", [False, True])
def test_a_process_that_was_cut_off_keeps_its_place_and_its_state(tmp_path: Path, lost_at_once: bool) -> None:
    """horovodrun starts another process in its place, and both were told the same rank.

    Then the others are lost, at once or later. It has the newest state that is left; the other process would
    begin the training anew.
    """
    options = parse(["--hosts", "3", "--seed", "1"])
    with Cluster(4, "unlimited", ssh=True) as cluster, Job(cluster, 1, tmp_path, options) as job:
        job.wait(job.is_whole, "step of all ranks")
        first, back, last = job.members(job.steps[-1].epoch).values()
        cut = time.monotonic()
        cluster.cut(back.host)
        step = job.wait(lambda: job.step(cut), "step of the others")
        # horovodrun tries the host again from now on, and the others wait for it.
        job.wait(lambda: job.errors(job.began(step.epoch), [first, last]), "end of their epoch")
        cluster.mend(back.host)
        moment = time.monotonic()
        job.wait(lambda: has_processes(job, 4), "process beside the one that comes back")
        if not lost_at_once:
            step = job.wait(lambda: job.step(moment, size=3), "step of all ranks")
            assert pids(job, step.epoch) == {first.pid, back.pid, last.pid}
            job.wait(lambda: waits_for_place(job), "process that waits for the place")
        moment, newest = time.monotonic(), job.steps[-1].number if step.size == 3 else 0
        for member in (first, last):
            os.kill(member.pid, signal.SIGKILL)
        step = job.wait(lambda: job.step(moment), "step of the one that came back")
        # All have made the newest step, but it is committed only where all live on: else it is made again.
        assert back.pid in pids(job, step.epoch) and step.number >= newest
        step = job.wait(lambda: job.step(moment, size=3), "step of all ranks")
        if lost_at_once:
            job.wait(lambda: waits_for_place(job), "process that waits for the place")
            kept, one, other = sorted(job.members(step.epoch).values(), key=lambda each: each.pid != back.pid)
            moment = time.monotonic()
            os.kill(one.pid, signal.SIGKILL)
            step = job.wait(lambda: job.step(moment), "step of the others")
            assert pids(job, step.epoch) == {kept.pid, other.pid} and kept.pid == back.pid
            job.wait(lambda: job.step(moment, size=3), "step of all ranks")
        job.finish()
        outcome = Outcome(Fault(0, "link", 0, 0, 0, 0), 1, at=cut)
        judge(job, [outcome])
        assert not outcome.is_wrong, outcome.problems


def pids(job: Job, epoch: str) -> set[int]:
    return {note["pid"] for note in job.begins[epoch].values()}


def waits_for_place(job: Job) -> bool:
    """Whether a process has told that it waits for the earlier one in its place."""
    return "waits: an earlier one" in (job.folder / "output").read_text(errors="replace")


def has_processes(job: Job, count: int) -> bool:
    """Whether so many processes of ranks run."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return sum(line[:2] == [sys.executable, "-m"] and str(job.folder) in line for line in lines) == count


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_sixty_faults_of_all_kinds(tmp_path: Path) -> None:
    run(tmp_path, "--faults", "60", "--seed", "2", timeout=7000)
