"""Operations that act on each pixel alone: they run on the local parts. New tensors, dropout and masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.layout import ON_FOLDED, Folded, common_cuts, fit, fold, parameter
from commsched.spatial.mesh import draws, everyone, shared_seed
from commsched.spatial.tile import (
    HANDLERS,
    MOVES,
    Cut,
    Cuts,
    Tile,
    Unsupported,
    cut_axes,
    handles,
    handles_all,
    image_of,
    is_inplace,
    local_of,
    sizes_of,
    tiles_in,
    tree_map,
)

_NAMES = """
    abs absolute neg negative positive sign sgn relu relu6 sigmoid tanh exp exp2 expm1 log log2 log10
    log1p sqrt rsqrt square reciprocal sin cos tan asin acos atan sinh cosh erf erfc floor ceil round
    trunc frac silu gelu elu selu celu leaky_relu hardtanh hardswish hardsigmoid hardshrink softshrink
    softplus mish logsigmoid softsign tanhshrink threshold logit sinc nan_to_num clamp clip clamp_min
    clamp_max pow float_power isnan isinf isfinite add sub subtract rsub mul multiply div divide
    true_divide floor_divide remainder fmod maximum minimum fmax fmin where lerp addcmul addcdiv atan2
    hypot logaddexp xlogy eq ne lt le gt ge not_equal greater greater_equal less less_equal logical_and
    logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not masked_fill
    copysign heaviside isclose to float double half bfloat16 int long short bool type type_as cpu cuda
    contiguous clone detach zeros_like ones_like empty_like full_like zero fill copy
    alias
"""
_OPERATORS = """
    and or xor invert rpow rdiv rtruediv rfloordiv rmod truediv floordiv mod radd rmul iadd imul isub
    idiv rand ror itruediv iand ior ipow rxor rsub pow add sub mul div eq ne lt le gt ge
"""
OPERATORS = frozenset(_OPERATORS.split())
POINTWISE = frozenset(_NAMES.split()) | OPERATORS
_INPLACE = frozenset(f"{name}_" for name in POINTWISE)
_DATA = getattr(torch.Tensor, "data").__get__  # noqa: B009 - typed as a tensor


def base_name(func: Any) -> str:
    """``add`` for ``torch.add``, ``Tensor.add_`` and ``Tensor.__iadd__``."""
    name: str = getattr(func, "__name__", "")
    inner = name[2:-2]
    return inner if name == f"__{inner}__" and inner in OPERATORS else name


def is_pointwise(func: Any) -> bool:
    name = base_name(func)
    return name in POINTWISE or name in _INPLACE or func == _DATA


def pointwise(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` on the parts; the result is cut as the operands are, in place as its target is.

    An in-place operation changes the target's own storage, margins included, so that views taken before see
    the change and autograd notices it; the other operands are fetched as the target is cut.
    """
    tiles = list(tiles_in((args, kwargs)))
    mesh, cuts, target = tiles[0].mesh, None, None
    if is_inplace(func, kwargs):
        target = args[0]
        if not isinstance(target, Tile):
            raise Unsupported("it would write split pixels into a tensor that is whole")
        cuts = target.cuts
    cuts = common_cuts(tiles) if cuts is None else cuts
    plain_args, plain_kwargs = tree_map(lambda t: fit(t, mesh, cuts), (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if target is not None and result is target.held:
        return target
    return tree_map(lambda t: Tile.make(t, mesh, cuts), result)


def _fallback(func: Any, args: tuple, kwargs: dict) -> Any:
    if func == torch.where and len(args) + len(kwargs) == 1:
        raise Unsupported("where(x) lists pixels")
    if is_pointwise(func):
        return pointwise(torch.Tensor.detach if func == _DATA else func, args, kwargs)
    if base_name(func) in ALONG:
        return along(func, args, kwargs)
    raise Unsupported


MOVES["fallback"] = _fallback


# Operations along one dimension; the position of ``dim`` among the arguments and its default.
ALONG: dict[str, tuple[int, Any]] = {
    "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None), "cumsum": (1, None),
    "cumprod": (1, None), "logsumexp": (1, None), "argmax": (1, None), "argmin": (1, None),
    "normalize": (2, 1), "glu": (1, -1), "chunk": (2, 0), "split": (2, 0), "tensor_split": (2, 0),
    "unbind": (1, 0), "narrow": (1, None), "select": (1, None), "sort": (1, -1), "argsort": (1, -1),
    "topk": (2, -1), "any": (1, None), "all": (1, None), "prod": (1, None), "std": (1, None),
    "var": (1, None), "norm": (2, None), "linalg_vector_norm": (2, None),
    "repeat_interleave": (2, None), "index_select": (1, None), "amax": (1, None), "amin": (1, None),
    "max": (1, None), "min": (1, None), "median": (1, None), "cosine_similarity": (2, 1),
    "squeeze": (1, None), "unsqueeze": (1, None),
}  # fmt: skip


def along(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` on the parts if it runs along dimensions that are whole on every rank."""
    name = base_name(func)
    position, default = ALONG[name]
    dims = kwargs.get("dim", args[position] if len(args) > position else default)
    tile, tiles = args[0] if args else None, list(tiles_in((args, kwargs)))
    chosen = (dims,) if isinstance(dims, int) else dims
    if (
        not isinstance(tile, Tile)
        or not isinstance(chosen, (tuple, list))
        or not all(type(dim) is int for dim in chosen)
        or (len(tiles) > 1 and name != "cosine_similarity")
    ):
        raise Unsupported
    place = fit if name == "cosine_similarity" else parameter  # operands, or counts and indices
    cuts = common_cuts(tiles)
    negative = [dim if dim < 0 else dim - tile.ndim for dim in chosen]
    if name == "unsqueeze":
        negative = [dim if dim < 0 else dim - tile.ndim - 1 for dim in chosen]
    elif any(cut.dim in negative for _, cut in cut_axes(cuts)):
        raise Unsupported(f"dimension {dims} is the one that is split")
    if name == "squeeze":
        negative = [dim for dim in negative if tile.shape[dim] == 1]
    plain_args, plain_kwargs = tree_map(
        lambda t: fit(t, tile.mesh, cuts) if t is tile else place(t, tile.mesh, cuts), (args, kwargs)
    )
    result = func(*plain_args, **plain_kwargs)
    return tree_map(lambda t: Tile.make(t, tile.mesh, moved(cuts, negative, t.ndim - tile.ndim)), result)


def moved(cuts: Cuts, dims: list[int], change: int) -> Cuts:
    """Cuts after ``change`` dimensions (+1, -1, ...) appeared or vanished at the places ``dims``."""
    if change == 0:
        return cuts
    step = 1 if change > 0 else -1
    result: list[Cut | None] = []
    for cut in cuts:
        if cut is None:
            result.append(None)
            continue
        dim = cut.dim
        if step > 0:
            dim -= sum(1 for d in dims if d >= cut.dim)
        else:
            dim += sum(1 for d in dims if d > cut.dim)
        result.append(Cut(dim, cut.split))
    return tuple(result)


def with_parameters(func: Any, input: Any, *args: Any, **options: Any) -> Any:
    """Run ``func`` on the part with parameters that do not broadcast against it."""
    mesh, cuts = image_of(input).mesh, input.cuts
    args, options = tree_map(lambda t: parameter(t, mesh, cuts), (args, options))
    return Tile.make(func(local_of(input), *args, **options), mesh, cuts)


def need_channels(tile: Any) -> None:
    """Dimension 1 must be whole on every rank."""
    if any(cut.dim == 1 - tile.ndim for _, cut in cut_axes(image_of(tile).cuts)):
        raise Unsupported("its channels are split")


@handles(F.prelu, torch.Tensor.prelu)
def _prelu(input: Any, weight: Tensor) -> Any:
    if weight.numel() > 1:
        need_channels(input)
    return with_parameters(F.prelu, input, weight)


def _over_channels(func: Any, input: Any, *args: Any, **options: Any) -> Any:
    need_channels(input)
    return with_parameters(func, input, *args, **options)


for _channelwise in (F.channel_shuffle, F.local_response_norm):
    handles(_channelwise)(partial(_over_channels, _channelwise))


@handles(F.linear)
def _linear(input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    if any(cut.dim == -1 for _, cut in cut_axes(image_of(input).cuts)):
        raise Unsupported("its last dimension is the one that is split")
    if weight.ndim != 2 or (bias is not None and bias.ndim != 1):
        raise Unsupported("the weight must be a matrix and the bias a vector")
    return with_parameters(F.linear, input, weight, bias)


@handles(F.layer_norm)
def _layer_norm(input: Any, normalized_shape: list[int], *args: Any, **options: Any) -> Any:
    if any(cut.dim >= -len(normalized_shape) for _, cut in cut_axes(image_of(input).cuts)):
        raise Unsupported("it normalizes over dimensions that are split")
    return with_parameters(F.layer_norm, input, normalized_shape, *args, **options)


@handles(torch.flip, torch.Tensor.flip)
def _flip(input: Any, *given: Any, dims: Any = ()) -> Any:
    chosen = sizes_of(given or (dims,))
    if any(cut.dim in chosen or cut.dim + input.ndim in chosen for _, cut in cut_axes(input.cuts)):
        raise Unsupported(f"dimension {chosen} is the one that is split")
    return Tile.make(local_of(input).flip(chosen), input.mesh, input.cuts)


# -- new tensors made by a tile: ``x.new_zeros(...)`` and its relatives --------------------------------------

_T = torch.Tensor
_creates = partial(handles, into=(HANDLERS, ON_FOLDED))


def _new(tile: Tile, size: list[int], make: Callable[[Tensor, Any], Tensor]) -> Tile:
    """Cut as ``tile`` where the shape is the same; any other shape is whole on every rank."""
    if size == list(tile.shape) and isinstance(tile, Folded):
        return fold(_new(tile.base, list(tile.base.shape), make), tile.counts)
    if size == list(tile.shape):
        return Tile.make(make(tile.held, tile.held.shape), tile.mesh, tile.cuts)
    return Tile.make(make(tile.held, size), tile.mesh, (None,) * len(tile.cuts))


def _alike(method: Any, tile: Any, *sizes: Any, size: Any = None, **options: Any) -> Any:
    wanted = sizes_of(sizes if size is None else (size,))
    return _new(tile, wanted, lambda local, shape: method(local, shape, **options))


for _method in (_T.new_empty, _T.new_zeros, _T.new_ones):
    _creates(_method)(partial(_alike, _method))


@_creates(_T.new_full)
def new_full(tile: Any, size: Any, fill_value: float, **options: Any) -> Any:
    return _new(tile, list(size), lambda local, shape: local.new_full(shape, fill_value, **options))


# -- dropout, and masks that depend on the position in the whole tensor, hence not on the grid ---------------

_STEP, _MIX1, _MIX2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def random_bits(positions: Tensor, seed: int) -> Tensor:
    """53 well mixed bits per position (the finalizer of splitmix64), as non-negative integers."""
    x = positions * _STEP + seed
    x = (x ^ _shifted(x, 30)) * _MIX1
    x = (x ^ _shifted(x, 27)) * _MIX2
    return _shifted(x ^ _shifted(x, 31), 11)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of signed numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def chosen(
    shape: torch.Size, bounds: tuple[tuple[int, int], ...], p: float | Tensor, seed: int, device: torch.device
) -> Tensor:
    """Which elements within ``bounds`` of a tensor of global ``shape`` are chosen, with probability ``p``."""
    local = [hi - lo for lo, hi in bounds]
    mask = torch.empty(local, dtype=torch.bool, device=device)
    threshold = round(p * (1 << 53)) if isinstance(p, float) else (p.double() * (1 << 53)).expand(local)
    for row in range(local[0]):  # one sample at a time: positions take eight bytes per element
        position = torch.tensor(bounds[0][0] + row, device=device)
        for size, (lo, hi) in zip(shape[1:], bounds[1:]):
            position = position.unsqueeze(-1) * size + torch.arange(lo, hi, device=device)
        limit = threshold if isinstance(threshold, int) else threshold[row]
        mask[row] = random_bits(position, seed) < limit
    return mask


def _held_bounds(tile: Tile) -> list[tuple[int, int]]:
    bounds = [(0, size) for size in tile.shape]
    for axis, cut in cut_axes(tile.cuts):
        bounds[cut.dim] = cut.split.held(tile.mesh.coord[axis])
    return bounds


def _drop(
    input: Any,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
    channels: bool,
) -> Any:
    """``channels``: drop whole channels, the same ones in every tile."""
    p = float(p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{input.mesh.where('dropout')}: probability must be between 0 and 1, got {p}")
    local: Tensor = local_of(input)
    if not (training and train) or p == 0.0:
        return input
    bounds, shape = _held_bounds(input), list(input.shape)
    if channels:
        bounds[2:], shape[2:] = [(0, 1)] * (input.ndim - 2), [1] * (input.ndim - 2)
    mask = chosen(torch.Size(shape), tuple(bounds), p, shared_seed(input.mesh, local.device), local.device)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    if inplace:
        local.masked_fill_(mask, 0.0).mul_(scale)
        return input
    return Tile.make(local.masked_fill(mask, 0.0) * scale, input.mesh, input.cuts)


handles_all(F.dropout, torch.dropout)(partial(_drop, channels=False))
handles_all(F.dropout2d, torch.feature_dropout)(partial(_drop, channels=True))


def _drop_unbatched(samples: int, input: Any, *args: Any, **options: Any) -> Any:
    """``samples``: the dimensions of an input of several samples; another one is a sample alone."""
    if input.ndim == samples:
        return _drop(input, *args, **options, channels=True)
    result = _drop(input.unsqueeze(0), *args, **options, channels=True)
    return input if options.get("inplace") else result.squeeze(0)


handles_all(F.dropout1d)(partial(_drop_unbatched, 3))
handles_all(F.dropout3d)(partial(_drop_unbatched, 5))


_DRAWS = "each rank would draw other numbers"


@handles_all(torch.Tensor.bernoulli_)
def bernoulli_(tile: Tile, p: float | Tensor = 0.5, *, generator: Any = None) -> Any:
    if generator is not None or not isinstance(tile, Tile):
        raise Unsupported(_DRAWS, gather=False)
    tile.held.copy_(_bernoulli(tile, p))
    return tile


@handles_all(torch.bernoulli, torch.Tensor.bernoulli)
def bernoulli(input: Any, p: float | None = None, *, generator: Any = None) -> Any:
    """With probability ``p``, or that of each element of ``input``."""
    if generator is not None or not isinstance(input, Tile):
        raise Unsupported(_DRAWS, gather=False)
    return Tile.make(_bernoulli(input, input if p is None else p), input.mesh, input.cuts)


def _bernoulli(tile: Tile, p: float | Tensor) -> Tensor:
    """Ones and zeros. A mask without image dimensions (of drop path) has torch's own numbers."""
    mesh = tile.mesh
    probability: Any = fit(p, mesh, tile.cuts).detach() if isinstance(p, Tensor) else float(p)
    if tile.replicated and all(dim < -tile.ndim or tile.shape[dim] == 1 for dim in mesh.dims):
        drawn = torch.zeros_like(tile.held)
        if draws(mesh):
            drawn.bernoulli_(probability)
        return everyone(drawn, mesh, tuple(range(len(mesh.grid))), "random mask")[0]
    seed = shared_seed(mesh, tile.device)
    return chosen(tile.shape, tuple(_held_bounds(tile)), probability, seed, tile.device).to(tile.dtype)
