"""`spatial.run`: an image on disk, tile by tile or block by block, equals the model on the whole image."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched import spatial
from commsched.transport.channel import Channel
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
    refused(r"1 \(AdaptiveAvgPool2d\): sum over tiles needs the whole image", whole, blocks=(2, 2))
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
