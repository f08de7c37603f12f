"""Margins: pixels beyond its own that a block of a large image holds, and that its operations compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from commsched import spatial
from commsched.channels import Channel
from commsched.spatial import fetch
from commsched.spatial.intervals import Split, TransposedWindow, Window, spare_margin
from commsched.spatial.layout import recut
from tests.support.spatial_cases import integers, on_threads


def chain(seed: int) -> nn.Sequential:
    """A few convolutions and poolings of random geometry, with integer weights and biases."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(rng.randint(2, 5)):
        kernel = rng.randint(1, 4)
        options = {"stride": rng.choice((1, 1, 1, 2)), "padding": rng.randint(0, kernel // 2)}
        layers.append(nn.Conv2d(2, 2, kernel, dilation=rng.randint(1, 2), **options))
        layers.append(nn.ReLU() if rng.random() < 0.5 else nn.MaxPool2d(2, 1, 1))
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(integers(generator, parameter.shape) % 3 - 1)
    return model


class Residual(nn.Module):
    """A block whose sum is taken in place, as in most published ResNets: margins of both sides differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.first(x).relu_())
        before = out[:, :1]  # a view of the same storage: it must see the sum, in its margin too
        out += x
        return self.second(out) + before


def residuals(seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(Residual(), Residual()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(integers(generator, parameter.shape) % 3 - 1)
    return model


def _too_small(seed: int) -> bool:
    try:
        return chain(seed)(torch.zeros(1, 2, 22, 25).double()).numel() == 0
    except RuntimeError:
        return True


class Views(nn.Module):
    """A view that has not the margin of its tile is written to: the margin must change, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[1](self.layers[0](x))
        y[..., 1:, :].mul_(2)
        return self.layers[2](y)


def views(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = Views()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(integers(generator, parameter.shape) % 3 - 1)
    return model


def compare(seed: int, blocks: tuple[int, int], make: Callable[[int], nn.Module] = chain) -> None:
    """Each block computes alone, from pixels and a margin, what the whole image gives."""
    model, image = make(seed).eval(), integers(torch.Generator().manual_seed(seed), (1, 2, 22, 25))
    with torch.no_grad():
        expected = model(image)
    tile = spatial.run(model, image, (1, 1), blocks=blocks)
    assert torch.equal(tile.local, expected), f"output of {make.__name__} {seed}"


@cache
def seeds() -> list[int]:
    """Those of chains that this image is large enough for."""
    return [seed for seed in range(40) if not _too_small(seed)][:12]


@pytest.mark.parametrize("blocks", [(2, 2), (1, 3), (3, 1)])
def test_the_same_bits(blocks: tuple[int, int]) -> None:
    for seed in seeds():
        compare(seed, blocks)


@pytest.mark.parametrize("make", [residuals, views])
@pytest.mark.parametrize("blocks", [(2, 2), (1, 3)])
def test_changes_in_place_reach_the_margins(
    blocks: tuple[int, int], make: Callable[[int], nn.Module]
) -> None:
    """The two sides of ``out += identity`` have different margins; a view may have none."""
    compare(5, blocks, make)


def test_without_zeros_beyond_the_border_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations outside the image are zero again at every layer; here they are something else."""
    original = fetch.own_pixels
    monkeypatch.setattr(fetch, "own_pixels", lambda x, plan, fill: original(x, plan, 1.0))
    with pytest.raises(AssertionError, match="of chain"):
        for seed in seeds():
            compare(seed, (1, 3))


def test_no_user_sees_a_margin() -> None:
    """``.local`` has exactly the pixels that a rank owns."""

    def run(channel: Channel) -> None:
        tile = spatial.scatter(torch.zeros(1, 1, 16, 16), spatial.Mesh(channel, (2, 1), (-2, -1)))
        wide = recut(tile, {0: Split((0, 8, 16), margin=(1, 1))})
        assert wide.local.shape[2] == 8 and wide.held.shape[2] == 9
        wide.mul_(2).local.add_(1)
        with pytest.raises(ValueError, match=r"tile.local was changed in place while the tile holds a halo"):
            wide + 1

    on_threads(2, run)


@pytest.mark.parametrize(
    ("window", "margin", "expected"),
    [
        (Window(3, before=1, after=1), (0, 0), (0, 0)),
        (Window(1), (0, 0), (0, 0)),
        (Window(3, before=1, after=1), (3, 2), (2, 1)),
        (Window(5, before=2, after=2), (1, 3), (0, 0)),
        (Window(2, stride=2), (4, 4), (2, 2)),
        (TransposedWindow(2, stride=2), (1, 1), (2, 2)),
    ],
)
def test_spare_margin(window: Window, margin: tuple[int, int], expected: tuple[int, int]) -> None:
    split = Split.even(24, 3)
    out = window.split(split, window.outputs(24))
    assert spare_margin(window, split.with_margin(margin), out) == expected
