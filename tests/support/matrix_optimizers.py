"""Optimizers that need whole matrices, as users write them, and models with enough matrices for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import commsched as hvd


@hvd.register_whole_matrix
class Soapy(torch.optim.Optimizer):
    """SOAP without its corrections: Adam in the eigenbasis of the gradient's second moments on both sides.

    Vectors get plain Adam. State: square matrices, a list of bases, moments, and a count.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.01, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            if p.ndim == 2:
                state["left"], state["right"] = (p.new_zeros(n, n) for n in p.shape)
                state["bases"] = [torch.eye(n, dtype=p.dtype) for n in p.shape]
        state["step"] += 1
        if p.ndim == 2:
            state["left"].mul_(0.9).addmm_(grad, grad.T, alpha=0.1)
            state["right"].mul_(0.9).addmm_(grad.T, grad, alpha=0.1)
            if state["step"] % group["every"] == 1:
                state["bases"] = [torch.linalg.eigh(state[side])[1] for side in ("left", "right")]
            left, right = state["bases"]
            grad = left.T @ grad @ right
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].lerp_(grad.square(), 0.05)
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-3)
        p.sub_(left @ update @ right.T if p.ndim == 2 else update, alpha=group["lr"])


@hvd.register_whole_matrix
class MuonAndMomentum(torch.optim.Optimizer):
    """One class for all parameters: orthogonalised momentum for groups with ``use_muon``, else momentum."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.02, "use_muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                if group["use_muon"]:
                    u, _, v = torch.linalg.svd(buffer, full_matrices=False)
                    p.sub_(u @ v, alpha=group["lr"])
                else:
                    p.sub_(buffer, alpha=group["lr"])


def matrices(sizes: tuple[int, ...] = (12, 40, 24, 33, 48, 3)) -> nn.Module:
    """Matrices of different shapes, nothing else."""
    layers: list[nn.Module] = []
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(before, after, bias=False), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(model.parameters(), lr=0.02)


def soapy(model: nn.Module) -> torch.optim.Optimizer:
    return Soapy(model.parameters())


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return MuonAndMomentum(
        [
            {"params": [p for p in params if p.ndim == 2], "use_muon": True, "lr": 0.01},
            {"params": [p for p in params if p.ndim != 2]},
        ]
    )


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.02)
