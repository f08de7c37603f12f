"""docker/install.sh: says what is wrong in one line, and does nothing twice."""

import fcntl
import os
import shutil
import subprocess
import sysconfig
import threading
import time
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, install, make_checkout, make_environment, make_path, make_script

# Each starts Python or pip a few times, which a busy machine takes its time for.
pytestmark = pytest.mark.dist
HOROVOD = {"COMMSCHED_WITH_HOROVOD": "1"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "checkout")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH with a compiler and an MPI (by name), and no apt-get."""
    # Debian's Python calls its compiler by a longer name.
    own = [str(sysconfig.get_config_var(name)).split()[0] for name in ("CC", "CXX")]
    folder = make_path(tmp_path / "bin", "g++", "gcc", "cc", "c++", "as", "ld", *map(os.path.basename, own))
    for name in ("mpirun", "mpicxx"):
        make_script(folder / name, "echo 'mpirun (Open MPI) 9.9.9'")
    return folder


def assert_one_error(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert result.returncode != 0
    assert len(errors) == 1, result.stderr
    assert all(part in errors[0] for part in parts), errors[0]


def test_help() -> None:
    result = install(ROOT, "--help")
    assert result.returncode == 0
    assert "COMMSCHED_WITHOUT_MPI" in result.stdout


def test_unknown_argument(checkout: Path) -> None:
    assert_one_error(install(checkout, "--frobnicate"), "--frobnicate", "--help")


def test_no_compiler(checkout: Path, path: Path) -> None:
    (path / "g++").unlink()
    assert_one_error(install(checkout, path=path), "no C++ compiler", "apt-get install g++", "CXX")
    assert not (checkout / ".venv").exists()


def test_compiler_too_old(checkout: Path, path: Path) -> None:
    make_script(path / "g++", "exit 1")
    assert_one_error(install(checkout, path=path), "-std=c++20", "GCC 10")


@pytest.mark.parametrize("missing", ["mpirun", "mpicxx"])
def test_no_mpi(checkout: Path, path: Path, missing: str) -> None:
    (path / missing).unlink()
    result = install(checkout, path=path, **HOROVOD)
    assert_one_error(result, "no MPI", "openmpi-bin libopenmpi-dev", "COMMSCHED_WITHOUT_MPI=1")
    assert not (checkout / ".venv").exists()


def has_debian_mpi() -> bool:
    """Then installing it changes nothing."""
    if shutil.which("dpkg") is None:
        return False
    return (
        subprocess.run(["dpkg", "-s", "openmpi-bin", "libopenmpi-dev"], capture_output=True).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or not has_debian_mpi(), reason="needs root and Debian's Open MPI")
@pytest.mark.parametrize("lock", ["/var/lib/apt/lists/lock", "/var/lib/dpkg/lock-frontend"])
def test_waits_for_another_apt(checkout: Path, path: Path, lock: str) -> None:
    """A new machine was updating itself when dist.sh was started, which gave up at once."""
    (path / "mpirun").unlink()
    for tool in ("apt-get", "dpkg"):
        (path / tool).symlink_to(str(shutil.which(tool)))
    results: list[subprocess.CompletedProcess[str]] = []
    running = threading.Thread(target=lambda: results.append(install(checkout, path=path, **HOROVOD)))
    with open(lock, "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        running.start()
        time.sleep(4)
        gave_up = bool(results)
    running.join(300)
    assert not gave_up, results[0].stderr
    # Both packages were there: only this PATH has no mpirun.
    assert_one_error(results[0], "no MPI")


def test_no_python(checkout: Path, path: Path) -> None:
    make_script(path / "python3", "exit 1")
    result = install(checkout, path=path)
    assert_one_error(result, "no Python that fits", "3.10", "python3-venv", "COMMSCHED_PYTHON")


@pytest.mark.parametrize("wanted", [{}, {"COMMSCHED_WITH_HOROVOD": "1", "COMMSCHED_WITHOUT_MPI": "1"}])
def test_without_mpi_it_is_not_asked_for(checkout: Path, path: Path, wanted: dict[str, str]) -> None:
    (path / "mpirun").unlink()
    make_script(path / "python3", "exit 1")
    result = install(checkout, path=path, **wanted)
    assert_one_error(result, "no Python that fits")


def test_wrong_switch(checkout: Path) -> None:
    assert_one_error(install(checkout, COMMSCHED_WITH_CUDA="yes"), "COMMSCHED_WITH_CUDA", "'yes'")
    assert_one_error(install(checkout, COMMSCHED_WITHOUT_HOROVOD="1"), "set COMMSCHED_WITH_HOROVOD=0 or 1")


def test_active_environment_that_does_not_exist(checkout: Path) -> None:
    assert_one_error(install(checkout, VIRTUAL_ENV="/nowhere/env"), "/nowhere/env", "unset VIRTUAL_ENV")


def test_a_failing_step_shows_the_end_of_its_log(checkout: Path, path: Path) -> None:
    # Nothing can be fetched: there is no index.
    result = install(checkout, path=path)
    assert_one_error(result, "getting the build tools failed", "build-tools.log")
    assert "No matching distribution found" in result.stderr


@pytest.mark.slow
def test_damaged_wheel_in_the_cache(checkout: Path, path: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "env", without=("horovod",))
    where = subprocess.run(
        ["/bin/bash", str(checkout / "docker/horovod.sh"), "--where", str(environment / "bin/python")],
        env={"PATH": str(path), "HOME": str(tmp_path), "COMMSCHED_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert where.returncode == 0, where.stderr
    wheel = Path(where.stdout.strip())
    assert "mpi9.9.9" in wheel.parent.name and wheel.name.startswith("horovod-0.28.1-cp3")
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"half a wh")
    wheel.with_name(wheel.name + ".sha256").write_text("0" * 64)
    result = install(checkout, path=path, VIRTUAL_ENV=str(environment), **HOROVOD)
    assert_one_error(result, "damaged", f'rm -r "{wheel.parent}"', "run again")


def test_horovod_that_cannot_be_imported(checkout: Path, path: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "env", without=("horovod",))
    package = next(environment.glob("lib/python3.*/site-packages")) / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    result = install(checkout, path=path, VIRTUAL_ENV=str(environment), **HOROVOD)
    assert_one_error(result, "cannot be imported", "undefined symbol: _ZN3c10", "COMMSCHED_WITH_HOROVOD=0")


def test_an_interrupted_installation_of_horovod_is_repeated(
    checkout: Path, path: Path, tmp_path: Path
) -> None:
    """What it had left was taken for somebody else's Horovod, which could not be imported."""
    environment = make_environment(tmp_path / "env", without=("horovod",))
    make_script(checkout / "docker/horovod.sh", f"echo {tmp_path}/horovod-0.28.1.whl")
    package = next(environment.glob("lib/python3.*/site-packages")) / "horovod"
    python, real, attempts = environment / "bin/python", environment / "bin/real", tmp_path / "attempts"
    real.symlink_to(python.resolve())
    # pip ends as if it were interrupted, after it has installed the package.
    installs = f"mkdir -p {package}; touch {package}/__init__.py; echo x >>{attempts}; exit 1"
    make_script(python, f'case "$*" in *--no-deps*) {installs};; esac; exec {real} "$@"')
    for attempt in (1, 2):
        result = install(checkout, path=path, VIRTUAL_ENV=str(environment), **HOROVOD)
        assert_one_error(result, "installing Horovod failed")
        assert attempts.read_text() == "x\n" * attempt


@pytest.mark.slow
def test_a_horovod_that_cannot_be_built_is_left_out(checkout: Path, path: Path, tmp_path: Path) -> None:
    """Its build beside a CUDA build of torch failed, and took the installation with it."""
    environment = make_environment(tmp_path / "env", without=("horovod",))
    # Nothing can be fetched: there is no index.
    result = install(checkout, path=path, VIRTUAL_ENV=str(environment), **HOROVOD)
    assert result.returncode == 0, result.stderr
    log = checkout / "build/logs/horovod-download.log"
    assert f"Horovod 0.28.1 cannot be built here: {log} says why" in result.stderr and log.exists()
    assert "going on without Horovod: torchrun starts the ranks" in result.stderr
    assert list(checkout.glob("comm_core/_C.*.so"))
    # It is not tried again at every start.
    assert install(checkout, path=path, VIRTUAL_ENV=str(environment), **HOROVOD).stderr == ""


@pytest.mark.parametrize(
    ("gpu", "switch", "version"),
    [
        (False, {}, "torch==2.13.0"),
        (True, {}, "torch>=2.6,<2.16"),
        pytest.param(True, {"COMMSCHED_WITH_CUDA": "0"}, "torch==2.13.0", marks=pytest.mark.slow),
        # An image is built without its GPU.
        pytest.param(False, {"COMMSCHED_WITH_CUDA": "1"}, "torch>=2.6,<2.16", marks=pytest.mark.slow),
        pytest.param(True, {"COMMSCHED_TORCH": "torch==2.9.1"}, "torch==2.9.1", marks=pytest.mark.slow),
    ],
)
def test_which_torch(
    checkout: Path, path: Path, tmp_path: Path, gpu: bool, switch: dict[str, str], version: str
) -> None:
    """Machines with a GPU got the newest version with a CPU build, two releases old.

    The folder is what an interrupted installation leaves: it was taken for a torch that can be kept.
    """
    environment = make_environment(tmp_path / "env", without=("torch",))
    (next(environment.glob("lib/python3.*/site-packages")) / "torch").mkdir()
    make_script(path / "nvidia-smi", f"exit {0 if gpu else 9}")
    nowhere = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}
    result = install(checkout, path=path, VIRTUAL_ENV=str(environment), **nowhere, **switch)
    assert_one_error(result, f"installing {version} failed")


def test_it_builds_once_and_again_only_when_something_changed(
    checkout: Path, path: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "env")

    def run() -> list[str]:
        result = install(checkout, path=path, VIRTUAL_ENV=str(environment))
        assert result.returncode == 0, result.stderr
        assert "Horovod" not in result.stderr
        return result.stderr.splitlines()

    building = "[commsched] building commsched (a minute or two) ..."
    assert building in run()

    assert run() == []

    # What Python itself leaves beside sources, as soon as they are imported, is no reason to build.
    compiled = checkout / "comm_core/cuda/__pycache__/copies.cpython-311.pyc"
    compiled.parent.mkdir(parents=True)
    compiled.write_text("bytecode")
    assert run() == []

    source = checkout / "comm_core/csrc/tiny.c"
    source.write_text(source.read_text() + "/* changed */\n")
    assert building in run()
    assert run() == []

    next(checkout.glob("comm_core/_C.*.so")).unlink()
    assert building in run()

    # Nothing was written into the home folder.
    assert list((tmp_path / "home").iterdir()) == []
