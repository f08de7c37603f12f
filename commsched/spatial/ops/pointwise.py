"""Operations that act on each pixel alone: they run on the local parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.layout import common_cuts, enter, fit
from commsched.spatial.tile import (
    MOVES,
    Cut,
    Cuts,
    Tile,
    cut_axes,
    handles,
    is_inplace,
    tiles_in,
    tree_map,
    unsupported,
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
    contiguous clone detach requires_grad_ zeros_like ones_like empty_like full_like zero fill copy
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
    if kwargs.get("out") is not None:
        return unsupported(func, args, kwargs, "out= would write into a tensor that may be cut otherwise")
    if is_inplace(func, kwargs):
        target = args[0] if args else kwargs.get("input")
        if not isinstance(target, Tile):
            return unsupported(func, args, kwargs, "it would write split pixels into a tensor that is whole")
        cuts = target.cuts
    cuts = common_cuts(tiles) if cuts is None else cuts
    plain_args, plain_kwargs = tree_map(lambda t: fit(t, mesh, cuts), (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if target is not None and result is target.local:
        return target
    return tree_map(lambda t: Tile.make(t, mesh, cuts), result)


def _fallback(func: Any, args: tuple, kwargs: dict) -> Any:
    if is_pointwise(func):
        return pointwise(torch.Tensor.detach if func == _DATA else func, args, kwargs)
    if base_name(func) in ALONG:
        return along(func, args, kwargs)
    return NotImplemented


MOVES["fallback"] = _fallback


# Operations along one dimension; the position of ``dim`` among the arguments and its default.
ALONG: dict[str, tuple[int, Any]] = {
    "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None), "cumsum": (1, None),
    "cumprod": (1, None), "logsumexp": (1, None), "argmax": (1, None), "argmin": (1, None),
    "normalize": (2, 1), "glu": (1, -1), "chunk": (2, 0), "split": (2, 0), "tensor_split": (2, 0),
    "unbind": (1, 0), "narrow": (1, None), "select": (1, None), "sort": (1, -1), "argsort": (1, -1),
    "topk": (2, -1), "any": (1, None), "all": (1, None), "prod": (1, None), "std": (1, None),
    "var": (1, None), "norm": (2, None), "flip": (1, None),
    "repeat_interleave": (2, None), "index_select": (1, None), "amax": (1, None), "amin": (1, None),
    "max": (1, None), "min": (1, None), "median": (1, None), "cosine_similarity": (2, 1),
    "squeeze": (1, None), "unsqueeze": (1, None),
}  # fmt: skip


def along(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` on the parts if it runs along dimensions that are whole on every rank."""
    position, default = ALONG[base_name(func)]
    dims = kwargs.get("dim", args[position] if len(args) > position else default)
    tile = args[0] if args else kwargs["input"]
    chosen = (dims,) if isinstance(dims, int) else dims
    tiles = list(tiles_in((args, kwargs)))
    if (
        not isinstance(tile, Tile)
        or not isinstance(chosen, (tuple, list))
        or not all(isinstance(dim, int) for dim in chosen)
    ):
        return unsupported(func, args, kwargs)
    cuts = common_cuts(tiles)
    negative = [dim if dim < 0 else dim - tile.ndim for dim in chosen]
    if base_name(func) == "unsqueeze":
        negative = [dim if dim < 0 else dim - tile.ndim - 1 for dim in chosen]
    elif any(cut.dim in negative for _, cut in cut_axes(cuts)):
        return unsupported(func, args, kwargs, f"dimension {dims} is the one that is split")
    plain_args, plain_kwargs = tree_map(lambda t: _whole_or_fit(t, tile, cuts), (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    return tree_map(lambda t: Tile.make(t, tile.mesh, moved(cuts, negative, t.ndim - tile.ndim)), result)


def _whole_or_fit(value: Tensor, tile: Tile, cuts: Cuts) -> Tensor:
    return fit(value, tile.mesh, cuts) if isinstance(value, Tile) else enter(value, tile.mesh, cuts)


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
    if not isinstance(input, Tile):
        return unsupported(func, (input, *args), options)
    mesh, cuts = input.mesh, input.cuts
    args, options = tree_map(lambda t: enter(t, mesh, cuts), ((input, *args), options))
    return Tile.make(func(*args, **options), mesh, cuts)


for _function in (F.prelu, torch.Tensor.prelu, F.channel_shuffle, F.local_response_norm):
    handles(_function)(partial(with_parameters, _function))


@handles(F.linear)
def _linear(input: Any, *args: Any, **options: Any) -> Any:
    if not isinstance(input, Tile) or any(cut.dim == -1 for _, cut in cut_axes(input.cuts)):
        why = "its last dimension is the one that is split"
        return unsupported(F.linear, (input, *args), options, why)
    return with_parameters(F.linear, input, *args, **options)


@handles(F.layer_norm)
def _layer_norm(input: Any, normalized_shape: list[int], *args: Any, **options: Any) -> Any:
    dims = -len(normalized_shape)
    if not isinstance(input, Tile) or any(cut.dim >= dims for _, cut in cut_axes(input.cuts)):
        why = "it normalizes over dimensions that are split"
        return unsupported(F.layer_norm, (input, normalized_shape, *args), options, why)
    return with_parameters(F.layer_norm, input, normalized_shape, *args, **options)
