"""Give all ranks one rank's parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from commsched.collectives.job import ProcessSet, global_process_set, rank
from commsched.collectives.operations import broadcast_async_, broadcast_object, synchronize


def broadcast_parameters(
    params: Any, root_rank: int, *, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters with rank `root_rank`'s.

    `params` is a ``state_dict()``, ``named_parameters()`` or a list of tensors.
    """
    if isinstance(params, dict):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor):
        pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(
            "broadcast_parameters needs a dict (model.state_dict()) or a list (model.named_parameters()), "
            f"but got {type(params).__name__}"
        )
    pairs = [(name, value) for name, value in pairs if value is not None]
    for name, value in pairs:
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters takes tensors, but {name!r} is a {type(value).__name__}; use"
                " broadcast_object, or broadcast_optimizer_state"
            )
    with torch.no_grad():
        _broadcast_tensors(pairs, root_rank, process_set)


def _broadcast_tensors(
    pairs: list[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Broadcast all tensors at the same time; a tensor that is not contiguous is sent as a copy."""
    started = []
    for name, tensor in pairs:
        contiguous = tensor.detach().contiguous()
        started.append((tensor, contiguous, broadcast_async_(contiguous, root_rank, name, process_set)))
    for tensor, contiguous, handle in started:
        synchronize(handle)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(contiguous)


@dataclass(frozen=True)
class _Placeholder:
    """Replaces a tensor in the pickled state; the tensor is broadcast by itself."""

    index: int
    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give every rank's optimizer the state and the options of rank `root_rank`'s.

    Takes no optimizer step: if the root's optimizer is fresh, every rank's is fresh afterwards. As with
    Horovod, the trained parameters of a fresh optimizer then have gradients of zero. `model` is in Horovod's
    signature and ignored.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state does not support torch.optim.LBFGS")
    state = optimizer.state_dict()  # on every rank: it may gather shards
    if not state["state"]:
        sparse = isinstance(optimizer, torch.optim.SparseAdam)  # takes only sparse gradients
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
            zero = torch.zeros_like(p, requires_grad=False)
            p.grad = zero.to_sparse(1) if sparse else zero
    _share(state, optimizer, root_rank)


def share_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Give every rank's optimizer the state and the options of rank `root_rank`'s. Gradients stay."""
    _share(optimizer.state_dict(), optimizer, root_rank)


def _share(state: dict[str, Any], optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    tensors: list[torch.Tensor] = []

    def take_out(tensor: torch.Tensor) -> _Placeholder:
        tensors.append(tensor)
        return _Placeholder(len(tensors) - 1, tensor.shape, tensor.dtype, tensor.device.type == "cpu")

    skeleton = tree_map_only(torch.Tensor, take_out, state) if rank() == root_rank else None
    skeleton = broadcast_object(skeleton, root_rank, name="commsched.optimizer_state")
    if rank() != root_rank:
        tensors = _empty_like_placeholders(skeleton, optimizer)
    _broadcast_tensors(
        [(f"commsched.optimizer_state.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank
    )
    if rank() != root_rank:
        state = tree_map_only(_Placeholder, lambda holder: tensors[holder.index], skeleton)
        _check_groups(state, optimizer)
    # A state that is spread over the ranks is cut anew, on the root too.
    spread = getattr(optimizer, "spreads_state", False)
    if rank() != root_rank or spread:
        optimizer.load_state_dict(state)
    if rank() != root_rank and not spread:
        _restore_types(state, optimizer)


def _restore_types(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Undo that ``load_state_dict()`` casts to the parameter's type, which the root's state was not.

    With bfloat16 parameters, ASGD's rate would be another one than the root's.
    """
    places = (place for group in state["param_groups"] for place in group["params"])
    params = (param for group in optimizer.param_groups for param in group["params"])
    for place, param in zip(places, params, strict=True):
        mine = optimizer.state[param] if place in state["state"] else {}
        for key, value in state["state"].get(place, {}).items():
            if isinstance(value, torch.Tensor) and key in mine and mine[key].dtype != value.dtype:
                mine[key] = value


def _empty_like_placeholders(skeleton: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return tensors to receive into, on this rank's own devices."""
    device = next(
        (p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu")
    )
    return [
        torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu" if leaf.on_cpu else device)
        for leaf in tree_leaves(skeleton)  # in the order in which they were taken out
        if isinstance(leaf, _Placeholder)
    ]


def _check_groups(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    mine = [len(group["params"]) for group in optimizer.param_groups]
    root = [len(group["params"]) for group in state["param_groups"]]
    if mine != root:
        raise ValueError(
            f"rank {rank()}'s optimizer has parameter groups of {mine} parameters, the root's has {root}; "
            "build the same model and the same groups on every rank"
        )
