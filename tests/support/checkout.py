"""A small checkout and an environment to try docker/install.sh on, without waiting for real builds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TOOLS = """
    basename bash cat cut date dirname env find flock grep gzip head id ln ls mkdir mktemp mv readlink rm
    sed sh sha256sum sleep sort tail tar touch tr true uname xargs
""".split()

# A real extension that compiles in a second stands in for comm_core's.
TINY_SETUP = """
from setuptools import Extension, setup
setup(ext_modules=[Extension("comm_core._C", ["comm_core/csrc/tiny.c"])])
"""
TINY_SOURCE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", 0, -1, 0, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&module); }
"""


def make_checkout(folder: Path) -> Path:
    """docker/ as it is, with a tiny comm_core to build."""
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "docker", folder / "docker")
    for name in ("pyproject.toml", "VERSION", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "setup.py").write_text(TINY_SETUP)
    (folder / "comm_core" / "csrc").mkdir(parents=True)
    (folder / "comm_core" / "csrc" / "tiny.c").write_text(TINY_SOURCE)
    (folder / "comm_core" / "__init__.py").write_text("import comm_core._C\n")
    return folder


def make_path(folder: Path, *tools: str, without: str = "") -> Path:
    """A folder for PATH with links to the ordinary tools and `tools`, and nothing else."""
    folder.mkdir(parents=True)
    for tool in {*TOOLS, *tools} - {without}:
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    (folder / "python3").symlink_to(base)
    return folder


def make_script(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make_environment(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """A virtualenv with links to all that this one has, but this project and the packages in `without`."""
    venv.EnvBuilder(symlinks=True).create(folder)
    target = next(folder.glob("lib/python3.*/site-packages"))
    own = Path(sysconfig.get_path("purelib"))
    # It may see the packages of the Python below it, too; its own come first.
    others = [Path(p) for p in sys.path if p.endswith("site-packages") and Path(p) != own]
    for place in [own, *filter(Path.is_dir, others)]:
        for entry in place.iterdir():
            link = target / entry.name
            if not link.exists() and not entry.name.lower().startswith(
                ("commsched", "__editable__", *without)
            ):
                link.symlink_to(entry)
    return folder


def install(
    checkout: Path, *arguments: str, path: Path | None = None, timeout: float = 200, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run docker/install.sh of this checkout with HOME and the cache beside it; only PATH is inherited."""
    beside = checkout.parent
    (beside / "home").mkdir(exist_ok=True)
    env = {"HOME": str(beside / "home"), "COMMSCHED_CACHE": str(beside / "cache"), "PIP_NO_INDEX": "1"}
    env |= {"PATH": str(path) if path else os.environ["PATH"]} | environment
    return run_group(["/bin/bash", str(checkout / "docker" / "install.sh"), *arguments], beside, env, timeout)


def run_group(
    command: list[str], folder: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, but a time-out also ends the compilers that the command has started."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, error)
