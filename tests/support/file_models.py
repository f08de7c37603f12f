"""Small models for small data, to be named on command lines."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


def convolutions(num_classes: int, width: int = 12) -> nn.Module:
    def block(c_in: int, c_out: int) -> nn.Module:
        parts = nn.Conv2d(c_in, c_out, 3, padding=1), nn.GroupNorm(4, c_out), nn.ReLU(), nn.MaxPool2d(2)
        return nn.Sequential(*parts)

    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * width, num_classes)
    wide = {"first": block(3, width), "second": block(width, 2 * width), "third": block(2 * width, 4 * width)}
    return nn.Sequential(OrderedDict([*wide.items(), ("head", nn.Sequential(*pooled))]))


def pixels(num_classes: int, width: int = 12) -> nn.Module:
    def block(c_in: int, c_out: int, dilation: int) -> list[nn.Module]:
        wide = nn.Conv2d(c_in, c_out, 3, padding=dilation, dilation=dilation)
        return [wide, nn.GroupNorm(4, c_out), nn.ReLU()]

    return nn.Sequential(
        *block(3, width, 1), *block(width, 2 * width, 2), *block(2 * width, 2 * width, 4),
        nn.Conv2d(2 * width, num_classes, 1),
    )  # fmt: skip


class Words(nn.Module):
    """The mean of the words' vectors."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(vocab_size, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.vectors(tokens).mean(1)


def words(vocab_size: int, num_classes: int, dim: int = 64) -> nn.Module:
    return nn.Sequential(
        Words(vocab_size, dim), nn.Linear(dim, dim), nn.Tanh(), nn.Dropout(0.1),
        nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, num_classes),
    )  # fmt: skip


class Halves(nn.Module):
    """How the mean vectors of a sequence's two halves differ."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(vocab_size, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        one, other = self.vectors(tokens).chunk(2, dim=1)
        return (one.mean(1) - other.mean(1)).abs()


def pairs(vocab_size: int, num_classes: int, dim: int = 32, depth: int = 4) -> nn.Module:
    hidden = [part for _ in range(depth - 2) for part in (nn.Linear(dim, dim), nn.Tanh())]
    return nn.Sequential(Halves(vocab_size, dim), nn.Dropout(0.1), *hidden, nn.Linear(dim, num_classes))
