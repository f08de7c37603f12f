"""``DistributedOptimizer``: wraps a torch optimizer so that its gradients are reduced over all ranks.

The package's docstring says which files a gradient passes; ``wrapper.py`` has the resulting methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.collectives.compression import Compression, block_code
from commsched.collectives.process_sets import ProcessSet, global_process_set
from commsched.collectives.reductions import Adasum, Average
from commsched.optimizer.options import (
    Options,
    check_master_weights,
    checked_names,
    checked_row_sparse,
    group_indices,
    in_bytes,
    is_sum,
    needs_plain,
    tell_ignored,
    transport_for_blocks,
)
from commsched.optimizer.session import Session
from commsched.optimizer.wrapper import DistributedMethods, Unplanned
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    model: nn.Module | None = None,
    schedule: str | Program = "auto",
    gather: str = "gradients",
    early_step: bool = False,
    master_weights: bool = False,
    transport: str | None = None,
    bucket_mb: float | None = None,
    profile: Profile | str | None = None,
    row_sparse: bool | str = "auto",
) -> Optimizer:
    """Wraps ``optimizer`` so that gradients are reduced over all ranks, in the best order, under compute.

    The positional arguments are Horovod's and mean the same. ``model`` is the module that owns the parameters
    (found among the live objects otherwise). ``schedule`` is ``"auto"`` (measure, then plan), a policy's
    name, or a ``Program``. ``gather="parameters"`` shards the optimizer's state and work over the ranks;
    ``early_step`` then updates inside the backward, ``master_weights`` then keeps float32 weights for half-
    precision parameters in the optimizer's state. ``transport`` is ``direct``, ``ring``, ``gloo`` or
    ``horovod`` (default: the fastest), ``bucket_mb`` fixes the bucket size, ``profile`` is a measured profile
    (or its file) to plan from instead of measuring. ``row_sparse`` sends only the touched rows of embeddings'
    gradients: ``"auto"`` where that takes less time, True always, False never.

    Adasum, compressors of your own and parameters on several devices are reduced at step time, without a
    plan. The result is an instance of ``optimizer``'s class that shares its state and parameter groups.
    """
    if isinstance(optimizer, DistributedMethods):
        raise ValueError("this optimizer is distributed already; wrap the one that it was made from")
    named = list(named_parameters) if named_parameters is not None else None
    if named is None and model is not None:
        named = list(model.named_parameters())
    one_by_one = needs_plain(optimizer, compression, op, transport)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if master_weights:
        check_master_weights(gather, params, not one_by_one, bool(process_set.included()))
    if one_by_one:
        tell_ignored(gather, early_step)
        gather, early_step = "gradients", False
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support process sets; use the global one")
    wire_dtype = getattr(compression, "wire_dtype", None)
    if code := block_code(wire_dtype):
        transport = transport_for_blocks(code, transport, params, one_by_one)
    names = checked_names(optimizer.param_groups, named)
    options = Options(
        process_set=process_set,
        sums=is_sum(op, gradient_predivide_factor),
        predivide=float(gradient_predivide_factor),
        wire_dtype=wire_dtype,
        schedule=schedule,
        gather=gather,
        early_step=early_step,
        master_weights=master_weights,
        transport=transport,
        bucket_bytes=in_bytes(bucket_mb),
        profile=profile,
        groups=group_indices(optimizer.param_groups, groups, num_groups),
        sparse_as_dense=sparse_as_dense,
        row_sparse=checked_row_sparse(row_sparse, one_by_one),
    )
    base = type(optimizer)
    cls = type(base.__name__, (DistributedMethods, base), {"_base": base})
    wrapped: Any = object.__new__(cls)
    wrapped.__dict__ = optimizer.__dict__
    wrapped._parameter_names, wrapped._model, wrapped._options = names, model, options
    wrapped._session, wrapped._unplanned, wrapped._closed, wrapped._released = None, None, False, False
    # One rank alone needs a session for master weights only.
    if process_set.included() and (int(process_set.size()) > 1 or master_weights):  # type: ignore[arg-type]
        if one_by_one:
            trained = [p for p in params if p.requires_grad]
            grouped = [[trained[i] for i in group] for group in options.groups] if options.groups else None
            factor = options.predivide
            wrapped._unplanned = Unplanned(compression, op, factor, sparse_as_dense, process_set, grouped)
        else:
            wrapped._session = Session(wrapped)
    wrapped._patch_step_function()
    _keep_together(wrapped)
    wrapped.set_backward_passes_per_step(backward_passes_per_step)
    return wrapped


def _keep_together(wrapped: Any) -> None:
    """Make the wrapped optimizer, which shares all state, step on all ranks too.

    Its ``state_dict()`` then shows the state after the last step.
    """
    this = weakref.ref(wrapped)

    def settle(optimizer: Optimizer, *_: Any) -> None:
        owner = this()
        if owner is None or owner._session is None:
            return
        if not isinstance(optimizer, DistributedMethods) and owner._options.gather == "parameters":
            raise ValueError(
                "with gather='parameters' the state is spread over the ranks; call state_dict() and"
                " load_state_dict() on all ranks, of the optimizer that DistributedOptimizer returned"
            )
        owner._settle()

    def step(*args: Any, **kwargs: Any) -> Any:
        owner: Any = this()
        if owner is None:
            raise ValueError(
                "the optimizer that DistributedOptimizer returned does not exist any more; keep it, and call"
                " its step()"
            )
        owner._opt_called = True
        return type(owner).step(owner, *args, **kwargs)

    wrapped.register_state_dict_pre_hook(settle)
    wrapped.register_load_state_dict_pre_hook(settle)
    # A scheduler of the wrapped optimizer puts a counting step() around that one's plain step() into the
    # instance, unless it finds one that counts.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    wrapped._plain_step = wrapped.__dict__.get("step")
    wrapped.__dict__["step"] = step
