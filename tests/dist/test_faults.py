"""Elastic training on emulated hosts under faults of a seed: `python -m dnn_bench faults`, as root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dnn_bench.cluster import namespaces
from tests.support.needs import needs, needs_horovod, needs_root

pytestmark = [
    pytest.mark.dist,
    pytest.mark.root,
    needs_root,
    needs_horovod,
    needs("ip", "tc", "sshd", "ssh"),
]
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


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_sixty_faults_of_all_kinds(tmp_path: Path) -> None:
    run(tmp_path, "--faults", "60", "--seed", "2", timeout=7000)
