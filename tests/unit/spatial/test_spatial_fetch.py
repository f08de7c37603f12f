"""The fetch itself: adjointness, derivatives of first and second order, corners, fixed order of addition."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from commsched.channels import Channel
from commsched.errors import CommError
from commsched.spatial import Mesh, scatter
from commsched.spatial.fetch import delivered, fetched
from commsched.spatial.intervals import Fill, Run, Split, Want
from commsched.spatial.layout import plan_for, recut, replicate
from commsched.spatial.mesh import apply, everyone, spread, sum_in_order
from tests.support.spatial_cases import bounds_of, integers, on_threads


def random_want(rng: random.Random, size: int) -> Want:
    parts: list[Run | Fill] = []
    for _ in range(rng.randint(0, 3)):
        lo = rng.randint(0, size - 1)
        parts.append(
            rng.choice((Fill(rng.randint(1, 3)), Run(lo, rng.randint(lo + 1, size), rng.random() < 0.5)))
        )
    return tuple(parts)


def adjoint(seed: int, grid: tuple[int, int], channel: Channel) -> None:
    """<fetch(x), y> == <x, deliver(y)>, summed over ranks, for arbitrary wants."""
    rng = random.Random(seed)
    mesh = Mesh(channel, grid, (-2, -1))
    shape = (2, 3, rng.randint(4, 9), rng.randint(4, 9))
    whole = integers(torch.Generator().manual_seed(seed), shape)
    bounds = {axis: Split(bounds_of(rng, shape[2 + axis], grid[axis])) for axis in range(2)}
    wants = {axis: tuple(random_want(rng, shape[2 + axis]) for _ in range(grid[axis])) for axis in range(2)}
    tile = recut(scatter(whole, mesh), bounds)
    plan = plan_for(mesh, tile.cuts, wants)
    there = fetched(tile.local, plan, mesh, "test")
    y = integers(torch.Generator().manual_seed(seed + 1000 * mesh.rank), there.shape)
    back = delivered(y, plan, mesh, "test")
    assert back.shape == tile.local.shape
    products = torch.stack([(there * y).sum(), (tile.local * back).sum()])
    left, right = sum_in_order(everyone(products, mesh, (0, 1), "test"))
    assert left == right, (seed, left, right)


@pytest.mark.parametrize("grid", [(2, 2), (1, 3), (3, 1)])
def test_deliver_is_the_adjoint_of_fetch(grid: tuple[int, int]) -> None:
    on_threads(grid[0] * grid[1], lambda ch: [adjoint(seed, grid, ch) for seed in range(40)])


OPERATIONS = {
    "conv": lambda t, w: F.conv2d(t, w, stride=2, padding=1),
    "transposed": lambda t, w: F.conv_transpose2d(t, w.transpose(0, 1), stride=2, padding=1),
    "reflect": lambda t, w: F.conv2d(F.pad(t, (1, 1, 1, 1), mode="reflect"), w[..., :2, :]),
    "average": lambda t, w: F.avg_pool2d(t * w[0, 0, 0, 0], 3, 2, 1),
    "batch_norm": lambda t, w: F.batch_norm(t, None, None, w[:, 0, 0, 0], w[:, 0, 0, 1], True),
    "group_norm": lambda t, w: F.group_norm(t, 1, w[:, 0, 0, 0]),
    "global": lambda t, w: t * (t.mean((2, 3), keepdim=True) * w[0, 0, 0, 0]),
    "bilinear": lambda t, w: F.interpolate(t, size=(4, 7), mode="bilinear") * w[0, 0, 0, 0],
}


@pytest.mark.few
@pytest.mark.parametrize(("name", "overlap"), [*((name, "off") for name in OPERATIONS), ("conv", "on")])
def test_first_and_second_derivatives(name: str, overlap: str) -> None:
    def check(channel: Channel) -> None:
        mesh = Mesh(channel, (1, 3), (-2, -1), overlap=overlap)
        generator = torch.Generator().manual_seed(0)

        def whole(x: Tensor, w: Tensor) -> Tensor:
            # All ranks perturb the same whole x and w, so both collect every rank's contributions.
            shared = [apply(spread, t, mesh, (0, 1), "test") for t in (x, w)]
            tile = recut(scatter(shared[0], mesh), {1: Split((0, 2, 2, 5))})
            return replicate(OPERATIONS[name](tile, shared[1])).local

        x = torch.randn(1, 2, 2, 5, generator=generator).double().requires_grad_()
        w = torch.randn(2, 2, 3, 2, generator=generator).double().requires_grad_()
        assert torch.autograd.gradcheck(whole, (x, w))
        grad = torch.randn(whole(x, w).shape, generator=generator).double().requires_grad_()
        # Along random directions, which every wrong entry of the Hessian shows in.
        assert torch.autograd.gradgradcheck(whole, (x, w), grad, fast_mode=True)

    on_threads(3, check)


def test_a_hot_pixel_reaches_the_diagonal_tile() -> None:
    def probe(channel: Channel) -> None:
        mesh = Mesh(channel, (2, 2), (-2, -1))
        image = torch.zeros(1, 1, 8, 8, dtype=torch.double)
        image[0, 0, 3, 3] = 1.0  # the corner of tile (0, 0) that touches tile (1, 1)
        image.requires_grad_()
        weight = torch.arange(1.0, 10.0, dtype=torch.double).view(1, 1, 3, 3)
        out = F.conv2d(scatter(image, mesh), weight, padding=1)
        expected = {0: (-1, -1, 5.0), 1: (-1, 0, 4.0), 2: (0, -1, 2.0), 3: (0, 0, 1.0)}
        row, column, value = expected[mesh.rank]
        assert out.local[0, 0, row, column] == value
        grad = torch.zeros_like(out.local)
        if mesh.rank == 3:
            grad[0, 0, 0, 0] = 7.0
        out.local.backward(grad)
        assert image.grad[0, 0, 3, 3] == (7.0 if mesh.rank == 0 else 0.0)

    on_threads(4, probe)


def test_gradients_are_the_same_bits_every_time() -> None:
    def run(channel: Channel) -> Tensor:
        mesh = Mesh(channel, (2, 2), (-2, -1))
        image = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
        conv = nn.Conv2d(4, 4, 5, padding=2, bias=False)
        with torch.no_grad():
            conv.weight.copy_(torch.randn(conv.weight.shape, generator=torch.Generator().manual_seed(1)))
        conv(scatter(image, mesh)).local.square().sum().backward()
        return image.grad

    first, second = on_threads(4, run), on_threads(4, run)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_ranks_in_different_operations_are_told_so() -> None:
    def run(channel: Channel) -> None:
        mesh = Mesh(channel, (2,), (-1,))
        mesh.names.append("left" if channel.rank else "right")
        F.conv1d(scatter(torch.zeros(1, 1, 8), mesh), torch.zeros(1, 1, 3))

    with pytest.raises(CommError, match="different operations"):
        on_threads(2, run)


def test_a_silent_peer_is_an_error_within_the_timeout() -> None:
    def run(channel: Channel) -> None:
        if channel.rank == 0:
            with pytest.raises(CommError, match="rank 0 heard nothing of rank 1"):
                F.conv1d(scatter(torch.zeros(1, 1, 8), Mesh(channel, (2,), (-1,))), torch.zeros(1, 1, 3))

    on_threads(2, run, timeout=1.0)
