"""A recommendation model in the shape of DLRM (Naumov et al. 2019): one embedding is nearly all of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ClickModel(nn.Module):
    """Predicts whether a user clicks: embeds every field of a sample, multiplies all pairs, then an MLP."""

    pairs: Tensor

    def __init__(self, vocab_size: int, fields: int, dim: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, dim)
        self.register_buffer("pairs", torch.triu_indices(fields, fields, 1), persistent=False)
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
        x = self.table(ids)
        products = (x @ x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.mlp(torch.cat([x.flatten(1), products], dim=1))
        return logits
