"""Small tables in device memory, written anew only when their content has changed, and never by waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from comm_core.cuda.launchers import current_stream


class DeviceTable:
    """A table of fixed shape that kernels read.

    In a steady state gradients come back at the same addresses, so mostly there is nothing to do. A change
    travels through pinned memory, which torch keeps until it has arrived.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._content = b""
        self._stream: Any = None  # the one that was current last time

    @property
    def address(self) -> int:
        return self._tensor.data_ptr()

    def set(self, values: npt.NDArray[Any]) -> None:
        """The table holds these values for every kernel that is started on the current stream from now on."""
        self._join(current_stream(self._tensor.device))
        content = values.tobytes()
        if content == self._content:
            return
        self._content = content
        source = torch.from_numpy(np.array(values))
        if self._tensor.is_cuda:
            source = source.pin_memory()
        self._tensor.copy_(source.view(self._tensor.shape), non_blocking=True)

    def _join(self, stream: Any) -> None:
        """Kernels on the stream that was current last time may still be reading, or the values be on
        their way.
        """
        # The stream itself, not its number: torch makes a new stream of the default one's number, which is 0.
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def addresses(tensors: list[torch.Tensor | None]) -> npt.NDArray[np.int64]:
    """Where each tensor's first element lies; 0 for one that is not there."""
    return np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors], np.int64)
