"""Broadcast and gather Python objects."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from commsched.collectives.data_movement import allgather, broadcast_
from commsched.collectives.initialization import rank
from commsched.collectives.process_sets import ProcessSet, global_process_set


def dumps(obj: Any) -> torch.Tensor:
    """Return an object as pickled bytes."""
    try:
        import cloudpickle as pickler  # also pickles lambdas and classes of __main__
    except ModuleNotFoundError:
        pickler = pickle
    return torch.frombuffer(bytearray(pickler.dumps(obj)), dtype=torch.uint8)


def loads(data: torch.Tensor) -> Any:
    """Return the object that ``dumps`` has pickled."""
    return pickle.loads(data.numpy().tobytes())


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank `root_rank`'s `obj`, which is pickled, on every rank; the root gets `obj` itself."""
    sends = rank() == root_rank
    data = dumps(obj) if sends else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
    broadcast_(length, root_rank, name and f"{name}.length", process_set)
    if not sends:
        data = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, name and f"{name}.data", process_set)
    return obj if sends else loads(data)


def allgather_object(
    obj: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's `obj`, in rank order."""
    data = dumps(obj)
    length = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
    lengths = allgather(length, name and f"{name}.length", process_set)
    gathered = allgather(data, name and f"{name}.data", process_set)
    return [loads(part) for part in gathered.split(lengths.tolist())]
