"""Predict the bytes that a sharded model sends and holds, by a dry run of every rank on the meta device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commsched.channels import SilentChannel
from commsched.spatial.api import even_cuts
from commsched.spatial.mesh import Mesh
from commsched.spatial.shard import (
    call_without_data,
    meta_state,
    meta_tile,
    name_hooks,
    owned_outputs,
)
from commsched.spatial.tile import tiles_in


@dataclass
class RankReport:
    """One rank's bytes per module, sent in forward and backward and received of whole tensors (of attention's
    keys and values, for example), and its peak activation bytes."""

    coord: tuple[int, ...]
    tile: tuple[int, ...]
    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    gathered: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    @property
    def sent(self) -> int:
        return sum(self.forward.values()) + sum(self.backward.values())


@dataclass
class Report:
    """The result of `explain`; ``print`` shows it as text."""

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    ranks: list[RankReport]
    unsupported: list[str]
    whole_peak: int

    def __str__(self) -> str:
        grid = "x".join(map(str, self.grid))
        lines = [f"image {self.shape} over a grid of {grid}", "bytes sent, all ranks:"]
        names = list(dict.fromkeys(name for rank in self.ranks for name in (*rank.forward, *rank.backward)))
        width = max([len(name) for name in names] + [6])
        lines.append(f"  {'module':{width}} {'forward':>12} {'backward':>12}")
        for name in names:
            there = sum(rank.forward[name] for rank in self.ranks)
            back = sum(rank.backward[name] for rank in self.ranks)
            lines.append(f"  {name:{width}} {there:12,} {back:12,}")
        lines.append("per rank:")
        for number, rank in enumerate(self.ranks):
            lines.append(
                f"  rank {number} at {rank.coord}: tile {rank.tile}, sends {rank.sent:,} bytes, "
                f"holds {rank.peak:,} bytes of activations at most"
            )
        whole = sum((rank.gathered for rank in self.ranks), Counter())
        lines += [f"{name} gathers {size:,} bytes for all ranks" for name, size in whole.items()]
        lines.append(f"one process: holds {self.whole_peak:,} bytes of activations at most")
        lines.append(f"not supported: {', '.join(self.unsupported) or 'nothing'}")
        return "\n".join(lines)


def explain(
    model: nn.Module,
    shape: Sequence[int],
    grid: Sequence[int] = (2, 2),
    dims: Sequence[int] = (-2, -1),
    dtype: torch.dtype = torch.float32,
    *,
    overlap: str = "auto",
) -> Report:
    """Halo bytes per module, peak activation memory per rank and unsupported operations of a training step.

    ``model`` is not changed and nothing is computed or sent. The step is forward and backward of the sum of
    the outputs; an unsupported operation is counted as if the whole image were gathered for it.
    """
    refused: list[str] = []
    ranks = []
    for rank in range(prod(grid)):
        mesh = Mesh(SilentChannel(rank, prod(grid)), grid, dims, "gather", overlap)
        mesh.refused = refused
        ranks.append(_rank_report(model, tuple(shape), dtype, mesh))
    whole = _plain_peak(model, shape, dtype)
    return Report(tuple(shape), tuple(grid), ranks, list(dict.fromkeys(refused)), whole)


@contextmanager
def naming(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Keep the name of the running module in ``mesh``."""
    with ExitStack() as stack:
        for path, module in model.named_modules():
            for handle in name_hooks(module, mesh, path, type(module).__name__):
                stack.callback(handle.remove)
        yield


def backward_of_sums(outputs: Iterable[Any]) -> None:
    sums = [out.sum() for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if sums:
        torch.autograd.backward(sums)


def _plain_peak(model: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Peak activation bytes of the same step in one process."""
    image, state = torch.empty(tuple(shape), dtype=dtype, device="meta"), meta_state(model, dtype)
    with PeakMeter() as meter:
        meter.ignore(image, *state.values())
        backward_of_sums(tree_leaves(_tree(call_without_data(model, state, (image,)))))
    return meter.peak


def _rank_report(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh) -> RankReport:
    mesh.dry = True
    tile, state = meta_tile(shape, dtype, mesh, even_cuts(mesh, shape)), meta_state(model, dtype)
    report = RankReport(mesh.coord, tuple(tile.held.shape))
    with naming(model, mesh), PeakMeter() as meter:
        meter.ignore(tile.held, *state.values())
        output = owned_outputs(_tree(call_without_data(model, state, (tile,))))
        report.forward = Counter(mesh.traffic)
        backward_of_sums(tile.held for tile in tiles_in(output))
        report.backward = mesh.traffic - report.forward
        report.peak, report.gathered = meter.peak, mesh.gathered
    return report


def _tree(output: Any) -> Any:
    """Convert model outputs that are neither list nor dict to their fields."""
    known = isinstance(output, (Tensor, dict, list, tuple))
    return output if known else vars(output)


# -- the peak bytes of live tensors: storages are counted as they are made and freed, on any device ----------


class PeakMeter(TorchDispatchMode):
    """Within ``with PeakMeter() as meter:`` counts storages that operations make; ``meter.peak`` in bytes.

    What existed before (parameters, the input) does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def ignore(self, *tensors: Tensor) -> None:
        """Do not count these tensors, even if operations return them."""
        for tensor in tensors:
            self._track(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):  # inputs of the operation, not made by it
            if isinstance(value, Tensor) and id(value.untyped_storage()) not in self._known:
                self._track(value.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if id(storage) not in self._known:
                    self._track(storage, storage.nbytes())
        return result

    def _track(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)

        def freed(_: Any) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
