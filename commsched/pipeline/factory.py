"""Models that no rank holds whole: a factory makes them, and a rank keeps the parameters of its own stages.

The factory runs twice. The first time every parameter becomes a shape (a tensor on the meta device) as soon
as a module registers it; that is enough to cut the model. The second time everything is computed as in one
process, but the memory of other stages' parameters is given back as soon as the next one is made. So a kept
parameter starts with the values that it has in one process, whatever random numbers were drawn before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commsched.pipeline.allocator import giving_back_large_blocks
from commsched.pipeline.random_state import ONE_AT_A_TIME

Make = Callable[[], nn.Module | Sequence[nn.Module]]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
_FILLS = (
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_"
).split()


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """A list of modules as one that calls them one after the other."""
    return model if isinstance(model, nn.Module) else nn.Sequential(*model)


class Factory:
    """A function without arguments that makes a model, the same at every call but for random numbers."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._first: _Construction | None = None
        self._numbers: dict[str, int] = {}

    def outline(self) -> nn.Module:
        """The model with shapes for parameters. Random generators stay where they are."""
        try:
            model, self._first = self._run(_Outline())
        except (NotImplementedError, RuntimeError):  # the factory computes with a parameter's values
            model, self._first = self._run(_Partial(frozenset()))
            _empty(model, self._first)
        self._numbers = {
            name: number
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if (number := self._first.number(parameter)) is not None
        }
        return model

    def partial(self, names: Collection[str], random: Tensor) -> nn.Module:
        """The model in which the parameters of these names have values; ``random``: the state of torch's
        generator at its start.
        """
        assert self._first is not None, "outline() comes first"
        wanted = {self._numbers[name] for name in names if name in self._numbers}
        for copy in sorted(self._first.sources, reverse=True):
            wanted |= {self._first.sources[copy]} if copy in wanted else set()
        model, second = self._run(_Partial(frozenset(wanted)), random)
        if second.shapes != self._first.shapes:
            raise ValueError(
                f"the factory of {type(model).__name__} made {len(self._first.shapes)} parameters at its"
                f" first call and {len(second.shapes)}, or others, at the second; it must make the same model"
                " at every call"
            )
        return model

    def _run(
        self, construction: _Construction, random: Tensor | None = None
    ) -> tuple[nn.Module, _Construction]:
        # nn.Module.register_parameter is exchanged for the whole process, too.
        with ONE_AT_A_TIME, giving_back_large_blocks():
            before = torch.get_rng_state()
            if random is not None:
                torch.set_rng_state(random)
            try:
                with construction.registering():
                    return as_module(self._make()), construction
            finally:
                if random is None:
                    torch.set_rng_state(before)


def _empty(model: nn.Module, made: _Construction) -> None:
    """Replaces the numbered parameters by shapes."""
    shapes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (number := made.number(parameter)) is not None:
                if id(parameter) not in shapes:
                    shapes[id(parameter)] = as_shape(parameter)
                    made.take(shapes[id(parameter)], number)
                module._parameters[name] = shapes[id(parameter)]


def as_shape(parameter: nn.Parameter) -> nn.Parameter:
    shape = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    shape.__dict__.update(parameter.__dict__)
    return shape


class _Construction(TorchDispatchMode):
    """While it is active, the memory of every parameter that a module registers gets a number, and so does a
    copy of such memory (``sources``: of a copy's number what was copied). Numbers are alike in every run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.sources: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # by address of a storage
        self._storages: list[torch.UntypedStorage] = []  # while they are here, their addresses stay theirs

    def number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def take(self, tensor: Tensor, number: int) -> None:
        self._storages.append(tensor.untyped_storage())
        self._numbers[self._storages[-1]._cdata] = number

    def new(self, tensor: Tensor, source: int | None = None) -> int:
        number = len(self.shapes)
        self.shapes.append((tensor.shape, tensor.dtype))
        if source is not None:
            self.sources[number] = source
        self.take(tensor, number)
        return number

    def registered(self, parameter: nn.Parameter) -> nn.Parameter:
        """What a module gets instead of a parameter."""
        raise NotImplementedError

    @contextmanager
    def registering(self) -> Iterator[None]:
        register, thread = nn.Module.register_parameter, threading.get_ident()

        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if threading.get_ident() == thread and type(parameter) is nn.Parameter:
                parameter = self.registered(parameter)
            register(module, name, parameter)

        nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Outline(_Construction):
    """All parameters are shapes."""

    def __init__(self) -> None:
        super().__init__()
        self._shape_of: dict[int, nn.Parameter] = {}
        self._replaced: list[nn.Parameter] = []

    def registered(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.number(parameter) is not None:
            return parameter
        if id(parameter) not in self._shape_of:
            self._replaced.append(parameter)
            self._shape_of[id(parameter)] = as_shape(parameter)
            self.new(self._shape_of[id(parameter)])
        return self._shape_of[id(parameter)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = self.number(args[0]) if func in _COPIES else None
        if source is None:
            return func(*args, **kwargs)
        if "device" in kwargs:  # a shape stays one on every device
            kwargs = {**kwargs, "device": torch.device("meta")}
        result = func(*args, **kwargs)
        self.new(result, source)
        return result


class _Partial(_Construction):
    """All parameters are computed; those not ``kept`` have memory only from when they are used until others
    are. Then their values are lost; so is what is computed from lost values, which nothing kept may be.
    """

    def __init__(self, kept: frozenset[int]) -> None:
        super().__init__()
        self.kept = kept
        self._valid: dict[
            int, bool
        ] = {}  # of those not kept that have memory: whether they have their values
        self._sizes: dict[int, int] = {}
        self._lost_results: dict[int, StorageWeakRef] = {}

    def registered(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.number(parameter) is None:
            self._use({self.new(parameter): True})
        return parameter

    @contextmanager
    def registering(self) -> Iterator[None]:
        try:
            with super().registering():
                yield
        except BaseException:
            for number, size in self._sizes.items():  # printing a tensor without memory ends the process
                self._storages[number].resize_(size)
            raise

    def _use(self, valid: dict[int, bool]) -> None:
        """Gives memory to these parameters, and takes it from all others. ``valid``: whether they have their
        values then.
        """
        valid = {number: is_valid for number, is_valid in valid.items() if number not in self.kept}
        if not valid:
            return
        for number in self._valid.keys() - valid.keys():
            self._storages[number].resize_(0)
        for number in valid:
            size = self._sizes.setdefault(number, self._storages[number].nbytes())
            if self._storages[number].nbytes() != size:  # resize_ copies even to the same size
                self._storages[number].resize_(size)
        self._valid = valid

    def _is_lost(self, tensor: Tensor) -> bool:
        number = self.number(tensor)
        if number is not None:
            return number not in self.kept and not self._valid.get(number, False)
        reference = self._lost_results.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = args[0] if _name(func) in _FILLS else kwargs.get("out")
        lost = [x for x in tensors if x is not target and self._is_lost(x)]
        self._use({n: self._valid.get(n, False) for x in tensors if (n := self.number(x)) is not None})
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        for out in [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] + [target]:
            self._made(func, out, target, lost)
        if func in _COPIES and (source := self.number(args[0])) is not None:
            self._use({source: self._valid.get(source, False), self.new(result, source): not lost})
        elif lost and not isinstance(result, (Tensor, tuple, list)):
            raise _reads_lost(func, lost[0])
        return result

    def _made(self, func: Any, out: Tensor | None, target: Tensor | None, lost: list[Tensor]) -> None:
        """Remembers whether a tensor that an operation has written has its values."""
        if out is None:
            return
        number = self.number(out)
        if number in self.kept and lost:
            raise _reads_lost(func, lost[0])
        if number in self._valid:
            whole = out.numel() * out.element_size() == self._sizes[number]
            filled = out is target and whole
            self._valid[number] = not lost and (filled or self._valid[number])
        elif number is None and lost:
            storage = out.untyped_storage()
            self._lost_results[storage._cdata] = StorageWeakRef(storage)


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _reads_lost(func: Any, tensor: Tensor) -> ValueError:
    return ValueError(
        f"the model's factory reads (in {func}) a parameter, or what was made of it, of shape"
        f" {tuple(tensor.shape)} after others were made, and this rank does not hold it; initialise each"
        " parameter at once, or pass a made model"
    )
