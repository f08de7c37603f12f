"""How setup.py treats CUDA: forced, forbidden, found."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, run_group

pytestmark = pytest.mark.dist

# As little as setup.py asks for beside the CUDA sources, which are the real ones.
BINDINGS = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
#ifdef COMMSCHED_WITH_CUDA
  m.attr("CUDA_BUILT") = true;
#else
  m.attr("CUDA_BUILT") = false;
#endif
}
"""
# Every launch must end with a message: of a kernel that is not there, and of a machine without a GPU.
TRY_TO_LAUNCH = """
import torch
from comm_core import CUDA_BUILT, _cuda
assert CUDA_BUILT
for kernel, count in [("pack_i8_i8", 4), ("pack_f32_f32", 3), ("pack_f32_f32", 4)]:
    try:
        _cuda.launch(kernel, 0, 1, (0,) * count, 0)
    except RuntimeError as error:
        print(error)
    else:
        torch.cuda.synchronize()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "VERSION", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    package = tmp_path / "comm_core"
    shutil.copytree(
        ROOT / "comm_core/cuda", package / "cuda", ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    (package / "csrc").mkdir()
    (package / "csrc/bindings.cpp").write_text(BINDINGS)
    (package / "__init__.py").write_text("import torch\nfrom comm_core._C import CUDA_BUILT\n")
    return tmp_path


def build(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    return run_group(command, checkout, os.environ | environment, timeout=400)


def test_insisting_on_cuda_without_nvcc_fails_loudly(checkout: Path) -> None:
    result = build(checkout, COMMSCHED_WITH_CUDA="1", NVCC="/nowhere/nvcc")
    assert result.returncode != 0
    assert "COMMSCHED_WITH_CUDA=1 but nvcc was not found" in result.stderr
    assert "COMMSCHED_WITH_CUDA=0" in result.stderr


def test_a_wrong_value_is_named(checkout: Path) -> None:
    result = build(checkout, COMMSCHED_WITH_CUDA="yes")
    assert result.returncode != 0
    assert "COMMSCHED_WITH_CUDA must be 0, 1 or unset, not 'yes'" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("archs", ["", "90"])
def test_a_build_with_cuda(checkout: Path, archs: str) -> None:
    """In CI without a GPU: the sources compile, link beside a CPU build of torch, load, and report what
    is missing.
    """
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed")
    result = build(checkout, COMMSCHED_WITH_CUDA="1", COMMSCHED_CUDA_ARCHS=archs)
    assert result.returncode == 0, result.stdout + result.stderr
    command = [sys.executable, "-c", TRY_TO_LAUNCH]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    lines = subprocess.check_output(command, cwd=checkout, env=environment, text=True).splitlines()
    assert lines[0] == "CUDA kernel pack_i8_i8: there is no kernel of this name"
    assert lines[1] == "CUDA kernel pack_f32_f32: the kernel takes another number of arguments"
    assert lines[2].startswith("CUDA kernel pack_f32_f32: ") and "argument" not in lines[2]


@pytest.mark.slow
def test_a_build_without_cuda(checkout: Path) -> None:
    result = build(checkout, COMMSCHED_WITH_CUDA="0")
    assert result.returncode == 0, result.stdout + result.stderr
    # By file: an editable install of another checkout would still find its own kernels.
    assert not list((checkout / "comm_core").glob("_cuda*.so"))
    code = "import comm_core; print(comm_core.__file__, comm_core.CUDA_BUILT)"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=checkout, text=True)
    assert said == f"{checkout / 'comm_core' / '__init__.py'} False\n"
