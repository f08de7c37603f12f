"""One convolution on tiles: how long its halo takes alone, and how much of that its interior hides.

Times are taken in turn, the slowest rank's, of forward and backward: with messages that are there at once
(``compute``), waiting for every halo before computing (``waiting``), and computing the interior meanwhile
(``overlapped``). ``halo`` is the exchange without computing, ``sent`` the bytes of the busiest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched import spatial
from commsched.channels import Channel, Parcel, SilentChannel
from commsched.spatial.mesh import Mesh, everyone
from commsched.spatial.tile import Tile
from scheduler.ir.layout import Tiles
from scheduler.ir.link import Link
from scheduler.ir.profile import Border, Layer, Profile
from scheduler.pipelines.build import generate
from scheduler.simulate.simulator import simulate

Pair = tuple[float, float]
"""Seconds of the forward and of the backward."""


class Instant(SilentChannel):
    """A channel that delivers at once, with buffers as they are. It keeps the last exchange's parcels."""

    parcels: tuple[list[Parcel], list[Parcel]]

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], what: str) -> Instant:
        self.parcels = [*sends], [*recvs]
        return self

    def wait(self) -> None:
        return None

    def watch(self) -> None:
        return None


def judged(times: dict[str, Pair], sent: list[int], border: float) -> dict[str, Any]:
    """The figures with `hidden`, the part of the halo's time that does not show in the overlapped step, and
    its prediction by the simulator from the times of halo and compute.
    """
    halo, compute = times["halo"], times["compute"]
    hidden = 1.0 - (sum(times["overlapped"]) - sum(compute)) / sum(halo)
    wire = Link(0.0, sum(halo) / sum(sent))
    exchange = Border(sent[0], sent[1], border)
    exposed = simulated_step(compute, exchange, wire) - simulated_step(compute, None, wire)
    predicted = 1.0 - exposed / sum(halo)
    figures = {"hidden": hidden, "predicted": predicted, "large_enough": predicted > 0.99}
    return {**times, "sent": sent, "border": border, **figures}


def simulated_step(compute: Pair, border: Border | None, wire: Link) -> float:
    """Seconds of a forward and backward that take ``compute`` on each of two tiles, halos included."""
    layer = Layer("convolution", 2 * compute[0], 2 * compute[1], 0)
    profile = Profile("convolution", (layer,))
    program = generate("gpipe", 1, placements=[Tiles((1, 2))], profile=profile, borders=[border])
    return simulate(program, profile, wire).period


def measure(
    shape: Sequence[int],
    halo: int,
    grid: tuple[int, int],
    counts: tuple[int, int],
    channel: Channel,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Measure a convolution with this halo. ``counts``: iterations to warm up, and timed.

    Collective: every rank of ``channel`` calls it and gets the same figures.
    """
    meshes = {
        "compute": Mesh(Instant(channel.rank, channel.size), grid, (-2, -1), overlap="on"),
        "waiting": Mesh(channel, grid, (-2, -1), overlap="off"),
        "overlapped": Mesh(channel, grid, (-2, -1), overlap="on"),
    }
    real = meshes["waiting"]
    data = _Data(shape, halo, real)
    one, other = data.forward(real), data.forward(meshes["overlapped"])
    if not torch.allclose(one, other, rtol=1e-4, atol=1e-3):
        raise RuntimeError(
            f"overlapped and waiting convolution differ by {(one - other).abs().max().item()} on rank"
            f" {channel.rank}; their times mean nothing"
        )
    steps: dict[str, Callable[[], Pair]] = {name: partial(data.step, mesh) for name, mesh in meshes.items()}
    steps["halo"] = _exchange(data, meshes["overlapped"])
    samples: dict[str, list[Pair]] = {name: [] for name in steps}
    for number in range(sum(counts)):
        note(f"iteration {number + 1} of {sum(counts)}")
        for name, step in steps.items():
            everyone(torch.zeros(1), real, (0, 1), "start")
            pair = step()
            if number >= counts[0]:
                samples[name].append(pair)
    sent = data.sent(real)
    rows = everyone(torch.tensor([samples[name] for name in steps]), real, (0, 1), "times")
    slowest = torch.stack(rows).max(0).values  # name, iteration, forward or backward
    times = {name: (median(t[:, 0].tolist()), median(t[:, 1].tolist())) for name, t in zip(steps, slowest)}
    most = torch.stack(everyone(torch.tensor(sent), real, (0, 1), "bytes")).max(0).values.tolist()
    return judged(times, most, data.border(real))


class _Data:
    """A rank's tile and the weights, the same on all ranks."""

    def __init__(self, shape: Sequence[int], halo: int, mesh: Mesh) -> None:
        self.shape, self.halo = tuple(shape), halo
        bounds = spatial.tile_bounds(self.shape, mesh)
        generator = torch.Generator().manual_seed(mesh.rank)
        self.x = torch.randn([b.stop - b.start for b in bounds], generator=generator).requires_grad_()
        size = (shape[1], shape[1], 2 * halo + 1, 2 * halo + 1)
        self.weight = torch.randn(size, generator=torch.Generator().manual_seed(99)).requires_grad_()

    def forward(self, mesh: Mesh) -> Tensor:
        tile = spatial.from_local(self.x * 1, self.shape, mesh)
        result = F.conv2d(tile, self.weight, padding=self.halo)
        assert isinstance(result, Tile)
        return result.local

    def step(self, mesh: Mesh) -> Pair:
        self.x.grad = self.weight.grad = None
        start = time.perf_counter()
        out = self.forward(mesh)
        middle = time.perf_counter()
        out.backward(out.detach())
        return middle - start, time.perf_counter() - middle

    def sent(self, mesh: Mesh) -> tuple[int, int]:
        """Bytes of one forward and of one backward."""
        before = mesh.channel.sent
        out = self.forward(mesh)
        between = mesh.channel.sent
        out.backward(torch.ones_like(out))
        return between - before, mesh.channel.sent - between

    def border(self, mesh: Mesh) -> float:
        """The part of the outputs that needs the halo, on the tile with most neighbours."""
        inner = 1.0
        for dim, parts in zip(mesh.dims, mesh.grid):
            length = self.shape[dim] / parts
            inner *= max(0.0, 1 - min(2, parts - 1) * self.halo / length)
        return 1 - inner


def _exchange(data: _Data, mesh: Mesh) -> Callable[[], Pair]:
    """The forward's messages, without a convolution."""
    recorder = Instant(mesh.rank, mesh.size)
    with torch.no_grad():
        data.forward(Mesh(recorder, mesh.grid, mesh.dims, overlap="off"))
    sends, recvs = recorder.parcels

    def once() -> float:
        start = time.perf_counter()
        mesh.channel.exchange(sends, recvs, "halo alone").wait()
        return time.perf_counter() - start

    return lambda: (once(), once())
