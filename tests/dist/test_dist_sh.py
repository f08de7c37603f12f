"""dist.sh from the outside, in the environment that runs the tests."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from dnn_bench.cluster import Cluster
from dnn_bench.settings import Settings
from tests.support.launch import MARK, ROOT, carries, clean_environment
from tests.support.needs import needs, needs_horovod, needs_root

pytestmark = pytest.mark.dist
QUICK = {"dnn": "mlp_tiny", "bs": "8", "nwarmup": "1", "niters": "2"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """dist.sh in a folder that shows this checkout's files but has an install.sh with nothing to do.

    The environment that runs the tests is complete; a developer's half-built one is to stay as it is.
    """
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "common.sh").symlink_to(ROOT / "docker" / "common.sh")
    install = tmp_path / "docker" / "install.sh"
    install.write_text("#!/bin/sh\n")
    install.chmod(0o755)
    (tmp_path / "dist.sh").write_bytes((ROOT / "dist.sh").read_bytes())
    return tmp_path / "dist.sh"


def environment_of(script: Path) -> dict[str, str]:
    env = clean_environment({MARK: str(script), "VIRTUAL_ENV": sys.prefix})
    for name in ("HOSTS", "RDMA", "COMMSCHED_WITH_HOROVOD"):  # tests/run sets the last
        env.pop(name, None)
    return env


def dist(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = environment_of(script) | variables
    return subprocess.run(
        ["/bin/bash", str(script), *arguments],
        env=env,
        cwd=script.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.parametrize(
    ("launcher", "baseline"),
    [
        pytest.param("horovodrun", "horovod", marks=needs_horovod),
        ("torchrun", "pipedap"),
        pytest.param("mpirun", "pipedap", marks=[needs("mpirun"), pytest.mark.slow]),
    ],
)
def test_horovods_familiar_lines(script: Path, launcher: str, baseline: str) -> None:
    result = dist(script, launcher=launcher, baseline=baseline, **QUICK)
    assert result.returncode == 0, result.stdout + result.stderr
    command = result.stdout.splitlines()[0]
    assert command.startswith("+ env ") and f"/{launcher} " in command
    assert len(re.findall(r"Iter #\d: \d+\.\d sample/sec per CPU", result.stdout)) == 2
    assert re.search(r"Total sample/sec on 2 CPU\(s\): \d+\.\d \+-\d+\.\d", result.stdout)
    assert not [p for p in psutil.process_iter() if carries(p, str(script))]


@pytest.mark.root
@needs_root
@needs("ip", "tc", "sshd", "ssh")
@pytest.mark.parametrize(
    ("launcher", "baseline"),
    [
        pytest.param("mpirun", "dear", marks=needs("mpirun")),
        pytest.param("horovodrun", "horovod", marks=[needs_horovod, pytest.mark.slow]),
        pytest.param("horovodrun", "dear", marks=[needs_horovod, pytest.mark.slow]),
    ],
)
def test_several_workers_on_each_of_several_hosts(script: Path, launcher: str, baseline: str) -> None:
    with Cluster(2, "unlimited", ssh=True) as cluster:
        where = {
            "nworkers": "4",
            "hosts": cluster.hosts_argument(2),
            "launcher": launcher,
            "baseline": baseline,
        }
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        env = environment_of(script) | QUICK | where
        text, _ = cluster.run(0, ["/bin/bash", str(script)], env, **pipes).communicate(timeout=400)
        first, second = cluster.names
    assert f"Ranks: host {first} [0 1], host {second} [2 3]" in text, text
    assert re.search(r"Total sample/sec on 4 CPU\(s\): \d+\.\d \+-\d+\.\d", text), text


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"dnn": "resnet99"}, "choose one of: .*resnet50"),
        ({"baseline": "magic"}, "choose of: .*pipedap"),
        ({"LAUNCHER": "srun"}, "choose of: horovodrun, torchrun, mpirun"),
        ({"nworkers": "0"}, "nworkers must be a whole number of at least 1"),
    ],
)
def test_a_wrong_value_starts_nothing(script: Path, variables: dict[str, str], message: str) -> None:
    result = dist(script, **variables)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr)


def test_arguments_show_the_variables(script: Path) -> None:
    result = dist(script, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert [field.name for field in fields(Settings) if f" {field.name} " not in result.stdout] == []
    assert "baseline=all" in result.stdout
    wrong = dist(script, "dnn=mlp")  # a variable comes before the command
    assert (wrong.returncode, wrong.stdout, wrong.stderr) == (2, "", result.stdout)


def test_training_on_a_text(script: Path) -> None:
    """The folder is relative to where dist.sh is called."""
    (script.parent / "texts").mkdir()
    (script.parent / "texts" / "one.txt").write_text("all work and no play\n" * 200)
    quick = {**QUICK, "dnn": "gpt2_tiny", "bs": "1", "senlen": "16", "nworkers": "1"}
    result = dist(script, DATA_DIR="texts", **quick)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"--data-dir {script.parent / 'texts'} " in result.stdout.splitlines()[0]
    assert "Total sentence/sec on 1 CPU(s)" in result.stdout
    missing = dist(script, data="books", **quick)
    assert missing.returncode == 2 and f"data=books: there is no {script.parent / 'books'}" in missing.stderr


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, "0"),
        ({"baseline": "ddp,auto", "nworkers": "4"}, "0"),
        ({"Baseline": "ddp,Horovod_4mb"}, "1"),
        ({"baseline": "all"}, "1"),
        ({"LAUNCHER": "horovodrun"}, "1"),
        ({"launcher": "horovodrun", "COMMSCHED_WITH_HOROVOD": "0"}, "0"),
        ({"COMMSCHED_WITH_HOROVOD": "1"}, "1"),
    ],
)
def test_horovod_is_built_where_it_is_needed(script: Path, variables: dict[str, str], wanted: str) -> None:
    """Its build takes minutes, which the first run spent before it measured anything."""
    install = script.parent / "docker" / "install.sh"
    install.write_text("#!/bin/sh\necho Horovod: $COMMSCHED_WITH_HOROVOD; exit 1\n")
    assert dist(script, **variables).stdout == f"Horovod: {wanted}\n"


@pytest.mark.slow
def test_a_first_answer_without_variables(script: Path) -> None:
    """On loopback as well as on emulated hosts, whichever this machine allows."""
    page = script.parent / "build" / "first.html"
    result = dist(script)
    assert result.returncode == 0, result.stdout + result.stderr
    command, network, costs, ordinary, ours, *_, first, last = result.stdout.splitlines()
    assert command.endswith("-m dnn_bench first --html build/first.html")
    assert re.match(r"Network: (an emulated link of 1gbit|the loopback of this machine)", network)
    assert re.match(r"This network costs -?\d+% \(.*\) of a step: DDP takes \d+ ms", costs)
    assert re.match(r"The best ordinary way, DDP .*, takes \d+ ms", ordinary)
    assert re.match(r"commsched takes \d+ ms .* times as fast", ours)
    assert re.match(r"Of its first 15 steps, .* \d\.\d\d times DDP's median of \d+ ms: (\d+ ?){15}\.", first)
    assert last == f"The page with the picture: {page}" and page.stat().st_size > 10_000


def test_a_failing_install_ends_it(script: Path) -> None:
    (script.parent / "docker" / "install.sh").write_text("#!/bin/sh\necho no compiler >&2; exit 1\n")
    result = dist(script)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "no compiler\n")
