"""torch's devices and streams and the extension's kernels on a machine without a GPU.

They behave as the real ones where that matters: the extension makes the device of a launch the current one,
and a stream made from the number 0 is another one than the default stream, whose number is 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from comm_core.cuda import launchers


class Stream:
    def __init__(self, device: int, cuda_stream: int) -> None:
        self.device, self.cuda_stream = device, cuda_stream
        self.waits: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)


class FakeCuda:
    """``capabilities``: one for each device; the extension's kernels were built for ``built``."""

    def __init__(
        self, capabilities: Sequence[tuple[int, int]] = ((9, 0),), built: tuple[int, int] = (9, 0)
    ) -> None:
        self.capabilities, self.built = capabilities, built
        self.current = 0
        self.streams = [Stream(number, 0) for number in range(len(capabilities))]
        self.launches: list[tuple[str, int]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        monkeypatch.setattr(launchers._C, "CUDA_BUILT", True)
        extension = SimpleNamespace(launch=self.launch, unfit=self.unfit)
        monkeypatch.setitem(sys.modules, "comm_core._cuda", extension)  # type: ignore[arg-type]
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capabilities[device])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.streams[device.index])
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: Stream(device.index, number))
        return self

    @contextmanager
    def device(self, number: int) -> Iterator[None]:
        before, self.current = self.current, number
        try:
            yield
        finally:
            self.current = before

    # -- the extension ---------------------------------------------------------------------------------------

    def launch(
        self, kernel: str, device: int, blocks: int, arguments: tuple[int | float, ...], stream: int
    ) -> None:
        self.current = device
        self.launches.append((kernel, device))

    def unfit(self, device: int) -> str | None:
        self.current = device
        fits = self.capabilities[device] >= self.built
        return None if fits else "no kernel image is available for execution on the device"
