"""tests/run: gets the programs that tests need where it may, and names what was not tested elsewhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, make_path, make_script

pytestmark = pytest.mark.dist
# sshd and the browser are never on the PATH of these tests.
WANTED = "chromium chromium-driver openssh-server"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH with all programs that tests need except WANTED's, and an apt-get that logs its arguments."""
    folder = make_path(tmp_path / "bin", "tail")
    for name in ("ip", "tc", "ssh", "mpirun", "srun", "slurmctld", "slurmd"):
        make_script(folder / name, "")
    make_script(folder / "id", "echo 0")
    make_script(folder / "apt-get", f'echo "$*" >> {tmp_path}/apt')
    return folder


def run(
    folder: Path, path: Path, *arguments: str, failing: str = "none", **variables: str
) -> subprocess.CompletedProcess[str]:
    """tests/run in a checkout with nothing to install; its Python says what it does and fails as told."""
    checkout = folder / "checkout"
    for name in ("docker", "tests/support", "tests/native", "comm_core", "env/bin"):
        (checkout / name).mkdir(parents=True)
    for name in ("docker/common.sh", "tests/run", "tests/support/needs.py"):
        shutil.copy(ROOT / name, checkout / name)
    make_script(checkout / "docker/install.sh", "")
    make_script(checkout / "env/bin/clang-format", "")
    answer = (
        f'case $2 in tests.*) exec {sys.executable} "$@" ;; *) echo "ran $*" ;; esac; [ "$2" != {failing} ]'
    )
    make_script(checkout / "env/bin/python", answer)
    env = {"PATH": str(path), "HOME": str(folder), "VIRTUAL_ENV": str(checkout / "env")} | variables
    command = ["/bin/bash", str(checkout / "tests/run"), *(arguments or ("tests/unit",))]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)


def asked(folder: Path) -> list[str]:
    return (folder / "apt").read_text().splitlines() if (folder / "apt").exists() else []


def test_root_gets_what_the_tests_need(tmp_path: Path, path: Path) -> None:
    """A fresh machine left out 14 tests, of ssh between hosts and of the report's page, and passed."""
    result = run(tmp_path, path)
    assert result.returncode == 0, result.stderr
    assert asked(tmp_path)[0] == "update"
    assert asked(tmp_path)[1].endswith(f"install -y --no-install-recommends {WANTED}")
    *_, tests, times = result.stdout.splitlines()
    assert tests == "ran -m pytest tests/unit"
    took = ", ".join(rf"{name} \d+ s" for name in ("format", "clang-format", "ruff", "pytest", "mypy"))
    assert re.fullmatch(rf"tests/run: \d+ s \({took}\)", times)


@pytest.mark.parametrize("failing", ["pytest", "mypy"])
def test_what_fails_beside_the_other_one_is_told(tmp_path: Path, path: Path, failing: str) -> None:
    result = run(tmp_path, path, failing=failing)
    assert result.returncode == 1
    assert ("ran -m mypy" in result.stdout) == (failing == "mypy") and "ran -m pytest" in result.stdout


@pytest.mark.parametrize("how", ["", "--all"])
def test_what_runs_without_names_of_tests(tmp_path: Path, path: Path, how: str) -> None:
    result = run(tmp_path, path, how)
    assert result.returncode == 0, result.stderr
    asked_for = result.stdout.splitlines()[-2]
    assert asked_for.startswith("ran -m pytest -n 3 --dist loadscope")
    assert asked_for.endswith("and (quick or not dist)") == (how == "")


def test_nothing_is_installed_where_nothing_is_missing(tmp_path: Path, path: Path) -> None:
    for name in ("sshd", "google-chrome", "chromedriver"):
        make_script(path / name, "")
    assert run(tmp_path, path).returncode == 0
    assert asked(tmp_path) == []


@pytest.mark.parametrize("reason", ["not root", "no apt-get", "not wanted"])
def test_where_it_may_not_install_the_tests_run_all_the_same(tmp_path: Path, path: Path, reason: str) -> None:
    if reason == "not root":
        make_script(path / "id", "echo 1000")
    elif reason == "no apt-get":
        (path / "apt-get").unlink()
    result = run(tmp_path, path, COMMSCHED_TEST_TOOLS="0" if reason == "not wanted" else "1")
    assert result.returncode == 0 and "ran -m pytest tests/unit" in result.stdout
    assert asked(tmp_path) == []


def test_an_apt_that_fails_is_told_and_the_tests_run(tmp_path: Path, path: Path) -> None:
    make_script(path / "apt-get", 'case "$*" in update) ;; *) exit 100 ;; esac')
    result = run(tmp_path, path)
    assert result.returncode == 0 and "ran -m pytest tests/unit" in result.stdout
    assert "build/logs/test-tools.log says why" in result.stderr


UNTESTED = """
import pytest
from tests.support.needs import needs

@needs("sshd")
@pytest.mark.parametrize("n", [1, 2])
def test_ssh(n):
    pass
"""


@pytest.mark.parametrize("options", [[], ["-n", "1"]])
def test_the_end_names_what_was_not_tested(tmp_path: Path, path: Path, options: list[str]) -> None:
    (tmp_path / "test_untested.py").write_text(UNTESTED)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
    ]
    result = subprocess.run(
        [*command, *options, "test_untested.py"],
        cwd=tmp_path,
        env={"PATH": str(path), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    title, line, end = [line for line in result.stdout.splitlines() if line][-3:]
    assert "not tested" in title and "2 skipped" in end
    assert line == "   2 tests: needs sshd: apt-get install openssh-server"


def test_each_launch_belongs_to_one_process() -> None:
    """Two processes take turns: neither gets a part of a launch, or all launches of the file."""
    options = (
        "-n 2 --dist loadscope --no-loadscope-reorder -v -p no:cacheprovider -k optimizer_uneven".split()
    )
    command = [sys.executable, "-m", "pytest", *options, "tests/dist/test_optimizer_cases.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:]
    ran = re.findall(r"\[(gw\d)\].*PASSED.*\[optimizer_uneven-\w+-(\d)\]", result.stdout)
    assert {process for process, _ in ran} == {"gw0", "gw1"}
    assert len(set(ran)) == len({ranks for _, ranks in ran}) > 1
