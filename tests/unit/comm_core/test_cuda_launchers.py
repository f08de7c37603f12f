"""Which backend does the work: compiled kernels, CuPy's, or torch's operations."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_core.cuda import launchers
from comm_core.cuda.copies import BucketCopy
from comm_core.cuda.tables import CODES, SOURCE, Region
from tests.support.fake_cuda import FakeCuda, Stream


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
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(launchers._C, "CUDA_BUILT", built)
    with_cupy(monkeypatch, FakeCupy() if cupy else None)
    found = launchers.gpu_launcher(0)
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
        launchers.gpu_launcher(0)


UNFIT = (
    "the kernels that were built do not run on cuda:1, compute capability 75 (no kernel image is available"
    " for execution on the device): reinstall with COMMSCHED_CUDA_ARCHS=75"
)


@pytest.mark.parametrize("cupy", [True, False])
def test_a_gpu_that_the_built_kernels_do_not_fit(monkeypatch: pytest.MonkeyPatch, cupy: bool) -> None:
    """They were chosen because they were there, and failed at the first launch."""
    cuda = FakeCuda(capabilities=[(9, 0), (7, 5)]).install(monkeypatch)
    with_cupy(monkeypatch, FakeCupy() if cupy else None)
    with pytest.warns(UserWarning) as told:
        found = launchers.launcher_for(torch.device("cuda:1"))
    instead = "CuPy compiles them now and does" if cupy else "torch's operations do"
    assert str(told[0].message) == f"{UNFIT}. Until then {instead} their work"
    assert (found and found.name) == ("cupy" if cupy else None)
    fits = launchers.launcher_for(torch.device("cuda:0"))
    assert fits is not None and fits.name == "built" and cuda.current == 0


def test_kernels_that_do_not_fit_are_an_error_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(capabilities=[(9, 0), (7, 5)]).install(monkeypatch)
    monkeypatch.setenv("COMMSCHED_KERNELS", "built")
    with pytest.raises(
        ValueError, match="COMMSCHED_KERNELS=built, but the kernels that were built do not run"
    ):
        launchers.gpu_launcher(1)


def test_a_launch_leaves_the_current_device_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that updates tensors of cuda:1 went on to make its next tensors there."""
    cuda = FakeCuda(capabilities=[(9, 0), (9, 0)]).install(monkeypatch)
    launcher = launchers.gpu_launcher(1)
    assert launcher is not None
    for device in (1, 0):
        launcher.launch("hold", device, 1, (1000,), 0)
        assert cuda.current == 0
    assert cuda.launches == [("hold", 1), ("hold", 0)]


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(capabilities=[(9, 0), (9, 0)]).install(monkeypatch)
    cuda.current = 1
    assert [launchers.device_number(torch.device(name)) for name in ("cuda", "cuda:0", "cpu")] == [1, 0, 0]


def test_a_table_waits_for_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is 0, and torch makes a new stream of that: the next stream waited for one without work."""
    cuda = FakeCuda().install(monkeypatch)
    copy = BucketCopy([], torch.zeros(2), 2, torch.float32, launcher=launchers.gpu_launcher(0))
    default, side = cuda.streams[0], Stream(0, 77)
    for stream, waits in (
        (default, []),
        (default, []),
        (side, [default]),
        (side, [default]),
        (default, [side]),
    ):
        copy._set_addresses(stream, [1, 2])
        assert stream.waits == waits


def test_the_first_launch_waits_for_the_stream_that_made_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is filled with zeros where the plan is installed: on another stream they came after it."""
    made, first = Stream(0, 0), Stream(0, 77)
    streams = [made, first]
    monkeypatch.setattr("comm_core.cuda.copies.current_stream", lambda device: streams[0])
    launches = SimpleNamespace(launch=lambda *call: None)
    region = Region(0, 0, 0, 2)
    copy = BucketCopy([region], torch.zeros(2), 1, torch.float32, launcher=launches)
    streams.pop(0)
    for _ in range(2):
        copy.pack([torch.ones(2)])
    assert first.waits == [made] and made.waits == []


def test_cupy_compiles_the_same_source_and_starts_it_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    monkeypatch.setattr(launchers._C, "CUDA_BUILT", False)
    with_cupy(monkeypatch, cupy)
    launcher = launchers.gpu_launcher(0)
    assert launcher is not None
    assert cupy.calls == [(SOURCE.read_text(), ("--std=c++17", f"-I{SOURCE.parent}"), "nvrtc")]
    cupy.calls.clear()
    launcher.launch("pack_f32_f32", 1, 7, (8, 16, 24, 1.5), 99)
    launcher.launch("hold", 1, 1, (1000,), 99)
    around = [("device", 1), ("stream", 99)], [("end of stream", 99), ("end of device", 1)]
    assert cupy.calls == [
        *around[0],
        ("pack_f32_f32", (7,), (256,), (8, 16, 24, 1.5)),
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
options = [b"--std=c++17", b"-I" + folder.encode(), b"-arch=sm_90", b"-ftz=true"]  # which CuPy adds
status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
size = ctypes.c_size_t()
nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
log = ctypes.create_string_buffer(size.value)
nvrtc.nvrtcGetProgramLog(program, log)
assert status == 0, log.value.decode()
nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
assert size.value > 10_000
nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
ptx = ctypes.create_string_buffer(size.value)
nvrtc.nvrtcGetPTX(program, ptx)
print(ptx.value.decode())
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
    entries = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", result.stdout, re.DOTALL))
    assert ".ftz" in entries["pack_f32_f32"], "the option had no effect, so nothing was tested"
    for code in CODES.values():
        for kernel in (f"quantise_{code}", f"sum_{code}"):
            # Each operation rounds by itself, and subnormal numbers stay what they are.
            arithmetic = set(re.findall(r"\b(?:add|sub|mul|div|fma|mad)\.\S*f32", entries[kernel]))
            assert arithmetic and arithmetic <= {f"{name}.rn.f32" for name in ("add", "sub", "mul", "div")}
