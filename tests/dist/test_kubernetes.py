"""The commands of docs/runtime.md with the variables that Kubernetes' training operator sets in pods."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from commsched.process.network import HeldPort
from tests.support.documented_commands import ROOT
from tests.support.launch import clean_environment
from tests.support.needs import needs

pytestmark = pytest.mark.dist
SCRIPT = """
import os
import commsched as hvd
hvd.init()
total = sum(hvd.allgather_object(hvd.rank()))
line = f"{hvd.rank()} {hvd.size()} {hvd.local_rank()} {hvd.local_size()} {total}\\n"
os.write(1, line.encode())  # in one write: ranks share the pipe
"""
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def command(program: str) -> list[str]:
    """The command of the page's YAML that starts with this program."""
    page = (ROOT / "docs/runtime.md").read_text()
    (words,) = re.findall(rf"command: \[({program}, .*)\]", page)
    return [word.strip(' "') for word in words.split(",")]


def run_pods(folder: Path, commands: list[list[str]], variables: list[dict[str, str]]) -> list[str]:
    """What the ranks of all pods print, sorted."""
    (folder / "script.py").write_text(SCRIPT)
    base = POD | {"PYTHONPATH": str(ROOT)}
    pods = [
        subprocess.Popen(
            words,
            env=clean_environment(base | own),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words, own in zip(commands, variables, strict=True)
    ]
    try:
        said = [pod.communicate(timeout=300)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0] * len(pods), said
    return sorted(line for text in said for line in text.splitlines() if re.fullmatch(r"[\d ]+", line))


@pytest.mark.slow
def test_pytorchjob_with_torchrun(tmp_path: Path) -> None:
    with HeldPort() as port:
        common = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port.number)}
        pods = [common | {"PET_NODE_RANK": str(rank)} for rank in range(2)]
        lines = run_pods(tmp_path, [command("torchrun")] * 2, pods)
    assert lines == ["0 4 0 2 6", "1 4 1 2 6", "2 4 0 2 6", "3 4 1 2 6"]


def test_pytorchjob_without_torchrun(tmp_path: Path) -> None:
    """Each pod is a host of its own."""
    with HeldPort() as port:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port.number)}
        pods = [common | {"RANK": str(rank)} for rank in range(2)]
        lines = run_pods(tmp_path, [[sys.executable, "script.py"]] * 2, pods)
    assert lines == ["0 2 0 1 1", "1 2 0 1 1"]


@needs("mpirun")
def test_mpijob(tmp_path: Path) -> None:
    """As the operator's launcher: the workers stand in a host file that a variable names."""
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    variables = {
        "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hostfile"),
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    assert run_pods(tmp_path, [command("mpirun")], [variables]) == ["0 2 0 2 1", "1 2 1 2 1"]
