"""Which backend does the work: compiled kernels, CuPy's, or torch's operations."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_core.cuda import launchers
from comm_core.cuda.kernels import SOURCE


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("COMMSCHED_KERNELS", raising=False)
    launchers.gpu_launcher.cache_clear()
    yield
    launchers.gpu_launcher.cache_clear()


class FakeCupy:
    """As much of CuPy as a launch takes."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.cuda = SimpleNamespace(Device=self._entered("device"), ExternalStream=self._entered("stream"))

    def _entered(self, kind: str) -> Any:
        calls = self.calls

        class Entered:
            def __init__(self, value: int) -> None:
                self.value = value

            def __enter__(self) -> None:
                calls.append((kind, self.value))

            def __exit__(self, *_: Any) -> None:
                calls.append((f"end of {kind}", self.value))

        return Entered

    def RawModule(self, code: str, options: tuple[str, ...], backend: str) -> Any:
        self.calls.append((code, options, backend))
        return SimpleNamespace(get_function=lambda name: lambda *call: self.calls.append((name, *call)))


def with_cupy(monkeypatch: pytest.MonkeyPatch, found: FakeCupy | None) -> None:
    monkeypatch.setitem(sys.modules, "cupy", found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "built", "cupy", "name"),
    [
        ("", True, True, "built"),
        ("", False, True, "cupy"),
        ("", False, False, None),
        ("cupy", True, True, "cupy"),
        ("torch", True, True, None),
        ("built", True, False, "built"),
    ],
)
def test_the_first_that_is_there(
    monkeypatch: pytest.MonkeyPatch, wanted: str, built: bool, cupy: bool, name: str | None
) -> None:
    monkeypatch.setenv("COMMSCHED_KERNELS", wanted)
    monkeypatch.setattr(launchers._C, "CUDA_BUILT", built)
    monkeypatch.setitem(sys.modules, "comm_core._cuda", SimpleNamespace(launch=print))  # type: ignore[arg-type]
    with_cupy(monkeypatch, FakeCupy() if cupy else None)
    found = launchers.gpu_launcher()
    assert (found and found.name) == name
    assert launchers.launcher_for(torch.device("cpu")) is None
    assert launchers.launcher_for(torch.device("cuda:0")) is found


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("nvcc", "must be one of built, cupy, torch, or unset, not 'nvcc'"),
        ("built", "was built without CUDA: install nvcc and reinstall with COMMSCHED_WITH_CUDA=1"),
        ("cupy", "CuPy cannot be imported: pip install"),
    ],
)
def test_what_is_asked_for_and_not_there(monkeypatch: pytest.MonkeyPatch, wanted: str, message: str) -> None:
    monkeypatch.setenv("COMMSCHED_KERNELS", wanted)
    monkeypatch.setattr(launchers._C, "CUDA_BUILT", False)
    with_cupy(monkeypatch, None)
    with pytest.raises(ValueError, match=message):
        launchers.gpu_launcher()


def test_cupy_compiles_the_same_source_and_starts_it_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    monkeypatch.setattr(launchers._C, "CUDA_BUILT", False)
    with_cupy(monkeypatch, cupy)
    launcher = launchers.gpu_launcher()
    assert launcher is not None
    assert cupy.calls == [(SOURCE.read_text(), ("--std=c++17", f"-I{SOURCE.parent}"), "nvrtc")]
    cupy.calls.clear()
    launcher.launch("pack_f32_f32", 1, 7, (8, 16, 24, 1.5, 0, 0), 99)
    launcher.launch("hold", 1, 1, (1000,), 99)
    around = [("device", 1), ("stream", 99)], [("end of stream", 99), ("end of device", 1)]
    assert cupy.calls == [
        *around[0],
        ("pack_f32_f32", (7,), (256,), (8, 16, 24, 1.5, 0, 0)),
        *around[1],
        *around[0],
        ("hold", (1,), (1,), (1000,)),
        *around[1],
    ]


def test_the_sources_need_no_header_of_their_own_compilers() -> None:
    """NVRTC has no standard headers; what only nvcc reads stands apart."""
    for path in sorted(SOURCE.parent.glob("*.h")) + [SOURCE]:
        if path.name != "launch.h":
            lines = [line for line in path.read_text().splitlines() if line.startswith("#include")]
            assert all('"' in line for line in lines), (path.name, lines)
            assert [line for line in lines if "launch.inl" in line] == (
                [] if path != SOURCE else ['#include "launch.inl"']
            )


COMPILE = """
import ctypes, sys
library, source, folder = sys.argv[1:]
nvrtc, program = ctypes.CDLL(library), ctypes.c_void_p()
text = open(source, "rb").read()
assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None) == 0
options = [b"--std=c++17", b"-I" + folder.encode(), b"-arch=sm_90"]
status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
size = ctypes.c_size_t()
nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
log = ctypes.create_string_buffer(size.value)
nvrtc.nvrtcGetProgramLog(program, log)
assert status == 0, log.value.decode()
nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
assert size.value > 100_000
"""


def nvrtc() -> Path | None:
    """NVIDIA's run-time compiler, from its Python package or a CUDA toolkit; it needs no GPU."""
    folders = [Path(entry) / "nvidia" for entry in sys.path] + [
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    ]
    for folder in folders:
        for pattern in ("cu*/lib", "cuda_nvrtc/lib", "lib64"):
            found = sorted(folder.glob(f"{pattern}/libnvrtc.so.*"))
            if found:
                return found[-1]
    return None


def test_the_compiler_that_cupy_uses_takes_the_sources() -> None:
    library = nvrtc()
    if library is None:
        pytest.skip("NVRTC is not here; pip install nvidia-cuda-nvrtc brings it")
    command = [sys.executable, "-c", COMPILE, str(library), str(SOURCE), str(SOURCE.parent)]
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr
