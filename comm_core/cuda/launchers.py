"""Who starts kernels: the extension, when it was built with nvcc; else CuPy, which compiles the same source
at run time. With neither, the functions of this package are done with torch's own operations.

``COMMSCHED_KERNELS=built|cupy|torch`` chooses; by default the first of these that is there.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Protocol

import torch

from comm_core import _C
from comm_core.cuda.kernels import SOURCE, THREADS

NAMES = ("built", "cupy", "torch")


class Launcher(Protocol):
    """Starts a kernel by name. Arguments are addresses and integers, or doubles; eight bytes each."""

    name: str

    def launch(
        self, kernel: str, device: int, blocks: int, arguments: tuple[int | float, ...], stream: int
    ) -> None:
        """Returns at once; the kernel runs when it is the stream's turn."""


class Built:
    """The kernels that were compiled into the extension."""

    name = "built"

    def __init__(self) -> None:
        from comm_core._cuda import launch

        self._launch = launch

    def launch(
        self, kernel: str, device: int, blocks: int, arguments: tuple[int | float, ...], stream: int
    ) -> None:
        self._launch(kernel, device, blocks, arguments, stream)


class Cupy:
    """The kernels, compiled when the first one is needed."""

    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        # No fast math: sums, roots and divisions are those of the compiled kernels.
        self._module = cupy.RawModule(
            code=SOURCE.read_text(), options=("--std=c++17", f"-I{SOURCE.parent}"), backend="nvrtc"
        )

    def launch(
        self, kernel: str, device: int, blocks: int, arguments: tuple[int | float, ...], stream: int
    ) -> None:
        threads = 1 if kernel == "hold" else THREADS
        with self._cupy.cuda.Device(device), self._cupy.cuda.ExternalStream(stream):
            self._module.get_function(kernel)((blocks,), (threads,), arguments)


def _cupy() -> Cupy | None:
    try:
        import cupy
    except ImportError:
        return None
    return Cupy(cupy)


@cache
def gpu_launcher() -> Launcher | None:
    """What starts kernels on this machine's GPUs; None where torch's operations have to do."""
    wanted = os.environ.get("COMMSCHED_KERNELS", "")
    if wanted not in ("", *NAMES):
        raise ValueError(f"COMMSCHED_KERNELS must be one of {', '.join(NAMES)}, or unset, not {wanted!r}")
    if wanted == "torch":
        return None
    if wanted == "built" or (not wanted and _C.CUDA_BUILT):
        if not _C.CUDA_BUILT:
            raise ValueError(
                "COMMSCHED_KERNELS=built, but the extension was built without CUDA: install nvcc and"
                " reinstall with COMMSCHED_WITH_CUDA=1, or use COMMSCHED_KERNELS=cupy or torch"
            )
        return Built()
    found = _cupy()
    if found is None and wanted == "cupy":
        raise ValueError(
            "COMMSCHED_KERNELS=cupy, but CuPy cannot be imported: pip install cupy-cuda12x or -cuda13x"
        )
    return found


def launcher_for(device: torch.device) -> Launcher | None:
    """None for CPU tensors, whose kernels are torch's."""
    return gpu_launcher() if device.type == "cuda" else None


def current_stream(device: torch.device) -> int:
    """The handle of the stream that torch would use now."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def device_number(device: torch.device) -> int:
    return 0 if device.index is None else device.index
