"""Vision transformer (Dosovitskiy et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dnn_bench.models.transformer import Block, normal_init


class ViT(nn.Module):
    def __init__(
        self, num_classes: int, image_size: int, patch: int, dim: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError(f"the image size must be a multiple of the patch size {patch}, not {image_size}")
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, (image_size // patch) ** 2 + 1, dim).normal_(std=0.02))
        self.blocks = nn.Sequential(
            *(Block(dim, heads, pre_norm=True, dropout=dropout, eps=1e-6) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        normal_init(self)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


def vit(
    num_classes: int = 1000,
    image_size: int = 224,
    patch: int = 16,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    dropout: float = 0.0,
) -> ViT:
    return ViT(num_classes, image_size, patch, dim, depth, heads, dropout)
