"""Bandwidth of packing real models' gradients, beside torch's ways and a plain copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from comm_core.cuda import BucketCopy, one_after_another
from dnn_bench import models

WARM_UP = 3


def tensors_of(model: str, device: torch.device) -> list[torch.Tensor]:
    """Random gradients in the sizes of a model's parameters."""
    with torch.device("meta"):
        sizes = [p.numel() for p in models.build(model).parameters()]
    generator = torch.Generator(device).manual_seed(1)
    return [torch.randn(size, generator=generator, device=device) for size in sizes]


def rows(model: str, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Measure every way to pack. The result of each kernel is checked before it is timed.

    ``bytes`` are read and written by one call; ``to_copy`` is its bandwidth over a plain copy's.
    """
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
    found: list[dict[str, Any]] = []
    for what, act, moved in ways:
        seconds, size = seconds_of(act, device, repeats), moved * total
        copy = found[0] if found else {"bytes": size, "seconds": seconds}
        to_copy = (size / seconds) / (copy["bytes"] / copy["seconds"])
        row = {"model": model, "what": what, "seconds": seconds, "bytes": size, "to_copy": to_copy}
        found.append(row)
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


def seconds_of(act: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of the repetitions, after some that do not count."""
    for _ in range(WARM_UP):
        act()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            act()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        act()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:], strict=False))
