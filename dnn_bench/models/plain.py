"""Models whose layers simply follow each other: VGG-16, AlexNet and a multi-layer perceptron."""

from __future__ import annotations

from torch import Tensor, nn

from dnn_bench.models.vision import he_init

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
