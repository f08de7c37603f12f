"""Small models that the optimizer's programs train, and losses of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.oracle import batch


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 3))


def wide() -> nn.Module:
    """Has a matrix that is large enough to be quantised."""
    return nn.Sequential(nn.Linear(12, 201), nn.ReLU(), nn.Linear(201, 3))


def mlp64() -> nn.Module:
    """In float64, for comparisons within rounding."""
    return mlp().double()


def samples(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """This rank's samples of this step, in the type of the model's first parameter."""
    return batch(rank, step, dtype=next(model.parameters()).dtype)


def loss_of(step: int, scale: float = 1.0) -> Callable[[nn.Module, int], torch.Tensor]:
    return lambda model, rank: model(samples(model, rank, step)).square().mean() * scale


class Odd(nn.Module):
    """Odd sizes, a scalar, an empty parameter, three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 37)
        self.brief = nn.Linear(37, 5).to(torch.bfloat16)
        self.wide = nn.Linear(37, 11, bias=False).double()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.last = nn.Linear(16, 1)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.first(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hidden(x) * self.scalar + self.empty.sum()
        wide = self.wide(x.double()).float()
        return self.last(torch.cat([self.brief(x.bfloat16()).float(), wide], 1))


class Branches(nn.Module):
    """Uses the branches that it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 33)
        self.branch = nn.ModuleList(nn.Linear(33, 33) for _ in range(4))
        self.head = nn.Linear(33, 3)

    def forward(self, x: torch.Tensor, use: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        x = self.stem(x)
        for i in use:
            x = x + torch.tanh(self.branch[i](x))
        return self.head(x)


def branches64() -> nn.Module:
    return Branches().double()


def using(step: int, *use: int) -> Callable[[nn.Module, int], torch.Tensor]:
    return lambda model, rank: model(samples(model, rank, step), use or (0, 1, 2, 3)).square().mean()


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8, sparse=sparse)
        self.out = nn.Linear(8, 30)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(words))


def words64() -> nn.Module:
    return Words(True).double()


def words_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    words = torch.randint(30, (5 + rank,), generator=torch.Generator().manual_seed(10 * step + rank))
    return F.cross_entropy(model(words), words.roll(1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)
