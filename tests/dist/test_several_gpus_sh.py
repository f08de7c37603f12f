"""docker/several_gpus.sh: its report, with programs that only say so; and its commands on two CPU ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, make_script

pytestmark = pytest.mark.dist

# The tests of collectives fail, and fsdp2 does; hsdp takes longer than it may.
PYTHON = """
case "$*" in
*test_collectives_gpu*) echo "FAILED test_collectives_gpu.py::test_gpu_tensors[2]"; exit 1 ;;
*"-m pytest"*) echo "7 passed in 0.10s" ;;
*"--baseline fsdp2 "*) echo "RuntimeError: no memory"; exit 1 ;;
*synthetic*) echo "Iter #0: 99.0 img/sec per GPU"; echo "Img/sec per GPU: 100.5 +-1.0" ;;
*doctor*) echo "torch    ok" ;;
*"dnn_bench gpu"*) echo "### kernels" >build/logs/several-gpus.md ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("docker", ".venv/bin", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("several_gpus.sh", "common.sh"):
        shutil.copy(ROOT / "docker" / name, tmp_path / "docker" / name)
    make_script(tmp_path / "docker/install.sh", "")
    make_script(tmp_path / ".venv/bin/python", PYTHON)
    make_script(tmp_path / "bin/nvidia-smi", 'case "$*" in -L) echo "GPU 0: X"; echo "GPU 1: X" ;; esac')
    (tmp_path / "VERSION").write_text("0.1.0\n")
    return tmp_path


def run(checkout: Path, *words: str, gpus: bool = True) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    env |= {"COMMSCHED_CACHE": str(checkout / "cache")}
    env |= {"PATH": f"{checkout / 'bin'}:{env['PATH']}"} if gpus else {}
    command = ["/bin/bash", str(checkout / "docker/several_gpus.sh"), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)


def test_the_report_tells_what_passed_and_what_failed(checkout: Path) -> None:
    done = run(checkout, "--models", "resnet50")
    report = (checkout / "build/several_gpus.md").read_text()
    assert done.returncode == 1, done.stderr
    assert "# commsched on 2 rank(s)" in report and "torch    ok" in report
    assert "- kernels: 7 passed in 0.10s" in report
    assert "**collectives: failed: FAILED test_collectives_gpu.py::test_gpu_tensors[2]" in report
    assert "| auto | 100.5 | 100.5 |" in report and "### kernels" in report
    assert "| fsdp2 | failed: RuntimeError: no memory | failed: RuntimeError: no memory |" in report


def test_what_does_not_fit_into_the_time_is_left_out(checkout: Path) -> None:
    make_script(
        checkout / ".venv/bin/python", 'case "$*" in *"-m pytest"*) sleep 41; echo "1 passed" ;; esac'
    )
    run(checkout, "--models", "resnet50", "--minutes", "1")
    report = (checkout / "build/several_gpus.md").read_text()
    assert "- collectives: left out: no time left" in report
    assert "| ddp | left out: no time left | left out: no time left |" in report


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "3"], "--gpus 3, but this machine has 2"),
        (["--gpus", "two"], "not 'two'"),
        (["--minutes"], "--minutes needs a value"),
        (["--gpu"], "unknown argument --gpu"),
    ],
)
def test_wrong_arguments(checkout: Path, words: list[str], says: str) -> None:
    done = run(checkout, *words)
    assert done.returncode == 2 and says in done.stderr, done.stderr


def test_a_machine_without_a_gpu(checkout: Path) -> None:
    (checkout / "bin/nvidia-smi").unlink()
    done = run(checkout)
    assert done.returncode == 2 and "nvidia-smi shows no GPU here; --cpu tries" in done.stderr


@pytest.mark.slow
def test_its_commands_on_cpus(tmp_path: Path) -> None:
    """With this environment, in a folder whose ``install.sh`` does nothing."""
    for name in ("comm_core", "commsched", "scheduler", "dnn_bench", "tests", "pyproject.toml", "VERSION"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docker").mkdir()
    for name in ("several_gpus.sh", "common.sh"):
        shutil.copy(ROOT / "docker" / name, tmp_path / "docker" / name)
    make_script(tmp_path / "docker/install.sh", "")
    command = ["/bin/bash", str(tmp_path / "docker/several_gpus.sh"), "--cpu", "--models", "mlp"]
    env = os.environ | {"VIRTUAL_ENV": str(Path(sys.executable).parents[1]), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    report = (tmp_path / "build/several_gpus.md").read_text()
    assert done.returncode == 0, report + done.stderr
    rows = [
        line.split(" | ") for line in report.splitlines() if line.startswith(("| auto", "| ddp", "| fsdp"))
    ]
    assert len(rows) == 5 and all(float(cell.strip(" |")) > 0 for row in rows for cell in row[1:]), report
