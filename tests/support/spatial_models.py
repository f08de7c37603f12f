"""Small models of the kinds that very large images are trained with, and five steps of training."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched import spatial
from commsched.spatial import Mesh
from dnn_bench.models.convolutional import ResNet, conv_norm_relu
from dnn_bench.spatial.models import amoebanet, unet

__all__ = ["build", "conv_norm_relu", "train"]


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in float64 with images and targets, the same on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"resnet18": (2, 3, 44, 52), "unet": (2, 3, 21, 26), "amoebanet": (2, 3, 38, 34)}
        models: dict[str, Callable[[], nn.Module]] = {
            "resnet18": lambda: ResNet(18, 3, 4),
            "unet": lambda: nn.Sequential(*unet(2, 4, 3)),
            "amoebanet": lambda: nn.Sequential(*amoebanet(3, 4, 3)),
        }
        model = models[name]().double()
        images = torch.randn(sizes[name]).double()
        shape = (2, *sizes[name][2:]) if name == "unet" else (2,)
        return model, images, torch.randint(0, 3, shape)


def train(
    model: nn.Module, images: Tensor, target: Tensor, steps: int, mesh: Mesh | None = None
) -> list[Tensor]:
    """Losses of some steps, then the output in eval mode (of the whole image)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), target)
        loss.backward()
        if mesh is not None:
            spatial.sum_gradients(model.parameters(), mesh)
        optimizer.step()
        losses.append(_plain(loss).detach())
    model.eval()
    with torch.no_grad():
        output = model(images)
    model.train()
    return [*losses, output if mesh is None else _plain(spatial.gather(output))]


def _plain(value: Tensor) -> Tensor:
    return value.local if isinstance(value, spatial.Tile) else value
