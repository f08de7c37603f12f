"""The layers of a model: its modules, in the order in which its forward runs them.

Lists of blocks, and modules that have such a list inside, are opened; every other module is one layer. What
an opened module holds itself (a scale, a table of positions) belongs to the layer in which it is read first.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Held:
    """A module by its name in the model, with all below it; or ``only`` these tensors of its own."""

    name: str
    module: nn.Module
    only: frozenset[str] | None = None

    @property
    def whole(self) -> bool:
        return self.only is None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the model."""
        return self._named(self.module.named_parameters(recurse=self.whole, remove_duplicate=False))

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the model."""
        buffers = self.module.named_buffers(recurse=self.whole, remove_duplicate=False)
        return {**self.parameters(), **self._named(buffers)}

    def _named(self, found: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        prefix = f"{self.name}." if self.name else ""
        return {prefix + name: tensor for name, tensor in found if self.only is None or name in self.only}


@dataclass(frozen=True)
class ModuleLayer:
    """A module and, ``borrowed``, the tensors of others that it reads too."""

    own: Held
    borrowed: tuple[Held, ...] = ()

    @property
    def parts(self) -> tuple[Held, ...]:
        return self.own, *self.borrowed

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the model."""
        return {name: tensor for part in self.parts for name, tensor in part.tensors().items()}


def owners_of(layers: Sequence[ModuleLayer]) -> dict[int, list[int]]:
    """The layers of each parameter and buffer, by id; new at each call: weight versions exchange them."""
    found: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        for tensor in layer.tensors().values():
            found.setdefault(id(tensor), []).append(number)
    return found


def in_copy(copied: nn.Module, layer: ModuleLayer) -> ModuleLayer:
    def held(part: Held) -> Held:
        return replace(part, module=copied.get_submodule(part.name))

    return ModuleLayer(held(layer.own), tuple(map(held, layer.borrowed)))


def skeleton(model: nn.Module, layers: Sequence[ModuleLayer], kept: range) -> nn.Module:
    """A copy of the model that shares the tensors of the layers ``kept`` and of no layer; of other layers'
    tensors it has the shapes. So the rest of the model can be freed.
    """
    mine = {id(tensor) for number in kept for tensor in layers[number].tensors().values()}
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for layer in layers:
        for tensor in layer.tensors().values():
            if id(tensor) not in mine:
                shape = torch.empty_like(tensor, device="meta", requires_grad=False)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if is_parameter else shape
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception as error:
        raise ValueError(
            f"a stage runs a copy of the model, and {_uncopied(model, memo)} cannot be copied ({error}):"
            " define __deepcopy__ for it, or set it after the pipeline is made, which then takes it as it is"
        ) from error


def _uncopied(model: nn.Module, memo: dict[int, Any]) -> str:
    for name, part in model.named_modules():
        for key, value in vars(part).items():
            try:
                copy.deepcopy(value if key != "_modules" else None, dict(memo))
            except Exception:
                return f"{name or type(model).__name__}.{key}"
    return type(model).__name__


def in_no_layer(model: nn.Module, layers: Sequence[ModuleLayer]) -> list[str]:
    """The modules that every stage runs, by name: those that are opened, and those in no layer."""
    left_out = {id(part) for layer in layers if layer.own.whole for part in layer.own.module.modules()}
    return [name for name, part in model.named_modules() if id(part) not in left_out]


# -- finding them --------------------------------------------------------------------------------------------


def layers_of(model: nn.Module, inside: tuple[type[nn.Module], ...] = ()) -> list[ModuleLayer]:
    """Modules with parameters or saved buffers, in the order in which the model registers them. Lists of
    blocks, modules that have such a list inside, and those of classes ``inside`` are opened; every other
    module stays whole.
    """
    found: list[Held] = []
    _open("", model, found, (*_LISTS, type(model), *inside))
    return [ModuleLayer(held) for held in found]


def _open(name: str, module: nn.Module, found: list[Held], opened: tuple[type[nn.Module], ...]) -> None:
    if not _has_state(module):
        return
    if not (isinstance(module, opened) or has_blocks(module)):
        found.append(Held(name, module))
        return
    own = (*module._parameters.items(), *module._buffers.items())
    if only := frozenset(key for key, value in own if value is not None):
        found.append(Held(name, module, only))
    for child_name, child in module.named_children():
        _open(f"{name}.{child_name}" if name else child_name, child, found, opened)


def has_blocks(module: nn.Module) -> bool:
    """Whether a list inside holds two modules of one class that have modules with parameters themselves; or
    a module two numbered ones (``b1``, ``b2``) of one class, whose parts have such modules.
    """
    for part in module.modules():
        listed = isinstance(part, _LISTS)
        kinds = []
        for name, child in part.named_children():
            parts = list(child.children())
            if not listed:
                parts = [inner for each in parts for inner in each.children()]
            if any(map(_has_state, parts)):
                kinds.append((type(child), "" if listed else name.rstrip("0123456789")))
        if len(kinds) > len(set(kinds)):
            return True
    return False


def _has_state(module: nn.Module) -> bool:
    return any(
        part._parameters or part._buffers.keys() - part._non_persistent_buffers_set
        for part in module.modules()
    )


# -- their order ---------------------------------------------------------------------------------------------


def ordered(model: nn.Module, layers: Sequence[ModuleLayer], events: Iterable[Event]) -> list[ModuleLayer]:
    """The layers in the order in which a forward runs them, each with what it reads of others. ``events``: of
    that forward. A whole layer whose parameters are read by others only is left out.
    """
    order: dict[int, None] = {}
    borrowed: dict[int, dict[int, None]] = {}  # by layer the ids of tensors
    first: dict[int, int] = {}  # by id of an opened module's tensor the layer that has it
    running: list[int] = []
    last = -1
    for kind, read in events:
        if kind == "call":
            running.append(last := read[0][0])
            order.setdefault(last)
        elif kind == "return":
            running.pop()
        else:
            if not running:
                for layer, _ in read:  # the operation belongs to the last of these
                    if layer not in order:
                        order.setdefault(last := layer)
            reader = running[-1] if running else last
            for layer, tensor in read:
                home = layer if layers[layer].own.whole else first.setdefault(tensor, reader)
                if layer not in running and home != reader:
                    borrowed.setdefault(reader, {})[tensor] = None
    lent = {tensor for found in borrowed.values() for tensor in found}
    numbers = list(order)
    for number, layer_ in enumerate(layers):
        read_by_others = any(id(t) in lent or id(t) in first for t in layer_.tensors().values())
        if number not in order and not read_by_others:
            # This forward has not run it, and another one may (layer drop): after the one before it in the
            # model.
            before = [place for place, other in enumerate(numbers) if other < number]
            last = max(before, key=numbers.__getitem__, default=-1)
            numbers.insert(last + 1, number)
    taken: dict[int, list[int]] = {}  # by layer, what it has of opened modules
    for tensor, home in first.items():
        taken.setdefault(home, []).append(tensor)
    homes = _homes(model)
    return [
        ModuleLayer(
            _without(layers[number].own, {tensor for tensor, home in first.items() if home != number}),
            _held_alone(homes, [*taken.get(number, ()), *borrowed.get(number, ())], layers[number].own),
        )
        for number in numbers
    ]


def _without(own: Held, tensors: set[int]) -> Held:
    """The tensors of an opened module that other layers do not have."""
    if own.only is None:
        return own
    slots = own.module._parameters | own.module._buffers
    return replace(own, only=frozenset(key for key in own.only if id(slots[key]) not in tensors))


def _held_alone(
    homes: dict[int, tuple[str, nn.Module, str]], tensors: Iterable[int], own: Held
) -> tuple[Held, ...]:
    """These tensors, module by module; those of ``own`` are there already."""
    keys: dict[str, tuple[nn.Module, list[str]]] = {}
    for name, module, key in (homes[tensor] for tensor in tensors):
        if module is not own.module:
            keys.setdefault(name, (module, []))[1].append(key)
    return tuple(Held(name, module, frozenset(found)) for name, (module, found) in keys.items())


def _homes(model: nn.Module) -> dict[int, tuple[str, nn.Module, str]]:
    """By id of a tensor the module that has it, and its name there."""
    return {
        id(tensor): (name, module, key)
        for name, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


# torch.fx patches modules for the whole process while it traces: one trace at a time, and modules that other
# threads call meanwhile compute as ever.
_TRACING = threading.Lock()


@contextmanager
def set_back(model: nn.Module, kinds: tuple[type, ...] = ()) -> Iterator[None]:
    """Sets attributes of its modules back to what they were: those of these types, or all. A model may count
    its forwards or keep results, and this is none.
    """
    every = [held for module in model.modules() for held in (vars(module), module._buffers)]
    before = [(held, {k: v for k, v in held.items() if not kinds or type(v) in kinds}) for held in every]
    try:
        yield
    finally:
        for held, kept in before:
            for key in held.keys() - kept.keys():
                if not kinds or type(held[key]) in kinds:
                    del held[key]
            held.update(kept)


def traced_events(model: nn.Module, layers: Sequence[ModuleLayer]) -> list[Event]:
    """The events of a forward whose inputs are not known, from a trace by torch.fx; none where that fails.
    Only the order of the layers is taken from it, which is wrong at worst: then the forward says so.
    """
    whole = {id(layer.own.module): number for number, layer in enumerate(layers) if layer.own.whole}
    owners = owners_of(layers)
    events: list[Event] = []
    with _TRACING, set_back(model):
        try:
            graph = _Tracer(whole).trace(model)
        except Exception:
            return []
        for node in graph.nodes:
            read = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
            tensors = [id(attrgetter(target)(model)) for target in read]
            # Of a tensor with several layers the call tells which of them runs.
            events.append(("read", [(owners[t][0], t) for t in tensors if len(owners.get(t, ())) == 1]))
            if node.op == "call_module":
                number = whole.get(id(model.get_submodule(str(node.target))))
                if number is not None:
                    events += [("call", [(number, 0)]), ("return", [(number, 0)])]
    return events


class _Tracer(fx.Tracer):
    """Looks into modules that are opened."""

    def __init__(self, whole: dict[int, int]) -> None:
        super().__init__()
        self.whole, self.thread = whole, threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(id(part) in self.whole for part in m.modules() if part is not m)


# -- the record of one forward: what crosses a border between stages -----------------------------------------

Event = tuple[str, list[tuple[int, int]]]
""""call" and "return" of a layer; "read" of one operation: layers, and the tensor of each (its id)."""


@dataclass
class Operations:
    """By number the layer that makes a result, the last layer that reads it, how many results there were at
    that moment, and whether it is written to; by input the last layer that reads its values. ``decisions``:
    the values of inputs that the code asked for, such as ``mask.all()``: with others it may do other
    operations.
    """

    maker: list[int] = field(default_factory=list)
    last_use: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    last_moment: dict[int, int] = field(default_factory=dict)
    writes: list[tuple[set[int], int, int, str]] = field(default_factory=list)
    """Of operations that write to memory of several results: the results, layer, moment and line of code."""
    functions: list[tuple[int, int]] = field(default_factory=list)
    """Of each autograd function the first and the last layer whose operations its forward contains."""
    inputs: dict[int, float] = field(default_factory=dict)
    decisions: list[Any] = field(default_factory=list)
    writes_inputs: bool = False
    draws: bool = False  # whether operations that every stage computes draw random numbers
    events: list[Event] = field(default_factory=list)
    inside: int = 0  # how many calls of layers are under way
    outer_uses: list[tuple[int, int]] = field(default_factory=list)  # reads outside of them: number, layer
    calls: dict[int, list[Any]] = field(default_factory=dict)  # of layers; see forward_mode.py

    def use(self, number: int, layer: int) -> None:
        self.last_use[number] = max(layer, self.last_use.get(number, 0))
        self.last_moment[number] = len(self.maker)
        if not self.inside:
            self.outer_uses.append((number, layer))

    def crossing(self, cut: int) -> tuple[int, ...]:
        """The numbers of the results that cross a border: made before layer ``cut``, read in it or later."""
        for first, last in self.functions:
            if first < cut <= last:
                raise ValueError(
                    f"the model cannot be cut before layer {cut}: layers {first} to {last} run inside of one"
                    " autograd function (checkpoint(..., use_reentrant=True)), where values have no gradient"
                    " that could return from the next stage; pass use_reentrant=False, or choose other cuts"
                )
        found = tuple(n for n, maker in enumerate(self.maker) if maker < cut <= self.last_use.get(n, -1))
        for shared, layer, moment, place in self.writes:
            several = shared.intersection(found)
            if layer >= cut and len(several) > 1 and any(self.last_moment[n] > moment for n in several):
                raise ValueError(
                    f"the model cannot be cut before layer {cut}: a tensor and a view of it are both sent to"
                    f" the next stage, and {place} writes to one of them, which would not change the other;"
                    " write to a copy (x = x * 2 instead of x *= 2), or choose other cuts"
                )
        return found

    def before(self, layer: int) -> int:
        """How many results the layers before ``layer`` make."""
        return next((n for n, maker in enumerate(self.maker) if maker >= layer), len(self.maker))


# -- the arguments of a model's forward, from the inputs of a batch ------------------------------------------

_REST, _EXTRA = "*", "**"  # the keys of what a forward takes as ``*inputs`` and ``**inputs``


@dataclass(frozen=True)
class Arguments:
    """The names and defaults of a forward's arguments. ``placed``: how many can be given by place, and
    ``only_placed``: how many only so. ``rest`` and ``extra``: whether it takes more by place, and by name.
    """

    names: tuple[str, ...]
    defaults: dict[str, Any]
    placed: int = 1
    only_placed: int = 0
    rest: bool = False
    extra: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Arguments:
        found = list(signature(model.forward).parameters.values())
        kinds = [p.kind for p in found]
        named = [p for p in found if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        return cls(
            tuple(p.name for p in named),
            {p.name: p.default for p in named if p.default is not Parameter.empty},
            sum(p.kind is not Parameter.KEYWORD_ONLY for p in named),
            kinds.count(Parameter.POSITIONAL_ONLY),
            Parameter.VAR_POSITIONAL in kinds,
            Parameter.VAR_KEYWORD in kinds,
        )

    def __call__(self, inputs: Any) -> tuple[Any, ...]:
        """A batch's inputs as values of ``names``, then the rest and the extra ones if there are any: a dict
        by name, and a tuple by place where the forward takes several.
        """
        if isinstance(inputs, Mapping) and self._takes(inputs):
            given = {name: inputs[name] if name in inputs else self._default(name) for name in self.names}
            extra = {name: value for name, value in inputs.items() if name not in given}
            return self._values(given, (), extra)
        several = isinstance(inputs, (tuple, list)) and (self.placed > 1 or self.rest)
        placed = tuple(inputs) if several else (inputs,)
        if len(placed) > self.placed and not self.rest:
            raise ValueError(f"the model's forward takes {self._listed()}, and the inputs are {len(placed)}")
        given = dict(zip(self.names[: self.placed], placed))
        given |= {name: self._default(name) for name in self.names if name not in given}
        return self._values(given, placed[self.placed :], {})

    def _takes(self, inputs: Mapping[Any, Any]) -> bool:
        """Whether these are arguments by name, and not one argument that is a dict."""
        known = inputs.keys() & set(self.names)
        others = inputs.keys() - known
        if not others:
            return bool(known)
        needed = set(self.names) - self.defaults.keys()
        if self.extra and needed <= known:
            return True
        if known or not needed:
            raise ValueError(
                f"the model's forward takes {self._listed()}, and the inputs have also"
                f" {', '.join(map(repr, sorted(others, key=str)))}; leave out what it does not take"
            )
        return False

    def _values(self, given: dict[str, Any], rest: tuple[Any, ...], extra: dict[str, Any]) -> tuple[Any, ...]:
        more = [rest] * self.rest + [extra] * self.extra
        return (*(given[name] for name in self.names), *more)

    def by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        """Those values by name, without those that are None by default too."""
        count = len(self.names)
        named = zip(self.names, values[:count], strict=True)
        found = {n: v for n, v in named if v is not None or self.defaults.get(n, self) is not None}
        more = zip([_REST] * self.rest + [_EXTRA] * self.extra, values[count:], strict=True)
        return found | {key: value for key, value in more if value}

    def named(self, inputs: Any) -> dict[str, Any]:
        return self.by_name(self(inputs))

    def call(self, model: nn.Module, named: dict[str, Any]) -> Any:
        named = dict(named)
        rest, extra = named.pop(_REST, ()), named.pop(_EXTRA, {})
        first = self.names[: self.placed if rest else self.only_placed]
        placed = [named.pop(name, self.defaults.get(name)) for name in first]
        return model(*placed, *rest, **named, **extra)

    def _default(self, name: str) -> Any:
        if name not in self.defaults:
            raise ValueError(f"the model's forward needs an argument {name!r} that the inputs do not have")
        return self.defaults[name]

    def _listed(self) -> str:
        return ", ".join(map(repr, self.names)) or "no arguments"
