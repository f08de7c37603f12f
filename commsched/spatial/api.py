"""Images in and out of tiles."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from commsched.spatial.fetch import Dim, fetch, make_plan
from commsched.spatial.intervals import Run, Split, Want
from commsched.spatial.layout import gathered, local_owned, recut, trimmed
from commsched.spatial.mesh import Mesh, current_mesh, everyone, sum_in_order
from commsched.spatial.tile import MOVES, Cut, Cuts, Tile, cut_axes


def tile_bounds(shape: Sequence[int], mesh: Mesh | None = None) -> tuple[slice, ...]:
    """Return the slices of an image of global ``shape`` that this rank owns; load only these."""
    mesh = mesh or current_mesh()
    bounds = [slice(0, size) for size in shape]
    for axis, (dim, split) in enumerate(zip(mesh.dims, mesh.even_splits(shape))):
        bounds[dim] = slice(*split.owned(mesh.coord[axis]))
    return tuple(bounds)


def scatter(image: Tensor, mesh: Mesh | None = None) -> Tile:
    """This rank's tile of a whole image that every rank has."""
    mesh = mesh or current_mesh()
    if isinstance(image, Tile):
        raise ValueError(f"{mesh.where('scatter')}: the image is a tile already; pass the whole image")
    return from_local(image[tile_bounds(image.shape, mesh)], image.shape, mesh)


def from_local(local: Tensor, shape: Sequence[int], mesh: Mesh | None = None) -> Tile:
    """A tile of an image of global ``shape`` from the part that this rank loaded (see `tile_bounds`)."""
    mesh = mesh or current_mesh()
    expected = tuple(b.stop - b.start for b in tile_bounds(shape, mesh))
    if tuple(local.shape) != expected:
        raise ValueError(
            f"rank {mesh.rank} of grid {mesh.grid} owns a part of shape {expected} of an image of shape "
            f"{tuple(shape)}, and got one of shape {tuple(local.shape)}"
        )
    return Tile.make(local, mesh, even_cuts(mesh, shape))


def even_cuts(mesh: Mesh, shape: Sequence[int], margin: int = 0) -> Cuts:
    """How `scatter` cuts an image of global ``shape``; each part holds a ``margin`` beside its own pixels."""
    splits = [split.with_margin((margin, margin)) for split in mesh.even_splits(shape)]
    return tuple(Cut(dim, split) if split.parts > 1 else None for dim, split in zip(mesh.dims, splits))


def gather(tile: Tile, to: str = "replicate") -> Tensor:
    """Return the whole tensor, from all tiles.

    ``"replicate"``: on every rank, as a replicated `Tile` (``.local`` is the plain tensor). All ranks go on
    to compute the same loss; in the backward each gets its own slice, and parameters used after it their
    gradient on one rank.

    ``"rank0"``: a plain tensor, whole on rank 0 and without pixels elsewhere. ``"batch"``: a plain tensor
    with all pixels of this rank's share of the samples. In both cases every rank must run a backward through
    what it got (an empty tensor's sum will do), and the sum of the ranks' losses is what is differentiated.
    """
    if not isinstance(tile, Tile):
        raise ValueError(f"gather takes a tile, not a {type(tile).__name__}; gather each tile of an output")
    if to == "replicate":
        return gathered(tile)
    if to not in ("rank0", "batch"):
        raise ValueError(f"gather to must be 'replicate', 'rank0' or 'batch', got {to!r}")
    mesh, tile = tile.mesh, trimmed(tile)
    replicated = [axis for axis, cut in enumerate(tile.cuts) if cut is None and mesh.grid[axis] > 1]
    if replicated:
        raise ValueError(f"{mesh.where('gather')}: the tile is already whole along mesh axes {replicated}")
    dims = []
    for axis, cut in cut_axes(tile.cuts):
        everything: Want = (Run(0, cut.split.size),)
        wants = tuple(everything if to == "batch" or rank == 0 else () for rank in range(mesh.size))
        dims.append(Dim(cut.dim, cut.split, mesh.parts(axis), wants))
    if to == "batch":
        samples = Split.shares(tile.shape[0], mesh.size)
        shares = tuple((Run(*samples.owned(rank)),) for rank in range(mesh.size))
        dims.append(Dim(-tile.ndim, Split((0, tile.shape[0])), (0,) * mesh.size, shares))
    return fetch(local_owned(tile), make_plan(mesh.rank, tuple(dims), (0,) * mesh.size), mesh)


def regrid(tile: Tile, grid: Sequence[int]) -> Tile:
    """Cut the image by a coarser ``grid`` on the same ranks: ranks beyond the grid own no pixels.

    For late, small feature maps, where many tiles are not worth their halos. Gradients flow back to the finer
    grid.
    """
    mesh, targets = tile.mesh, {}
    if len(grid) != len(mesh.grid) or any(not 1 <= new <= old for new, old in zip(grid, mesh.grid)):
        raise ValueError(f"{mesh.where('regrid')}: {tuple(grid)} is no coarser grid than {mesh.grid}")
    for axis, cut in cut_axes(tile.cuts):
        size, parts = cut.split.size, grid[axis]
        used = Split.shares(size, parts).bounds
        targets[axis] = Split((*used, *(size,) * (mesh.grid[axis] - parts)))
    return recut(tile, targets)


def sum_gradients(parameters: Iterable[Tensor], mesh: Mesh | None = None) -> None:
    """Make every ``.grad`` the whole gradient: the sum over tiles, in rank order, the same bits on every
    rank; None where no tile has one. Call it once, after the last backward of an accumulation.
    """
    mesh = mesh or current_mesh()
    chosen = [p for p in parameters if p.requires_grad]
    if not chosen:
        return
    grads = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in chosen]
    used = [p.grad is not None for p in chosen]
    summed_before = [p in _sums and _sums[p].is_in(p, mesh) for p in chosen]
    flat = torch.cat([*grads, torch.tensor([*used, *summed_before], device=grads[0].device)])
    parts = everyone(flat, mesh, tuple(range(len(mesh.grid))), "sum of gradients")
    *sums, counts, again = sum_in_order(parts).split([*map(len, grads), len(chosen), len(chosen)])
    exists = [True] * len(chosen) if flat.is_meta else counts.bool().tolist()
    if not flat.is_meta and again.any():
        ranks = [rank for rank, part in enumerate(parts) if part[-len(chosen) :].any()]
        first = int(again.nonzero()[0])
        raise ValueError(
            f"rank {mesh.rank}: sum_gradients: on ranks {ranks}, the gradient of parameter {first} of shape "
            f"{tuple(chosen[first].shape)} still contains the sum of an earlier call, which would be counted "
            f"{mesh.size} times; call sum_gradients once, after the last backward of an accumulation, and "
            "clear the gradients (optimizer.zero_grad()) before the next backward"
        )
    for parameter, grad, has_one in zip(chosen, sums, exists, strict=True):
        parameter.grad = grad.view(parameter.shape).to(parameter.dtype) if has_one else None
        if has_one and mesh.size > 1 and not flat.is_meta:
            _SummedGradient(parameter, mesh)


class _SummedGradient:
    """A parameter's ``.grad`` after `sum_gradients`, until it is cleared.

    Users clear gradients to None or to zeros. Zeros can only be seen before the next backward adds to them:
    a hook of the parameter looks then. The hooks hold the parameter weakly, because it holds the hooks.
    """

    def __init__(self, parameter: Tensor, mesh: Mesh) -> None:
        assert parameter.grad is not None
        if parameter in _sums:
            _sums[parameter].forget()
        self._parameter, self._mesh = weakref.ref(parameter), weakref.ref(mesh)
        self._grad, self._version = TensorWeakRef(parameter.grad), parameter.grad._version
        self._added = False
        self._hooks = [
            parameter.register_hook(self._before),
            parameter.register_post_accumulate_grad_hook(self._after),
        ]
        _sums[parameter] = self

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, _: Tensor) -> None:
        """Called before a backward adds a gradient, and by ``torch.autograd.grad``, which adds none."""
        parameter = self._parameter()
        if parameter is not None and not _has_nonzero(parameter.grad):
            self.forget()
            _sums.pop(parameter, None)

    def _after(self, _: Tensor) -> None:
        self._added = True

    def is_in(self, parameter: Tensor, mesh: Mesh) -> bool:
        """Whether the sum is part of the gradient. A second sum may be over another mesh, of replicas."""
        grad = parameter.grad
        untouched = grad is not None and self._grad() is grad and grad._version == self._version
        return (self._added or (untouched and self._mesh() is mesh)) and _has_nonzero(grad)


_sums: Any = WeakTensorKeyDictionary()


def _has_nonzero(grad: Tensor | None) -> bool:
    return grad is not None and bool(grad.any())


def _to_dtensor(tile: Tile) -> Any:
    from commsched.spatial.dtensor import to_dtensor  # `torch.distributed.tensor` takes a second to import

    return to_dtensor(tile)


MOVES["to_dtensor"] = _to_dtensor
