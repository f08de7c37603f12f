"""ResNet (He et al. 2015), with the stride on the 3x3 convolution of a bottleneck as is usual today, and
ResNeXt (Xie et al. 2016), whose bottlenecks are wider and have that convolution in groups.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dnn_bench.models.vision import global_average, he_init

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
    """Has bottlenecks from 50 layers on; with `wider`, wider 3x3 convolutions in groups (ResNeXt)."""

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
