"""Launchers start CUDA kernels: those built into the extension by nvcc, or those that CuPy compiles from the
same source at run time. Without a launcher, this package uses torch's own operations instead of kernels.

``COMMSCHED_KERNELS=built|cupy|torch`` chooses one; the default is the first that is installed and that the
GPU can run.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any, Protocol

import torch

from comm_core import _C
from comm_core.cuda.tables import SOURCE, THREADS

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
        from comm_core._cuda import launch, unfit

        self._launch, self._unfit = launch, unfit

    def problem(self, device: int) -> str | None:
        """Why these kernels cannot run on the GPU, None where they can."""
        with torch.cuda.device(device):
            reason = self._unfit(device)
        if reason is None:
            return None
        capability = "".join(map(str, torch.cuda.get_device_capability(device)))
        return (
            f"the kernels that were built do not run on cuda:{device}, compute capability {capability}"
            f" ({reason}): reinstall with COMMSCHED_CUDA_ARCHS={capability}"
        )

    def launch(
        self, kernel: str, device: int, blocks: int, arguments: tuple[int | float, ...], stream: int
    ) -> None:
        # The extension has a runtime of its own and makes the device the current one for torch too.
        if torch.cuda.current_device() == device:
            self._launch(kernel, device, blocks, arguments, stream)
        else:
            with torch.cuda.device(device):
                self._launch(kernel, device, blocks, arguments, stream)


class Cupy:
    """The kernels that CuPy compiles from the source when the first one is launched."""

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
def gpu_launcher(device: int) -> Launcher | None:
    """What starts kernels on this GPU; None where torch's operations have to do."""
    wanted = os.environ.get("COMMSCHED_KERNELS", "")
    if wanted not in ("", *NAMES):
        raise ValueError(f"COMMSCHED_KERNELS must be one of {', '.join(NAMES)}, or unset, not {wanted!r}")
    if wanted == "torch":
        return None
    problem = None
    if wanted == "built" and not _C.CUDA_BUILT:
        raise ValueError(
            "COMMSCHED_KERNELS=built, but the extension was built without CUDA: install nvcc and"
            " reinstall with COMMSCHED_WITH_CUDA=1, or use COMMSCHED_KERNELS=cupy or torch"
        )
    if wanted != "cupy" and _C.CUDA_BUILT:
        built = Built()
        problem = built.problem(device)
        if problem is None:
            return built
        if wanted == "built":
            raise ValueError(f"COMMSCHED_KERNELS=built, but {problem} or use COMMSCHED_KERNELS=cupy or torch")
    found = _cupy()
    if found is None and wanted == "cupy":
        raise ValueError(
            "COMMSCHED_KERNELS=cupy, but CuPy cannot be imported: pip install cupy-cuda12x or -cuda13x"
        )
    if problem is not None:
        instead = "torch's operations do" if found is None else "CuPy compiles them now and does"
        warnings.warn(f"{problem}. Until then {instead} their work", stacklevel=2)
    return found


def launcher_for(device: torch.device) -> Launcher | None:
    """None for CPU tensors, whose kernels are torch's."""
    return gpu_launcher(device_number(device)) if device.type == "cuda" else None


def current_stream(device: torch.device) -> Any:
    """The stream that torch would use now, None for the CPU."""
    # By a number: torch would ask a device first whether there are GPUs.
    return torch.cuda.current_stream(device_number(device)) if device.type == "cuda" else None


def device_number(device: torch.device) -> int:
    if device.index is not None or device.type != "cuda":
        return device.index or 0
    return torch.cuda.current_device()
