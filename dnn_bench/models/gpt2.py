"""GPT-2 (Radford et al. 2019); the word embedding is also the output matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dnn_bench.models.transformer import Block, normal_init

POSITIONS = 1024


class Embedding(nn.Module):
    """Words and positions; a module of its own, because it looks at shapes and a model to be cut may not."""

    def __init__(self, vocab_size: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(POSITIONS, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > POSITIONS:
            raise ValueError(f"GPT-2 takes sequences of at most {POSITIONS} tokens, not {length}")
        place = torch.arange(length, device=tokens.device)
        x: Tensor = self.dropout(self.words(tokens) + self.positions(place))
        return x


class GPT2(nn.Module):
    def __init__(self, vocab_size: int, dim: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, dim, dropout)
        self.blocks = nn.Sequential(
            *(
                Block(dim, heads, pre_norm=True, causal=True, dropout=dropout, gelu="tanh")
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(dim)
        normal_init(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return F.linear(self.norm(self.blocks(x)), self.embedding.words.weight)


def gpt2(
    vocab_size: int = 50257, dim: int = 768, depth: int = 12, heads: int = 12, dropout: float = 0.1
) -> GPT2:
    return GPT2(vocab_size, dim, depth, heads, dropout)
