"""DenseNet-BC (Huang et al. 2016): hundreds of small tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dnn_bench.models.vision import global_average, he_init

BOTTLENECK = 4


def _norm_conv(c_in: int, c_out: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(c_in),
        nn.ReLU(inplace=True),
        nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2, bias=False),
    )


class DenseLayer(nn.Module):
    """Appends `growth` channels to what it gets."""

    def __init__(self, c_in: int, growth: int) -> None:
        super().__init__()
        self.squeeze = _norm_conv(c_in, BOTTLENECK * growth, 1)
        self.grow = _norm_conv(BOTTLENECK * growth, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.grow(self.squeeze(x))], dim=1)


class DenseNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], num_classes: int = 1000, growth: int = 32) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        layers: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            for _ in range(depth):
                layers.append(DenseLayer(channels, growth))
                channels += growth
            if stage < len(depths) - 1:
                layers.append(nn.Sequential(_norm_conv(channels, channels // 2, 1), nn.AvgPool2d(2)))
                channels //= 2
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.stem(x))), inplace=True)
        logits: Tensor = self.head(global_average(x))
        return logits
