"""A source distribution and its wheel, installed where no checkout is: every command runs, ranks train."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, run_group

# Compiles the whole extension.
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)]
TRAIN = """
import torch
import commsched as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 8).double()
data = torch.randn(8, 64, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if hvd.size() > 1:
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
rows = len(data) // hvd.size()
for _ in range(10):
    optimizer.zero_grad()
    model(data[hvd.rank() * rows : (hvd.rank() + 1) * rows]).square().mean().backward()
    optimizer.step()
total = sum(p.sum().item() for p in model.parameters())
with open(f"rank{hvd.rank()}of{hvd.size()}", "w") as file:
    file.write(f"{total:.10f}")
"""


def files_of_the_checkout(folder: Path) -> None:
    """Copy what git knows and what it would not ignore."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(listed, text=True).split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


def build(folder: Path) -> Path:
    """As `python -m build --no-isolation` does: a source distribution, and the wheel of what is in it."""
    env = os.environ | {"COMMSCHED_WITH_CUDA": "0", "PYTHONPATH": ""}

    def run(command: list[str], where: Path) -> None:
        done = run_group(command, where, env, timeout=1200)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    checkout = folder / "checkout"
    files_of_the_checkout(checkout)
    run([sys.executable, "-c", "import setuptools.build_meta as b; b.build_sdist('dist')"], checkout)
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    run(["tar", "-xzf", str(archive), "-C", str(folder)], folder)
    source = folder / archive.name.removesuffix(".tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    run([*pip, "-w", str(folder / "wheels"), str(source)], folder)
    run(["rm", "-r", str(source), str(checkout)], folder)
    (wheel,) = (folder / "wheels").glob("commsched-*.whl")
    return wheel


def environment_with(wheel: Path, folder: Path) -> Path:
    """An environment that has the wheel, and the other packages of this one without its editable installs."""
    venv.EnvBuilder(symlinks=True).create(folder)
    own = next(folder.glob("lib/python3.*/site-packages"))
    # Paths in a .pth file are added, but .pth files in them (of editable installs) are not read.
    others = [sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("site-packages"))]
    (own / "others.pth").write_text("\n".join(dict.fromkeys(others)) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--no-deps"]
    subprocess.run([*pip, "--no-index", "-q", "--ignore-installed", str(wheel)], check=True)
    return folder / "bin"


def test_everything_runs_from_the_wheel(tmp_path: Path) -> None:
    programs = environment_with(build(tmp_path), tmp_path / "env")
    here = tmp_path / "elsewhere"
    here.mkdir()
    (here / "train.py").write_text(TRAIN)
    python = str(programs / "python")
    env = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(here)}
    env |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = run_group(list(command), here, env, timeout=400)
        assert done.returncode == 0, f"{command}\n{(done.stdout + done.stderr)[-4000:]}"
        return done.stdout

    packages = next((tmp_path / "env").glob("lib/python3.*/site-packages"))
    for name in ("commsched", "comm_core", "scheduler", "dnn_bench"):
        assert (packages / name / "py.typed").exists()
        found = run(python, "-c", f"import {name}; print({name}.__file__)").strip()
        assert found == str(packages / name / "__init__.py")

    run(python, "train.py")
    run(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    alone, *both = ((here / name).read_text() for name in ("rank0of1", "rank0of2", "rank1of2"))
    assert both == [alone, alone]

    plan = ["--profile", "resnet50", "--link", "10gbit"]
    assert "optimal" in run("commsched", "simulate", *plan)
    assert "dear" in run(python, "-m", "commsched", "simulate", *plan, "--policies", "dear")
    assert "comm_core is built for this torch" in run("commsched", "doctor")
    table = ["resnet50", "--ratios", "1", "--startups", "2e-4"]
    assert "cells, " in run(python, "-m", "scheduler.table", *table)
    quick = ["--local", "--batch-size", "8", "--reps", "1", "--html", "first.html"]
    assert "The page with the picture" in run(python, "-m", "dnn_bench", "first", *quick)
    assert "function timelines" in (here / "first.html").read_text()
