"""ResNet (He et al. 2015), with the stride on the 3x3 convolution of a bottleneck as is usual today, and
ResNeXt (Xie et al. 2016), whose bottlenecks are wider and have that convolution in groups.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dnn_bench.models.vision import global_average, he_init


def _conv(c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(c_out),
    )


class Block(nn.Module):
    """A residual block: `convs` and, where the shape changes, a projection on the shortcut. `groups` and
    `wider` (times `planes`) are those of a bottleneck's 3x3 convolution.
    """

    def __init__(
        self, c_in: int, planes: int, stride: int, bottleneck: bool, groups: int = 1, wider: int = 1
    ) -> None:
        super().__init__()
        c_out = planes * 4 if bottleneck else planes
        if bottleneck:
            inner = planes * wider
            convs = [_conv(c_in, inner, 1), _conv(inner, inner, 3, stride, groups), _conv(inner, c_out, 1)]
        else:
            convs = [_conv(c_in, planes, 3, stride), _conv(planes, c_out, 3)]
        self.convs = nn.ModuleList(convs)
        self.shortcut = _conv(c_in, c_out, 1, stride) if stride != 1 or c_in != c_out else None
        self.c_out = c_out

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv in self.convs[:-1]:
            y = F.relu(conv(y), inplace=True)
        y = self.convs[-1](y)
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)), inplace=True)


class ResNet(nn.Module):
    def __init__(
        self,
        depths: tuple[int, ...],
        bottleneck: bool,
        num_classes: int,
        width: int,
        groups: int = 1,
        wider: int = 1,
    ) -> None:
        super().__init__()
        self.stem = _conv(3, width, 7, stride=2)
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                block = Block(channels, width << stage, stride, bottleneck, groups, wider)
                blocks.append(block)
                channels = block.c_out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x), inplace=True), 3, 2, 1)
        logits: Tensor = self.head(global_average(self.blocks(x)))
        return logits


def resnet18(num_classes: int = 1000, width: int = 64) -> ResNet:
    return ResNet((2, 2, 2, 2), False, num_classes, width)


def resnet50(num_classes: int = 1000, width: int = 64) -> ResNet:
    return ResNet((3, 4, 6, 3), True, num_classes, width)


def resnet101(num_classes: int = 1000, width: int = 64) -> ResNet:
    return ResNet((3, 4, 23, 3), True, num_classes, width)


def resnet152(num_classes: int = 1000, width: int = 64) -> ResNet:
    return ResNet((3, 8, 36, 3), True, num_classes, width)


def resnext50(num_classes: int = 1000, width: int = 64) -> ResNet:
    """32x4d: 32 groups of 4 channels in the first blocks."""
    return ResNet((3, 4, 6, 3), True, num_classes, width, groups=width // 2, wider=2)


def resnext101(num_classes: int = 1000, width: int = 64) -> ResNet:
    """32x8d."""
    return ResNet((3, 4, 23, 3), True, num_classes, width, groups=width // 2, wider=4)
