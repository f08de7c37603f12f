"""One stage of a model that cannot be traced: the model's own forward, with the values of other stages absent.

    dry = DryRun(...)                   # which values cross each border, found on the meta device
    outputs = StageForward(...)(values, inputs)

Every rank runs the whole forward. An operation that reads a parameter belongs to the stage that holds it, any other
to the stage of the parameter read last. Operations of the rank's own stage compute; those of other stages only work
out shapes, and their results are ``Absent``. Operations that read no parameter and no result of one (masks,
positions) compute on every rank. All ranks number the operations alike, so a number names a value on all of them.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

_NUMBER = "_commsched_number"
_METADATA = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.element_size,
    Tensor.__len__,
    Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_VALUES = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}


class Absent(Tensor):
    """A tensor that another stage computes: shape and type only."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # the mode handles it

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.as_subclass(Tensor).shape)})"


def absent(shape_of: Tensor, device: torch.device, grad: bool) -> Tensor:
    found = torch.Tensor._make_subclass(Absent, shape_of.detach())
    found.real_device, found.has_grad = device, grad  # type: ignore[attr-defined]
    return found


class StageEnded(BaseException):
    """Leaves the model's forward: the rest belongs to later stages."""


@dataclass
class Operations:
    """What a dry run finds: the stage that makes each numbered value and the stages that use it; the inputs whose
    values (not only shapes) some stage after the first needs.
    """

    maker: list[int] = field(default_factory=list)
    users: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    inputs: set[int] = field(default_factory=set)

    def crossing(self, stage: int) -> tuple[int, ...]:
        """The values that cross the border behind a stage."""
        return tuple(
            number for number, maker in enumerate(self.maker) if maker <= stage < max(self.users[number], default=0)
        )


class ForwardMode(TorchFunctionMode):
    """Decides for each torch function whether it computes. ``stage`` None: a dry run, nothing computes.

    ``owners``: the stages of each parameter and buffer of a layer, by id.
    """

    def __init__(
        self,
        owners: Mapping[int, Sequence[int]],
        stage: int | None,
        device: torch.device,
        received: Mapping[int, Tensor] | None = None,
        inputs: Mapping[int, int] | None = None,
        wanted: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self.owners, self.stage, self.device = owners, stage, device
        self.received = dict(received or {})
        self.inputs = inputs or {}
        self.wanted = frozenset(wanted)
        self.made: dict[int, Tensor] = {}
        self.found = Operations()
        self.current = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func in _METADATA or getattr(func, "__name__", "") == "__get__":
            known, value = self._metadata(func, tensors, leaves, spec)
            if known:
                return value
        counted = [t for t in tensors if id(t) in self.owners or hasattr(t, _NUMBER)]
        if not counted:
            self.found.inputs |= {self.inputs[id(t)] for t in tensors if id(t) in self.inputs}
            return func(*args, **kwargs)
        self._move_on(tensors)
        if self.current == self.stage:
            leaves = [self._present(func, leaf, place == 0) for place, leaf in enumerate(leaves)]
            args, kwargs = tree_unflatten(leaves, spec)
            return self._numbered(func(*args, **kwargs))
        return self._numbered(self._shapes(func, tensors, leaves, spec))

    def _metadata(self, func: Any, tensors: list[Tensor], leaves: list[Any], spec: Any) -> tuple[bool, Any]:
        """Answers questions about shape, type and device; ``.T`` and the like are operations."""
        first = tensors[0] if tensors else None
        if isinstance(first, Absent):
            if func is Tensor.device.__get__:  # type: ignore[attr-defined]
                return True, first.real_device  # type: ignore[attr-defined]
            if func is Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
                return True, first.has_grad  # type: ignore[attr-defined]
        args, kwargs = tree_unflatten([_plain(leaf) for leaf in leaves], spec)
        value = func(*args, **kwargs)
        return not isinstance(value, Tensor), value

    def _move_on(self, tensors: list[Tensor]) -> None:
        """The stage of the parameters read becomes the current one."""
        for tensor in tensors:
            owners = self.owners.get(id(tensor))
            if owners is None or self.current in owners:
                continue
            later = [stage for stage in owners if stage > self.current]
            if not later:
                raise ValueError(
                    f"this model cannot be cut here: stage {max(owners)} holds a parameter that {_place()} reads after"
                    f" stage {self.current} has begun; choose other cuts, so that both are in one stage"
                )
            self.current = min(later)
        if self.stage is not None and self.current > self.stage:
            raise StageEnded

    def _present(self, func: Any, leaf: Any, target: bool) -> Any:
        """An operand of this stage's operation: what was received in place of an absent one."""
        if not isinstance(leaf, Absent):
            return leaf
        number = getattr(leaf, _NUMBER)
        if number not in self.received:
            raise ValueError(f"{_place()} reads a value of another stage that was not sent; the forward is not the same every time")
        value = self.received[number]
        if target and value.is_leaf and value.requires_grad and _writes(func):
            value = self.received[number] = value.clone()  # a leaf that needs a gradient must not be written to
        return value

    def _shapes(self, func: Any, tensors: list[Tensor], leaves: list[Any], spec: Any) -> Any:
        if func in _VALUES:
            raise ValueError(
                f"this model cannot be cut: {_place()} reads the value of a tensor that another stage computes"
            )
        if _writes(func) and not getattr(func, "__name__", "").startswith("__i") and self._computed_here(tensors[0]):
            raise ValueError(
                f"this model cannot be cut: {_place()} writes a value of another stage into a tensor that every stage"
                " computes; assign the result to a new name instead"
            )
        for tensor in tensors:
            if hasattr(tensor, _NUMBER):
                self.found.users[getattr(tensor, _NUMBER)].add(self.current)
            elif self.current > 0 and id(tensor) in self.inputs:
                self.found.inputs.add(self.inputs[id(tensor)])
        grad = torch.is_grad_enabled() and any(_has_grad(tensor) for tensor in tensors)
        device = next((t.real_device for t in tensors if isinstance(t, Absent)), self.device)  # type: ignore[attr-defined]
        args, kwargs = tree_unflatten([_on_meta(leaf) for leaf in leaves], spec)
        with torch.no_grad():
            try:
                result = args[0] if func in (Tensor.cpu, Tensor.cuda) else func(*args, **kwargs)
            except NotImplementedError as error:
                raise ValueError(
                    f"this model cannot be cut: {_place()} needs values to know shapes ({error})"
                ) from None
        return tree_map_only(
            Tensor, lambda t: t if isinstance(t, Absent) else absent(t, device, grad and t.is_floating_point()), result
        )

    def _computed_here(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, Absent) and id(tensor) not in self.owners and not hasattr(tensor, _NUMBER)

    def _numbered(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            self._number(result)
        elif isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
            for part in tree_flatten(result)[0]:
                if isinstance(part, Tensor):
                    self._number(part)
        return result

    def _number(self, result: Tensor) -> None:
        number = len(self.found.maker)
        if id(result) not in self.owners:  # a parameter: `weight.to(dtype)` may return itself
            setattr(result, _NUMBER, number)
        self.found.maker.append(self.current)
        if number in self.wanted:
            self.made[number] = result


def _plain(leaf: Any) -> Any:
    return leaf.as_subclass(Tensor) if isinstance(leaf, Absent) else leaf


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Absent):
        return leaf.as_subclass(Tensor)
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", "cuda")):
        return torch.device("meta")
    return leaf


def _has_grad(tensor: Tensor) -> bool:
    return bool(tensor.has_grad if isinstance(tensor, Absent) else tensor.requires_grad)  # type: ignore[attr-defined]


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__setitem__",) or (name.endswith("_") and not name.startswith("__")) or name.startswith("__i")


def _place() -> str:
    """The line of the model's own code that runs now, in words."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and not frame.filename.endswith(("partial_forward.py",)):
            return f"{frame.name} ({frame.filename}:{frame.lineno}: {frame.line})"
    return "the forward"


class Borders:
    """What crosses the borders between the stages of a model, for inputs of each shape: by dry runs."""

    def __init__(self, model: nn.Module, owners: Sequence[tuple[nn.Module, bool, Sequence[int]]], stages: int) -> None:
        self.model, self.held, self.stages = model, owners, stages
        self._known: dict[Any, tuple[list[tuple[int, ...]], set[int]]] = {}

    def owners(self) -> dict[int, Sequence[int]]:
        """The stages of each parameter and buffer, by id: weight versions exchange the tensors of a module."""
        found: dict[int, Sequence[int]] = {}
        for module, whole, stages in self.held:
            for part in module.modules() if whole else (module,):
                for tensor in (*part._parameters.values(), *part._buffers.values()):
                    if tensor is not None:
                        found[id(tensor)] = sorted({*found.get(id(tensor), ()), *stages})
        return found

    def of(self, inputs: dict[str, Any], device: torch.device) -> tuple[list[tuple[int, ...]], set[int]]:
        """The numbers of the values that cross each border, and the places of the inputs whose values later stages
        need.
        """
        leaves, spec = tree_flatten(inputs)
        key = (str(spec), *map(_shape_key, leaves), self.model.training, torch.is_grad_enabled())
        if key not in self._known:
            places = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
            mode = ForwardMode(self.owners(), None, device, inputs=places)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), mode:
                output = self.model(**inputs)
            for leaf in tree_flatten(output)[0]:
                if isinstance(leaf, Absent):
                    mode.found.users[getattr(leaf, _NUMBER)].add(self.stages - 1)
            self._known[key] = [mode.found.crossing(stage) for stage in range(self.stages - 1)], mode.found.inputs
        return self._known[key]


def _shape_key(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


class StageForward(nn.Module):
    """Stage ``stage`` of a model: takes the model's inputs, or what the stage before returned, and returns the values
    that cross its border with the inputs, or the model's output.

    Has the modules of its own layers under their names in the model, and shares them with it.
    """

    def __init__(self, borders: Borders, stage: int, names: Sequence[str], layers: Mapping[str, tuple[nn.Module, bool]]) -> None:
        super().__init__()
        self._shared = (borders,)  # in a tuple: the model is not a part of this module
        self.stage, self._names = stage, tuple(names)
        for name, (module, whole) in layers.items():
            self._hold(name, module, whole)
        self.device = next((p.device for p in self.parameters()), torch.device("cpu"))

    def _hold(self, name: str, module: nn.Module, whole: bool) -> None:
        if not name:
            self._parameters, self._buffers = module._parameters, module._buffers
            return
        parent: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]  # type: ignore[assignment]
        if whole:
            parent._modules[last] = module
            return
        # Parameters of its own beside layers: the same dictionaries, so that weight versions reach the model.
        own = parent._modules.setdefault(last, nn.Module())
        assert own is not None
        own._parameters, own._buffers = module._parameters, module._buffers

    def forward(self, *arguments: Any) -> Any:
        (borders,) = self._shared
        values, inputs = ((), self._named(arguments)) if self.stage == 0 else arguments
        if borders.model.training != self.training:
            borders.model.train(self.training)
        whole = {name: _whole(leaf) for name, leaf in inputs.items()}
        crossing, needed = borders.of(whole, self.device)
        last = self.stage + 1 == borders.stages
        received = dict(zip(crossing[self.stage - 1], values)) if self.stage else {}
        wanted = () if last else crossing[self.stage]
        mode = ForwardMode(borders.owners(), self.stage, self.device, received, wanted=wanted)
        output = None
        try:
            with mode:
                output = borders.model(**whole)
        except StageEnded:
            pass
        if last:
            return tree_map_only(Absent, lambda t: mode.received[getattr(t, _NUMBER)], output)
        have = {**mode.received, **mode.made}
        return tuple(have[number] for number in wanted), self._carried(inputs, needed)

    def _named(self, arguments: Sequence[Any]) -> dict[str, Any]:
        return {name: value for name, value in zip(self._names, arguments) if value is not None}

    def _carried(self, inputs: dict[str, Any], needed: set[int]) -> dict[str, Any]:
        """The inputs for the next stage. Of a tensor that it does not read only the shape travels: (rows, 0, ...)."""
        leaves, spec = tree_flatten(inputs)
        carried = [
            leaf.new_empty((len(leaf), 0, *leaf.shape[1:]))
            if isinstance(leaf, Tensor) and place not in needed and leaf.dim() and leaf.numel()
            else leaf
            for place, leaf in enumerate(leaves)
        ]
        result: dict[str, Any] = tree_unflatten(carried, spec)
        return result


def _whole(value: Any) -> Any:
    """An input with its full shape again; no operation reads its values."""
    return tree_map_only(Tensor, _expanded, value)


def _expanded(leaf: Tensor) -> Tensor:
    if leaf.dim() > 1 and leaf.shape[1] == 0:
        return leaf.new_empty((len(leaf), *leaf.shape[2:]))
    return leaf
