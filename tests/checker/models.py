"""The small models of random programs, and their data: float64, few weights, no global random state."""

from __future__ import annotations

import threading
import zlib
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, SAMPLES, WORDS = 8, 4, 3, 12
LAYERS = 3
JIT = threading.Lock()
"""torch.jit is for one thread at a time."""


def number(*parts: Any) -> int:
    """Return a number that depends on these values alone."""
    return zlib.crc32(repr(parts).encode())


def noise(shape: Any, *key: Any) -> torch.Tensor:
    """Return the same random tensor for the same key, in any process and thread."""
    generator = torch.Generator().manual_seed(number(*key))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Bomb(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a bomb in the backward")


class Block(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if norm else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        return x if self.norm is None else self.norm(x)


class Net(nn.Module):
    """A front by ``kind`` (dense, table, sparse, image), blocks, two heads of which a loss uses one, a tail.

    ``late`` is used from ``uses_late`` on: a script adds it to its optimizer later.
    """

    def __init__(self, kind: str, tied: bool) -> None:
        super().__init__()
        self.kind, self.uses_late = kind, False
        self.gain = nn.Parameter(torch.ones(()))
        if kind == "image":
            self.front: nn.Module = nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, WIDTH, 3, padding=1)
            )
        elif kind in ("table", "sparse"):
            self.front = nn.Embedding(WORDS, WIDTH, sparse=kind == "sparse")
        else:
            self.front = nn.Linear(6, WIDTH)
        self.body = nn.ModuleList(Block(norm=i == 1) for i in range(LAYERS))
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.late = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.tail = nn.Linear(WIDTH, WORDS, bias=False)
            self.tail.weight = self.front.weight
        else:
            self.tail = nn.Linear(WIDTH, CLASSES)

    def forward(
        self,
        x: torch.Tensor,
        branch: str = "left",
        twice: bool = False,
        checkpointed: str = "no",
        bomb: int | None = None,
    ) -> torch.Tensor:
        """``bomb``: before which block the backward raises; LAYERS: after all, -1: before the front."""

        def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if checkpointed == "no":
                return module(x)
            return checkpoint(module, x, use_reentrant=checkpointed == "reentrant", preserve_rng_state=False)

        x = self.front(x)
        if self.kind == "image":
            x = x.mean((2, 3))
        for place, block in enumerate(self.body):
            if bomb == place:
                x = Bomb.apply(x)
            x = call(block, x)
            if twice and place == 1:
                x = call(block, x)
        if bomb == LAYERS:
            x = Bomb.apply(x)
        if branch != "right":
            x = self.left(x) + (self.right(x) if branch == "both" else 0.0)
        else:
            x = self.right(x)
        if self.uses_late:
            x = self.late(x)
        x = self.tail(torch.tanh(x)) * self.gain
        return Bomb.apply(x) if bomb == LAYERS + 1 else x


def build(kind: str, tied: bool, *key: Any) -> Net:
    """Return a net with weights that depend on the key alone."""
    with torch.no_grad():
        net = Net(kind, tied).double()
        for name, param in net.named_parameters():
            base = 1.0 if name == "gain" or "norm.weight" in name else 0.0
            param.copy_(base + 0.3 * noise(param.shape, name, *key))
    return net


def batch(kind: str, *key: Any) -> torch.Tensor:
    """Return the input of a batch."""
    if kind in ("table", "sparse"):
        generator = torch.Generator().manual_seed(number(*key))
        return torch.randint(0, WORDS, (SAMPLES,), generator=generator)
    return noise((SAMPLES, 2, 4, 4) if kind == "image" else (SAMPLES, 6), *key)
