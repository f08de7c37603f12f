"""Broadcasts of whole things: objects, parameters, the state of an optimizer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch

from commsched.collectives.initialization import rank
from commsched.collectives.ops import allgather, broadcast_, broadcast_async_, synchronize
from commsched.collectives.process_sets import ProcessSet, global_process_set


def _dumps(obj: Any) -> torch.Tensor:
    try:
        import cloudpickle as pickler  # lambdas and classes of __main__ travel too, where it is installed
    except ModuleNotFoundError:
        pickler = pickle
    return torch.frombuffer(bytearray(pickler.dumps(obj)), dtype=torch.uint8)


def _loads(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Rank `root_rank`'s `obj` (anything that can be pickled), on every rank; the root gets back its own
    object."""
    sends = rank() == root_rank
    data = _dumps(obj) if sends else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    broadcast_(length, root_rank, name and f"{name}.length", process_set)
    if not sends:
        data = torch.empty(int(length.item()), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.data", process_set)
    return obj if sends else _loads(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's `obj`, in rank order."""
    return gather_objects(obj, name, global_process_set)


def gather_objects(obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """``allgather_object`` within a process set."""
    data = _dumps(obj)
    lengths = allgather(torch.tensor([data.numel()]), name and f"{name}.length", process_set)
    gathered = allgather(data, name and f"{name}.data", process_set)
    return [_loads(part) for part in gathered.split(lengths.tolist())]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters with rank `root_rank`'s: a ``state_dict()``, ``named_parameters()`` or list of
    tensors."""
    if isinstance(params, dict):
        pairs = sorted(params.items())
    elif isinstance(params, list) or (
        isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor)
    ):
        pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(
            "broadcast_parameters needs a dict (model.state_dict()) or a list (model.named_parameters()), "
            f"but got {type(params).__name__}"
        )
    with torch.no_grad():
        _broadcast_tensors(
            [(name, tensor) for name, tensor in pairs if isinstance(tensor, torch.Tensor)], root_rank
        )


def _broadcast_tensors(pairs: list[tuple[str | None, torch.Tensor]], root_rank: int) -> None:
    """All at once; a tensor that is not contiguous travels as a copy."""
    begun = []
    for name, tensor in pairs:
        travelling = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
        begun.append((tensor, travelling, broadcast_async_(travelling, root_rank, name)))
    for tensor, travelling, handle in begun:
        synchronize(handle)
        if travelling.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(travelling)


class _Placeholder:
    """Stands for a tensor in the state that travels pickled; the tensor follows by itself."""

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        self.index, self.shape, self.dtype, self.on_cpu = (
            index,
            tensor.shape,
            tensor.dtype,
            tensor.device.type == "cpu",
        )


def _replace(value: Any, kind: type, with_what: Callable[[Any], Any]) -> Any:
    """`value` with every object of `kind` within its dicts, lists and tuples replaced."""
    if isinstance(value, kind):
        return with_what(value)
    if isinstance(value, dict):
        return {key: _replace(item, kind, with_what) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_replace(item, kind, with_what) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give every rank's optimizer the state and the options of rank `root_rank`'s.

    Takes no optimizer step: where the root's optimizer is fresh, every rank's is fresh afterwards. As with
    Horovod, the trained parameters of a fresh optimizer have gradients of zero afterwards. `model` is
    accepted for Horovod's sake and not needed.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state does not support torch.optim.LBFGS")
    tensors: list[torch.Tensor] = []

    def take_out(tensor: torch.Tensor) -> _Placeholder:
        tensors.append(tensor)
        return _Placeholder(len(tensors) - 1, tensor)

    state = optimizer.state_dict()  # on every rank: shards are gathered for it
    if not state["state"]:
        _zero_gradients(optimizer)
    skeleton = _replace(state, torch.Tensor, take_out) if rank() == root_rank else None
    skeleton = broadcast_object(skeleton, root_rank, name="commsched.optimizer_state")
    if rank() != root_rank:
        tensors = _empty_like_placeholders(skeleton, optimizer)
    _broadcast_tensors(
        [(f"commsched.optimizer_state.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank
    )
    if rank() != root_rank:
        state = _replace(skeleton, _Placeholder, lambda holder: tensors[holder.index])
        _fit_options(state, optimizer)
        optimizer.load_state_dict(state)


def _zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give every trained parameter a gradient of zero, sparse where the optimizer takes no other."""
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                zero = torch.zeros_like(p, requires_grad=False)
                p.grad = zero.to_sparse(1) if sparse else zero


def _empty_like_placeholders(skeleton: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Tensors to receive into, on this rank's own devices."""
    device = next(
        (p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu")
    )
    holders: list[_Placeholder] = []
    _replace(skeleton, _Placeholder, holders.append)
    return [
        torch.empty(h.shape, dtype=h.dtype, device="cpu" if h.on_cpu else device)
        for h in sorted(holders, key=lambda h: h.index)
    ]


def _fit_options(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    mine = [len(group["params"]) for group in optimizer.param_groups]
    root = [len(group["params"]) for group in state["param_groups"]]
    if mine != root:
        raise ValueError(
            f"rank {rank()}'s optimizer has parameter groups of {mine} parameters, the root's has {root}; "
            "build the same model and the same groups on every rank"
        )
