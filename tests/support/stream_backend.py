"""The stream backend of one rank, which answers for a second one that has the same gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import comm_core
from comm_core.cuda.tables import BLOCK
from commsched.backends.cpu import EngineBackend
from commsched.backends.cuda import StreamBackend
from commsched.backends.interface import Scaling, StepWork
from commsched.devices import Device
from commsched.optimizer.buckets import Buffers, build_layout
from dnn_bench.emulate import HostLink, OneProcess, emulated_ranks
from scheduler.ir.buckets import Bucket, Piece

SIZE = 2
SHAPES = [(24,), (20, 10), (5, 2)]
# Tensor 1 lies in both buckets.
AS_THEY_ARE = Scaling()
CUTS = [[(0, 0, 24), (1, 0, 64)], [(1, 64, 200), (2, 0, 10)]]


class Alike:
    """RS and AG as if the other rank had the same values, run by torch on the current stream.

    ``in_place``: what is reduced is gathered. Else the bucket's memory is free after the RS, and another
    bucket may get its address.
    """

    name = "alike"

    def __init__(self, scales: bool, in_place: bool) -> None:
        self.scales, self._in_place = scales, in_place
        self._theirs: dict[int, torch.Tensor] = {}  # the other rank's shards, by bucket

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None:
        factor = SIZE * (postscale if self.scales else 1.0)
        mine, other = bucket.view(SIZE, -1)
        mine.mul_(factor)
        if self._in_place:
            self._theirs[bucket.data_ptr()] = other * factor
        other.fill_(float("nan"))  # it is the other rank's

    def all_gather(self, bucket: torch.Tensor) -> None:
        mine, other = bucket.view(SIZE, -1)
        other.copy_(self._theirs.pop(bucket.data_ptr(), mine))

    def all_to_all(self, received: torch.Tensor, message: torch.Tensor) -> None:
        received.view(SIZE, -1).copy_(message.view(SIZE, -1)[0])

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


class OneRank:
    """A backend with the buckets of ``CUTS``.

    ``slots``: views of the gradients' memory; ``results``: of what is gathered, which is other memory if
    ``sharded``. With int8 or fp8 as the wire's type, ``residuals`` are those of the buckets; what the other
    rank then sends is this rank's shard, and not its own.
    """

    def __init__(
        self,
        device: Device | None = None,
        dtype: torch.dtype = torch.float32,
        scaling: Scaling = AS_THEY_ARE,
        order: Sequence[tuple[str, int]] | None = None,
        scales: bool = True,
        cuts: Sequence[Sequence[tuple[int, int, int]]] = CUTS,
        sharded: bool = False,
    ) -> None:
        ranks = OneProcess(emulated_ranks(SIZE))
        host = EngineBackend(ranks, "alone", comm_core.PythonTransport(HostLink(ranks, None)), 20.0)
        self.backend = StreamBackend(host, device or Device(torch.device("cpu")), Alike(scales, not sharded))
        self.dtype, self.scaling, self.cuts, self.sharded = dtype, scaling, cuts, sharded
        self.order = [(op, b) for op in ("RS", "AG") for b in range(len(cuts))] if order is None else order
        self.install()

    def install(self) -> None:
        size = self.dtype.itemsize
        buckets = [Bucket(tuple(Piece(i, a * size, b * size) for i, a, b in cut)) for cut in self.cuts]
        numels = [torch.Size(shape).numel() for shape in SHAPES]
        quantised = self.scaling.wire_dtype in (torch.int8, torch.float8_e4m3fn)
        blocks = {0: BLOCK} if quantised else None
        layout = build_layout(numels, [size] * len(SHAPES), buckets, SIZE, alignment=blocks)
        buffers = Buffers(layout, {0: (self.dtype, torch.device("cpu"))}, self.backend.zeros)
        with torch.inference_mode(False):
            flags = [torch.zeros(2 * 16, dtype=torch.int32)]
        order = [*self.order, ("AR", len(self.cuts))]
        gathered = buffers.more() if self.sharded else None
        lost, pieces = buffers.more(), layout.slices if quantised else []
        sums = {b.number: None if self.sharded else torch.zeros((b.stop - b.start) // SIZE) for b in pieces}
        residuals = {number: (lost.bucket(number), mine) for number, mine in sums.items()}
        self.backend.install(StepWork(order, buffers, flags, gathered, self.scaling, residuals))
        self.residuals = [lost for pair in residuals.values() for lost in pair if lost is not None]
        examples = [torch.empty(shape, dtype=self.dtype) for shape in SHAPES]
        self.buffers, self.gathered = buffers, gathered or buffers
        self.slots, self.results = (
            [each.view(example, layout.slots[i]) for i, example in enumerate(examples)]
            for each in (buffers, self.gathered)
        )

    def gradient(self, param: int, value: float) -> torch.Tensor:
        """Return a gradient whose elements all differ."""
        numel = torch.Size(SHAPES[param]).numel()
        real = (torch.arange(numel, dtype=torch.float32) + value).view(SHAPES[param])
        return (torch.complex(real, 1.0 - real) if self.dtype.is_complex else real).to(self.dtype)
