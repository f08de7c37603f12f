"""`spatial.run`: an image on disk, tile by tile or block by block, equals the model on the whole image."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched import spatial
from commsched.channels import Channel
from tests.support.rounding import rounding
from tests.support.spatial_cases import on_threads
from tests.support.spatial_models import build


def conv_bn(c_in: int, c_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))


class Up(nn.Module):
    """A small U-Net that enlarges by interpolation."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.first, self.last = conv_bn(2, 4, 3), nn.Conv2d(8, 3, 3, padding=1)
        self.down, self.mode = nn.Sequential(conv_bn(4, 4, 3, 2), conv_bn(4, 4, 5)), mode

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(
            torch.cat([F.interpolate(self.down(first), scale_factor=2, mode=self.mode), first], 1)
        )


def ready(model: nn.Module) -> nn.Module:
    """In eval mode, with running statistics that are not those of a fresh model."""
    torch.manual_seed(1)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    return model.double().eval()


def image_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, shape, np.uint8)


MODELS: dict[str, Any] = {
    "unet": lambda: build("unet")[0],
    "nearest": lambda: Up("nearest"),
    "bilinear": lambda: Up("bilinear"),
    "bicubic": lambda: Up("bicubic"),
}


@pytest.mark.few
@pytest.mark.parametrize("blocks", [None, pytest.param((1, 1), marks=pytest.mark.slow), (3, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_parts_from_a_file_are_those_of_the_whole(
    name: str, blocks: tuple[int, int] | None, tmp_path: Path
) -> None:
    model = ready(MODELS[name]())
    image = image_of(3 if name == "unet" else 2, 96, 64)
    np.save(tmp_path / "image.npy", image)
    with torch.no_grad():
        expected = model(torch.from_numpy(image).double()[None] / 255)

    def run(channel: Channel) -> None:
        options: dict[str, Any] = {
            "channel": channel,
            "blocks": blocks,
            "prepare": lambda x: x.double() / 255,
        }
        mine = copy.deepcopy(model)
        tile = spatial.run(mine, tmp_path / "image.npy", (2, 2), **options)
        assert isinstance(tile, spatial.Tile) and tile.shape == expected.shape
        part = expected[tuple(slice(*bound) for bound in tile.bounds)]
        torch.testing.assert_close(tile.local, part, rtol=0, atol=1e-12)
        out = spatial.run(mine, image, (2, 2), out=tmp_path / "out.npy", **options)
        assert np.abs(out - expected.numpy()).max() < 1e-12

    on_threads(4, run)
    assert np.abs(np.load(tmp_path / "out.npy") - expected.numpy()).max() < 1e-12


class Calls(nn.Module):
    """A convolution before and after a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def padded(x: Tensor) -> Tensor:
    """To a multiple of 8 for a network that halves three times, and back."""
    y = F.pad(x, (0, -x.shape[-1] % 8, 0, -x.shape[-2] % 8), mode="replicate")
    return F.interpolate(F.max_pool2d(y, 8), scale_factor=8)[..., : x.shape[-2], : x.shape[-1]]


def differentiated(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = F.avg_pool2d(x.requires_grad_(), 3, 1, 1)
        (gradient,) = torch.autograd.grad(y, x, torch.ones(y.shape, dtype=y.dtype))
    return gradient


PADDED: dict[str, Any] = {
    "reflection": lambda: nn.Sequential(nn.ReflectionPad2d(3), nn.Conv2d(2, 3, 7)),
    "several": lambda: nn.Sequential(
        nn.ReflectionPad2d((1, 2, 3, 1)),
        nn.Conv2d(2, 3, 3, 2),
        nn.ReplicationPad2d(2),
        nn.Conv2d(3, 3, 5),
        nn.Upsample(scale_factor=2),
        nn.ZeroPad2d((1, 2, 0, 1)),
        nn.Conv2d(3, 1, 3),
    ),
    "padding mode": lambda: nn.Conv2d(2, 3, 5, padding=2, padding_mode="reflect"),
    "constant": lambda: Calls(lambda x: F.pad(x, (1, 2, 3, 4), value=0.5)),
    "negative": lambda: Calls(lambda x: F.pad(x, (-1, -2, 3, -1))),
    "crop": lambda: Calls(lambda x: x[..., 2:-1, 1:]),
    "crop of more than a block": lambda: Calls(lambda x: x[..., 9:-9, :]),
    "crop to a smaller result": lambda: Calls(lambda x: x[..., 2:-2, 2:-2] + F.avg_pool2d(x, 5, 1)),
    "narrow": lambda: Calls(lambda x: x.narrow(-1, 3, 30).narrow(2, -20, 20)),
    "every third row": lambda: Calls(lambda x: x[..., 1::3, ::2]),
    "pixel shuffle": lambda: Calls(lambda x: F.pixel_shuffle(torch.cat([x, -x, x, x + 1], 1), 2)),
    "to a multiple": lambda: Calls(padded),
}  # fmt: skip


@pytest.mark.parametrize("name", PADDED)
def test_padding_and_cropping_in_blocks(name: str) -> None:
    """They dropped the halo of a block, and the convolution after them was refused."""
    model, image = ready(PADDED[name]()), image_of(2, 37, 45)
    with torch.no_grad():
        expected = model(torch.from_numpy(image)[None].double())

    def run(channel: Channel) -> None:
        for blocks in (None, (3, 2)):
            tile = spatial.run(copy.deepcopy(model), image, (2, 1), blocks=blocks, channel=channel)
            assert tile.shape == expected.shape
            part = expected[tuple(slice(*bound) for bound in tile.bounds)]
            # Pixels of up to 255, and two convolutions of up to 49 of them.
            exact = 255 * rounding(torch.float64, 4 * 49, 3)
            torch.testing.assert_close(tile.local, part, rtol=0, atol=exact)

    on_threads(2, run)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.CircularPad2d(1), nn.Conv2d(2, 2, 3)),
            r"0 \(CircularPad2d\): pad cannot be computed in blocks: it joins the two ends of the image; run",
        ),
        (
            Calls(lambda x: torch.roll(x, 1, -1)),
            r"Calls: torch.roll cannot be computed in blocks: it joins the two ends of the image; run",
        ),
        (
            Calls(lambda x: x.flatten(2).reshape(x.shape)),
            r"last \(Conv2d\): conv2d cannot .*: Calls: torch.Tensor.flatten keeps no halo for it; run",
        ),
        (
            nn.Sequential(Calls(lambda x: x[..., 14:, :]), nn.ConvTranspose2d(2, 2, 4, 2)),
            r"1 \(ConvTranspose2d\): conv_transpose2d cannot .*: 0 \(Calls\): torch.Tensor.__getitem__ leaves"
            " blocks without pixels; take fewer blocks, or run without blocks=",
        ),
        (
            Calls(differentiated),
            "Calls: grad cannot be computed in blocks: several blocks compute with a pixel,"
            " and its gradient is the sum of theirs; run",
        ),
        (
            Calls(lambda x: x.softmax(-1)),
            "Calls: torch.Tensor.softmax .*: dimension -1 is the one that is split; call the model on the",
        ),
    ],
)
def test_blocks_name_the_operation_that_needs_others(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spatial.run(model.eval(), image_of(2, 37, 45), (1, 1), blocks=(6, 4))


def test_dimensions_in_any_order_from_anything_with_slices() -> None:
    image = image_of(20, 30, 3)

    class Reader:
        shape = image.shape

        def __getitem__(self, index: Any) -> Any:
            assert all(part.stop - part.start < 30 for part in index), "the whole image was read"
            return image[index].tolist()

    model = nn.Conv2d(3, 2, 3, padding=1).double().eval()
    expected = model(torch.from_numpy(image).permute(2, 0, 1)[None].double())

    def run(channel: Channel) -> None:
        out = np.zeros((1, 2, 20, 30))
        for source, blocks in ((Reader(), None), (image, (1, 2))):
            options: dict[str, Any] = {"layout": "HWC", "blocks": blocks, "channel": channel}
            tile = spatial.run(copy.deepcopy(model), source, (1, 2), **options)
            part = tuple(slice(*bound) for bound in tile.bounds)
            torch.testing.assert_close(tile.local, expected.detach()[part], rtol=0, atol=1e-12)
            assert spatial.run(copy.deepcopy(model), source, (1, 2), out=out, **options) is out
            assert np.abs(out[part] - expected.detach().numpy()[part]).max() < 1e-12

    on_threads(2, run)


@pytest.mark.parametrize("blocks", [None, (2, 2)])
def test_another_byte_order_in_and_bfloat16_out(blocks: tuple[int, int] | None, tmp_path: Path) -> None:
    """Both failed, the second one after all the work."""
    model = ready(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1))).bfloat16()
    image = image_of(2, 16, 16).astype(">u2")
    np.save(tmp_path / "image.npy", image)
    with torch.no_grad():
        expected = model(torch.from_numpy(image.astype(np.int32)).bfloat16()[None])

    def run(channel: Channel) -> np.ndarray:
        files = tmp_path / "image.npy", tmp_path / "result.npy"
        return spatial.run(copy.deepcopy(model), files[0], out=files[1], blocks=blocks, channel=channel)

    for result in on_threads(4, run):
        assert result.dtype == np.float32
        assert torch.equal(torch.from_numpy(result[:]), expected.float())


def test_what_cannot_be_run_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, image = nn.Conv2d(3, 2, 3).eval(), image_of(3, 16, 16)

    def refused(expected: str, model: nn.Module = model, image: Any = image, **options: Any) -> None:
        with pytest.raises(ValueError, match=expected):
            spatial.run(model, image, options.pop("grid", (1, 1)), **options)

    whole = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.AdaptiveAvgPool2d(1)).eval()
    refused(
        r"1 \(AdaptiveAvgPool2d\): adaptive_avg_pool2d cannot be computed in blocks: it needs the whole",
        whole,
        blocks=(2, 2),
    )
    refused("in training mode: call model.eval", nn.Conv2d(3, 2, 3))
    refused("that is sharded: call unshard first", spatial.shard(nn.Conv2d(3, 2, 3).eval(), (1, 1)))
    refused("blocks must be 2 positive numbers", blocks=(2,))
    refused(
        r"out must have the result's shape \(1, 2, 14, 14\), got \(2, 14, 14\)", out=np.zeros((2, 14, 14))
    )
    refused("layout must name the 3 dimensions", layout="HW")
    refused("an image is an array", image="picture.jpeg")
    refused("a grid of 2x2 with 1 replicas needs 4 ranks", grid=(2, 2))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    refused("reading a TIFF needs tifffile: pip install tifffile", image=tmp_path / "x.tif")
    with pytest.raises(ValueError, match="rows of a reshaped tile are no interval"):
        mesh = spatial.Mesh(spatial.SilentChannel(0, 4), (2, 2), (-2, -1))
        print(spatial.scatter(torch.zeros(1, 2, 4, 4), mesh).flatten(1).bounds)
