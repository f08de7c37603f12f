"""Convolutional networks: ResNet, ResNeXt, DenseNet, VGG-16, AlexNet, Inception-v4; and an MLP."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BOTTLENECK = 4


def conv_norm_relu(
    c_in: int,
    c_out: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    same: bool = True,
    eps: float = 1e-5,
) -> nn.Sequential:
    """Convolution without bias, batch norm, ReLU; `same` pads so that stride 1 keeps the image's size."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2) if same else 0
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, (height, width), stride, padding, bias=False),
        nn.BatchNorm2d(c_out, eps=eps),
        nn.ReLU(inplace=True),
    )


def he_init(model: nn.Module) -> None:
    """Weights for ReLU networks, so that gradients of deep stacks neither vanish nor grow."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def global_average(x: Tensor) -> Tensor:
    return x.mean(dim=(2, 3))


DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def _conv(c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(c_out),
    )


class Block(nn.Module):
    """A residual block: `convs` and, if the shape changes, a projection on the shortcut."""

    def __init__(self, c_in: int, c_out: int, stride: int, convs: list[nn.Sequential]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.shortcut = _conv(c_in, c_out, 1, stride) if stride != 1 or c_in != c_out else None

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv in self.convs[:-1]:
            y = F.relu(conv(y), inplace=True)
        y = self.convs[-1](y)
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)), inplace=True)


class ResNet(nn.Module):
    """He et al. 2015, with the stride on the 3x3 convolution of a bottleneck as is usual today.

    Has bottlenecks from 50 layers on; with `wider`, wider 3x3 convolutions in groups (ResNeXt)."""

    def __init__(self, layers: int, num_classes: int = 1000, width: int = 64, wider: int = 1) -> None:
        super().__init__()
        self.stem = _conv(3, width, 7, stride=2)
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(DEPTHS[layers]):
            planes = width << stage
            inner, c_out = planes * wider, planes * 4 if layers >= 50 else planes
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                if layers >= 50:
                    middle = _conv(inner, inner, 3, stride, width // 2 if wider > 1 else 1)
                    convs = [_conv(channels, inner, 1), middle, _conv(inner, c_out, 1)]
                else:
                    convs = [_conv(channels, planes, 3, stride), _conv(planes, c_out, 3)]
                blocks.append(Block(channels, c_out, stride, convs))
                channels = c_out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x), inplace=True), 3, 2, 1)
        return self.head(global_average(self.blocks(x)))


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
        self.stem = nn.Sequential(*_conv(3, channels, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
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
        return self.head(global_average(x))


POOL = None
# Convolutions as (multiple of the width, kernel, stride, padding); the pooling kernel; the side of the image
# that the dense layers get. VGG-16 (Simonyan and Zisserman 2014) has three quarters of its parameters in one
# layer. AlexNet has its one-tower form (Krizhevsky 2014).
VGG16 = [(m, 3, 1, 1) if m else POOL for m in (1, 1, 0, 2, 2, 0, 4, 4, 4, 0, 8, 8, 8, 0, 8, 8, 8, 0)]
ALEXNET = [(1, 11, 4, 2), POOL, (3, 5, 1, 2), POOL, (6, 3, 1, 1), (4, 3, 1, 1), (4, 3, 1, 1), POOL]
LAYERS = {"vgg16": (VGG16, 2, 7), "alexnet": (ALEXNET, 3, 6)}


class Plain(nn.Module):
    """Convolutions, then three dense layers."""

    def __init__(self, kind: str, num_classes: int = 1000, width: int = 64, dropout: float = 0.5) -> None:
        super().__init__()
        convolutions, pool, grid = LAYERS[kind]
        layers: list[nn.Module] = []
        channels, hidden = 3, width * 64
        for entry in convolutions:
            if entry is POOL:
                layers.append(nn.MaxPool2d(pool, 2))
                continue
            multiple, kernel, stride, padding = entry
            conv = nn.Conv2d(channels, width * multiple, kernel, stride, padding)
            layers += [conv, nn.ReLU(inplace=True)]
            channels = width * multiple
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(grid))
        dense: list[nn.Module] = []
        for size in (channels * grid * grid, hidden):
            dense += [nn.Linear(size, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        self.classifier = nn.Sequential(*dense, nn.Linear(hidden, num_classes))
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def mlp(width: int = 1024, depth: int = 8, num_classes: int = 10) -> nn.Sequential:
    """A stack of equal linear layers with a small head: the plainest communication pattern there is."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


# -- Inception-v4 (Szegedy et al. 2016), described by its branches -------------------------------------------

# The published stem has width 32.

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
        return self.head(self.dropout(global_average(self.features(x))))
