"""The transformer block that ViT, BERT and GPT-2 share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Multi-head self-attention; `fused` computes queries, keys and values with one matrix."""

    def __init__(self, dim: int, heads: int, *, causal: bool, fused: bool) -> None:
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
        out: Tensor = self.project_out(y.transpose(1, 2).reshape(batch, length, dim))
        return out


class Block(nn.Module):
    """Attention and feed-forward with residuals; `pre_norm` as in GPT-2 and ViT, otherwise as in BERT."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        pre_norm: bool,
        dropout: float,
        causal: bool = False,
        fused: bool = True,
        eps: float = 1e-5,
        gelu: str = "none",
    ) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.attention = SelfAttention(dim, heads, causal=causal, fused=fused)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(gelu), nn.Linear(4 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=eps) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, (self.attention, self.feed_forward), strict=True):
            x = x + self.dropout(layer(norm(x))) if self.pre_norm else norm(x + self.dropout(layer(x)))
        return x


def normal_init(model: nn.Module, std: float = 0.02) -> None:
    """Small normal weights and zero biases, as BERT and GPT-2 start."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
