"""`commsched partition`: from a profile to a plan file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commsched.cli import main
from commsched.cli.options import bytes_of
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.layout import Samples, Tiles
from scheduler.ir.profile import Layer, Profile
from scheduler.pipelines.build import program_of
from scheduler.validate import validate


@pytest.fixture
def alex(tmp_path: Path) -> str:
    """Light weights in front, heavy ones after them."""
    front = tuple(Layer(f"conv{n}", 10e-3, 20e-3, 10_000, 50_000) for n in range(4))
    rear = tuple(Layer(f"fc{n}", 2e-3, 4e-3, 5_000_000, 5_000) for n in range(2))
    path = tmp_path / "alex.json"
    Profile("alex", front + rear).save(path)
    return str(path)


def test_plan_file(alex: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = ["partition", "--profile", alex, "--devices", "4", "--link", "alpha=0,beta=2e-8", "-o", str(path)]
    assert main([*words, "--schedule", "ashpipe", "--memory", "1g"]) == 0
    out = capsys.readouterr().out
    assert "stage 0: layers 0..3, 3 devices" in out and "stage 1: layers 4..5, 1 device\n" in out
    assert "delays      1 0" in out and "versions    2 1" in out
    plan = PipelinePlan.load(path)
    assert plan.replicas == (3, 1)
    profile = Profile.load(alex)
    validate(program_of(plan, profile), profile)


def test_hosts_and_json(alex: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["partition", "--profile", alex, "--devices", "4", "--link", "1gbit", "--json"]
    memory = ["--memory", "64m,64m,128m,128mib", "--recompute", "auto", "--microbatches", "4"]
    assert main([*words, "--per-host", "2", "--inside", "10gbit", "--schedule", "1f1b", *memory]) == 0
    plan = PipelinePlan.from_dict(json.loads(capsys.readouterr().out))
    assert plan.microbatches == 4 and max(plan.memory) <= 128 << 20


def test_placements(alex: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = ["partition", "--profile", alex, "--devices", "5", "--link", "1gbit", "--schedule", "1f1b"]
    assert main([*words, "--placements", "2x2,1", "-o", str(path)]) == 0
    assert "4 devices with a tile of 2x2 each" in capsys.readouterr().out
    assert PipelinePlan.load(path).placements == [Tiles((2, 2)), Samples()]


@pytest.mark.parametrize(
    ("text", "size"), [("64k", 65536), ("16M", 2**24), ("100", 100), ("1gb", 2**30), ("1.5GiB", 3 << 29)]
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of("--memory", text) == size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "0"], "--devices must be at least 1, got 0"),
        (["--devices", "4", "--per-host", "2"], "need both --per-host and --inside"),
        (["--devices", "4", "--per-host", "3", "--inside", "10gbit"], "4 devices do not fill hosts of 3"),
        (["--devices", "4", "--memory", "lots"], "cannot read 'lots'"),
        (["--devices", "4", "--memory", "1g,2g"], "one entry for each of 4 devices, got 2"),
        (["--devices", "4", "--memory", "1k"], "fits into the memory of 4 devices"),
        (["--devices", "5", "--placements", "2xtwo,1"], "numbers of ranks such as 2x2,1, got '2xtwo,1'"),
        (["--devices", "4", "--schedule", "fast"], "there is no pipeline schedule 'fast'"),
    ],
)
def test_errors(alex: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "--profile", alex, "--link", "1gbit", *words]) == 2
    assert message in capsys.readouterr().err
