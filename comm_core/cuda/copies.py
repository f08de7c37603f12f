"""Packs many tensors into one flat bucket in one launch, scaled and cast on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from comm_core._C import source_addresses
from comm_core.cuda.launchers import Launcher, current_stream, device_number, launcher_for
from comm_core.cuda.tables import Region, chunk_elements, chunk_table, pack_kernel

Tensors = Sequence[torch.Tensor | None]


class BucketCopy:
    """Packs one bucket.

    ``regions`` say which elements of which tensor (by number, in memory order) stand where in the bucket;
    ``tensors`` is how many tensors there are and ``dtype`` their type. Every call may bring other tensors,
    which must fill their memory without holes. Elements of the bucket between the regions are left alone.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        bucket: torch.Tensor,
        tensors: int,
        dtype: torch.dtype,
        launcher: Launcher | None | Literal["choose"] = "choose",
    ) -> None:
        _check(regions, bucket, tensors)
        self.regions, self.bucket, self.dtype = list(regions), bucket, dtype
        self._launcher = launcher_for(bucket.device) if launcher == "choose" else launcher
        self._count = tensors
        self._needed = [0] * tensors
        for region in self.regions:
            end = region.offset + region.count
            self._needed[region.tensor] = max(self._needed[region.tensor], end)
        if self._launcher is None:
            return
        self._kernel = pack_kernel(dtype, bucket.dtype)
        self._like = torch.empty(0, dtype=dtype, device=bucket.device)
        table = torch.from_numpy(chunk_table(self.regions, chunk_elements(dtype, bucket.dtype)))
        self._blocks = len(table)
        self._chunks = table.to(bucket.device)
        # Gradients mostly come back at the same addresses, so the table in device memory rarely changes.
        self._table = torch.zeros(max(tensors, 1), dtype=torch.int64, device=bucket.device)
        self._addresses: list[int] = []
        # The stream that wrote or read the table last: now it fills in zeros.
        self._stream = current_stream(bucket.device)

    def pack(self, tensors: Tensors, scale: float = 1.0) -> None:
        """Write scale * tensors into the bucket; a tensor that is None counts as zeros."""
        if self._launcher is None:
            self._check_tensors(tensors)
            self._pack_by_torch(tensors, scale)
            return
        addresses = source_addresses(list(tensors), self._needed, self._like)
        if addresses is None:
            self._check_tensors(tensors)  # says which one does not fit
            raise ValueError("a tensor without memory of its own cannot be packed")
        if self._blocks == 0:
            return
        device = self.bucket.device
        stream = current_stream(device)
        self._set_addresses(stream, addresses)
        arguments = (
            self._chunks.data_ptr(), self._table.data_ptr(), self.bucket.data_ptr(), float(scale)
        )  # fmt: skip
        number = int(stream.cuda_stream) if stream else 0
        self._launcher.launch(self._kernel, device_number(device), self._blocks, arguments, number)

    def _set_addresses(self, stream: Any, addresses: list[int]) -> None:
        """Write the tensors' addresses for kernels on the stream, without waiting for any.

        A change travels through pinned memory, which torch keeps until it has arrived.
        """
        # Kernels on another stream may still read the table, or the first one fill it. Compare streams,
        # not their numbers: torch makes a new stream of the default one's number, which is 0.
        if stream != self._stream:
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream = stream
        if addresses != self._addresses:
            self._addresses = addresses
            source = torch.tensor(addresses, dtype=torch.int64, device="cpu")
            self._table[: len(addresses)].copy_(
                source.pin_memory() if self._table.is_cuda else source, non_blocking=True
            )

    def _check_tensors(self, tensors: Tensors) -> None:
        if len(tensors) != self._count:
            raise ValueError(f"the bucket was laid out for {self._count} tensors, got {len(tensors)}")
        for i, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if tensor.dtype != self.dtype or tensor.device != self.bucket.device:
                raise ValueError(
                    f"tensor {i} must be {self.dtype} on {self.bucket.device}, got {tensor.dtype}"
                    f" on {tensor.device}"
                )
            if tensor.numel() < self._needed[i]:
                raise ValueError(
                    f"tensor {i} must have at least {self._needed[i]} elements, got {tensor.numel()}"
                )

    def _pack_by_torch(self, tensors: Tensors, scale: float) -> None:
        """The same with torch's operations: in double where either side is double, else in float."""
        for region in self.regions:
            tensor, target = tensors[region.tensor], self.bucket.narrow(0, region.at, region.count)
            if tensor is None:
                target.zero_()
                continue
            value = _flat(tensor).narrow(0, region.offset, region.count)
            double = torch.float64 in (value.dtype, target.dtype)
            value = value.to(torch.float64 if double else torch.float32)
            target.copy_(value if scale == 1.0 else value * scale)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order in which they lie in memory."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _check(regions: Sequence[Region], bucket: torch.Tensor, tensors: int) -> None:
    if bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(f"the bucket must be flat and contiguous, got sizes {tuple(bucket.shape)}")
    for region in regions:
        if region.at + region.count > bucket.numel() or region.tensor >= tensors:
            raise ValueError(f"{region} is not within {tensors} tensors and {bucket.numel()} elements")
