"""Messages between ranks: tensors, and descriptions by which they can be received."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from commsched.pipeline.fabric import Lane, from_host, to_host
from commsched.pipeline.parts import UNCUT, Cuts
from commsched.transport.channel import Pending

_CONSTANTS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Leaf:
    """One tensor of a message; ``grad``: a gradient will come back; ``cuts``: how tiles cut it in the
    sender's stage and in the receiver's. Or a constant.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    grad: bool = False
    constant: Any = None
    cuts: Cuts = UNCUT


@dataclass(frozen=True)
class Description:
    """The structure of a message (a pytree with the leaves' numbers) and its leaves, for its receiver."""

    structure: Any
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(
        cls, leaves: Sequence[Any], spec: Any, grads: Sequence[bool], cuts: Sequence[Cuts] | None = None
    ) -> Description:
        structure = None if spec is None else tree_unflatten(range(len(leaves)), spec)
        each = zip(leaves, grads, cuts or [UNCUT] * len(leaves), strict=True)
        return cls(structure, tuple(_leaf(leaf, grad, cut) for leaf, grad, cut in each))

    @cached_property
    def spec(self) -> Any:
        return tree_flatten(self.structure)[1]

    def __reduce__(self) -> Any:
        # Structures travel: torch's specifications are not meant to be pickled.
        return Description, (self.structure, self.leaves)

    def buffers(self) -> list[Tensor]:
        return [torch.empty(shape, dtype=kind) for shape, kind in self._tensors]

    @cached_property
    def _tensors(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(leaf.shape, leaf.dtype) for leaf in self.leaves if leaf.dtype is not None]

    def fill(self, buffers: Sequence[Tensor], device: torch.device) -> list[Any]:
        """The message's leaves, of what has arrived."""
        coming = iter(buffers)
        return [
            leaf.constant if leaf.dtype is None else from_host(next(coming), device) for leaf in self.leaves
        ]

    def __str__(self) -> str:
        return ", ".join(
            repr(leaf.constant) if leaf.dtype is None else f"{list(leaf.shape)} {leaf.dtype}"
            for leaf in self.leaves
        )


def no_gradient(like: Tensor) -> Tensor:
    """Stands for a gradient that is None, because messages have fixed sizes: all bytes are 0xFF, a NaN that
    no operation makes.
    """
    data = torch.full((like.numel() * like.element_size(),), 0xFF, dtype=torch.uint8, device=like.device)
    return data.view(like.dtype).view(like.shape)


def is_gradient(buffer: Tensor) -> bool:
    """Whether a message is a gradient, and does not stand for None."""
    flat = buffer.view(-1)
    first = flat[0].item() if len(flat) else 0.0
    # Only a NaN differs from itself, so ordinary gradients cost one comparison.
    return first == first or not (flat.view(torch.uint8) == 0xFF).all()


def _leaf(value: Any, grad: bool, cuts: Cuts) -> Leaf:
    if isinstance(value, Tensor):
        return Leaf(tuple(value.shape), value.dtype, grad, cuts=cuts)
    if isinstance(value, _CONSTANTS):
        return Leaf(constant=value)
    raise ValueError(
        f"only tensors, numbers, strings and None can cross the border of a stage, got"
        f" {type(value).__name__}; cut the model elsewhere"
    )


def in_words(leaves: Sequence[Any]) -> str:
    """A stage's inputs, for its errors."""
    try:
        return str(Description.of(leaves, None, [False] * len(leaves)))
    except ValueError:
        return "the batch"


def send_tree(lane: Lane, peer: int, tree: Any) -> list[Pending]:
    """Any pytree of tensors and constants, with its description."""
    leaves, spec = tree_flatten(tree)
    described = Description.of(leaves, spec, [False] * len(leaves))
    buffers = [to_host(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    return [*send_object(lane, peer, described), lane.send(peer, buffers)]


def receive_tree(lane: Lane, peer: int, device: torch.device | None = None) -> Any:
    described = receive_object(lane, peer)
    buffers = described.buffers()
    lane.receive(peer, buffers).wait()
    return tree_unflatten(described.fill(buffers, device or torch.device("cpu")), described.spec)


def send_object(lane: Lane, peer: int, value: Any) -> list[Pending]:
    """Anything that can be pickled."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [lane.send(peer, [torch.tensor([len(data)])]), lane.send(peer, [data])]


def receive_object(lane: Lane, peer: int) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    lane.receive(peer, [size]).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    lane.receive(peer, [data]).wait()
    return pickle.loads(data.numpy().tobytes())
