"""`spatial.run`: an image on disk, tile by tile or block by block, equals the model on the whole image."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched import spatial
from commsched.transport.channel import Channel
from dnn_bench.spatial.models import conv_bn
from tests.support.spatial_cases import on_threads
from tests.support.spatial_models import build


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


@pytest.mark.parametrize("blocks", [None, (1, 1), (3, 2)])
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
