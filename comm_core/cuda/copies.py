"""Many tensors into one flat bucket and back, in one launch: scaled, cast, counted and measured on the
way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from comm_core.cuda.kernels import copy_kernel
from comm_core.cuda.launchers import Launcher, device_number, launcher_for, stream_handle
from comm_core.cuda.memory import DeviceTable, addresses
from comm_core.cuda.tables import Region, chunk_table

Tensors = Sequence[torch.Tensor | None]


class BucketCopy:
    """The way of one bucket's tensors into the bucket and out of it.

    ``regions`` say which elements of which tensor (by number, in memory order) stand where; ``tensors``
    is how
    many there are and ``dtype`` their type. The tensors may be others in every call; they must fill their
    memory without holes. What stands between the regions is left alone.
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
        self._names = copy_kernel("pack", dtype, bucket.dtype), copy_kernel("unpack", bucket.dtype, dtype)
        table = torch.from_numpy(chunk_table(self.regions))
        self._blocks = len(table)
        self._chunks = table.to(bucket.device)
        self._addresses = DeviceTable((max(tensors, 1),), torch.int64, bucket.device)

    def pack(
        self, tensors: Tensors, scale: float = 1.0, factor: torch.Tensor | None = None, stats: bool = False
    ) -> torch.Tensor | None:
        """bucket = scale * factor * tensors; a tensor that is None counts as zeros.

        ``factor`` is one float on the same device, so that its value need not be known here. With ``stats``:
        the sum of squares and the number of infinite or NaN elements of what was written, before rounding, as
        two doubles on the device.
        """
        self._check_tensors(tensors)
        if self._launcher is None:
            return self._pack_by_torch(tensors, scale, factor, stats)
        found = (
            torch.zeros(self._blocks, 2, dtype=torch.float64, device=self.bucket.device) if stats else None
        )
        self._launch(self._names[0], tensors, scale, factor, (_address(found),))
        return None if found is None else found.sum(0)

    def unpack(self, tensors: Tensors, scale: float = 1.0, factor: torch.Tensor | None = None) -> None:
        """tensors = scale * factor * bucket; a tensor that is None is left out."""
        self._check_tensors(tensors)
        if self._launcher is None:
            self._unpack_by_torch(tensors, scale, factor)
        else:
            self._launch(self._names[1], tensors, scale, factor, ())

    def _launch(
        self, kernel: str, tensors: Tensors, scale: float, factor: torch.Tensor | None, more: tuple[int, ...]
    ) -> None:
        if self._blocks == 0:
            return
        assert self._launcher is not None
        device = self.bucket.device
        self._addresses.set(addresses(list(tensors)))
        arguments = (
            self._chunks.data_ptr(),
            self._addresses.address,
            self.bucket.data_ptr(),
            float(scale),
            _address(factor),
            *more,
        )
        self._launcher.launch(kernel, device_number(device), self._blocks, arguments, stream_handle(device))

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

    # -- the same with torch's operations --------------------------------------------------------------------

    def _pack_by_torch(
        self, tensors: Tensors, scale: float, factor: torch.Tensor | None, stats: bool
    ) -> torch.Tensor | None:
        found = torch.zeros(2, dtype=torch.float64, device=self.bucket.device) if stats else None
        for region in self.regions:
            tensor, target = tensors[region.tensor], self.bucket.narrow(0, region.at, region.count)
            if tensor is None:
                target.zero_()
                continue
            value = _scaled(_flat(tensor).narrow(0, region.offset, region.count), target.dtype, scale, factor)
            target.copy_(value)
            if found is not None:
                found[0] += value.double().square().sum()
                found[1] += (~value.isfinite()).sum()
        return found

    def _unpack_by_torch(self, tensors: Tensors, scale: float, factor: torch.Tensor | None) -> None:
        for region in self.regions:
            tensor = tensors[region.tensor]
            if tensor is not None:
                source = self.bucket.narrow(0, region.at, region.count)
                target = _flat(tensor).narrow(0, region.offset, region.count)
                target.copy_(_scaled(source, target.dtype, scale, factor))


def _scaled(
    value: torch.Tensor, target: torch.dtype, scale: float, factor: torch.Tensor | None
) -> torch.Tensor:
    """As the kernels: in double where either side is, else in float."""
    value = value.to(torch.float64 if torch.float64 in (value.dtype, target) else torch.float32)
    if scale != 1.0 or factor is not None:
        value = value * (scale if factor is None else factor.to(value.dtype) * scale)
    return value


def fills_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements lie without holes and without sharing, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


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


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
