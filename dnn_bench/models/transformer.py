"""Transformers: ViT (Dosovitskiy et al. 2020), BERT (Devlin et al. 2018) and GPT-2 (Radford et al. 2019).

As language models, BERT and GPT-2 tie their output matrix to the word embedding. With `num_classes` they have
a classification head instead, which shares nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BERT_EPS = 1e-12


class SelfAttention(nn.Module):
    """Multi-head self-attention; `fused` computes queries, keys and values with one matrix."""

    def __init__(self, dim: int, heads: int, causal: bool, fused: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        sizes = [3 * dim] if fused else [dim] * 3
        self.project_in = nn.ModuleList(nn.Linear(dim, size) for size in sizes)
        self.project_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = torch.cat([project(x) for project in self.project_in], dim=-1)
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.project_out(y.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """Attention and feed-forward with residuals, as `kind` has them: `vit`, `bert` or `gpt2`."""

    def __init__(self, kind: str, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.pre_norm = kind != "bert"
        self.attention = SelfAttention(dim, heads, causal=kind == "gpt2", fused=kind != "bert")
        gelu = nn.GELU("tanh" if kind == "gpt2" else "none")
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), gelu, nn.Linear(4 * dim, dim))
        eps = {"vit": 1e-6, "bert": BERT_EPS, "gpt2": 1e-5}[kind]
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=eps) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, (self.attention, self.feed_forward), strict=True):
            x = x + self.dropout(layer(norm(x))) if self.pre_norm else norm(x + self.dropout(layer(x)))
        return x


def blocks(kind: str, dim: int, depth: int, heads: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(*(Block(kind, dim, heads, dropout) for _ in range(depth)))


def normal_init(model: nn.Module, std: float = 0.02) -> None:
    """Small normal weights and zero biases, as BERT and GPT-2 start."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class ViT(nn.Module):
    def __init__(
        self,
        num_classes: int = 1000,
        image_size: int = 224,
        patch: int = 16,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError(f"the image size must be a multiple of the patch size {patch}, not {image_size}")
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, (image_size // patch) ** 2 + 1, dim).normal_(std=0.02))
        self.blocks = blocks("vit", dim, depth, heads, dropout)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        normal_init(self)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.positions
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class Embedding(nn.Module):
    """Words and positions; for BERT also segments: sentence A is the first half of a sequence, B the second.

    It looks at shapes, which a model that is cut into stages may do inside of modules like this one only.
    """

    def __init__(self, kind: str, vocab_size: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.most = {"bert": 512, "gpt2": 1024}[kind]
        self.words = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(self.most, dim)
        self.segments = nn.Embedding(2, dim) if kind == "bert" else None
        self.norm = nn.LayerNorm(dim, eps=BERT_EPS) if kind == "bert" else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.most:
            raise ValueError(f"the model takes sequences of at most {self.most} tokens, not {length}")
        place = torch.arange(length, device=tokens.device)
        x = self.words(tokens) + self.positions(place)
        if self.segments is not None:
            x = x + self.segments((2 * place >= length).long())
        return self.dropout(self.norm(x))


class LanguageModel(nn.Module):
    """BERT returns the logits of every position's word and of the next sentence, GPT-2 those of the token
    that follows each position. With `num_classes`, both return the logits of each sequence's class.
    """

    def __init__(
        self,
        kind: str,
        vocab_size: int,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
        num_classes: int = 0,
    ) -> None:
        super().__init__()
        self.bert, self.num_classes = kind == "bert", num_classes
        self.embedding = Embedding(kind, vocab_size, dim, dropout)
        self.blocks = blocks(kind, dim, depth, heads, dropout)
        self.norm = nn.Identity() if self.bert else nn.LayerNorm(dim)
        if self.bert:
            self.pooler = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        if num_classes:
            dropped = nn.Dropout(dropout if self.bert else 0.0)
            self.head = nn.Sequential(dropped, nn.Linear(dim, num_classes, bias=self.bert))
        elif self.bert:
            self.follows = nn.Linear(dim, 2)
            self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim, eps=BERT_EPS))
        if not num_classes:
            self.words = nn.Linear(dim, vocab_size, bias=self.bert)
            self.words.weight = self.embedding.words.weight
        normal_init(self)

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.norm(self.blocks(self.embedding(tokens)))
        summary = self.pooler(x[:, 0]) if self.bert else x[:, -1]
        if self.num_classes:
            return self.head(summary)
        if not self.bert:
            return self.words(x)
        return self.words(self.transform(x)), self.follows(summary)
