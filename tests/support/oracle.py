"""What plain PyTorch does, in one process: the truth that distributed training is compared with.

``Oracle`` replays every rank's backward on one model, sums the gradients in rank order as the direct
transport promises, and takes the plain optimizer's step: equal bit for bit. Large batches (the mean loss over
all ranks' samples) agree within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tests.support.rounding import rounding

Loss = Callable[[nn.Module, int, int], "torch.Tensor | None"]
"""Of a model, a rank and a step. None: this rank does no backward."""


class Oracle:
    """One model that learns what all ranks learn together."""

    def __init__(
        self, model: nn.Module, optimizer: Any, ranks: int, sums: bool = False, predivide: float = 1.0
    ) -> None:
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.scale = 1.0 if sums else 1.0 / ranks
        self.predivide = predivide

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def backward(self, *losses: Callable[[nn.Module, int], torch.Tensor | None]) -> None:
        """Adds to ``p.grad`` what the ranks' backwards of these losses, accumulated locally, give
        together.
        """
        before = [p.grad for p in self.params]
        by_rank = [self._local(rank, losses) for rank in range(self.ranks)]
        for p, earlier, grads in zip(self.params, before, zip(*by_rank, strict=True), strict=True):
            total = self.reduced(grads)
            p.grad = earlier if total is None else total if earlier is None else earlier + total

    def _local(self, rank: int, losses: Sequence[Any]) -> list[torch.Tensor | None]:
        for p in self.model.parameters():
            p.grad = None
        for loss in losses:
            value = loss(self.model, rank)
            if value is not None:
                value.backward()
        return [p.grad for p in self.params]

    def reduced(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The sum in rank order, formed in fp32 for halves, rounded once; None where no rank has a
        gradient.
        """
        present = [g for g in grads if g is not None]
        if not present:
            return None
        dtype = present[0].dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        dense = [torch.zeros_like(present[0]) if g is None else g for g in grads]
        if dense[0].is_sparse:
            return torch.stack([g.to_dense() for g in dense]).sum(0) * self.scale
        total = dense[0].to(wide)
        for grad in dense[1:]:
            total = total + grad.to(wide)
        return (total * self.scale).to(dtype) if self.scale != 1.0 else total.to(dtype)

    def step(self, *losses: Callable[[nn.Module, int], torch.Tensor | None]) -> None:
        """Backward, step, ``zero_grad``."""
        self.backward(*losses)
        self.optimizer.step()
        self.optimizer.zero_grad()


def batch(
    rank: int, step: int, shape: Sequence[int] = (6, 12), dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """This rank's samples of this step: any process can make any rank's."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64
    ).to(dtype)


def seeded(build: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def values(model: nn.Module | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    tensors = model.state_dict().values() if isinstance(model, nn.Module) else model
    return [t.detach().clone() for t in tensors]


def fingerprint(tensors: nn.Module | Iterable[torch.Tensor]) -> str:
    """Differs when one bit differs."""
    import hashlib

    text = hashlib.sha256()
    for tensor in values(tensors):
        text.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return text.hexdigest()[:16]


def assert_same_bits(actual: Any, expected: Any, what: str = "parameters") -> None:
    for number, (a, e) in enumerate(zip(values(actual), values(expected), strict=True)):
        if not torch.equal(a, e):
            worst = float((a.double() - e.double()).abs().max())
            raise AssertionError(
                f"{what}: tensor {number} of shape {tuple(a.shape)} {a.dtype} differs by up to {worst}"
            )


def terms_of(model: nn.Module, steps: int) -> int:
    """Terms of all sums in these steps: forward and backward of each parameter, at most all elements each."""
    params = list(model.parameters())
    return sum(p.numel() for p in params) * 2 * len(params) * steps


def assert_close(
    actual: Any, expected: Any, terms: int, what: str = "parameters", worth: float = 1e-3
) -> None:
    """Each tensor within its type's rounding of sums of ``terms``, as a share of its largest value.

    A largest value below ``worth`` counts as that much.
    """
    for number, (a, e) in enumerate(zip(values(actual), values(expected), strict=True)):
        if a.numel() == 0:
            continue
        if not e.is_floating_point():
            assert torch.equal(a, e), f"{what}: tensor {number} is {a}, not {e}"
            continue
        worst, scale = float((a.double() - e.double()).abs().max()), max(float(e.double().abs().max()), worth)
        allowed = rounding(e.dtype, terms)
        if not worst <= allowed * scale:
            raise AssertionError(
                f"{what}: tensor {number} of shape {tuple(a.shape)} {a.dtype} differs by {worst},"
                f" {worst / scale:.2e} of its largest value; rounding explains {allowed:.2e}"
            )


def release(optimizer: Any) -> None:
    """Ends a distributed optimizer's threads and connections now, so that many in one process do not add
    up.
    """
    optimizer.close()
