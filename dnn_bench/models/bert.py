"""BERT (Devlin et al. 2018): with its two pre-training heads, of which the output matrix is also the word
embedding; and with the classification head of fine-tuning, which shares nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dnn_bench.models.transformer import Block, normal_init

EPS = 1e-12
POSITIONS = 512


class BertEmbedding(nn.Module):
    """Words, positions and segments: first half of a sequence sentence A, second half B."""

    def __init__(self, vocab_size: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(POSITIONS, dim)
        self.segments = nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim, eps=EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > POSITIONS:
            raise ValueError(f"BERT takes sequences of at most {POSITIONS} tokens, not {length}")
        place = torch.arange(length, device=tokens.device)
        segment = (2 * place >= length).long()
        x: Tensor = self.dropout(
            self.norm(self.words(tokens) + self.positions(place) + self.segments(segment))
        )
        return x


def _blocks(dim: int, depth: int, heads: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        *(Block(dim, heads, pre_norm=False, fused=False, dropout=dropout, eps=EPS) for _ in range(depth))
    )


def _pooler(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, dim), nn.Tanh())


class Bert(nn.Module):
    """Returns the word logits of every position and the next-sentence logits."""

    def __init__(self, vocab_size: int, dim: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = BertEmbedding(vocab_size, dim, dropout)
        self.blocks = _blocks(dim, depth, heads, dropout)
        self.pooler = _pooler(dim)
        self.follows = nn.Linear(dim, 2)
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim, eps=EPS))
        self.word_bias = nn.Parameter(torch.zeros(vocab_size))
        normal_init(self)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks(self.embedding(tokens))
        words = F.linear(self.transform(x), self.embedding.words.weight, self.word_bias)
        return words, self.follows(self.pooler(x[:, 0]))


class BertClassifier(nn.Module):
    """Returns the logits of each sequence's class."""

    def __init__(
        self, vocab_size: int, dim: int, depth: int, heads: int, dropout: float, num_classes: int
    ) -> None:
        super().__init__()
        self.embedding = BertEmbedding(vocab_size, dim, dropout)
        self.blocks = _blocks(dim, depth, heads, dropout)
        self.pooler = _pooler(dim)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(dim, num_classes))
        normal_init(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens))
        logits: Tensor = self.head(self.pooler(x[:, 0]))
        return logits


def bert(
    vocab_size: int = 30522, dim: int = 768, depth: int = 12, heads: int = 12, dropout: float = 0.1
) -> Bert:
    return Bert(vocab_size, dim, depth, heads, dropout)


def bert_classifier(
    vocab_size: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    dropout: float = 0.1,
    num_classes: int = 2,
) -> BertClassifier:
    return BertClassifier(vocab_size, dim, depth, heads, dropout, num_classes)
