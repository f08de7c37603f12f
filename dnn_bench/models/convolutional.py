"""Convolutional networks: ResNet, ResNeXt, DenseNet, VGG-16 and AlexNet; and a multi-layer perceptron."""

from __future__ import annotations

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
        logits: Tensor = self.head(global_average(self.blocks(x)))
        return logits


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
        self.classifier = nn.Sequential(
            nn.Linear(channels * grid * grid, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def mlp(width: int = 1024, depth: int = 8, num_classes: int = 10) -> nn.Sequential:
    """A stack of equal linear layers with a small head: the plainest communication pattern there is."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
