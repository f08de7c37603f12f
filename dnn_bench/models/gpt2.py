"""GPT-2 (Radford et al. 2019): as a language model, whose output matrix is also the word embedding; and with
a classification head on the last token, which shares nothing.
"""

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


def _blocks(dim: int, depth: int, heads: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        *(Block(dim, heads, pre_norm=True, causal=True, dropout=dropout, gelu="tanh") for _ in range(depth))
    )


class GPT2(nn.Module):
    """Returns the logits of the token that follows each position."""

    def __init__(self, vocab_size: int, dim: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, dim, dropout)
        self.blocks = _blocks(dim, depth, heads, dropout)
        self.norm = nn.LayerNorm(dim)
        normal_init(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return F.linear(self.norm(self.blocks(x)), self.embedding.words.weight)


class GPT2Classifier(nn.Module):
    """Returns the logits of each sequence's class."""

    def __init__(
        self, vocab_size: int, dim: int, depth: int, heads: int, dropout: float, num_classes: int
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, dim, dropout)
        self.blocks = _blocks(dim, depth, heads, dropout)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes, bias=False)
        normal_init(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.embedding(tokens)))
        logits: Tensor = self.head(x[:, -1])
        return logits


def gpt2(
    vocab_size: int = 50257, dim: int = 768, depth: int = 12, heads: int = 12, dropout: float = 0.1
) -> GPT2:
    return GPT2(vocab_size, dim, depth, heads, dropout)


def gpt2_classifier(
    vocab_size: int = 50257,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    dropout: float = 0.1,
    num_classes: int = 2,
) -> GPT2Classifier:
    return GPT2Classifier(vocab_size, dim, depth, heads, dropout, num_classes)
