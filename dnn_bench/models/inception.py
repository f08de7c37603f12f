"""Inception-v4 (Szegedy et al. 2016). All channel counts are multiples of the stem's width, 32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dnn_bench.models.vision import ConvNormRelu, global_average, he_init

Kernel = int | tuple[int, int]
EPS = 1e-3
ROW, COLUMN = (1, 7), (7, 1)
SHORT_ROW, SHORT_COLUMN = (1, 3), (3, 1)


class Branches(nn.Module):
    """Runs its branches on one input and joins their channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class Maker:
    """Makes the network's pieces at a scale: channel counts are given for the published width."""

    def __init__(self, width: int) -> None:
        self.width = width

    def scale(self, channels: int) -> int:
        return channels if channels == 3 else channels * self.width // 32

    def conv(self, c_in: int, c_out: int, kernel: Kernel, stride: int = 1, same: bool = True) -> ConvNormRelu:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if same else 0
        return ConvNormRelu(
            self.scale(c_in), self.scale(c_out), kernel, stride=stride, padding=padding, eps=EPS
        )

    def chain(self, c_in: int, *steps: tuple[int, Kernel]) -> nn.Sequential:
        """Stride-1 convolutions that keep the image's size."""
        layers = []
        for c_out, kernel in steps:
            layers.append(self.conv(c_in, c_out, kernel))
            c_in = c_out
        return nn.Sequential(*layers)

    def pooled(self, c_in: int, c_out: int) -> nn.Sequential:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), self.conv(c_in, c_out, 1))

    def halve(self, c_in: int, c_out: int) -> ConvNormRelu:
        return self.conv(c_in, c_out, 3, stride=2, same=False)

    def stem(self) -> nn.Sequential:
        return nn.Sequential(
            self.halve(3, 32),
            self.conv(32, 32, 3, same=False),
            self.conv(32, 64, 3),
            Branches(nn.MaxPool2d(3, 2), self.halve(64, 96)),
            Branches(
                nn.Sequential(self.conv(160, 64, 1), self.conv(64, 96, 3, same=False)),
                nn.Sequential(
                    self.chain(160, (64, 1), (64, ROW), (64, COLUMN)), self.conv(64, 96, 3, same=False)
                ),
            ),
            Branches(self.halve(192, 192), nn.MaxPool2d(3, 2)),
        )

    def block_a(self) -> Branches:
        return Branches(
            self.conv(384, 96, 1),
            self.chain(384, (64, 1), (96, 3)),
            self.chain(384, (64, 1), (96, 3), (96, 3)),
            self.pooled(384, 96),
        )

    def reduction_a(self) -> Branches:
        long = nn.Sequential(self.chain(384, (192, 1), (224, 3)), self.halve(224, 256))
        return Branches(self.halve(384, 384), long, nn.MaxPool2d(3, 2))

    def block_b(self) -> Branches:
        return Branches(
            self.conv(1024, 384, 1),
            self.chain(1024, (192, 1), (224, ROW), (256, COLUMN)),
            self.chain(1024, (192, 1), (192, COLUMN), (224, ROW), (224, COLUMN), (256, ROW)),
            self.pooled(1024, 128),
        )

    def reduction_b(self) -> Branches:
        short = nn.Sequential(self.conv(1024, 192, 1), self.halve(192, 192))
        long = nn.Sequential(self.chain(1024, (256, 1), (256, ROW), (320, COLUMN)), self.halve(320, 320))
        return Branches(short, long, nn.MaxPool2d(3, 2))

    def fork(self, c_in: int) -> Branches:
        return Branches(self.conv(c_in, 256, SHORT_ROW), self.conv(c_in, 256, SHORT_COLUMN))

    def block_c(self) -> Branches:
        return Branches(
            self.conv(1536, 256, 1),
            nn.Sequential(self.conv(1536, 384, 1), self.fork(384)),
            nn.Sequential(self.chain(1536, (384, 1), (448, SHORT_COLUMN), (512, SHORT_ROW)), self.fork(512)),
            self.pooled(1536, 256),
        )


class InceptionV4(nn.Module):
    def __init__(self, num_classes: int, width: int, dropout: float) -> None:
        super().__init__()
        make = Maker(width)
        self.features = nn.Sequential(
            make.stem(),
            *(make.block_a() for _ in range(4)),
            make.reduction_a(),
            *(make.block_b() for _ in range(7)),
            make.reduction_b(),
            *(make.block_c() for _ in range(3)),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(make.scale(1536), num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(global_average(self.features(x))))
        return logits


def inception_v4(num_classes: int = 1000, width: int = 32, dropout: float = 0.2) -> InceptionV4:
    return InceptionV4(num_classes, width, dropout)
