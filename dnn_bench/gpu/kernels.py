"""Bandwidth of packing real models' gradients, beside torch's ways and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from comm_core.cuda import BucketCopy, one_after_another
from dnn_bench import models
from dnn_bench.gpu.clock import seconds_of


@dataclass(frozen=True)
class KernelRow:
    """``bytes`` are read and written by one call; ``to_copy`` is its bandwidth over a plain copy's."""

    model: str
    what: str
    seconds: float
    bytes: int
    to_copy: float


def tensors_of(model: str, device: torch.device) -> list[torch.Tensor]:
    """Random gradients in the sizes of a model's parameters."""
    with torch.device("meta"):
        sizes = [p.numel() for p in models.build(model).parameters()]
    generator = torch.Generator(device).manual_seed(1)
    return [torch.randn(size, generator=generator, device=device) for size in sizes]


def rows(model: str, device: torch.device, repeats: int) -> list[KernelRow]:
    """Measure every way to pack. The result of each kernel is checked before it is timed."""
    tensors = tensors_of(model, device)
    total = sum(t.numel() for t in tensors)
    flat, other = (torch.zeros(total, device=device) for _ in range(2))
    half = torch.empty_like(flat, dtype=torch.bfloat16)
    sizes = [t.numel() for t in tensors]
    views, halves = flat.split(sizes), half.split(sizes)
    ways: list[tuple[str, Callable[[], object], int]] = [
        ("copy of the whole", lambda: other.copy_(flat), 8),
        ("pack to float32", _packing(tensors, flat), 8),
        ("pack to bfloat16", _packing(tensors, half), 6),
        ("torch._foreach_copy_", lambda: torch._foreach_copy_(views, tensors), 8),
        ("torch._foreach_copy_ to bfloat16", lambda: torch._foreach_copy_(halves, tensors), 6),
        ("torch.cat", lambda: torch.cat(tensors, out=flat), 8),
    ]
    found: list[KernelRow] = []
    for what, act, moved in ways:
        seconds = seconds_of(act, device, repeats)
        rate = moved * total / seconds
        copy_rate = found[0].bytes / found[0].seconds if found else rate
        found.append(KernelRow(model, what, seconds, moved * total, rate / copy_rate))
    return found


def _packing(tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> Callable[[], object]:
    """A call that packs, after one whose result was right."""
    copy = BucketCopy(one_after_another([t.numel() for t in tensors]), bucket, len(tensors), torch.float32)
    copy.pack(tensors, 0.5)
    wanted = (torch.cat(list(tensors)) * 0.5).to(bucket.dtype)
    if not torch.equal(bucket, wanted):
        worst = (bucket.float() - wanted.float()).abs().max().item()
        raise ValueError(f"packing to {bucket.dtype} is wrong by up to {worst}; nothing was timed")
    return lambda: copy.pack(tensors, 0.5)
