"""Bandwidth of pack, unpack and update on real models' tensors, beside torch's ways and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from comm_core.cuda import BucketCopy, Hyper, Part, ShardUpdate, one_after_another
from dnn_bench import models
from dnn_bench.gpu.clock import seconds_of


@dataclass(frozen=True)
class KernelRow:
    """``bytes`` read and written by one call; ``to_copy`` is its bandwidth over that of a copy in this
    run.
    """

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
    """Each result is checked before it is timed."""
    tensors = tensors_of(model, device)
    total = sum(t.numel() for t in tensors)
    flat, other = (torch.zeros(total, device=device) for _ in range(2))
    copy_rate = 8 * total / seconds_of(lambda: other.copy_(flat), device, repeats)

    def row(what: str, act: Callable[[], object], bytes_: int) -> KernelRow:
        seconds = seconds_of(act, device, repeats)
        return KernelRow(model, what, seconds, bytes_, bytes_ / seconds / copy_rate)

    found = [row("copy of the whole", lambda: other.copy_(flat), 8 * total)]
    for kind in (torch.float32, torch.bfloat16):
        found += _copies(tensors, torch.zeros(total, dtype=kind, device=device), row)
    found += _torchs_copies(tensors, flat, row)
    return found + _updates(tensors, row)


Row = Callable[[str, Callable[[], object], int], KernelRow]


def _torchs_copies(tensors: list[torch.Tensor], flat: torch.Tensor, row: Row) -> list[KernelRow]:
    """What packing and unpacking are without these kernels."""
    sizes = [t.numel() for t in tensors]
    half = torch.empty_like(flat, dtype=torch.bfloat16)
    views, halves, back = flat.split(sizes), half.split(sizes), [torch.empty_like(t) for t in tensors]
    total = flat.numel()
    return [
        row("torch._foreach_copy_ in", lambda: torch._foreach_copy_(views, tensors), 8 * total),
        row("torch._foreach_copy_ in, bfloat16", lambda: torch._foreach_copy_(halves, tensors), 6 * total),
        row("torch._foreach_copy_ out", lambda: torch._foreach_copy_(back, views), 8 * total),
        row("torch._foreach_copy_ out, bfloat16", lambda: torch._foreach_copy_(back, halves), 6 * total),
        row("torch.cat", lambda: torch.cat(tensors, out=flat), 8 * total),
    ]


def _copies(tensors: Sequence[torch.Tensor], bucket: torch.Tensor, row: Row) -> list[KernelRow]:
    name = str(bucket.dtype).removeprefix("torch.")
    copy = BucketCopy(one_after_another([t.numel() for t in tensors]), bucket, len(tensors), torch.float32)
    back = [torch.empty_like(t) for t in tensors]
    copy.pack(tensors, 0.5)
    wanted = (torch.cat(list(tensors)) * 0.5).to(bucket.dtype)
    _same(bucket, wanted, f"pack to {name}")
    copy.unpack(back, 2.0)
    _same(torch.cat(back), wanted.float() * 2.0, f"unpack from {name}")
    moved = bucket.numel() * (4 + bucket.element_size())
    return [
        row(f"pack to {name}", lambda: copy.pack(tensors, 0.5), moved),
        row(f"pack to {name}, norm and count", lambda: copy.pack(tensors, 0.5, stats=True), moved),
        row(f"unpack from {name}", lambda: copy.unpack(back, 2.0), moved),
    ]


def _same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.equal(found, wanted):
        worst = (found.float() - wanted.float()).abs().max().item()
        raise ValueError(f"{what} is wrong by up to {worst}; nothing was timed")


_ADAM = {"betas": (0.9, 0.999), "lr": 1e-3, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
_SGD = {
    "lr": 1e-3,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.01,
    "maximize": False,
    "nesterov": False,
}


def _updates(tensors: Sequence[torch.Tensor], row: Row) -> list[KernelRow]:
    total = sum(t.numel() for t in tensors)
    adam, sgd = Hyper.adam(_ADAM, True), Hyper.sgd(_SGD)
    halves = [t.bfloat16() for t in tensors]
    ways: list[tuple[str, Any, Hyper, Any, int]] = [
        ("adam on shards", "adam", adam, lambda: [_part(t, 2) for t in tensors], 28),
        ("sgd on shards", "sgd", sgd, lambda: [_part(t, 1) for t in tensors], 20),
        (
            "adam on shards, bfloat16 with masters",
            "adam",
            adam,
            lambda: [_part(t, 2, master=True) for t in halves],
            30,
        ),
    ]
    found = []
    for name, rule, hyper, parts, moved in ways:
        step = _checked(rule, hyper, parts)
        found.append(row(name, lambda step=step, hyper=hyper: step([hyper]), moved * total))  # type: ignore[misc]
    return found + _torchs_updates(tensors, row)


def _part(grad: torch.Tensor, states: int, master: bool = False) -> Part:
    first, second = (torch.zeros_like(grad, dtype=torch.float32) if n < states else None for n in range(2))
    weight = grad + 1
    steps = torch.zeros((), device=grad.device)
    return Part(grad, weight, first, second, weight.float() if master else None, steps)


def _checked(rule: Any, hyper: Hyper, parts: Callable[[], list[Part]]) -> ShardUpdate:
    """The kernel's update, after one step that gave what torch's operations give."""
    found, wanted = (ShardUpdate(rule, parts(), 1, launcher) for launcher in ("choose", None))
    for update in (found, wanted):
        update([hyper])
    for part, reference in zip(found.parts, wanted.parts, strict=True):
        exact, other = (p.weight if p.master is None else p.master for p in (part, reference))
        torch.testing.assert_close(exact, other, rtol=1e-5, atol=1e-6)
    return found


def _torchs_updates(tensors: Sequence[torch.Tensor], row: Row) -> list[KernelRow]:
    total = sum(t.numel() for t in tensors)
    found = []
    torchs: list[tuple[str, Any, dict[str, Any], int]] = [
        ("torch AdamW, fused", torch.optim.AdamW, {}, 28),
        ("torch SGD, fused", torch.optim.SGD, {"momentum": 0.9, "lr": 1e-3}, 20),
    ]
    for name, kind, options, moved in torchs:
        params = [torch.nn.Parameter(t + 1) for t in tensors]
        for param, grad in zip(params, tensors, strict=True):
            param.grad = grad
        optimizer: Any = kind(params, fused=True, **options)
        found.append(row(name, optimizer.step, moved * total))
    return found
