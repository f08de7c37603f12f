"""The wrapped optimizer on one rank's shards (``gather="parameters"``).

Parameters are views of flat buffers laid out like the gradients, so a rank's shard of a bucket is the same
range of both. The optimizer sees each overlap of a parameter with a shard as a small parameter of its own,
with the hyperparameters of the parameter's group; its state exists only for those. That is exact for
optimizers that treat every element by itself. For others each parameter lies in one rank's shard, as a whole
(``whole_matrix``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.optimizer.bucket_layout import Buffers
from commsched.optimizer.deferred_updates import ELEMENTWISE, OptimizerView, plain_math
from commsched.optimizer.master_weights import KEY, leaf_on, take_written


def register_elementwise(cls: type[Optimizer]) -> type[Optimizer]:
    """Declare that an optimizer class of your own updates every element by itself; usable as a decorator."""
    ELEMENTWISE.add(cls)
    return cls


def check_elementwise(cls: type[Optimizer]) -> None:
    if cls not in ELEMENTWISE:
        raise ValueError(
            f"gather='parameters' updates shards of flat buffers, and {cls.__name__} is not known to update"
            f" every element by itself (known: {', '.join(sorted(c.__name__ for c in ELEMENTWISE))}); use"
            " gather='gradients', or declare it with commsched.register_elementwise (for DistributedOptimizer"
            " also commsched.register_whole_matrix)"
        )


@dataclass(slots=True)
class Part:
    """This rank's elements ``[start, stop)`` (in memory order) of parameter ``param`` in one bucket."""

    param: int
    start: int
    stop: int
    leaf: nn.Parameter  # updated by the optimizer: ``weight``, or a float32 master of it
    weight: torch.Tensor  # this part of the flat parameter buffer
    grad: torch.Tensor  # the same part of the flat gradient buffer

    @property
    def master(self) -> torch.Tensor | None:
        return None if self.leaf.dtype == self.weight.dtype else self.leaf.detach()

    def begin_update(self) -> None:
        """Give the leaf its gradient, and the master any value that was written to the weight."""
        self.leaf.grad = self.grad if self.master is None else self.grad.float()
        if self.master is not None:
            take_written(self.master, self.weight)

    def end_update(self) -> None:
        if self.master is not None and self.leaf.grad is not None:
            self.weight.copy_(self.master)
        self.leaf.grad = None


def memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` as a vector, in the order in which ``like`` lies in memory."""
    placed = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device)
    placed.copy_(tensor)
    return placed.as_strided((placed.numel(),), (1,))


class Shards:
    """Flat parameter buffers, the parts that this rank owns, and their optimizer state."""

    def __init__(
        self,
        optimizer: Any,
        params: Sequence[nn.Parameter],
        grads: Buffers,
        rank: int,
        size: int,
        masters: bool = False,
    ):
        self._optimizer = optimizer
        self.params = list(params)
        self.rank, self.size = rank, size
        self.layout = grads.layout
        self.buffers = grads.more()
        with torch.no_grad():
            for i, slot in self.layout.slots.items():
                view = self.buffers.view(self.params[i], slot)
                view.copy_(self.params[i])
                self.params[i].data = view
        self.parts = [list(self._parts_of(piece.number, grads, masters)) for piece in self.layout.slices]
        self.state: dict[Any, Any] = defaultdict(dict)
        # The update multiplies gradients by this factor, which clipping sets; on the device.
        self.factor: torch.Tensor | None = None

    def _parts_of(self, bucket: int, grads: Buffers, masters: bool) -> Iterator[Part]:
        piece = self.layout.slices[bucket]
        first, last = piece.shard(self.rank, self.size)
        for i in piece.params:
            slot = self.layout.slots[i]
            start, stop = max(first, slot.offset), min(last, slot.offset + slot.numel)
            if start < stop:
                # Optimizers that get whole parameters need their shape, too.
                weight, grad = (
                    b.view(self.params[i], slot) if piece.ends else b.flat[slot.group][start:stop]
                    for b in (self.buffers, grads)
                )
                leaf = leaf_on(weight, masters)
                yield Part(i, start - slot.offset, stop - slot.offset, leaf, weight, grad)

    # -- the update ------------------------------------------------------------------------------------------

    @plain_math()
    def update(self, bucket: int, used: Sequence[int] | Mapping[int, int]) -> None:
        """Step the optimizer on this rank's parts of a bucket, for parameters that any rank used."""
        optimizer = self._optimizer
        group_of = {
            id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        # Leaves without state stand apart: torch's fused SGD fails where only some have a momentum.
        leaves: dict[tuple[int, bool], list[nn.Parameter]] = defaultdict(list)
        for part in self.parts[bucket]:
            if used[part.param]:
                part.begin_update()
                fresh = not self.state.get(part.leaf)
                leaves[group_of[id(self.params[part.param])], fresh].append(part.leaf)
        groups = [
            {**optimizer.param_groups[number], "params": members}
            for (number, _), members in sorted(leaves.items())
        ]
        if groups:
            self._scale([leaf.grad for members in leaves.values() for leaf in members])
            # A new view each time: GradScaler leaves its scale on a fused optimizer for one step only.
            OptimizerView(optimizer, optimizer._base, self.state).step(groups)
            self._zero_skipped_momentum(leaf for (_, fresh), new in leaves.items() if fresh for leaf in new)
            for part in self.parts[bucket]:
                if part.leaf.grad is not None and part.master is not None:
                    self.state[part.leaf][KEY] = part.master  # an update made it differ from the parameter
        for part in self.parts[bucket]:
            part.end_update()

    def _zero_skipped_momentum(self, new: Iterable[nn.Parameter]) -> None:
        """Zero the momentum of a first step that the device skipped.

        torch's fused SGD allocates it uninitialised, and its kernel writes nothing if ``found_inf`` is set.
        """
        found_inf = self._optimizer.__dict__.get("found_inf")
        if found_inf is None:
            return
        for leaf in new:
            momentum = self.state[leaf].get("momentum_buffer")
            if momentum is not None:
                momentum.masked_fill_(found_inf.to(momentum.device) != 0, 0.0)

    def scale_gradients(self) -> None:
        """Multiply all gradients by the factor now; called before somebody reads them."""
        self._scale([part.grad for parts in self.parts for part in parts])
        self.factor = None

    def _scale(self, grads: Sequence[torch.Tensor | None]) -> None:
        if self.factor is not None:
            for grad in grads:
                assert grad is not None
                grad.mul_(self.factor)

    # -- norms -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next((flat.device for flat in self.buffers.flat.values()), torch.device("cpu"))

    def owned_gradients(self, used: Sequence[int]) -> list[torch.Tensor]:
        return [part.grad for parts in self.parts for part in parts if used[part.param]]

    # -- whole state -----------------------------------------------------------------------------------------

    def take_state(self, full: dict[Any, Any]) -> None:
        """Take this rank's parts out of the state of whole parameters; that of frozen ones stays there."""
        self.state.clear()
        for parts in self.parts:
            for part in parts:
                param = self.params[part.param]
                for key, value in full.get(param, {}).items():
                    self.state[part.leaf][key] = self._cut(key, value, param, part)
                self._take_master(part)
        for param in self.params:
            full.pop(param, None)

    def _take_master(self, part: Part) -> None:
        saved = self.state[part.leaf].pop(KEY, None) if part.leaf in self.state else None
        if part.master is not None:
            part.master.copy_(part.weight if saved is None else saved)
            if saved is not None:
                self.state[part.leaf][KEY] = part.master

    def _cut(self, key: str, value: Any, param: nn.Parameter, part: Part) -> Any:
        if _by_element(key, value, param):
            if part.leaf.shape == param.shape:
                cut = value
            else:
                cut = memory_order(value, param)[part.start : part.stop]
            widened = part.master is not None and cut.is_floating_point()
            return cut.to(torch.float32 if widened else cut.dtype, copy=True)
        if not isinstance(value, torch.Tensor):
            return deepcopy(value)
        # A GPU's count may have come from another rank, where it lay on that rank's GPU.
        return value.clone() if value.device.type == "cpu" else value.to(part.leaf.device, copy=True)

    def described_state(self) -> dict[int, dict[str, Any]]:
        """Return the state of this rank's parts by parameter; for tensors of a part's shape the dtype."""
        described: dict[int, dict[str, Any]] = {}
        for parts in self.parts:
            for part in parts:
                for key, value in self.state.get(part.leaf, {}).items():
                    whole = _by_element(key, value, part.leaf)
                    described.setdefault(part.param, {})[key] = _ByElement(value.dtype) if whole else value
        return described

    def gathered_state(
        self, all_values: Callable[[Any], list[Any]], all_gather: Callable[..., None]
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the state of whole parameters, on every rank. Collective."""
        rows = all_values(self.described_state())
        full: dict[nn.Parameter, dict[str, Any]] = {}
        wanted: defaultdict[tuple[str, torch.dtype], set[int]] = defaultdict(set)
        for row in rows:
            for i, entries in row.items():
                for key, value in entries.items():
                    if isinstance(value, _ByElement):
                        wanted[key, value.dtype].add(i)
                        value = torch.empty_like(self.params[i], dtype=value.dtype, requires_grad=False)
                    full.setdefault(self.params[i], {}).setdefault(key, value)
        for (key, dtype), params in sorted(wanted.items(), key=str):
            targets = {i: full[self.params[i]][key] for i in params}
            for piece in self.layout.slices:
                self._gather_bucket(piece.number, key, dtype, targets, all_gather)
        return full

    def _gather_bucket(
        self,
        bucket: int,
        key: str,
        dtype: torch.dtype,
        targets: Mapping[int, torch.Tensor],
        all_gather: Callable[..., None],
    ) -> None:
        """Gather one entry of the state of the parameters in a bucket into ``targets``."""
        piece = self.layout.slices[bucket]
        data = torch.zeros(piece.numel, dtype=dtype)
        for part in self.parts[bucket]:
            value = self.state.get(part.leaf, {}).get(key)
            if part.param in targets and value is not None:
                start = self.layout.slots[part.param].offset + part.start - piece.start
                data[start : start + part.stop - part.start].copy_(memory_order(value, part.leaf))
        all_gather(data, piece.ends)
        for i in piece.params:
            if i not in targets:
                continue
            slot = self.layout.slots[i]
            start, stop = max(piece.start, slot.offset), min(piece.stop, slot.offset + slot.numel)
            vector = targets[i].as_strided((slot.numel,), (1,))
            vector[start - slot.offset : stop - slot.offset].copy_(
                data[start - piece.start : stop - piece.start]
            )


# State of torch's optimizers that is one number for the whole parameter, even if that is one number itself.
_COUNTERS = frozenset(("step", "eta", "mu", "mu_product"))


def _by_element(key: str, value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape and key not in _COUNTERS


@dataclass(frozen=True)
class _ByElement:
    """Stands for a tensor with one value for each element of the parameter."""

    dtype: torch.dtype
