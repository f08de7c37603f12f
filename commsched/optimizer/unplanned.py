"""Gradients reduced one by one within ``step()``, where buckets cannot carry them.

These are Adasum, compressors of single tensors, and parameters on several devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from commsched.collectives import reductions
from commsched.collectives.handles import synchronize
from commsched.collectives.initialization import size
from commsched.collectives.process_sets import ProcessSet, global_process_set
from commsched.collectives.reductions import Adasum, Average, Sum
from commsched.optimizer.parameter_names import checked_names, group_indices, later_names

Named = list[tuple[str, torch.Tensor]]


class _Distributed:
    """Mixed in before the wrapped optimizer's class, whose ``step`` it calls with combined gradients."""

    _options: dict[str, Any]
    _parameter_names: dict[Any, str]  # Horovod's attribute
    _groups: list[list[Any]] | None
    param_groups: list[dict[str, Any]]
    _synchronized = False
    _should_synchronize = True

    @property
    def backward_passes_per_step(self) -> int:
        return int(self._options["backward_passes_per_step"])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes accumulate before ``step()``; no gradient is sent before it."""
        self._options["backward_passes_per_step"] = passes

    def synchronize(self) -> None:
        """Combine the gradients now, for example to clip them; then ``step()`` in `skip_synchronize()`."""
        self._synchronized = True
        process_set: ProcessSet = self._options["process_set"]
        if size() == 1 or not process_set.included() or self._options["op"] == Adasum:
            return
        named = self._trained()
        kinds = self._agree_on_gradients(named, process_set)
        finish: list[Callable[[], None]] = []
        for group in self._in_groups(named):
            used = [(name, p) for name, p in group if kinds[name] == "dense"]
            if used:
                finish.append(self._start_dense(used, process_set))
            finish += [
                self._start_sparse(name, p, process_set) for name, p in group if kinds[name] == "sparse"
            ]
        for end in finish:
            end()

    def _trained(self) -> Named:
        """Return the trained parameters: some may have been added, frozen or unfrozen since the wrapping."""
        self._parameter_names = names = later_names(self.param_groups, self._parameter_names)
        return [(names[p], p) for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _in_groups(self, named: Named) -> list[Named]:
        """Return the parameters of each operation: the user's groups and single ones, or all together."""
        if self._groups is None:
            return [named]
        place = {p: number for number, group in enumerate(self._groups) for p in group}
        groups: list[Named] = [[] for _ in self._groups]
        alone: list[Named] = []
        for name, p in named:
            if p in place:
                groups[place[p]].append((name, p))
            else:
                alone.append([(name, p)])
        return [*groups, *alone]

    def _agree_on_gradients(self, named: Named, process_set: ProcessSet) -> dict[str, str | None]:
        """Return which gradients exist on any rank; others must stay None, or momentum would move them."""
        dense = self._options["sparse_as_dense"]
        counts = torch.zeros(2, len(named), dtype=torch.int32)
        for i, (_, p) in enumerate(named):
            if p.grad is not None:
                counts[int(p.grad.is_sparse and not dense), i] = 1
        counts = reductions.allreduce(counts, op=Sum, name="optimizer.gradients", process_set=process_set)
        return {
            name: "sparse" if sparse else "dense" if there else None
            for (name, _), there, sparse in zip(named, *counts.tolist(), strict=True)
        }

    def _start_dense(self, group: Named, process_set: ProcessSet) -> Callable[[], None]:
        compression, predivide = self._options["compression"], self._options["gradient_predivide_factor"]
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
            for _, p in group
        ]
        pairs = [compression.compress(gradient.contiguous()) for gradient in gradients]
        handle = reductions.grouped_allreduce_async_(
            [small for small, _ in pairs],
            name=f"optimizer.{group[0][0]}",
            op=self._options["op"],
            prescale_factor=1.0 / predivide,
            postscale_factor=predivide,
            process_set=process_set,
        )

        def finish() -> None:
            for (_, p), result, (_, context) in zip(group, synchronize(handle), pairs, strict=True):
                combined = compression.decompress(result, context)
                p.grad = combined.to_sparse(1) if p.grad is not None and p.grad.is_sparse else combined

        return finish

    def _start_sparse(self, name: str, p: torch.Tensor, process_set: ProcessSet) -> Callable[[], None]:
        gradient = p.grad
        if gradient is None:
            gradient = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64, device=p.device),
                p.new_empty(0, *p.shape[1:]),
                p.shape,
                check_invariants=False,
            )
        result = reductions.sparse_allreduce_async(
            gradient, name=f"optimizer.{name}", op=self._options["op"], process_set=process_set
        )

        def finish() -> None:
            p.grad = result()

        return finish

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context ``step()`` does not combine the gradients again."""
        if self._options["op"] == Adasum:
            raise AssertionError("Adasum combines the update itself within step(), which can not be skipped")
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients unless that is done, then take the wrapped optimizer's step."""
        if self._options["op"] == Adasum and size() > 1:
            return self._adasum_step(closure)
        if closure is not None:
            return self._step_with_closure(closure)
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize(), though synchronize() has "
                    "combined the gradients: they are combined a second time",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step()  # type: ignore[misc]

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        """Combine the gradients after each run of the closure, which may run several times."""

        def combined() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            return loss

        result = super().step(combined)  # type: ignore[misc]
        self._synchronized = False
        return result

    def close(self) -> None:
        """Do nothing: there are no threads or connections."""

    def _adasum_step(self, closure: Callable[[], Any] | None) -> Any:
        """Step locally, then combine the updates: Adasum does not combine gradients."""
        trained = [p for _, p in self._trained()]
        before = [p.detach().clone() for p in trained]
        loss = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            for p, old in zip(trained, before, strict=True):
                small, context = self._options["compression"].compress((p - old).contiguous())
                handle = reductions.allreduce_async_(small, op=Adasum)
                p.copy_(old + self._options["compression"].decompress(synchronize(handle), context))
        return loss


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: list[tuple[str, torch.nn.Parameter]] | None,
    compression: Any,
    backward_passes_per_step: int,
    op: Any,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Any,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> Any:
    """`optimizer` with gradients combined over all ranks before every step; the arguments are Horovod's."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be at least 1, but is {backward_passes_per_step}")
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support process sets; use the global one")
    names = checked_names(optimizer.param_groups, named_parameters)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    grouped = group_indices(optimizer.param_groups, groups, num_groups)
    wrapper = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    wrapped: Any = object.__new__(wrapper)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped._parameter_names = names
    wrapped._groups = None if grouped is None else [[trained[i] for i in group] for group in grouped]
    wrapped._options = {
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    return wrapped
