"""AlexNet in its one-tower form (Krizhevsky 2014)."""

from __future__ import annotations

from torch import Tensor, nn

GRID = 6


class AlexNet(nn.Module):
    def __init__(self, num_classes: int, width: int, dropout: float) -> None:
        super().__init__()
        c1, c2, c3, c4 = width, width * 3, width * 6, width * 4
        hidden = width * 64
        self.features = nn.Sequential(
            nn.Conv2d(3, c1, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(c1, c2, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(c2, c3, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(c3, c4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(c4, c4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.AdaptiveAvgPool2d(GRID),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(c4 * GRID * GRID, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def alexnet(num_classes: int = 1000, width: int = 64, dropout: float = 0.5) -> AlexNet:
    return AlexNet(num_classes, width, dropout)
