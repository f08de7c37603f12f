"""Every supported operation against the unsharded module: outputs, input, parameter gradients and buffers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from commsched.channels import Channel
from commsched.spatial import Mesh, scatter, tile_bounds
from commsched.spatial.intervals import Split
from commsched.spatial.layout import recut
from commsched.spatial.mesh import everyone, sum_in_order
from tests.support.spatial_cases import integers, on_threads

C, SHAPE = 4, (2, 4, 12, 14)
GRIDS = {
    "2x2 even": ((0, 6, 12), (0, 7, 14)),
    "1x4 with an empty tile": ((0, 12), (0, 3, 3, 10, 14)),
    "3x1 with an empty tile": ((0, 5, 12, 12), (0, 14)),
}


class Lambda(nn.Module):
    """A forward written with functional calls."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.inner)


def _odd_unet(x: Tensor) -> Tensor:
    up = F.interpolate(F.max_pool2d(x, 5), scale_factor=5)
    return torch.cat([x, F.pad(up, [0, x.size(3) - up.size(3), 0, x.size(2) - up.size(2)])], 1)


def _classes(x: Tensor) -> Tensor:
    n, _, h, w = x.shape
    return torch.arange(n * h * w).view(n, h, w) % 4


def normalizations() -> dict[str, nn.Module]:
    return {
        "batch_norm": nn.BatchNorm2d(C),
        "batch_norm eval": nn.BatchNorm2d(C).eval(),
        "batch_norm cumulative": nn.BatchNorm2d(C, momentum=None),
        "group_norm": nn.GroupNorm(2, C),
        "group_norm one channel": nn.GroupNorm(C, C),
        "instance_norm": nn.InstanceNorm2d(C, affine=True, track_running_stats=True),
        "instance_norm plain": nn.InstanceNorm2d(C),
        "layer_norm channels last": Lambda(
            lambda x, norm: norm(x.permute(0, 2, 3, 1)).movedim(-1, 1), nn.LayerNorm(C)
        ),
        "local_response_norm": nn.LocalResponseNorm(3),
    }


def pooling() -> dict[str, nn.Module]:
    return {
        "global average": nn.AdaptiveAvgPool2d(1),
        "adaptive average": nn.AdaptiveAvgPool2d((3, 5)),
        "adaptive average one row": nn.AdaptiveAvgPool2d((1, 5)),
        "adaptive average None": nn.AdaptiveAvgPool2d((None, 4)),
        "global maximum": nn.AdaptiveMaxPool2d(1),
        "adaptive maximum": nn.AdaptiveMaxPool2d((3, 5)),
        "adaptive maximum one column": nn.AdaptiveMaxPool2d((3, 1)),
        "mean of rows": Lambda(
            lambda x, conv: conv(x.mean(3, keepdim=True) * x), nn.Conv2d(C, 2, 3, padding=1)
        ),
        "sum of columns": Lambda(lambda x, conv: conv(x.sum(2)), nn.Conv1d(C, 2, 3, padding=1)),
        "mean of all": Lambda(lambda x: x.mean() * x),
    }


def resizing() -> dict[str, nn.Module]:
    sizes: list[dict[str, Any]] = [
        {"scale_factor": 2},
        {"size": (7, 19)},
        {"scale_factor": (1.7, 0.6)},
        {"scale_factor": (1.7, 0.6), "recompute_scale_factor": True},
    ]
    found: dict[str, nn.Module] = {}
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        for options in sizes:
            found[f"{mode} {options}"] = nn.Upsample(mode=mode, **options)
            if mode in ("bilinear", "bicubic"):
                found[f"{mode} {options} corners"] = nn.Upsample(mode=mode, align_corners=True, **options)
    found["from one pixel"] = Lambda(
        lambda x: F.interpolate(F.adaptive_avg_pool2d(x, 1), size=x.shape[-2:], mode="bilinear") + x
    )
    return found


def padding() -> dict[str, nn.Module]:
    return {
        "reflection then conv": nn.Sequential(nn.ReflectionPad2d((1, 2, 3, 0)), nn.Conv2d(C, 2, 3)),
        "circular": nn.Conv2d(C, 3, 3, padding=1, padding_mode="circular"),
        "reflect": nn.Conv2d(C, 3, 5, padding=2, padding_mode="reflect", stride=2),
        "replicate": nn.Conv2d(C, 3, 5, padding=2, padding_mode="replicate"),
        "crop": Lambda(lambda x: x[:, 1:3, 2:-1, :-3].relu()),
        "patch merging": Lambda(
            lambda x: torch.cat([x[..., i::2, j::2] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))], 1)
        ),
        "every third": Lambda(lambda x: x[:, ::2, 2:11:3, -9::3] * 2),
        "index": Lambda(lambda x: x[:, None, 0]),
        "odd u-net": Lambda(_odd_unet),
        "roll": Lambda(lambda x: torch.roll(x, (-2, 5, 1), (2, -1, 1)) * x),
        "roll beyond a tile": Lambda(
            lambda x, conv: conv(x.roll(10, -1).roll((3, 8, -30), (-2, -2, -1))), nn.Conv2d(C, 2, 3)
        ),
        "roll flattened": Lambda(lambda x: x * x.roll(7)),
    }


def shapes() -> dict[str, nn.Module]:
    return {
        "cat channels": Lambda(lambda x: torch.cat([x, x * 2], 1)),
        "cat columns": Lambda(lambda x: torch.cat([x, x[..., 2:] * 2], -1)),
        "cat rows": Lambda(lambda x: torch.cat([x, x[:, :, 1:4] * 2, x], 2)),
        "stack": Lambda(lambda x: torch.stack([x, x * 2], 1).flatten(0, 1)),
        "channel shuffle by hand": Lambda(
            lambda x: x.view(x.size(0), 2, 2, x.size(2), -1).transpose(1, 2).reshape(x.shape)
        ),
        "channel shuffle": nn.ChannelShuffle(2),
        "pixel shuffle": nn.PixelShuffle(2),
        "chunk": Lambda(lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1]),
        "expand": Lambda(lambda x: x[:, :1].expand(-1, 3, -1, -1) * 1.5),
        "expand_as": Lambda(lambda x: F.adaptive_avg_pool2d(x, 1).expand_as(x) * x),
        "position embedding": Lambda(
            lambda x, e: x + e.weight.view(1, 1, 12, 14)[:, :, : x.shape[2], : x.shape[3]],
            nn.Embedding(12, 14),
        ),
    }


def elementwise() -> dict[str, nn.Module]:
    return {
        "prelu": nn.PReLU(C),
        "softmax": nn.Softmax(1),
        "glu": nn.GLU(1),
        "max over channels": Lambda(lambda x: x.max(1)[0]),
        "normalize": Lambda(lambda x: F.normalize(x, dim=1)),
        "in place": Lambda(lambda x: F.relu(x * 2, inplace=True).add(1).mul_(x.detach())),
        "where": Lambda(lambda x: torch.where(x > 0, x, -x).clamp_(max=2) ** 2 / 3 - 1),
        "squeeze and excite": Lambda(
            lambda x, a, b: x * torch.sigmoid(b(F.relu(a(x.mean((2, 3), keepdim=True))))),
            nn.Conv2d(C, 2, 1),
            nn.Conv2d(2, C, 1),
        ),
    }


def heads() -> dict[str, nn.Module]:
    return {
        "pooled head": nn.Sequential(
            nn.Conv2d(C, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
        ),
        "flatten and linear": nn.Sequential(
            nn.Conv2d(C, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(90, 5)
        ),
        "mse": Lambda(lambda x: F.mse_loss(x, torch.ones(x.shape, dtype=x.dtype))),
        "cross entropy": Lambda(
            lambda x: F.cross_entropy(
                x, _classes(x), torch.tensor([1.0, 2, 3, 4]).double(), ignore_index=2, label_smoothing=0.1
            )
        ),
        "nll": Lambda(lambda x: F.nll_loss(F.log_softmax(x, 1), _classes(x), reduction="sum")),
        "bce": Lambda(lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x) * 0.3)),
    }


torch.manual_seed(1)
MODULES = {
    name: module.double()
    for family in (normalizations, pooling, resizing, padding, shapes, elementwise, heads)
    for name, module in family().items()
}


def image(seed: int, ties: bool) -> Tensor:
    """Integers, where maxima tie, or real numbers."""
    generator = torch.Generator().manual_seed(seed)
    return integers(generator, SHAPE) + (0.0 if ties else torch.randn(SHAPE, generator=generator).double())


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11, msg=lambda m: f"{what}: {m}")


def compare(module: nn.Module, whole: Tensor, bounds: tuple[tuple[int, ...], ...], channel: Channel) -> None:
    plain, sharded = copy.deepcopy(module), copy.deepcopy(module)
    x = whole.clone().requires_grad_()
    expected = plain(x)
    grad = integers(torch.Generator().manual_seed(5), expected.shape)
    expected.backward(grad)

    mesh = Mesh(channel, tuple(len(b) - 1 for b in bounds), (-2, -1))
    leaf = whole.clone().requires_grad_()
    tile = recut(scatter(leaf, mesh), {axis: Split(b) for axis, b in enumerate(bounds)})
    result = sharded(tile)
    assert result.shape == expected.shape
    own = tuple(slice(*b) for b in result.bounds)
    assert_close(result.local, expected[own], "output")
    result.local.backward(grad[own])
    own = tile_bounds(whole.shape, mesh)
    assert_close(leaf.grad[own], x.grad[own], "input gradient")
    for (name, parameter), reference in zip(sharded.named_parameters(), plain.parameters()):
        assert_close(sum_in_order(everyone(parameter.grad, mesh, (0, 1), "check")), reference.grad, name)
    for (name, buffer), reference in zip(sharded.named_buffers(), plain.buffers()):
        assert_close(buffer.double(), reference.double(), name)


# Where it matters which of several equal pixels is the largest.
TIES = {name for name in MODULES if "maximum" in name} | {
    "odd u-net",
    "max over channels",
    "where",
    "in place",
}


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "ties"),
    [
        pytest.param(
            name,
            ties,
            id=f"{name}-{'integers' if ties else 'reals'}",
            marks=[pytest.mark.slow] if ties and name not in TIES else [],
        )
        for name in MODULES
        for ties in (False, True)
    ],
)
def test_equals_the_unsharded_module(name: str, ties: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch notes how scale factors are taken
        for bounds in GRIDS.values():
            ranks = (len(bounds[0]) - 1) * (len(bounds[1]) - 1)
            on_threads(ranks, lambda channel, b=bounds: compare(MODULES[name], image(3, ties), b, channel))
