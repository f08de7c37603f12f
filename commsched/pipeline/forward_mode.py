"""Run a model's own forward where only some layers compute: the values of the others are ``Absent``.

An operation (a torch function) that reads a parameter or buffer belongs to the layer that holds it; any other
belongs to the layer whose parameter was read last. Operations of the wanted layers compute. Operations of
other layers work out shapes alone (on the meta device), and their results are ``Absent``. Operations that
depend on no parameter (masks, positions) are free: every stage computes them. All stages number the results
alike, so a number names one value in all of them.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_flatten, tree_unflatten

from commsched.pipeline.layers import Operations
from commsched.pipeline.random_state import SharedRandom, may_draw

_NUMBER = "_commsched_number"  # attribute of a result: (forward, number)
_DRAWN = -1  # the place of random numbers among the inputs
_INPUTS = "_commsched_inputs"  # attribute of a free result: the model's inputs that its values depend on

_forwards = itertools.count()


class StageEnded(BaseException):
    """Leaves the model's forward: all further operations belong to later stages."""


class ForwardMode(TorchFunctionMode):
    """Decides for each torch function whether it computes: those of ``layers`` do, in a dry run none.

    ``owners``: the layers of each parameter and buffer, by id. ``received``: values of earlier layers, by
    number. ``inputs``: the place of each input tensor, by id. ``seed``: of the random numbers that free
    operations draw, the same in all stages.
    """

    def __init__(
        self,
        owners: Mapping[int, Sequence[int]],
        layers: range,
        device: torch.device,
        received: Mapping[int, Tensor] | None = None,
        inputs: Mapping[int, int] | None = None,
        wanted: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.owners, self.layers, self.device = owners, layers, device
        self.made: dict[int, Tensor] = dict(received or {})
        self.inputs = inputs or {}
        self._random = SharedRandom(seed, device)
        self.native = False  # whether all operations just compute, unnumbered
        self.wanted = frozenset(wanted)
        self.found = Operations()
        self.current = 0
        self._forward = next(_forwards)  # a model may keep results for its next forward
        self._storages: dict[int, list[int]] = {}  # numbers of a dry run's results, by storage
        self._alive: list[Tensor] = []  # so that no two storages of a dry run have one address
        self._records_functions = not layers and torch.is_grad_enabled()
        self._function: FrameType | None = None  # the autograd function that was recorded last

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """All operations just compute, unnumbered."""
        self.native = True
        try:
            # Not even called, unless the model has put another mode on top.
            with _pop_mode_temporarily() if _get_current_function_mode() is self else nullcontext():
                yield
        finally:
            self.native = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.native:
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func in ASKS_FOR_SHAPE or getattr(func, "__name__", "") == "__get__":
            answer = self._metadata(func, tensors, leaves, spec)
            if not isinstance(answer, Tensor):
                return answer
        if not any(id(tensor) in self.owners or self.number(tensor) is not None for tensor in tensors):
            return self._free(func, tensors, args, kwargs)
        self._enter_layer(tensors)
        if self.current in self.layers:
            return self._computed(func, leaves, spec)
        return self._shapes(func, tensors, leaves, spec)

    def _metadata(self, func: Any, tensors: list[Tensor], leaves: list[Any], spec: Any) -> Any:
        """The answer to a question about shape, type or device; a tensor for ``.T`` and other operations."""
        first = tensors[0] if tensors else None
        if isinstance(first, Absent):
            attribute = getattr(func, "__self__", None)
            if attribute is Tensor.device:
                return first.real_device
            if attribute is Tensor.requires_grad:
                return first.has_grad
        args, kwargs = tree_unflatten([plain(leaf) for leaf in leaves], spec)
        return func(*args, **kwargs)

    def number(self, tensor: Tensor) -> int | None:
        """The number of a result of this forward."""
        forward, number = getattr(tensor, _NUMBER, (None, None))
        return number if forward == self._forward else None

    # -- free operations -------------------------------------------------------------------------------------

    def _free(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Every stage computes it. Its result remembers the inputs that it depends on."""
        places = self._places(tensors)
        draws = may_draw(func)
        result, drawn = self._random.draw(func, args, kwargs) if draws else (func(*args, **kwargs), False)
        if drawn:
            self.found.draws = True
            places |= {_DRAWN}
        if not places:
            return result
        if func in ASKS_FOR_VALUES:
            self._read_inputs(places, inf)
            self.found.decisions.append(result.tolist() if hasattr(result, "tolist") else result)
        for part in tree_flatten(result)[0]:
            if isinstance(part, Tensor):
                _depend(part, places)
        target = tensors[0] if tensors else None
        if target is not None and target._is_view() and getattr(func, "__name__", "").endswith("_"):
            _depend(target._base, places)  # type: ignore[arg-type]
        return result

    def _places(self, tensors: list[Tensor]) -> frozenset[int]:
        """The inputs that these tensors depend on."""
        found = set()
        for tensor in tensors:
            if id(tensor) in self.inputs:
                found.add(self.inputs[id(tensor)])
            found |= getattr(tensor, _INPUTS, frozenset())
        return frozenset(found)

    def _read_inputs(self, places: frozenset[int], layer: float) -> None:
        for place in places:
            self.found.inputs[place] = max(layer, self.found.inputs.get(place, 0))

    # -- operations of layers --------------------------------------------------------------------------------

    def enter(self, layer: int) -> None:
        """Operations belong to this layer from now on, unless later ones have begun."""
        self.current = max(layer, self.current)
        if self.layers and self.current >= self.layers.stop:
            raise StageEnded

    def _enter_layer(self, tensors: list[Tensor]) -> None:
        """The last layer of the parameters read becomes the current one."""
        read = [(self.owners[id(tensor)], id(tensor)) for tensor in tensors if id(tensor) in self.owners]
        if not read:
            return
        # Of a tensor with several layers the call tells which of them runs.
        self.found.events.append(("read", [(own[0], tensor) for own, tensor in read if len(own) == 1]))
        for owners, _ in read:
            if self.current not in owners:
                self.enter(min((layer for layer in owners if layer > self.current), default=self.current))
        if self.current not in self.layers:
            return
        for owners, _ in read:
            if not any(layer in self.layers for layer in owners):
                raise ValueError(
                    f"the model cannot be cut here: {code_place()} reads a parameter of layer {max(owners)}"
                    f" behind layer {self.current}; choose cuts that leave both in one stage, or pass"
                    " example= (inputs of a batch), which puts the layers into the order in which they run"
                )

    def _computed(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """An operation of this stage."""
        leaves = [self.present(leaf) for leaf in leaves]
        before = versions(leaves)
        args, kwargs = tree_unflatten(leaves, spec)
        result = func(*args, **kwargs)
        written = [leaf for leaf, version in before if leaf._version != version]
        for target in written:
            if id(target) not in self.owners:
                self.keep(target)
        return self._each(result, lambda part: part if any(part is w for w in written) else self.keep(part))

    def present(self, leaf: Any) -> Any:
        if not isinstance(leaf, Absent):
            return leaf
        value = self.known(leaf)
        if value is leaf:
            why = "the forward did other operations than with earlier inputs of these shapes"
            if self.number(leaf) is None:
                why = "an earlier forward has kept it; pass it to the model as an input"
            raise ValueError(f"{code_place()} reads a value that no earlier stage has sent: {why}")
        return value

    def known(self, leaf: Absent) -> Tensor:
        """What an earlier stage sent in the place of an absent tensor, or the absent one."""
        number = self.number(leaf)
        return leaf if number is None else self.made.get(number, leaf)

    def keep(self, result: Tensor) -> Tensor:
        number = self.give_number(result)
        if number in self.wanted:
            self.made[number] = result
        return result

    def name(self, result: Tensor, number: int) -> None:
        """Give a result the number that it has in a recorded call."""
        setattr(result, _NUMBER, (self._forward, number))
        if number in self.wanted and number not in self.made:
            self.made[number] = result

    def _shapes(self, func: Any, tensors: list[Tensor], leaves: list[Any], spec: Any) -> Any:
        """The absent results of an operation of another stage, whose hooks its own stage registers."""
        if func in _HOOKS:
            return None
        if func in ASKS_FOR_VALUES:
            norm = sys._getframe(2).f_locals.get("self")
            if isinstance(norm, _BatchNorm) and tensors[0] is norm.num_batches_tracked:
                return 1.0  # an average over all batches (momentum=None): no shape depends on their number
            raise ValueError(
                f"this model cannot be cut: {code_place()} reads the value of a tensor that another stage"
                " computes"
            )
        for tensor in tensors:
            number = self.number(tensor)
            if number is not None:
                self.found.use(number, self.current)
        self._read_inputs(self._places(tensors), self.current)
        device = next((t.real_device for t in tensors if isinstance(t, Absent)), self.device)
        grad = torch.is_grad_enabled() and any(has_grad(tensor) for tensor in tensors)
        shaped = [on_meta(leaf) for leaf in leaves]
        before = versions(shaped)
        args, kwargs = tree_unflatten(shaped, spec)
        with torch.no_grad():
            try:
                result = ON_META.get(func, func)(*args, **kwargs)
            except NotImplementedError as error:
                raise ValueError(
                    f"this model cannot be cut: {code_place()} needs values to know shapes ({error})"
                ) from None
        written = {id(leaf) for leaf, version in before if leaf._version != version}
        same = {}  # results that are an operand: written to, or ``weight.to(dtype)``
        for leaf, part in zip(leaves, shaped, strict=True):
            if id(leaf) in self.owners:
                same[id(part)] = leaf
            elif id(part) in written:
                same[id(part)] = self._written(leaf, device, grad)
        return self._each(
            result, lambda part: same[id(part)] if id(part) in same else self._absent(part, device, grad)
        )

    def _absent(self, shape_of: Tensor, device: torch.device, grad: bool) -> Tensor:
        received = self.made.get(len(self.found.maker))
        result = (
            absent(shape_of, device, grad and shape_of.is_floating_point()) if received is None else received
        )
        self.give_number(result)
        return result

    def _written(self, target: Tensor, device: torch.device, grad: bool) -> Tensor:
        """Another stage writes into a tensor: the same tensor has a new number from now on."""
        shared = set(self._storages.get(storage_of(target), ()))
        self.found.written |= shared
        if len(shared) > 1:
            self.found.writes.append((shared, self.current, len(self.found.maker), code_place()))
        if not isinstance(target, Absent) and self.number(target) is None and target._is_view():
            raise ValueError(
                f"this model cannot be cut: {code_place()} writes a value of another stage into a part of a"
                " tensor that every stage computes; assign to the tensor itself"
            )
        number = self.give_number(target)
        value = self.made.get(number)
        if isinstance(target, Absent):
            target.has_grad = target.has_grad or grad
            return target if value is None else value
        if value is not None and value is not target:
            target.copy_(value)  # every stage has made it; this is its content
        return target

    def _each(self, result: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """``result`` with its tensors changed, in the order of their numbers."""
        if isinstance(result, Tensor):
            return result if id(result) in self.owners else change(result)
        if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
            parts = [self._each(part, change) for part in result]
            named = hasattr(result, "_fields")
            return type(result)(*parts) if named else type(result)(parts)
        return result

    def give_number(self, result: Tensor) -> int:
        number = len(self.found.maker)
        self.found.maker.append(self.current)
        setattr(result, _NUMBER, (self._forward, number))
        if not self.layers:
            self._storages.setdefault(storage_of(result), []).append(number)
            self._alive.append(result)
        if self._records_functions and not torch.is_grad_enabled():
            self._record_function()
        return number

    def _record_function(self) -> None:
        """Note the layer of an operation in the forward of an autograd function: values in there have no
        gradients. Autograd does not tell, but the outermost ``forward`` with a context is on the stack.
        """
        found, frame = None, sys._getframe(1)
        while frame is not None:
            found = frame if _is_of_function(frame) else found
            frame = frame.f_back  # type: ignore[assignment]
        functions = self.found.functions
        if found is not None and found is self._function:
            functions[-1] = functions[-1][0], self.current
        elif found is not None:
            functions.append((self.current, self.current))
        self._function = found


def _is_of_function(frame: FrameType) -> bool:
    code = frame.f_code
    return (
        code.co_name == "forward"
        and code.co_argcount > 0
        and isinstance(frame.f_locals.get(code.co_varnames[0]), torch._C._FunctionBase)
    )


# The modes of a thread do not tell: torch takes a mode away while it handles an operation.
_this_thread = threading.local()


@contextmanager
def dry_run() -> Iterator[None]:
    before, _this_thread.dry = in_dry_run(), True
    try:
        yield
    finally:
        _this_thread.dry = before


def in_dry_run() -> bool:
    """Whether this thread runs a forward in which nothing computes."""
    return getattr(_this_thread, "dry", False)


def _depend(tensor: Tensor, places: frozenset[int]) -> None:
    setattr(tensor, _INPUTS, places | getattr(tensor, _INPUTS, frozenset()))


# -- calls of whole layers in a partial forward: another stage's are skipped, this stage's run undisturbed ---

# A dry run records what each call of a layer returns. Where nothing else of the call is seen outside of it, a
# later forward needs none of its operations: of another stage's layer it takes the recorded shapes, and this
# stage's computes as it would anywhere.

Forward = Callable[..., Any]


@dataclass
class LayerCall:
    """Results ``start`` to ``stop - 1`` are of this call. ``leaves``: of what it returns, and each one's
    number; a number of None: the same object as the argument at that place, or a constant.
    """

    start: int
    stop: int
    spec: Any
    leaves: list[tuple[Any, int | None]]
    alone: bool
    """Whether the call is seen outside by what it returns only."""


_CALLS = ("forward", "_compiled_call_impl")


@contextmanager
def intercepted(layers: Sequence[nn.Module | None], handle: Callable[..., Any]) -> Iterator[None]:
    """Call ``handle(number, forward, *args, **kwargs)`` in place of each layer's forward. Hooks run around it
    in every stage: models collect hidden states in them.
    """
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, layer in enumerate(layers):
        if layer is not None:
            attributes, forward = layer.__dict__, layer.forward
            before.append((attributes, {name: attributes[name] for name in _CALLS if name in attributes}))
            own = functools.partial(handle, number, forward)
            attributes.update(forward=functools.wraps(forward)(own), _compiled_call_impl=None)
    try:
        yield
    finally:
        for attributes, kept in before:
            for name in _CALLS:
                del attributes[name]
            attributes.update(kept)


class Recording:
    """Writes down the calls of layers in a dry run."""

    def __init__(self, mode: ForwardMode) -> None:
        self.mode = mode
        self.calls: defaultdict[int, list[LayerCall]] = defaultdict(list)

    def __call__(self, layer: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        mode, found = self.mode, self.mode.found
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        numbers = [mode.number(leaf) for leaf in given]
        with mode.suspended():
            before = versions(given)
        mode.enter(layer)
        found.events.append(("call", [(layer, 0)]))
        start, decisions = len(found.maker), len(found.decisions)
        found.inside += 1
        result = forward(*args, **kwargs)
        found.inside -= 1
        found.events.append(("return", [(layer, 0)]))
        stop = len(found.maker)
        leaves, spec = tree_flatten(result)
        with mode.suspended():
            written = any(leaf._version != version for leaf, version in before)
        alone = (
            set(found.maker[start:stop]) == {layer}
            and numbers == [mode.number(leaf) for leaf in given]
            and not written
            and decisions == len(found.decisions)
            and not any(isinstance(leaf, Tensor) and not isinstance(leaf, Absent) for leaf in leaves)
        )
        kept = [(leaf, mode.number(leaf) if isinstance(leaf, Absent) else None) for leaf in leaves]
        self.calls[layer].append(LayerCall(start, stop, spec, kept, alone))
        return result

    def settle(self) -> dict[int, list[LayerCall]]:
        """The calls, at the end of the forward: results that were read later must be among those returned."""
        for call in (call for calls in self.calls.values() for call in calls):
            returned = {number for _, number in call.leaves}
            hidden = set(range(call.start, call.stop)) - returned
            moments = self.mode.found.last_moment
            call.alone = call.alone and all(moments.get(number, 0) < call.stop for number in hidden)
        return dict(self.calls)


_STANCE = threading.Lock()
_within: list[Any] = []  # what sets torch's stance back, once for each ``uncompiled`` that some thread is in


@contextmanager
def uncompiled() -> Iterator[None]:
    """With ``torch.compile`` off, which cannot see values that are absent.

    torch has one stance for all threads. If each set back what it had found, one that began within another
    one's ``with`` and left later would leave ``force_eager`` for good.
    """
    with _STANCE:
        _within.append(_within[0] if _within else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _STANCE:
            if (stance := _within.pop()) and not _within:
                stance.__exit__(None, None, None)


class Replay:
    """Takes what a layer returns from the record of its calls, or from the layer alone."""

    def __init__(self, mode: ForwardMode, calls: dict[int, list[LayerCall]]) -> None:
        self.mode = mode
        self._next = {layer: iter(found) for layer, found in calls.items()}

    def __call__(self, layer: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        mode = self.mode
        mode.enter(layer)
        call = next(self._next.get(layer, iter(())), None)
        if call is None or not call.alone or call.start != len(mode.found.maker):
            mode.found.inside += 1
            try:
                with uncompiled():
                    return forward(*args, **kwargs)
            finally:
                mode.found.inside -= 1
        if layer in mode.layers:
            leaves = self._computed(call, forward, args, kwargs)
        else:
            leaves = [self._shape(leaf, number) for leaf, number in call.leaves]
        mode.found.maker += [layer] * (call.stop - call.start)
        return tree_unflatten(leaves, call.spec)

    def _shape(self, leaf: Any, number: int | None) -> Any:
        if number is None:
            return leaf
        received = self.mode.made.get(number)
        result = absent(leaf, leaf.real_device, leaf.has_grad) if received is None else received
        self.mode.name(result, number)
        return result

    def _computed(self, call: LayerCall, forward: Forward, args: Any, kwargs: Any) -> list[Any]:
        mode = self.mode
        given, spec = tree_flatten((args, kwargs))
        # An argument that the layer does not read may be absent.
        known = [mode.known(x) if isinstance(x, Absent) else x for x in given]
        args, kwargs = tree_unflatten(known, spec)
        with mode.suspended():
            result = forward(*args, **kwargs)
        leaves, spec = tree_flatten(result)
        if spec != call.spec:
            raise ValueError(
                f"a layer returned {spec}, and {call.spec} in a dry run; a pipeline needs a forward whose"
                " results depend on shapes and inputs alone"
            )
        for leaf, (_, number) in zip(leaves, call.leaves, strict=True):
            if number is not None:
                mode.name(leaf, number)
        return leaves


# -- ``Absent``: tensors that another stage computes, and lists of torch's functions -------------------------


def _functions(*listed: tuple[Any, str]) -> set[Any]:
    return {getattr(home, name) for home, names in listed for name in names.split()}


_ABOUT_NUMBERS = "is_floating_point is_complex numel"
ASKS_FOR_SHAPE = _functions(
    (torch, _ABOUT_NUMBERS),
    (Tensor, _ABOUT_NUMBERS),
    (Tensor, "size dim ndimension nelement stride storage_offset is_contiguous element_size get_device"),
    (Tensor, "__len__ __hash__"),
)
ASKS_FOR_VALUES = _functions(
    (torch, "equal allclose is_nonzero"),
    (Tensor, "equal allclose is_nonzero item tolist numpy __bool__ __int__ __float__ __index__"),
)
_HOOKS = _functions((Tensor, "register_hook retain_grad"))


def _same(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def _grouped_mm(
    a: Tensor, b: Tensor, *, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    size = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        size.insert(0, a.shape[0] if offs is None else len(offs))
    return a.new_empty(size, dtype=out_dtype)


ON_META: dict[Any, Any] = {Tensor.cpu: _same, Tensor.cuda: _same}
if hasattr(torch, "_grouped_mm"):  # mixtures of experts; torch's own takes bfloat16 alone on the meta device
    ON_META[torch._grouped_mm] = _grouped_mm
"""Functions that take the place of torch's on the meta device."""


class Absent(Tensor):
    """A tensor that another stage computes: shape and type only."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    real_device: torch.device
    has_grad: bool

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.as_subclass(Tensor).shape)})"


def absent(shape_of: Tensor, device: torch.device, grad: bool) -> Absent:
    found: Absent = torch.Tensor._make_subclass(Absent, shape_of.detach())
    found.real_device, found.has_grad = device, grad
    return found


def plain(leaf: Any) -> Any:
    return leaf.as_subclass(Tensor) if isinstance(leaf, Absent) else leaf


def on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Absent):
        return leaf.as_subclass(Tensor)
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.device) or (
        isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", "cuda")
    ):
        return torch.device("meta")
    return leaf


def has_grad(tensor: Tensor) -> bool:
    return tensor.has_grad if isinstance(tensor, Absent) else tensor.requires_grad


def versions(leaves: list[Any]) -> list[tuple[Tensor, int]]:
    return [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def code_place() -> str:
    """The line of the model's own code that runs now."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and Path(frame.filename).parent != Path(__file__).parent:
            return f"{frame.name} ({frame.filename}:{frame.lineno}: {frame.line})"
    return "the forward"
