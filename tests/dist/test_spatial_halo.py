"""`python -m dnn_bench halo`: runs as it is started, and on a slow link interiors hide halos."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_module
from tests.support.launch import ROOT, clean_environment, launcher_command
from tests.support.needs import needs, needs_root

pytestmark = pytest.mark.dist
SMALL = ["--image-size", "64x24", "--iterations", "3", "--warmup", "1"]


def halo(*arguments: str, before: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    if before is None:
        return run_module("dnn_bench", "halo", *arguments)
    command = [*before, sys.executable, "-m", "dnn_bench", "halo", *arguments]
    return subprocess.run(
        command, env=clean_environment(), cwd=ROOT, capture_output=True, text=True, timeout=400
    )


def test_started_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "halo.json"
    done = halo(*SMALL, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "hidden:" in done.stdout and "the simulator says" in done.stdout
    measured = json.loads(file.read_text())
    # Two samples, 16 channels, 64 rows of 2 columns in float32, there and back.
    assert measured["sent"] == [2 * 16 * 64 * 2 * 4] * 2
    assert measured["border"] == pytest.approx(2 / 12)
    assert all(seconds > 0 for name in ("halo", "compute", "overlapped") for seconds in measured[name])


@needs("mpirun")
def test_under_mpirun() -> None:
    done = halo(*SMALL, before=launcher_command("mpirun", 2))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hidden:") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image-size", "big"], "--image-size is a number of pixels"),
        (["--num-spatial-parts", "3", "--slice-method", "square"], "square needs a square number of parts"),
        (["--halo-len", "0"], "--halo-len must be at least 1, got 0"),
        (["--hosts", "3"], "--hosts 3 runs 3 ranks, and this needs 2"),
    ],
)
def test_bad_options(arguments: list[str], said: str) -> None:
    done = halo(*arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.bench
@pytest.mark.root
@needs_root
@needs("ip", "tc")
def test_large_interiors_hide_four_fifths_of_the_halo_on_a_slow_link(tmp_path: Path) -> None:
    found = {}
    for columns in (64, 10):
        file = tmp_path / f"{columns}.json"
        options = [
            "--image-size",
            f"8192x{columns}",
            "--hosts",
            "2",
            "--link",
            "250mbit",
            "--json",
            str(file),
        ]
        done = halo(*options)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        found[columns] = json.loads(file.read_text())
    assert found[64]["large_enough"] and not found[10]["large_enough"]
    assert found[64]["hidden"] >= 0.8
    assert found[10]["hidden"] < found[10]["predicted"] + 0.1
