"""A recommendation model in the shape of DLRM (Naumov et al. 2019): one embedding is nearly all of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Pairs(nn.Module):
    """Multiplies every field with every other; appends the products to the fields."""

    pairs: Tensor

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.triu_indices(fields, fields, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        products = (x @ x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return torch.cat([x.flatten(1), products], dim=1)


class ClickModel(nn.Module):
    """Predicts whether a user clicks: embeds every field of a sample, multiplies all pairs, then an MLP."""

    def __init__(self, vocab_size: int, fields: int, dim: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, dim)
        self.interaction = Pairs(fields)
        width = fields * dim + fields * (fields - 1) // 2
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(inplace=True),
            nn.Linear(hidden // 2, 2),
        )
        nn.init.normal_(self.table.weight, std=dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.interaction(self.table(ids)))
