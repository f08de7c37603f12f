"""Calls of torch's functions on a tile, with drawn arguments, against the same calls on the whole image.

Every function that acts on tiles is called with each argument that torch has for it. ``draw`` makes a call
that plain PyTorch accepts, ``failure`` makes it on tiles: the results are those of the whole image, or the
call is refused by name. With ``unsupported="gather"`` nothing is refused but what draws random numbers.

    python -m tests.checker.calls --name pool --seeds 20
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from commsched import spatial
from commsched.channels import Channel
from commsched.spatial.layout import Folded
from commsched.spatial.mesh import Mesh
from commsched.spatial.ops.gradients import GRADIENTS
from commsched.spatial.ops.pointwise import ALONG, POINTWISE
from commsched.spatial.tile import HANDLERS, ON_ALL
from tests.support.spatial_cases import on_threads

Dice = random.Random
TRIES = 3000
WAYS = ("image", "channels last", "tokens")  # what a call gets: the image, permuted or reshaped


class Argument(NamedTuple):
    name: str
    needed: bool
    kind: str  # the schema's type, or the default value of a function written in Python
    keyword: bool


@dataclass(frozen=True)
class Call:
    """``tiles``: the tensors among its arguments that are split, by their place among all tensors."""

    function: Any
    way: str
    shape: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tiles: frozenset[int]
    gradients: bool

    @property
    def changes(self) -> bool:
        """Whether it writes to an argument."""
        name = getattr(self.function, "__name__", "")
        named = name.endswith("_") and not name.endswith("__") or name.startswith("__i")
        return bool(named or self.kwargs.get("inplace") or "out" in self.kwargs)

    def __str__(self) -> str:
        def shown(value: Any) -> Any:
            return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else value

        args, kwargs = tree_map(shown, (self.args, self.kwargs))
        return f"{resolve_name(self.function)}{args} {kwargs} on {self.way}, split: {sorted(self.tiles)}"


# -- functions and their arguments ---------------------------------------------------------------------------


def functions() -> list[Any]:
    """Return every function that acts on tiles, in torch's own order of names."""
    named = {*HANDLERS, *ON_ALL} - {*GRADIENTS, F.multi_head_attention_forward}
    for name in (*POINTWISE, *ALONG, "cumsum_", "index_fill_", "lp_pool2d", "grid_sample", "frexp"):
        for space in (torch, F, torch.Tensor):
            for spelled in (name, f"{name}_", f"__{name}__"):
                function = getattr(space, spelled, None)
                if callable(function) and function in torch.overrides.get_testing_overrides():
                    named.add(function)
    named -= {torch.Tensor.__float__, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__long__}
    named -= {torch.Tensor.detach_}  # torch refuses it for views, and more tiles are views
    return sorted(named, key=lambda function: (str(resolve_name(function)), str(function)))


_BY_HAND = {
    torch.einsum: [[Argument("equation", True, "str", False), Argument("operands", True, "Tensor", False)]],
    torch.Tensor.__getitem__: [
        [Argument("input", True, "Tensor", False), Argument("index", True, "", False)]
    ],
    F.logsigmoid: [[Argument("input", True, "Tensor", False), Argument("out", False, "Tensor", True)]],
}
_IMAGE, _OTHER = Argument("input", True, "Tensor", False), Argument("other", True, "Tensor", False)


def overloads(function: Any) -> list[list[Argument]]:
    """Return the arguments of each form of ``function``, the image first."""
    name, method = function.__name__, hasattr(torch.Tensor, function.__name__)
    method = method and getattr(torch.Tensor, name) is function
    if function in _BY_HAND:
        return _BY_HAND[function]
    if inspect.isfunction(function) or not _schemas(name):
        twin = getattr(F, f"{name}_with_indices", function)
        try:
            parameters = list(inspect.signature(twin).parameters.values())
        except ValueError:  # an operator, or a conversion
            return [[_IMAGE, _OTHER] if method and _is_binary(function) else [_IMAGE]]
        if parameters[-1].kind is parameters[-1].VAR_KEYWORD:
            return [[_IMAGE, _OTHER], [_IMAGE]]
        found = [
            Argument(p.name, p.default is p.empty, repr(p.default), p.kind is p.KEYWORD_ONLY)
            for p in parameters
            if p.name != "_stacklevel"
        ]
        return [[Argument("input", True, "Tensor", False), *found[1:]]]
    forms: dict[tuple[str, ...], list[Argument]] = {}
    for schema in _schemas(name):
        form = [
            Argument(a.name, not a.has_default_value() and not a.is_out, str(a.type), a.kwarg_only)
            for a in schema.arguments
            if not a.is_out
        ]
        form = [a._replace(name="input") if a.name == "self" else a for a in form]
        if method:
            form.sort(key=lambda a: a.name != "input")
        if not method and any(a.is_out for a in schema.arguments):
            form.append(Argument("out", False, "Tensor", True))
        if not {a.name for a in form} & {"input", "tensors"}:  # of counts, or of a condition, alone
            continue
        forms.setdefault(tuple(a.name + a.kind for a in form), form)
    return list(forms.values())


def _schemas(name: str) -> list[Any]:
    def usable(schema: Any) -> bool:
        kinds = [str(a.type) for a in schema.arguments]
        names = {a.name for a in schema.arguments}
        other = "Dimname" in str(schema) or names & {"names", "names_out", "a", "b", "reverse"}
        return bool(kinds) and kinds[0] in ("Tensor", "List[Tensor]") and not other

    return [s for s in torch._C._jit_get_schemas_for_operator(f"aten::{name}") if usable(s)]


def _is_binary(function: Any) -> bool:
    try:
        function(torch.ones(1), torch.ones(1))
    except (TypeError, RuntimeError):
        return False
    return True


# -- drawn values --------------------------------------------------------------------------------------------


@dataclass
class Values:
    """Draws values for the arguments of a function of an image ``x``."""

    dice: Dice
    function: Any
    x: Tensor
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    def of(self, argument: Argument) -> Any:
        """Return a value for ``argument``; those that torch refuses are drawn again."""
        name, kind, dice = argument.name, argument.kind, self.dice
        if name in _NAMED:
            value = dice.choice(_NAMED[name])
            return value(self) if callable(value) else value
        if "Tensor" in kind:
            several = kind.startswith("List")
            return [self.tensor() for _ in range(dice.randint(1, 3))] if several else self.tensor()
        if "bool" in kind or kind in ("True", "False"):
            return dice.random() < 0.5
        if "List" in kind:
            return [dice.randint(0, 3) for _ in range(dice.randint(1, 3))]
        if "int" in kind or kind.isdigit():
            return dice.randint(0, 3)
        if "str" in kind:
            return dice.choice(["none", "tanh", "floor", "trunc"])
        return dice.choice([0.5, 1.5, -1.0, 2, 1, 0.1])

    def reals(self, shape: Sequence[int]) -> Tensor:
        if not self.x.is_floating_point():
            return torch.randint(0, 9, tuple(shape))
        seed = torch.Generator().manual_seed(self.dice.randrange(10**6))
        return torch.rand(tuple(shape), generator=seed, dtype=torch.float64) + 0.1

    def tensor(self) -> Tensor:
        """Return another operand: of the image's shape, or one that broadcasts."""
        shape = self.x.shape
        turned = (*shape[:-2], shape[-1], shape[-2])
        others = [shape[-1:], (shape[1], *(1,) * (len(shape) - 2)), (), turned]
        return self.reals(self.dice.choice([shape, shape, *others]))

    def mask(self) -> Tensor:
        return self.tensor() > 0.6

    def dim(self) -> int:
        return self.dice.randrange(-self.x.ndim, self.x.ndim)

    def dims(self) -> Any:
        n = self.dice.choice([1, 2, 2, 3])
        return tuple(self.dice.sample(range(-self.x.ndim, 0), min(n, self.x.ndim)))

    def size(self) -> Any:
        shape = list(self.x.shape)
        return self.dice.choice([shape, [*shape[:2], -1], [shape[0], -1], (3, 5), (2, 4), 3, (4,)])

    def pads(self) -> Any:
        return [self.dice.randint(-1, 2) for _ in range(self.dice.choice([2, 4]))]

    def index(self) -> Any:
        rows = torch.tensor([1, 0])
        entries = [
            slice(None),
            slice(1, 3),
            slice(None, None, 2),
            1,
            None,
            Ellipsis,
            True,
            rows,
            self.x > 0.5,
        ]
        return tuple(self.dice.choice(entries) for _ in range(self.dice.randint(1, 3)))

    def weight(self) -> Any:
        """Return a kernel, or numbers per channel, class, element or place."""
        channels, last, n = self.x.shape[1], self.x.shape[-1], self.x.ndim - 2
        kernels = [(channels, channels, *(3,) * n), (2 * channels, channels // 2, *(2,) * n)]
        others = [self.x.shape, (channels,), (1,), (5, last), (last,), (channels, 6, *(4,) * n)]
        return self.reals(self.dice.choice([*kernels, *others]))

    def target(self) -> Any:
        shape = self.x.shape
        classes = (self.reals((shape[0], *shape[2:])) * 3).long()
        return self.dice.choice([self.reals(shape).clamp(max=1.0), classes])

    def out(self) -> Any:
        return None  # made in the shape of the result

    def statistics(self) -> Any:
        return self.reals(self.x.shape[1:2])


_NAMED: dict[str, Sequence[Any]] = {
    "dim": (Values.dim, Values.dims), "dims": (Values.dims,), "dim0": (Values.dim,), "dim1": (Values.dim,),
    "axis0": (Values.dim,), "axis1": (Values.dim,), "source": (Values.dim, Values.dims),
    "destination": (Values.dim, Values.dims), "start_dim": (0, 1), "end_dim": (-1, -2, 2),
    "dtype": (torch.float32, torch.float64, torch.int64), "out_dtype": (torch.float32,),
    "memory_format": (torch.contiguous_format, torch.preserve_format, torch.channels_last),
    "layout": (torch.strided,), "device": ("cpu",), "pin_memory": (False,), "non_blocking": (True,),
    "generator": (lambda v: torch.Generator().manual_seed(3),), "out": (Values.out,),
    "input": (Values.tensor,), "mat2": (Values.tensor,), "condition": (Values.mask,),
    "mask": (Values.mask,),
    "size": (Values.size,), "shape": (Values.size,), "sizes": ((2, -1), (1, -1), (2, 2)),
    "output_size": (Values.size, (None, 2), 2, 1, 8, 12, 16, 96), "output_ratio": (0.5,),
    "normalized_shape": (lambda v: [v.x.shape[-1]], lambda v: list(v.x.shape[-2:])),
    "pad": (Values.pads,), "mode": ("constant", "reflect", "replicate", "circular", "nearest", "bilinear",
            "bicubic", "area", "nearest-exact"),
    "scale_factor": (2, 1.5, (2, 1.5)), "index": (Values.index, 1, lambda v: torch.tensor([1, 0])),
    "weight": (Values.weight, Values.weight, Values.weight, 0.3),
    "bias": (Values.statistics, Values.weight, lambda v: v.reals((5,))),
    "running_mean": (Values.statistics, Values.statistics, None),
    "running_var": (Values.statistics, Values.statistics, None),
    "target": (Values.target,), "kernel_size": (2, 3, (2, 3)), "stride": (1, 2, (2, 1), None),
    "padding": (0, 1, (1, 0), "same", "valid"), "dilation": (1, 2, (1, 2)), "output_padding": (1, (0, 1)),
    "padding_mode": ("border", "reflection"), "groups": (2, 4), "num_groups": (1, 2, 4),
    "reduction": ("sum", "none", "mean"), "norm_type": (2.0,),
    "ignore_index": (0, 1, -100), "divisor_override": (3,), "num_classes": (5,), "chunks": (2, 3),
    "split_size": (1, 2, [1, 3]), "split_sizes": ([1, 3], [2, 2]), "split_size_or_sections": (2, [1, 3]),
    "tensor_indices_or_sections": (torch.tensor([1, 2]), torch.tensor(2)), "sections": (2,),
    "indices": ([1, 2],), "repeats": (2,), "k": (1, 2), "size_average": (True, False),
    "reduce": (True, False), "p": (0.0, 1.0, 2, 1, "fro", float("inf")), "ord": (1, 2, 0, float("inf")),
    "equation": ("nchw->ncwh", "nchw->nc", "nchw->ncw", "nlc->ncl", "nchw", "...w->..."),
    "query": (Values.tensor,), "key": (Values.tensor,), "value": (Values.tensor, 0.5, None),
    "attn_mask": (lambda v: v.reals((v.x.shape[-2],) * 2),), "dropout_p": (0.0,), "scale": (0.3,),
    "upscale_factor": (2,), "downscale_factor": (2,), "shifts": (1, (2, -1)),
    "start": (0, 1, torch.tensor(1)),
    "length": (1, 2), "correction": (0, 1, 2), "fill_value": (0.5,),
    "grid": (lambda v: v.reals((2, 3, 3, 2)),),
    "implicit": (False,), "approximate": ("tanh",), "rounding_mode": ("floor", "trunc"), "copy": (True,),
    "label_smoothing": (0.1,), "enable_gqa": (True,), "align_corners": (True, False), "upscale": (2,),
    "beta": (0.5, 2), "delta": (0.5,), "alpha": (0.5, 2), "momentum": (0.3,), "eps": (0.1, 1e-3),
    "pos_weight": (Values.tensor,), "x1": (Values.tensor,), "x2": (Values.tensor,),
}  # fmt: skip
_OF_INTEGERS = {"and", "or", "xor", "iand", "ior", "ixor", "rand", "ror", "rxor", "invert"}
_NOT_ON_CPU = {"out_dtype", "pin_memory", "cudnn_enabled", torch.Tensor.cuda}
_DRAWS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "bernoulli", "bernoulli_"}


def image_of(function: Any, way: str, dice: Dice) -> Tensor:
    name = function.__name__
    shape = {"1": (2, 4, 12), "3": (1, 2, 4, 4, 6)}.get(name[-2] if name.endswith("d") else "", (2, 4, 6, 8))
    x = torch.rand(shape, generator=torch.Generator().manual_seed(dice.randrange(10**6)), dtype=torch.float64)
    if name.startswith("bernoulli"):
        return (x > 0.5).double()
    return (x * 9).long() if name.strip("_") in _OF_INTEGERS or "bitwise" in name else x * 0.8 + 0.1


def prepared(x: Tensor, way: str) -> Tensor:
    if way == "channels last":
        return x.movedim(1, -1).contiguous()
    return x.flatten(2).transpose(1, 2).contiguous() if way == "tokens" else x


def draw(function: Any, form: list[Argument], wanted: str, seed: int) -> Call | None:
    """Return a call with the argument ``wanted`` that plain PyTorch accepts.

    None if the function in Python does not have the argument that its schema has.
    """
    dice, refused = Dice(f"{resolve_name(function)} {wanted} {seed}"), ""
    for _ in range(TRIES):
        call = _draw(function, form, wanted, dice)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = plain(call)[0]
                if "out" in call.kwargs:
                    call = _with_out(call, result, dice)
                    plain(call)
        except TypeError:
            continue
        except Exception as error:
            refused = f"{resolve_name(function)}: no call with {wanted}: {error}"
            continue
        return call
    needed = {wanted, function, *(argument.name for argument in form if argument.needed)}
    assert not refused or needed & _NOT_ON_CPU, refused
    return None


def _draw(function: Any, form: list[Argument], wanted: str, dice: Dice) -> Call:
    way = dice.choice(WAYS)
    x = image_of(function, way, dice)
    values = Values(dice, function, prepared(x, way))
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for place, argument in enumerate(form):
        fixed = argument.name == "p" and function.__name__ in _DRAWS
        if not (argument.needed or argument.name == wanted or fixed or dice.random() < 0.3):
            continue
        value = x if argument.name in ("input", "operands") and place < 2 else values.of(argument)
        if place == 0 and argument.kind.startswith("List"):
            value = [x, *(values.tensor() for _ in range(dice.randint(1, 2)))]
        if argument.name == "p" and function.__name__ in _DRAWS and wanted != "generator":
            value = float(dice.random() < 0.5)
        positional = len(args) == place and not argument.keyword and place < 2
        if positional or (argument.needed and len(args) == place and dice.random() < 0.7):
            args.append(value)
        else:
            spelled = {"dim": "axis", "keepdim": "keepdims"} if not inspect.isfunction(function) else {}
            kwargs[dice.choice([argument.name, spelled.get(argument.name, argument.name)])] = value
    if args and args[0] is x and form[0].name == "input" and dice.random() < 0.1 and _takes_input(function):
        kwargs["input"] = args.pop(0)
        kwargs |= {a.name: value for a, value in zip(form[1:], args)}
        args = []
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    can = [i for i, t in enumerate(tensors) if t is x or _can_split(t)]
    chosen = {i for i in can if tensors[i] is x or dice.random() < 0.4}
    if len(can) > 1 and dice.random() < 0.3:
        chosen = {dice.choice(can)}
    return Call(function, way, tuple(x.shape), tuple(args), kwargs, frozenset(chosen), dice.random() < 0.75)


def _with_out(call: Call, result: Any, dice: Dice) -> Call:
    """Return the call with ``out`` of the shape of its result, last among its tensors."""
    made = tree_map(lambda t: torch.full_like(t, 7), result)
    kwargs = {name: value for name, value in call.kwargs.items() if name != "out"}
    before = sum(isinstance(t, Tensor) for t in tree_leaves((call.args, kwargs)))
    kwargs["out"] = made if isinstance(made, Tensor) else tuple(made)
    split = {before + i for i, t in enumerate(tree_leaves(made)) if _can_split(t) and dice.random() < 0.7}
    return replace(call, kwargs=kwargs, tiles=call.tiles | split)


def _can_split(value: Tensor) -> bool:
    return value.ndim > 1 and min(value.shape[-2:]) > 3


def _takes_input(function: Any) -> bool:
    return not any(function is getattr(torch.Tensor, name, None) for name in (function.__name__,))


# -- both sides ----------------------------------------------------------------------------------------------


def plain(call: Call) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Return the result on the whole image, what was written, and the gradients."""
    return _made(call, lambda t: t, lambda t: t)


def _made(
    call: Call, split: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor]
) -> tuple[Any, list[Tensor], list[Tensor]]:
    leaves: list[Tensor] = []
    number = iter(range(1000))

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor):
            if isinstance(value, torch.Generator):
                return torch.Generator().manual_seed(3)
            return value
        place, value = next(number), value.clone()
        tile = split(value) if place in call.tiles else value
        if call.gradients and place in call.tiles and value.is_floating_point() and "out" not in call.kwargs:
            leaves.append(tile.requires_grad_())
            tile = tile * 1 if call.changes else tile
        return prepared(tile, call.way) if place == image else tile

    tensors = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]
    image = next(i for i, t in enumerate(tensors) if tuple(t.shape) == call.shape)
    args, kwargs = tree_map(given, (call.args, call.kwargs))
    result = call.function(*args, **kwargs)
    results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    written = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    loss = sum((t * t).sum() for t in results if t.requires_grad and t.is_floating_point())
    if isinstance(loss, Tensor) and "empty" not in call.function.__name__:
        loss.backward()
    grads = [whole(t.detach() * 0 if t.grad is None else t.grad) for t in leaves]
    found = tree_map(lambda t: whole(t.detach()) if isinstance(t, Tensor) else t, result)
    return found, [whole(t.detach()) for t in written], grads


def _whole(value: Tensor) -> Tensor:
    if isinstance(value, Folded):
        value = value.whole
    return spatial.gather(value).local if isinstance(value, spatial.Tile) else value


GRIDS = {2: ((2, 1), (1, 2)), 4: ((2, 2),)}


def failure(call: Call, channel: Channel, unsupported: str) -> str:
    """Return how a call on tiles fails; "" if it does not."""
    wanted, n = plain(call), len(call.shape) - 2
    grid = GRIDS[channel.size][len(str(call)) % len(GRIDS[channel.size])]
    dims: tuple[int, ...] = (-2, -1)
    if n == 1:
        grid, dims = (channel.size,), (-1,)
    mesh = Mesh(channel, grid, dims, unsupported=unsupported)
    draws = call.function.__name__ in _DRAWS and {"generator", "out"} & {*call.kwargs}
    try:
        found = _made(call, lambda t: spatial.scatter(t, mesh), _whole)
    except ValueError as error:
        listed = "is not supported" in str(error) and (unsupported == "error" or draws)
        return "" if listed or "cannot change its shape" in str(error) else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if "empty" in call.function.__name__:
        return "" if found[0].shape == wanted[0].shape else f"shape {found[0].shape}"
    bound = 1e-4 if torch.float32 in (*call.args, *call.kwargs.values()) else 1e-9
    for what, one, other in zip(("result", "arguments", "gradients"), found, wanted):
        if reason := difference(tree_leaves(one), tree_leaves(other), bound):
            return f"the {what}: {reason}"
    return ""


def difference(found: list[Any], wanted: list[Any], bound: float) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} values, in one process {len(wanted)}"
    for one, other in zip(found, wanted):
        if not isinstance(other, Tensor):
            if one != other:
                return f"{one}, in one process {other}"
        elif not isinstance(one, Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
            kind = f"{getattr(one, 'shape', one)} {getattr(one, 'dtype', '')}"
            return f"{kind}, in one process {other.shape} {other.dtype}"
        else:
            try:
                torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)
            except AssertionError as error:
                return str(error)
    return ""


def faults(function: Any, seeds: int = 1) -> list[str]:
    """Return the calls of ``function`` that fail on tiles, with each argument of each of its forms."""
    forms = [
        (form, argument.name, seed)
        for form in overloads(function)
        for argument in form
        for seed in range(seeds)
    ]
    calls = [call for form in forms if (call := draw(function, *form)) is not None]
    ranks, found = 2 + 2 * (len(str(resolve_name(function))) % 2), []
    for unsupported in ("gather", "error"):

        def work(channel: Channel, unsupported: str = unsupported) -> list[str]:
            return [failure(call, channel, unsupported) for call in calls]

        for call, *reasons in zip(calls, *on_threads(ranks, work, 60.0)):
            if reason := next(filter(None, reasons), ""):
                found.append(f"unsupported={unsupported!r}: {call}\n    {reason}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="", help="only functions with this in their name (default all)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="calls per argument (default 1)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [function for function in functions() if given.name in str(resolve_name(function))]
    found = 0
    for function in chosen:
        for fault in faults(function, given.seeds):
            found += 1
            print(fault, flush=True)
    print(f"{len(chosen)} functions, {found} calls failed")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
