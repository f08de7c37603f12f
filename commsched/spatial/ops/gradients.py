"""Gradients of tiles: the gradient of a tile is a tile, of the pixels that each rank owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from commsched.spatial.layout import fit, local_owned, owned_cuts
from commsched.spatial.mesh import Mesh, NeedsOthersError
from commsched.spatial.tile import ON_ALL, Cuts, Tile, cut_axes, handles, tree_map

_T = torch.Tensor
_GRAD: Any = torch.Tensor.grad  # the descriptor
GRADIENTS: dict[Any, Callable[..., Any]] = {}  # the functions of this file
_handles = partial(handles, into=(ON_ALL, GRADIENTS))


def gradient(local: Tensor, mesh: Mesh, cuts: Cuts) -> Tile:
    """``local``, the gradient of a part cut by ``cuts``, as a tile."""
    if any(cut.split.margin != (0, 0) for _, cut in cut_axes(cuts)):
        raise NeedsOthersError("several blocks compute with a pixel, and its gradient is the sum of theirs")
    return Tile.make(local, mesh, cuts)


@_handles(_GRAD.__get__)
def get_grad(tile: Tile) -> Tile | None:
    local = tile.held.grad
    return None if local is None else gradient(local, tile.mesh, tile.cuts)


@_handles(_GRAD.__set__)
def set_grad(tile: Tile, grad: Tensor | None) -> None:
    tile.held.grad = None if grad is None else fit(grad, tile.mesh, tile.cuts)


@_handles(_GRAD.__delete__)
def delete_grad(tile: Tile) -> None:
    tile.held.grad = None


@_handles(_T.register_hook)
def register_hook(tile: Tile, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """``hook`` sees, and may replace, the gradient as a tile."""
    mesh, cuts = tile.mesh, tile.cuts  # not the tile: the hook would keep it alive

    def on_local(local: Tensor) -> Tensor | None:
        replaced = hook(gradient(local, mesh, cuts))
        return None if replaced is None else fit(replaced, mesh, cuts)

    return tile.held.register_hook(on_local)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _seeded(outputs: Any, grads: Any) -> tuple[list[Any], list[Any] | None]:
    """Owned parts of ``outputs`` and of the gradients at which the backward starts."""
    tensors = _as_list(outputs)
    plain = [local_owned(t) if isinstance(t, Tile) else t for t in tensors]
    if grads is None:
        return plain, None
    seeds = [
        fit(grad, tensor.mesh, owned_cuts(tensor.cuts))
        if isinstance(tensor, Tile) and isinstance(grad, Tensor)
        else grad
        for tensor, grad in zip(tensors, _as_list(grads), strict=True)
    ]
    return plain, seeds


def _locals(tree: Any) -> Any:
    return tree_map(lambda t: t.held if isinstance(t, Tile) else t, tree)


@_handles(_T.backward)
def tile_backward(tile: Any, gradient: Any = None, *args: Any, **options: Any) -> None:
    backward(tile, gradient, *args, **options)


@_handles(torch.autograd.backward)
def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
    plain, seeds = _seeded(tensors, grad_tensors)
    torch.autograd.backward(plain, seeds, *_locals(args), **_locals(options))


@_handles(torch.autograd.grad)
def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any) -> Any:
    """Gradients with respect to tiles are tiles."""
    plain, seeds = _seeded(outputs, grad_outputs)
    sources: Sequence[Any] = _as_list(inputs)
    grads = torch.autograd.grad(plain, _locals(sources), seeds, *args, **options)
    return tuple(
        gradient(part, source.mesh, source.cuts) if isinstance(source, Tile) and part is not None else part
        for part, source in zip(grads, sources, strict=True)
    )
