"""The CUDA kernels' bodies, compiled for the CPU and started as if by a launcher."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tests.support.checkout import ROOT


@cache
def library() -> ctypes.CDLL:
    """Compiled once per test run; the sanitizer stops at accesses that a GPU would not allow
    (misaligned ones).
    """
    folder = Path(mkdtemp(prefix="commsched-kernels-"))
    source, target = ROOT / "tests/native/cuda_host.cpp", folder / "kernels.so"
    include = ["-I", str(ROOT / "comm_core/cuda")]
    flags = [
        "-std=c++17",
        "-O1",
        "-g0",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-ffp-contract=off",
    ]
    checks = [
        "-fsanitize=alignment,bounds,shift,signed-integer-overflow",
        "-fsanitize-undefined-trap-on-error",
    ]
    try:
        subprocess.run(["g++", *flags, *checks, *include, str(source), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))
    finally:
        shutil.rmtree(folder)  # the loaded library stays mapped


class HostLauncher:
    """Runs launches on CPU tensors and remembers their names and sizes."""

    name = "host"

    def __init__(self) -> None:
        self.launches: list[tuple[str, int]] = []

    def launch(
        self, kernel: str, device: int, blocks: int, arguments: tuple[int | float, ...], stream: int
    ) -> None:
        self.launches.append((kernel, blocks))
        packed = [struct.pack("d" if isinstance(a, float) else "Q", a) for a in arguments]
        values = (ctypes.c_uint64 * len(packed))(*(int.from_bytes(p, "little") for p in packed))
        missing = library().run(kernel.encode(), ctypes.c_longlong(blocks), values)
        assert not missing, f"there is no kernel {kernel}"
