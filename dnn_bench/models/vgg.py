"""VGG-16 (Simonyan and Zisserman 2014): three quarters of the parameters are in one layer."""

from __future__ import annotations

from torch import Tensor, nn

from dnn_bench.models.vision import he_init

STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))  # (convolutions, multiple of the width)
GRID = 7


class VGG(nn.Module):
    def __init__(self, num_classes: int, width: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for depth, multiple in STAGES:
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width * multiple, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width * multiple
            layers.append(nn.MaxPool2d(2))
        hidden = width * 64
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(GRID))
        self.classifier = nn.Sequential(
            nn.Linear(channels * GRID * GRID, hidden),
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


def vgg16(num_classes: int = 1000, width: int = 64, dropout: float = 0.5) -> VGG:
    return VGG(num_classes, width, dropout)
