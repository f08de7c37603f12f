"""A stack of equal linear layers with a small head: the plainest communication pattern there is."""

from __future__ import annotations

from torch import nn


def mlp(width: int = 1024, depth: int = 8, num_classes: int = 10) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
