"""Gradients reduced one by one within ``step()``, where buckets cannot carry them.

These are Adasum, compressors of single tensors, and parameters on several devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from commsched.collectives import reductions
from commsched.collectives.handles import synchronize
from commsched.collectives.process_sets import ProcessSet
from commsched.collectives.reductions import Adasum, Sum

Named = list[tuple[str, torch.Tensor]]


@dataclass
class Unplanned:
    """Reduces the gradients of one optimizer; the fields are Horovod's arguments."""

    compression: Any
    op: Any
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet
    groups: list[list[torch.Tensor]] | None

    def reduce(self, named: Named) -> None:
        """Combine these parameters' gradients over the ranks, except for Adasum, which combines updates."""
        if self.op == Adasum:
            return
        kinds = self._agree_on_gradients(named)
        finish: list[Callable[[], None]] = []
        for group in self._in_groups(named):
            used = [(name, p) for name, p in group if kinds[name] == "dense"]
            if used:
                finish.append(self._start_dense(used))
            finish += [self._start_sparse(name, p) for name, p in group if kinds[name] == "sparse"]
        for end in finish:
            end()

    def _in_groups(self, named: Named) -> list[Named]:
        """Return the parameters of each operation: the user's groups and single ones, or all together."""
        if self.groups is None:
            return [named]
        place = {p: number for number, group in enumerate(self.groups) for p in group}
        groups: list[Named] = [[] for _ in self.groups]
        alone: list[Named] = []
        for name, p in named:
            if p in place:
                groups[place[p]].append((name, p))
            else:
                alone.append([(name, p)])
        return [*groups, *alone]

    def _agree_on_gradients(self, named: Named) -> dict[str, str | None]:
        """Return which gradients exist on any rank; others must stay None, or momentum would move them."""
        counts = torch.zeros(2, len(named), dtype=torch.int32)
        for i, (_, p) in enumerate(named):
            if p.grad is not None:
                counts[int(p.grad.is_sparse and not self.sparse_as_dense), i] = 1
        name, process_set = "optimizer.gradients", self.process_set
        counts = reductions.allreduce(counts, op=Sum, name=name, process_set=process_set)
        return {
            name: "sparse" if sparse else "dense" if there else None
            for (name, _), there, sparse in zip(named, *counts.tolist(), strict=True)
        }

    def _start_dense(self, group: Named) -> Callable[[], None]:
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
            for _, p in group
        ]
        pairs = [self.compression.compress(gradient.contiguous()) for gradient in gradients]
        handle = reductions.grouped_allreduce_async_(
            [small for small, _ in pairs],
            name=f"optimizer.{group[0][0]}",
            op=self.op,
            prescale_factor=1.0 / self.predivide,
            postscale_factor=self.predivide,
            process_set=self.process_set,
        )

        def finish() -> None:
            for (_, p), result, (_, context) in zip(group, synchronize(handle), pairs, strict=True):
                combined = self.compression.decompress(result, context)
                p.grad = combined.to_sparse(1) if p.grad is not None and p.grad.is_sparse else combined

        return finish

    def _start_sparse(self, name: str, p: torch.Tensor) -> Callable[[], None]:
        gradient = p.grad
        if gradient is None:
            gradient = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64, device=p.device),
                p.new_empty(0, *p.shape[1:]),
                p.shape,
                check_invariants=False,
            )
        result = reductions.sparse_allreduce_async(
            gradient, name=f"optimizer.{name}", op=self.op, process_set=self.process_set
        )

        def finish() -> None:
            p.grad = result()

        return finish

    def adasum_step(self, named: Named, step: Callable[[], Any]) -> Any:
        """Step locally, then combine the updates: Adasum does not combine gradients."""
        before = [p.detach().clone() for _, p in named]
        loss = step()
        with torch.no_grad():
            for (_, p), old in zip(named, before, strict=True):
                small, context = self.compression.compress((p - old).contiguous())
                handle = reductions.allreduce_async_(small, op=Adasum)
                p.copy_(old + self.compression.decompress(synchronize(handle), context))
        return loss
