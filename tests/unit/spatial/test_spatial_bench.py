"""What cutting an operation into interior and strips costs: where ``overlap="auto"`` draws its line.

`pytest -m bench -s tests/unit/spatial/test_spatial_bench.py` prints one line per tile size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from commsched import spatial
from commsched.channels import Parcel, SilentChannel
from commsched.spatial.mesh import OVERLAP_WORK

CHANNELS = 16


class Instant(SilentChannel):
    """Messages are there at once, with whatever their buffers hold."""

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], what: str) -> Instant:
        return self

    def wait(self) -> None:
        return None


def step_time(size: int, overlap: str) -> float:
    """Least seconds of processor time of a forward and backward of a 3x3 convolution on an inner tile."""
    mesh = spatial.Mesh(Instant(4, 9), (3, 3), (-2, -1), overlap=overlap)
    x = torch.randn(1, CHANNELS, size, size, requires_grad=True)
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3, requires_grad=True)
    shape, times = (1, CHANNELS, 3 * size, 3 * size), []
    for _ in range(7):
        start = time.process_time()
        out = F.conv2d(spatial.from_local(x * 1, shape, mesh), weight, padding=1).local
        out.backward(out.detach())
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.bench
def test_above_the_line_cutting_costs_little() -> None:
    torch.set_num_threads(1)
    for size in (32, 64, 128, 256, 512):
        work = CHANNELS * CHANNELS * 9 * size * size
        step_time(size, "off")
        one, pieces = step_time(size, "off"), step_time(size, "on")
        side = "above" if work >= OVERLAP_WORK else "below"
        print(f"tile {size:4d}: 2^{work.bit_length() - 1} multiplications ({side} the line)", end=" ")
        print(f"{1e3 * one:8.2f} ms in one piece, {1e3 * pieces:8.2f} ms in pieces, {pieces / one:.2f}x")
        assert work < OVERLAP_WORK or pieces < 1.25 * one
