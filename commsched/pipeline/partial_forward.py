"""A stage of a model that cannot be traced: the model's own forward, with the values of other stages absent.

Every stage runs the whole forward. An operation that reads a parameter belongs to the layer that holds it, any other
to the layer whose parameter was read last. Operations of the stage's own layers compute; those of other layers only
work out shapes, and their results are ``Absent``. Operations that read no parameter and no result of one (masks,
positions) compute in every stage. All stages number the operations alike, so a number names a value in all of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
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
_VALUES = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
}


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
    """What a dry run finds: the layer that makes each numbered value, the last layer that uses it, and the last layer
    that reads the values (not only the shape) of each input.
    """

    maker: list[int] = field(default_factory=list)
    last_use: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, float] = field(default_factory=dict)

    def crossing(self, cut: int) -> tuple[int, ...]:
        """The values that cross a border: made before layer ``cut`` and used in it or later."""
        return tuple(n for n, maker in enumerate(self.maker) if maker < cut <= self.last_use.get(n, -1))

    def use(self, number: int, layer: int) -> None:
        self.last_use[number] = max(layer, self.last_use.get(number, 0))

    def read_input(self, place: int, layer: float) -> None:
        self.inputs[place] = max(layer, self.inputs.get(place, 0))


class ForwardMode(TorchFunctionMode):
    """Decides for each torch function whether it computes: those of ``layers`` do (none of them in a dry run).

    ``owners``: the layers of each parameter and buffer, by id. ``received``: values of earlier layers, by number.
    """

    def __init__(
        self,
        owners: Mapping[int, Sequence[int]],
        layers: range,
        device: torch.device,
        received: Mapping[int, Tensor] | None = None,
        inputs: Mapping[int, int] | None = None,
        wanted: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self.owners, self.layers, self.device = owners, layers, device
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
            for tensor in tensors:
                if id(tensor) in self.inputs:
                    self.found.read_input(self.inputs[id(tensor)], inf)
            return func(*args, **kwargs)
        self._move_on(tensors)
        if self.current in self.layers:
            leaves = [self._present(func, leaf, place == 0) for place, leaf in enumerate(leaves)]
            args, kwargs = tree_unflatten(leaves, spec)
            return self._numbered(func(*args, **kwargs))
        return self._numbered(self._shapes(func, tensors, leaves, spec))

    def _metadata(self, func: Any, tensors: list[Tensor], leaves: list[Any], spec: Any) -> tuple[bool, Any]:
        """Answers questions about shape, type and device; ``.T`` and the like are operations."""
        first = tensors[0] if tensors else None
        if isinstance(first, Absent):
            attribute = getattr(func, "__self__", None)
            if attribute is Tensor.device:
                return True, first.real_device  # type: ignore[attr-defined]
            if attribute is Tensor.requires_grad:
                return True, first.has_grad  # type: ignore[attr-defined]
        args, kwargs = tree_unflatten([_plain(leaf) for leaf in leaves], spec)
        value = func(*args, **kwargs)
        return not isinstance(value, Tensor), value

    def _move_on(self, tensors: list[Tensor]) -> None:
        """The layer of the parameters read becomes the current one."""
        for tensor in tensors:
            owners = self.owners.get(id(tensor))
            if owners is None or self.current in owners:
                continue
            self.current = min((layer for layer in owners if layer > self.current), default=self.current)
            if self.current in self.layers and not any(layer in self.layers for layer in owners):
                raise ValueError(
                    f"the model cannot be cut here: {_place()} reads a parameter of layer {max(owners)} behind layer"
                    f" {self.current}; choose cuts that leave both in one stage"
                )
        if self.layers and self.current >= self.layers.stop:
            raise StageEnded

    def _present(self, func: Any, leaf: Any, target: bool) -> Any:
        """An operand of this stage's operation: what was received in place of an absent one."""
        if not isinstance(leaf, Absent):
            return leaf
        number = getattr(leaf, _NUMBER)
        if number not in self.received:
            raise ValueError(
                f"{_place()} reads a value of another stage that was not sent; the forward is not the same every time"
            )
        value = self.received[number]
        if target and value.is_leaf and value.requires_grad and _writes(func):
            value = self.received[number] = (
                value.clone()
            )  # a leaf that needs a gradient must not be written to
        return value

    def _shapes(self, func: Any, tensors: list[Tensor], leaves: list[Any], spec: Any) -> Any:
        if func in _VALUES:
            raise ValueError(
                f"this model cannot be cut: {_place()} reads the value of a tensor that another stage computes"
            )
        if (
            _writes(func)
            and not getattr(func, "__name__", "").startswith("__i")
            and self._computed_here(tensors[0])
        ):
            raise ValueError(
                f"this model cannot be cut: {_place()} writes a value of another stage into a tensor that every stage"
                " computes; assign the result to a new name instead"
            )
        for tensor in tensors:
            if hasattr(tensor, _NUMBER):
                self.found.use(getattr(tensor, _NUMBER), self.current)
            elif id(tensor) in self.inputs:
                self.found.read_input(self.inputs[id(tensor)], self.current)
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
            Tensor,
            lambda t: t if isinstance(t, Absent) else absent(t, device, grad and t.is_floating_point()),
            result,
        )

    def _computed_here(self, tensor: Tensor) -> bool:
        return (
            not isinstance(tensor, Absent) and id(tensor) not in self.owners and not hasattr(tensor, _NUMBER)
        )

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
    if isinstance(leaf, torch.device) or (
        isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", "cuda")
    ):
        return torch.device("meta")
    return leaf


def _has_grad(tensor: Tensor) -> bool:
    return bool(tensor.has_grad if isinstance(tensor, Absent) else tensor.requires_grad)  # type: ignore[attr-defined]


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (
        name in ("__setitem__",)
        or (name.endswith("_") and not name.startswith("__"))
        or name.startswith("__i")
    )


def _place() -> str:
    """The line of the model's own code that runs now, in words."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and not frame.filename.endswith(("partial_forward.py",)):
            return f"{frame.name} ({frame.filename}:{frame.lineno}: {frame.line})"
    return "the forward"


class PartialForward:
    """A model's forward in parts. ``held``: the layers' modules; not ``whole``: without the modules inside."""

    def __init__(self, model: nn.Module, held: Sequence[tuple[nn.Module, bool]]) -> None:
        self.model, self.held = model, held
        self._known: dict[Any, Operations] = {}

    def owners(self) -> dict[int, list[int]]:
        """The layers of each parameter and buffer, by id: weight versions exchange the tensors of a module."""
        found: dict[int, list[int]] = {}
        for layer, (module, whole) in enumerate(self.held):
            for part in module.modules() if whole else (module,):
                for tensor in (*part._parameters.values(), *part._buffers.values()):
                    if tensor is not None:
                        found.setdefault(id(tensor), []).append(layer)
        return found

    def operations(self, inputs: dict[str, Any], device: torch.device) -> Operations:
        """What a dry run with inputs of these shapes finds; kept for the next call."""
        leaves, spec = tree_flatten(inputs)
        key = (str(spec), *map(_shape_key, leaves), self.model.training, torch.is_grad_enabled())
        if key not in self._known:
            places = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
            mode = ForwardMode(self.owners(), range(0), device, inputs=places)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), mode:
                output = self.model(**inputs)
            for leaf in tree_flatten(output)[0]:
                if isinstance(leaf, Absent):
                    mode.found.use(getattr(leaf, _NUMBER), len(self.held) - 1)
            self._known[key] = mode.found
        return self._known[key]

    def run(self, mode: ForwardMode, inputs: dict[str, Any]) -> Any:
        """The model's output as far as the mode's layers make it."""
        try:
            with mode:
                output = self.model(**inputs)
        except StageEnded:
            return None
        return tree_map_only(Absent, lambda t: mode.received[getattr(t, _NUMBER)], output)


def _shape_key(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


class StageForward(nn.Module):
    """Layers ``first`` to ``end - 1`` of a model: takes the model's inputs, or what the part before returned, and
    returns the values that cross its border with the inputs, or the model's output.

    Has the modules of its own layers under their names in the model, and shares them with it.
    """

    def __init__(
        self, whole: PartialForward, layers: range, arguments: Sequence[str], names: Sequence[str]
    ) -> None:
        super().__init__()
        self._whole = (whole,)  # in a tuple: the rest of the model is no part of this module
        self.layers, self._arguments = layers, tuple(arguments)
        for layer in layers:
            self._hold(names[layer], *whole.held[layer])
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
        (whole,) = self._whole
        first, end = self.layers.start, self.layers.stop
        values, inputs = ((), self._named(arguments)) if first == 0 else arguments
        if whole.model.training != self.training:
            whole.model.train(self.training)
        shaped = {name: _shaped(leaf) for name, leaf in inputs.items()}
        operations = whole.operations(shaped, self.device)
        received = dict(zip(operations.crossing(first), values, strict=True)) if first else {}
        wanted = operations.crossing(end)
        mode = ForwardMode(whole.owners(), self.layers, self.device, received, wanted=wanted)
        output = whole.run(mode, shaped)
        if end == len(whole.held):
            return output
        have = {**mode.received, **mode.made}
        return tuple(have[number] for number in wanted), self._carried(inputs, operations)

    def _named(self, arguments: Sequence[Any]) -> dict[str, Any]:
        return {name: value for name, value in zip(self._arguments, arguments) if value is not None}

    def _carried(self, inputs: dict[str, Any], operations: Operations) -> dict[str, Any]:
        """The inputs for the next stage. Of a tensor that it does not read only the shape travels: (rows, 0, ...)."""
        leaves, spec = tree_flatten(inputs)
        carried = [
            leaf.new_empty((len(leaf), 0, *leaf.shape[1:]))
            if isinstance(leaf, Tensor)
            and operations.inputs.get(place, -1) < self.layers.stop
            and leaf.dim()
            and leaf.numel()
            else leaf
            for place, leaf in enumerate(leaves)
        ]
        result: dict[str, Any] = tree_unflatten(carried, spec)
        return result


def _shaped(value: Any) -> Any:
    """An input with its full shape again; no operation reads its values."""
    return tree_map_only(Tensor, _expanded, value)


def _expanded(leaf: Tensor) -> Tensor:
    if leaf.dim() > 1 and leaf.shape[1] == 0:
        return leaf.new_empty((len(leaf), *leaf.shape[2:]))
    return leaf
