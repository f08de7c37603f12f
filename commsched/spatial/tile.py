"""`Tile`: a tensor with a global shape of which each rank holds a part, and its registry of operations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from commsched.spatial.intervals import Split
from commsched.spatial.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Cut:
    """How one mesh axis cuts a tensor: dimension ``dim`` (counted from the end) as ``split`` says."""

    dim: int
    split: Split


Cuts = tuple[Cut | None, ...]  # one entry per mesh axis; None: all ranks along the axis hold the same


class Unsupported(ValueError):
    """A call that cannot be made on the parts. Handlers raise it before they send or change anything.

    `Tile` then refuses the call that the user made, or makes it on the gathered image with all its arguments.
    ``gather=False``: refuse it even with ``unsupported="gather"``.
    """

    def __init__(self, why: str = "", gather: bool = True) -> None:
        super().__init__(why)
        self.why, self.gather = why, gather


class Tile(torch.Tensor):
    """This rank's part (``local``) of a tensor whose ``shape`` is that of the whole.

    It owns no storage: torch functions on it are looked up in a registry. A function that is not registered
    and may mix pixels is refused by name instead of treating the part as the whole.
    """

    held: Tensor  # the pixels that it owns and the halo that it has of its neighbours
    mesh: Mesh
    cuts: Cuts
    copied: tuple[CopiedView, ...] = ()  # it is a copy where torch has a view
    shown: int | None = None  # the version of ``held`` when a user got the owned pixels

    @staticmethod
    def make(local: Tensor, mesh: Mesh, cuts: Cuts) -> Tile:
        shape = list(local.shape)
        for cut in cuts:
            if cut is not None:
                shape[cut.dim] = cut.split.size
        tile: Tile = torch.Tensor._make_wrapper_subclass(
            Tile, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        tile.held, tile.mesh, tile.cuts = local, mesh, cuts
        if local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                tile.register_hook(_refuse_gradient)
        return tile

    @property
    def owned(self) -> Tensor:
        """The pixels that this rank owns, a view of those that it holds."""
        part = self.held
        for dim, lo, length in owned_in_held(self):
            part = part.narrow(dim, lo, length)
        return part

    @property
    def local(self) -> Tensor:
        """`owned`, for users, whose writes to it would leave the halo as it was: see `local_of`."""
        part = self.owned
        if part is not self.held and not part.is_inference():
            self.shown = part._version
        return part

    @property
    def replicated(self) -> bool:
        """Every rank holds the whole."""
        return all(cut is None for cut in self.cuts)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For each dimension the interval of the whole that this rank owns."""
        result = [(0, size) for size in self.shape]
        for axis, cut in cut_axes(self.cuts):
            result[cut.dim] = cut.split.owned(self.mesh.coord[axis])
        return tuple(result)

    def to_dtensor(self) -> DTensor:
        """The same pixels as a `DTensor` on the same ranks; ``ValueError`` if it would cut them otherwise.

        The first call makes a device mesh, on all ranks together, unless the tiles came from a `DTensor`.
        """
        return MOVES["to_dtensor"](self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Tile(shape={tuple(self.shape)}, bounds={self.bounds}, local={self.owned!r})"

    def __deepcopy__(self, memo: dict) -> Tile:
        return Tile.make(
            self.held.detach().clone().requires_grad_(self.held.requires_grad), self.mesh, self.cuts
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            refuse_compiling(next(tiles_in((args, kwargs))).mesh)
        if func in NATIVE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in ON_LOCAL:
            args, kwargs = tree_map(lambda t: t.held if isinstance(t, Tile) else t, (args, kwargs))
            return func(*args, **kwargs)
        if func in SETS_GRADIENT:
            return _set_requires_grad(*args, **kwargs)
        if func in NAMES_TYPE:  # the tile behind the first argument only names a type and a device
            args, kwargs = (args[0], *tree_map(_kind_of, args[1:])), tree_map(_kind_of, kwargs)
            if not isinstance(args[0], Tile):
                return func(*args, **kwargs)
        try:
            targets = list(tiles_in(writes_to(func, args, kwargs)))
            _check(func, args, kwargs, targets)
            args, kwargs = _normalized(args, _with_lost_weight(kwargs) if func is F.l1_loss else kwargs)
            result = _sharing_as_torch(func, args, kwargs, cls._on_parts(func, args, kwargs))
            for target in targets:
                target.shown = None if target.shown is None else target.held._version
            return result
        except Unsupported as error:
            why, gather = error.why, error.gather
        return _refused_or_gathered(func, args, kwargs, why, gather)

    @classmethod
    def _on_parts(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        """``func`` on the parts, or `Unsupported`."""
        if func in ON_ALL:
            return called(ON_ALL[func], args, kwargs)
        if all(tile.replicated for tile in tiles_in((args, kwargs))):
            return _run_replicated(func, args, kwargs)
        if func in HANDLERS:
            result = called(HANDLERS[func], args, kwargs)
            if result is not NotImplemented:
                return result
        return MOVES["fallback"](func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # asked for when a leaf is saved
            return Tile.make(args[0].held.detach(), args[0].mesh, args[0].cuts)
        raise ValueError(
            f"{func}: a tile reached torch's kernels without passing commsched.spatial, which would compute"
            " on the part as if it were the whole; use tile.local or commsched.spatial.gather(tile) first"
        )


def _kind_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device) if isinstance(tensor, Tile) else tensor


def _set_requires_grad(tile: Tile, requires_grad: bool = True) -> Tile:
    """Set the part's flag and the tile's own, at which an autograd function looks that would bypass us."""
    tile.held.requires_grad_(requires_grad)
    with torch._C.DisableTorchFunctionSubclass():
        if requires_grad and not tile.requires_grad:
            tile.requires_grad_()
            tile.register_hook(_refuse_gradient)
        elif not requires_grad:
            tile.requires_grad_(False)
    return tile


def owned_in_held(tile: Tile) -> list[tuple[int, int, int]]:
    """(dim, start, length) of the owned pixels within what this rank holds; dimensions without margin are
    left out."""
    places = []
    for axis, cut in cut_axes(tile.cuts):
        (lo, hi), held = cut.split.owned(tile.mesh.coord[axis]), cut.split.held(tile.mesh.coord[axis])
        if (lo, hi) != held:
            places.append((cut.dim, lo - held[0], hi - lo))
    return places


def _getters(*names: str) -> set[Any]:
    """The getter functions that torch calls for these tensor attributes."""
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


_T = torch.Tensor
# Answered by the tile itself: its shape is that of the whole.
NATIVE: set[Any] = {
    *_getters(
        "shape", "ndim", "dtype", "device", "layout", "itemsize", "is_cuda", "is_cpu", "is_xpu", "is_meta"
    ),
    *_getters("is_mps", "is_sparse", "is_quantized", "is_mkldnn", "is_nested"),
    *(_T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.__len__, _T.__hash__, _T.element_size),
    *(_T.is_floating_point, _T.is_complex, _T.is_signed, _T.is_inference, _T.get_device),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
# Answered by the local part. `grad_fn` is not here: the tile's own tells that an autograd function bypassed
# us.
ON_LOCAL: set[Any] = {
    *_getters("requires_grad", "is_leaf", "retains_grad", "_version"),
    *(_T.retain_grad, _T.stride, _T.is_contiguous),
}
SETS_GRADIENT: set[Any] = {_T.requires_grad_, getattr(_T, "requires_grad").__set__}  # noqa: B009 - a bool
NAMES_TYPE: set[Any] = {_T.to, _T.type_as}
_RANDOM = """
    rand_like randn_like randint_like multinomial normal normal_ uniform_ random_
    exponential_ geometric_
    cauchy_ log_normal_ poisson rrelu rrelu_ gumbel_softmax alpha_dropout feature_alpha_dropout
    fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
"""
RANDOM = frozenset(_RANDOM.split())
HANDLERS: dict[Any, Callable[..., Any]] = {}
MOVES: dict[str, Callable[..., Any]] = {}
"""Functions of modules that need tiles themselves, which put them here."""

ON_ALL: dict[Any, Callable[..., Any]] = {}  # these also act on replicated tiles


def handles(
    *functions: Any, into: Sequence[dict[Any, Callable[..., Any]]] = (HANDLERS,)
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how ``functions`` act on split tiles, or in other registries.

    A handler takes the function's arguments, and raises `Unsupported` for those that it cannot honour. It may
    return ``NotImplemented``: the function then acts as one that has no handler.
    """

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for registry in into:
            registry.update(dict.fromkeys(functions, handler))
        return handler

    return register


handles_all = partial(handles, into=(ON_ALL,))
"""Register how functions act on any tile, replicated ones included."""


def refuse_compiling(mesh: Mesh) -> None:
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()  # else the compiler would run the calling function again, uncompiled
        raise ValueError(
            f"{mesh.where('torch.compile')} cannot trace tiles, whose operations exchange messages; call the "
            "model and its modules themselves, and compile functions of tile.local only"
        )


def cut_axes(cuts: Cuts) -> Iterator[tuple[int, Cut]]:
    return ((axis, cut) for axis, cut in enumerate(cuts) if cut is not None)


_NAMES = {"axis": "dim", "keepdims": "keepdim", "axis0": "dim0", "axis1": "dim1"}


def _normalized(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The same call with its image first, torch's names for numpy's, and without ``out=None``."""
    if not kwargs:
        return args, kwargs
    kwargs = {_NAMES.get(k, k): value for k, value in kwargs.items() if k != "out" or value is not None}
    return (args, kwargs) if args or "input" not in kwargs else ((kwargs.pop("input"),), kwargs)


def _with_lost_weight(kwargs: dict) -> dict:
    """Torch 2.13's ``l1_loss`` does not pass its weight on to subclasses of tensors; its frame has it.

    Under a `TorchFunctionMode` there is a second frame of the function, which has no weight.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and "weight" not in kwargs:
        weight = frame.f_locals.get("weight") if frame.f_code is F.l1_loss.__code__ else None
        if weight is not None:
            return {**kwargs, "weight": weight}
        frame = frame.f_back
    return kwargs


def _check(func: Any, args: tuple, kwargs: dict, targets: Sequence[Tile]) -> None:
    """Refuse what no handler can do. ``targets``: the tiles that ``func`` changes."""
    tiles = list(tiles_in((args, kwargs)))
    cut = [tile for tile in tiles if not tile.replicated]
    if any(tile.mesh is not cut[0].mesh and not tile.mesh.like(cut[0].mesh) for tile in cut):
        grids = " and ".join(sorted({str(tile.mesh.grid) for tile in cut}))
        raise ValueError(
            f"{cut[0].mesh.where(name_of(func))}: its tiles are cut by different grids, {grids}; give"
            " scatter() the mesh of the other tile (tile.mesh)"
        )
    for target in targets:
        for view in target.copied:
            view.check_write(target, func)
    if getattr(func, "__name__", "") in RANDOM and tiles[0].mesh.size > 1:
        raise Unsupported("each rank would draw other numbers", gather=False)
    if kwargs.get("out") is not None and not all(tile.replicated for tile in tiles):
        why = "out= would write into a tensor that may be cut otherwise"
        raise Unsupported(why, gather=func not in ON_ALL)


def called(handler: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """``handler`` of these arguments; `Unsupported` if it does not have all of them."""
    try:
        return handler(*args, **kwargs)
    except TypeError:
        try:
            signature(handler).bind(*args, **kwargs)
        except TypeError:
            raise Unsupported("not with these arguments") from None
        raise


def image_of(value: Any) -> Tile:
    """The image of an operation, which must be split."""
    if not isinstance(value, Tile):
        raise Unsupported("a parameter is split, and the image is not")
    return value


def sizes_of(given: tuple) -> list[int]:
    """Sizes that were passed one by one or as one sequence."""
    return list(given[0] if len(given) == 1 and not isinstance(given[0], int) else given)


def tiles_in(tree: Any) -> Iterator[Tile]:
    """The tiles in nested lists, tuples and dicts."""
    if isinstance(tree, Tile):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tiles_in(value)


def tree_map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to every tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        result = copy(tree)  # keeps the class: outputs of published models are dicts with attributes
        for key, value in tree.items():
            result[key] = tree_map(function, value)
        return result
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(tree_map(function, value) for value in tree)
    return tree


def local_of(tile: Tile) -> Tensor:
    """The plain tensor of a tile, checked for autograd functions that saw the tile itself."""
    with torch._C.DisableTorchFunctionSubclass():
        bypassed = tile.grad_fn is not None
    if bypassed:
        raise ValueError(
            f"{tile.mesh.where('custom autograd.Function')}: it cannot be differentiated on a split "
            "tensor; apply it to tile.local, or gather the tile first (checkpoint: use_reentrant=False)"
        )
    for view in tile.copied:
        view.check_read(tile)
    if tile.shown is not None and tile.shown != tile.held._version:
        raise ValueError(
            f"{tile.mesh.where('tile.local')} was changed in place while the tile holds a halo, which is "
            "as before; change the tile itself, as tile.mul_(2)"
        )
    return tile.held


def _run_replicated(func: Any, args: tuple, kwargs: dict) -> Any:
    """All ranks compute the same; parameters get their gradient once."""
    first = next(tiles_in((args, kwargs)))
    mesh, cuts = first.mesh, first.cuts
    plain_args, plain_kwargs = tree_map(lambda t: MOVES["enter"](t, mesh, cuts), (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    targets = {id(tile.held): tile for tile in tiles_in(writes_to(func, args, kwargs))}
    if any(tile.held.shape != tile.shape for tile in targets.values()):
        raise ValueError(
            f"{mesh.where(name_of(func))}: a tile cannot change its shape in place; make a new tensor"
        )
    return tree_map(lambda t: targets[id(t)] if id(t) in targets else Tile.make(t, mesh, cuts), result)


_OPERATORS = "setitem iadd imul isub idiv itruediv ifloordiv imod iand ior ixor ipow ilshift irshift"
_INPLACE_OPERATORS = frozenset(f"__{name}__" for name in _OPERATORS.split())


def is_inplace(func: Any, kwargs: dict) -> bool:
    name = getattr(func, "__name__", "")
    named = name.endswith("_") and not name.endswith("__")
    return named or name in _INPLACE_OPERATORS or kwargs.get("inplace") is True


def writes_to(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    first = args[0] if args else kwargs.get("input")
    return [first if is_inplace(func, kwargs) else None, kwargs.get("out")]


def _written_back(func: Any, given: tuple, whole: tuple, result: Any) -> Any:
    """Copy what ``func`` has written into the gathered operands to the parts of the given ones."""
    targets: dict[int, Tile] = {}
    for target, gathered in zip(tiles_in(writes_to(func, *given)), tiles_in(writes_to(func, *whole))):
        if gathered is not target:
            target.copy_(gathered)
            targets[id(gathered)] = target
    return tree_map(lambda t: targets.get(id(t), t), result)


# -- views: in one process they share memory with their tensor; on tiles some of them are copies -------------

_VIEWS = frozenset(
    "view view_as unflatten narrow select chunk split tensor_split unbind squeeze unsqueeze expand expand_as "
    "transpose swapaxes swapdims permute movedim moveaxis".split()
)
_RESHAPES = frozenset("reshape reshape_as flatten contiguous".split())  # views where the strides allow it
_COPIES = ("pad", "roll")  # never views


class CopiedView:
    """What a copy of a tile, of which one process has a view, knows of the tile's memory.

    After one of the two has been changed in place the other would differ from the one process's.
    """

    def __init__(self, name: str, tile: Tile) -> None:
        name = name.removeprefix("torch.Tensor.")
        self._call = "y[...]" if name == "__getitem__" else f"y.{name}(...)"
        self._memory = StorageWeakRef(tile.held.untyped_storage())
        self._counter: Tensor | None = None
        if not tile.held.is_inference():  # a tensor without data that has the version of ``tile.held``
            self._counter = tile.held.detach()
            self._counter.data = tile.held.new_empty(0)
            self._version = self._counter._version

    def check_read(self, copy_: Tile) -> None:
        if self._counter is not None and self._counter._version != self._version:
            self._refuse(copy_, f"y has been changed in place since; call {self._call} after the change")

    def check_write(self, copy_: Tile, func: Any) -> None:
        if not self._memory.expired():  # else nobody can miss the change (``x = x.flatten(2); x += z``)
            way_out = f"y = {self._call}.mul(2) instead of {self._call}.mul_(2)"
            self._refuse(copy_, f"{name_of(func)} would not change y; make a new tensor, such as {way_out}")

    def _refuse(self, copy_: Tile, why: str) -> None:
        where, grid = copy_.mesh.where(self._call), copy_.mesh.grid
        raise ValueError(f"{where} is a copy on a grid of {grid}, and a view in one process: {why}")


def _sharing_as_torch(func: Any, args: tuple, kwargs: dict, result: Any) -> Any:
    """``result``, without the first operand's memory where torch copies it; marked where torch views it."""
    first = args[0] if args else None
    parts = [part for part in tiles_in(result) if part is not first]
    if not isinstance(first, Tile) or not parts:
        return result
    name = getattr(func, "__name__", "")
    views = name in _VIEWS or (name == "__getitem__" and _is_basic(args[1]))
    if name in _RESHAPES:
        views = _is_viewable(first, parts[0].shape if name != "contiguous" else None, kwargs)
    owns = name in _COPIES or (name in _RESHAPES and not views)
    if any((owns or _lost_margin(first, part)) and _is_shared(first, part) for part in parts):
        # Shared memory means that nothing was sent: this rank may do it again alone.
        result = type(first)._on_parts(func, (first.clone(), *args[1:]), kwargs)
        parts = list(tiles_in(result))
    for part in parts if views or first.copied else ():
        shared = _is_shared(first, part)
        if shared or (views and part.held.numel()):
            copied = first.copied if shared else (*first.copied, CopiedView(name, first))
            part.copied = getattr(part, "base", part).copied = copied
    return result


def _is_basic(index: Any) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return all(type(entry) in (int, slice, type(None), type(Ellipsis)) for entry in entries)


def _is_shared(tile: Tile, part: Tile) -> bool:
    return tile.held.untyped_storage()._cdata == part.held.untyped_storage()._cdata


def _lost_margin(tile: Tile, part: Tile) -> bool:
    """Whether a write to ``part`` would miss pixels that ``tile`` holds for its neighbours."""
    return any(
        cut.split.margin != (0, 0)
        and ((kept := part.cuts[axis]) is None or kept.split.margin != cut.split.margin)
        for axis, cut in cut_axes(tile.cuts)
    )


def _is_viewable(tile: Tile, shape: torch.Size | None, options: dict) -> bool:
    """Whether one process would view the tensor in this shape (or as contiguous), by its strides."""
    strides = tile.held.stride()
    order = sorted(range(tile.ndim), key=lambda dim: -strides[dim])
    whole = torch.empty([tile.shape[dim] for dim in order], device="meta").permute(
        [order.index(dim) for dim in range(tile.ndim)]
    )
    if shape is None:
        return whole.is_contiguous(**options)
    with suppress(RuntimeError):
        whole.view(shape)
        return True
    return False


def _refuse_gradient(grad: Tensor) -> None:
    """The tile itself is no part of the graph, its local part is: nothing may flow here."""
    raise ValueError(
        "a gradient reached a tile and not its local part: a custom autograd.Function was applied to it, or "
        "torch.autograd.backward; use tile.backward(), or tile.local"
    )


def name_of(func: Any) -> str:
    name = torch.overrides.resolve_name(func)
    return str(name or getattr(func, "__name__", func)).removeprefix("torch.nn.functional.")


def _refused_or_gathered(func: Any, args: tuple, kwargs: dict, why: str, gather: bool) -> Any:
    """Gather and run on every rank when the mesh says so; else refuse by name."""
    tiles = list(tiles_in((args, kwargs)))
    mesh = tiles[0].mesh
    if getattr(func, "__name__", "") in ("__set__", "__delete__"):
        why, gather = "it would change the gathered copy", False
    if mesh.unsupported == "gather" and gather:
        mesh.refused.append(mesh.where(name_of(func)))
        whole = tree_map(lambda t: MOVES["replicate"](t) if isinstance(t, Tile) else t, (args, kwargs))
        for tile, copy_ in zip(tiles, tiles_in(whole)):
            if copy_ is not tile:
                copy_.copied = (*tile.copied, CopiedView(name_of(func), tile))
        result = _sharing_as_torch(func, whole[0], whole[1], _run_replicated(func, *whole))
        return _written_back(func, (args, kwargs), whole, result)
    shapes = ", ".join(str(tuple(tile.shape)) for tile in tiles)
    way_out = "gather the tile first" + (", or shard with unsupported='gather'" if gather else "")
    if mesh.alone:
        way_out = "call the model on the whole image"
    raise ValueError(
        f"{mesh.where(name_of(func))} on an image of shape {shapes} split over a grid of {mesh.grid} is not "
        f"supported{': ' + why if why else ''}; {way_out}"
    )
