"""Inception-v4 (Szegedy et al. 2016), described by its branches. The published stem has width 32."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dnn_bench.models.convolutional import conv_norm_relu, global_average, he_init

PUBLISHED = 32
EPS = 1e-3
ROW, COLUMN = (1, 7), (7, 1)
SHORT_ROW, SHORT_COLUMN = (1, 3), (3, 1)


class Conv(NamedTuple):
    """A convolution with batch norm and ReLU; `channels` at the published width."""

    channels: int
    kernel: int | tuple[int, int] = 1
    stride: int = 1
    same: bool = True


Step = Conv | str | list[Any]  # a list has branches, each a list of steps, whose outputs are joined
AVERAGE, LARGEST = "average", "largest"


def halved(channels: int) -> Conv:
    return Conv(channels, 3, stride=2, same=False)


LONG: list[Step] = [Conv(64), Conv(64, ROW), Conv(64, COLUMN), Conv(96, 3, same=False)]
STEM: list[Step] = [
    halved(32),
    Conv(32, 3, same=False),
    Conv(64, 3),
    [[LARGEST], [halved(96)]],
    [[Conv(64), Conv(96, 3, same=False)], LONG],
    [[halved(192)], [LARGEST]],
]
A = [[Conv(96)], [Conv(64), Conv(96, 3)], [Conv(64), Conv(96, 3), Conv(96, 3)], [AVERAGE, Conv(96)]]
REDUCTION_A = [[halved(384)], [Conv(192), Conv(224, 3), halved(256)], [LARGEST]]
B = [
    [Conv(384)],
    [Conv(192), Conv(224, ROW), Conv(256, COLUMN)],
    [Conv(192), Conv(192, COLUMN), Conv(224, ROW), Conv(224, COLUMN), Conv(256, ROW)],
    [AVERAGE, Conv(128)],
]
LONG_B = [Conv(256), Conv(256, ROW), Conv(320, COLUMN), halved(320)]
REDUCTION_B = [[Conv(192), halved(192)], LONG_B, [LARGEST]]
ENDS = [[Conv(256, SHORT_ROW)], [Conv(256, SHORT_COLUMN)]]
C = [
    [Conv(256)],
    [Conv(384), ENDS],
    [Conv(384), Conv(448, SHORT_COLUMN), Conv(512, SHORT_ROW), ENDS],
    [AVERAGE, Conv(256)],
]


class Branches(nn.Module):
    """Runs its branches on one input and joins their channels."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def chained(steps: list[Any], channels: int, width: int) -> tuple[nn.Sequential, int]:
    """The steps as modules for inputs of so many channels, and the channels of their outputs."""
    layers: list[nn.Module] = []
    for step in steps:
        if isinstance(step, Conv):
            c_out = step.channels * width // PUBLISHED
            layers.append(conv_norm_relu(channels, c_out, step.kernel, step.stride, step.same, EPS))
            channels = c_out
        elif isinstance(step, list):
            branches = [chained(branch, channels, width) for branch in step]
            layers.append(Branches([module for module, _ in branches]))
            channels = sum(c_out for _, c_out in branches)
        else:
            average = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
            layers.append(average if step == AVERAGE else nn.MaxPool2d(3, 2))
    return nn.Sequential(*layers), channels


class InceptionV4(nn.Module):
    def __init__(self, num_classes: int = 1000, width: int = PUBLISHED, dropout: float = 0.2) -> None:
        super().__init__()
        blocks: list[Any] = [A] * 4 + [REDUCTION_A] + [B] * 7 + [REDUCTION_B] + [C] * 3
        stem, channels = chained(STEM, 3, width)
        rest, channels = chained(blocks, channels, width)
        self.features = nn.Sequential(stem, *rest)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(global_average(self.features(x))))
        return logits
