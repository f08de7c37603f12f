"""docker/cuda_toolkit.py: headers and libcudart of nvcc's own toolkit, or of the wheels that torch brings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Where the wheels put headers and libcudart, in CUDA 12 and 13.
LAYOUTS = {"cuda12": ("nvidia/cuda_runtime", "libcudart.so.12"), "cuda13": ("nvidia/cu13", "libcudart.so.13")}


def make_nvcc(path: Path, top: Path) -> None:
    """A wrapper script, as package managers put one on PATH; like nvcc it says where its toolkit is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '#$ TOP={top}/bin/..' >&2\n")
    path.chmod(0o755)


def make_runtime(folder: Path, library: str) -> None:
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "cuda_runtime.h").touch()
    (folder / "lib").mkdir()
    (folder / "lib" / library).touch()


def look_up(tmp_path: Path, packages: Path) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "docker/cuda_toolkit.py")
    environment = {"PYTHONPATH": str(packages), "PATH": os.environ["PATH"]}
    # -S: the environment that runs the tests may have such wheels of its own.
    command = [sys.executable, "-S", script, str(tmp_path / "bin/nvcc"), str(tmp_path / "links")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def variables(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert result.returncode == 0, result.stderr
    return dict(line.split("=", 1) for line in result.stdout.splitlines())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_nvcc_alone_takes_the_wheels(tmp_path: Path, layout: str) -> None:
    """CMake could not find CUDAToolkit_INCLUDE_DIR and CUDA_CUDART, and the installation ended."""
    (tmp_path / "toolkit/bin").mkdir(parents=True)
    make_nvcc(tmp_path / "bin/nvcc", tmp_path / "toolkit")
    folder, library = LAYOUTS[layout]
    make_runtime(tmp_path / "packages" / folder, library)
    (tmp_path / "packages/nvidia/cublas/include").mkdir(parents=True)
    found = variables(look_up(tmp_path, tmp_path / "packages"))
    headers = [tmp_path / "packages" / folder / "include", tmp_path / "packages/nvidia/cublas/include"]
    assert found["CMAKE_INCLUDE_PATH"] == found["CPATH"] == ":".join(map(str, headers))
    # find_library(cudart) wants the unversioned name, which wheels do not have.
    link = Path(found["CMAKE_LIBRARY_PATH"]) / "libcudart.so"
    assert link.resolve() == tmp_path / "packages" / folder / "lib" / library
    assert (Path(found["CUDA_HOME"]) / "bin/nvcc").exists()


def test_the_toolkit_of_a_wrapper_comes_before_the_wheels(tmp_path: Path) -> None:
    """CMake looked beside the script /usr/local/bin/nvcc, where there is no toolkit."""
    make_runtime(tmp_path / "toolkit", "libcudart.so")
    make_nvcc(tmp_path / "bin/nvcc", tmp_path / "toolkit")
    make_runtime(tmp_path / "packages/nvidia/cu13", "libcudart.so.13")
    found = variables(look_up(tmp_path, tmp_path / "packages"))
    assert found["CUDA_HOME"] == str(tmp_path / "toolkit")
    assert found["CPATH"].split(":")[0] == str(tmp_path / "toolkit/include")
    assert (Path(found["CMAKE_LIBRARY_PATH"]) / "libcudart.so").resolve().parent == tmp_path / "toolkit/lib"


def test_neither_is_told_in_one_line(tmp_path: Path) -> None:
    make_nvcc(tmp_path / "bin/nvcc", tmp_path / "toolkit")
    result = look_up(tmp_path, tmp_path)
    assert result.returncode != 0 and result.stdout == ""
    assert result.stderr.startswith("cuda_runtime.h and libcudart.so are neither in nvcc's toolkit nor in")
