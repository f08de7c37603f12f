"""Pending parameters, which complete their value or gradient before it is read.

While the gradient or the value of a parameter is being communicated, the parameter's class is a subclass of
``Parameter`` whose ``__torch_function__`` sees every access through torch - printing, ``state_dict``,
``p.grad``, ``deepcopy``, an operator that takes it - and completes the parameter first. Nothing is
intercepted, and nothing costs anything, at any other time.

A compiled graph checks the class of each parameter before every call. The parameters that compiled graphs
read therefore keep one class, ``CompiledParameter``, whether they are pending or not.

``Module.zero_grad`` reads every gradient only to clear it, and ``p.grad = None`` replaces it. The parameter's
``Access`` notes that, so that the call does not wait for all gradients.

Functions that call no ``__torch_function__`` (of TorchScript or a C++ extension, ``torch.tensor``, ...) call
operators, which complete them first (``_complete_late``): ``comm_core.set_late`` gives a late parameter a key
of torch's dispatcher for that. Parameters of compiled graphs do not get it, because graphs check keys, too.

What cannot be intercepted is an alias of the memory made earlier (``p.detach()`` kept by the user).
``storages_held`` finds those by the storage's reference count; such parameters are never left pending.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from comm_core import complete_late_by, ignore_late, set_late


class Access(NamedTuple):
    """What to do before a pending parameter, or its gradient, is accessed."""

    complete: Callable[[], None]  # it must call ``clear_pending``
    replaced: Callable[[torch.Tensor | None], bool]  # p.grad is set; returns False to have it completed first
    cleared: Callable[[bool], bool]  # by Module.zero_grad(set_to_none); returns False as above
    # Calls its argument once the value is complete; returns False where it is, or must be accessed now.
    follow: Callable[[Callable[[], None]], bool] = lambda act: False


# The accesses of pending parameters, by id. An attribute would be pickled with the parameter.
_accesses: dict[int, Access] = {}
_only_gradients: set[int] = set()  # the ids among them whose value is complete

_grad: Any = torch.Tensor.grad
_requires_grad: Any = torch.Tensor.requires_grad

# These depend on neither value nor gradient, so they do not wait. Not size(): torch.vmap calls nothing else
# before it takes the value in a way that cannot be intercepted. GANs freeze and unfreeze parameters in every
# step; an optimizer updates whatever has a gradient, frozen or not.
_HARMLESS = (
    frozenset(
        getattr(torch.Tensor, name).__get__
        for name in "shape dtype device requires_grad is_leaf layout is_sparse ndim is_cuda".split()
    )
    | frozenset(
        getattr(torch.Tensor, name)
        for name in (
            "dim numel nelement is_floating_point is_complex is_contiguous stride element_size requires_grad_"
            " __hash__"
        ).split()
    )
    | {_requires_grad.__set__}
)

_GRAD_SET = frozenset((_grad.__set__, _grad.__delete__))
_GRAD = _GRAD_SET | {_grad.__get__}
_MODULE_ZERO_GRAD = nn.Module.zero_grad.__code__
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class PendingParameter(nn.Parameter):
    """A parameter whose value or gradient has not arrived."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        # Code such as ``type(p)(data)`` means an ordinary parameter.
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _grad.__get__ and _is_cleared_by_its_module(args[0]):
            return None
        if func in _GRAD_SET:
            grad = args[1] if len(args) > 1 else None
            if _is_replaced(args[0], grad):
                return None
            complete(args[0])
            if _is_replaced(args[0], grad):  # a step on shards has left no gradient
                return None
        found: list[Any] = list(_tensors_in((args, kwargs), PendingParameter))
        for parameter in found:
            if func in _GRAD or id(parameter) not in _only_gradients:
                complete(parameter)
        if func == _grad.__get__ and id(args[0]) in _only_gradients:
            complete(args[0])  # a step on shards has left no gradient: that is an error
        left = [parameter for parameter in found if type(parameter) is not nn.Parameter]
        if func in _BACKWARDS and all(parameter.requires_grad for parameter in left):
            return _run_backward(func, args, kwargs)
        if any(id(parameter) in _accesses for parameter in left):  # gradients, which func does not touch
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with ordinary(left):
            return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Complete the value first: torch calls no ``__torch_function__`` for this method."""
        complete_value(self)
        return torch.Tensor.set_(self, *args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """Complete the value first, as for ``set_``."""
        complete_value(self)
        return torch.Tensor.as_subclass(self, cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copied(self, lambda: nn.Parameter.__deepcopy__(self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copied(self, lambda: nn.Parameter.__reduce_ex__(self, protocol))


_make_parameter = nn.Parameter.__new__


def _parameter_of(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """Make ``nn.Parameter(data)``. Torch compares classes there and refuses those that it does not know."""
    return _make_parameter(cls, data.detach() if isinstance(data, PendingParameter) else data, requires_grad)


nn.Parameter.__new__ = _parameter_of  # type: ignore[method-assign]


class PendingGradient(PendingParameter):
    """A parameter whose value is complete and whose gradient has not arrived."""


class CompiledParameter(PendingParameter):
    """A parameter that compiled graphs read, pending or not."""

    @classmethod
    def intercept(cls, on: bool) -> None:
        """Intercept accesses, or, while dynamo traces a function, look like an ordinary parameter to it."""
        function = PendingParameter.__torch_function__ if on else torch._C._disabled_torch_function_impl
        cls.__torch_function__ = function  # type: ignore[assignment]


def can_pend(parameter: torch.Tensor) -> bool:
    """Return whether the class may be changed: only plain parameters, whose behaviour is known."""
    return type(parameter) in (nn.Parameter, PendingParameter, PendingGradient, CompiledParameter)


@cache
def _complete_before_functions() -> None:
    """Complete parameters given to an ``autograd.Function``, a function of TorchScript, or an operator.

    The first two call no ``__torch_function__``, and may read memory without an operator: a C++ extension
    that a forward calls, and kernels that TorchScript has fused.
    """

    def completing(plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            for parameter in _tensors_in((args, kwargs), PendingParameter):
                complete_value(parameter)
            return plain(*args, **kwargs)

        return call

    function: Any = torch.autograd.Function
    function.apply = classmethod(completing(function.apply.__func__))
    script: Any = torch.jit.ScriptFunction
    script.__call__ = completing(script.__call__)
    complete_late_by(_complete_late)


def _complete_late(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if isinstance(tensor, PendingParameter):
            complete_value(tensor)
        elif set_late(tensor, False):  # ``tensor.data = parameter`` copied the key: it may be any
            for key, access in list(_accesses.items()):
                if key not in _only_gradients:
                    access.complete()


def mark_pending(parameter: nn.Parameter, access: Access, only_grad: bool = False) -> None:
    """Intercept the next access (to the gradient)."""
    _complete_before_functions()
    key = id(parameter)
    _accesses[key] = access
    (_only_gradients.add if only_grad else _only_gradients.discard)(key)
    if type(parameter) is not CompiledParameter:
        parameter.__class__ = PendingGradient if only_grad else PendingParameter
        set_late(parameter, not only_grad)


def clear_pending(parameter: nn.Parameter, only: Access | None = None) -> None:
    """Intercept no access more, or not ``only`` these: another optimizer may have marked it since."""
    if only is not None and _accesses.get(id(parameter)) is not only:
        return
    if _accesses.pop(id(parameter), None) is not None:
        _only_gradients.discard(id(parameter))
        if type(parameter) is not CompiledParameter:
            parameter.__class__ = nn.Parameter
            set_late(parameter, False)


def complete(parameter: nn.Parameter) -> None:
    access = _accesses.get(id(parameter))
    if access is not None:
        access.complete()
    elif type(parameter) is not CompiledParameter:
        # Its owner no longer exists: make it an ordinary parameter again.
        parameter.__class__ = nn.Parameter
        set_late(parameter, False)


def complete_value(parameter: nn.Parameter) -> None:
    if id(parameter) not in _only_gradients:
        complete(parameter)


def is_late(parameter: nn.Parameter) -> bool:
    """Return whether the value is pending, and not the gradient alone."""
    return id(parameter) in _accesses and id(parameter) not in _only_gradients


def when_complete(parameter: nn.Parameter, act: Callable[[], None]) -> bool:
    """Call ``act`` when a late parameter has its value, before the access that waits for it goes on.

    Returns False where nothing is pending, or where an access must come first: it may raise.
    """
    access = _accesses.get(id(parameter)) if is_late(parameter) else None
    return access is not None and access.follow(act)


def _run_backward(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a backward from or to parameters whose gradients are pending.

    Hooks of user code run inside, and what they read must be intercepted: so nothing is turned off, and
    places in the graph stand for the parameters, for which torch calls no ``__torch_function__``.
    """
    if func is torch.Tensor.backward:
        func, kwargs["grad_tensors"] = torch.autograd.backward, kwargs.pop("gradient", None)
    inputs = args[1] if len(args) > 1 else kwargs.pop("inputs", None)
    zeros = kwargs.get("materialize_grads")
    if zeros:  # which torch refuses for places in the graph
        kwargs |= {"materialize_grads": False, "allow_unused": True}
    found = func(_places(args[0]), inputs=None if inputs is None else _places(inputs), **kwargs)
    if not zeros:
        return found
    made = partial(torch.zeros_like, requires_grad=kwargs["create_graph"])
    return tuple(made(to) if grad is None else grad for to, grad in zip(inputs, found, strict=True))


def _places(tensors: Any) -> list[Any]:
    """Return tensors, with their places in the graph where they are pending parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        several = tensors if isinstance(tensors, list | tuple) else [tensors]
        return [get_gradient_edge(t) if isinstance(t, PendingParameter) else t for t in several]


def _copied(parameter: nn.Parameter, copy: Callable[[], Any]) -> Any:
    """Return a copy or a pickle, which hold the value, and not the gradient, of an ordinary parameter."""
    complete_value(parameter)
    kind: Any = type(parameter)
    parameter.__class__ = nn.Parameter
    try:
        return copy()
    finally:
        parameter.__class__ = kind


def keep_class(parameter: torch.Tensor) -> None:
    """Give a parameter the class that it keeps, because a compiled graph reads it."""
    if can_pend(parameter):
        parameter.__class__ = CompiledParameter
        set_late(parameter, False)


def release_class(parameter: torch.Tensor) -> None:
    released: Any = parameter
    if type(parameter) is CompiledParameter:
        released.__class__ = nn.Parameter


@contextmanager
def ordinary(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within this context complete parameters of compiled graphs have the class of all others."""
    compiled: list[Any] = [parameter for parameter in parameters if type(parameter) is CompiledParameter]
    for parameter in compiled:
        parameter.__class__ = nn.Parameter
    try:
        yield
    finally:
        for parameter in compiled:
            parameter.__class__ = CompiledParameter


@contextmanager
def without_completing() -> Iterator[None]:
    """Within this context nothing completes a parameter, whose value may be anything."""
    before = ignore_late(True)
    try:
        with torch._C.DisableTorchFunctionSubclass():
            yield
    finally:
        ignore_late(before)


def raw_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return ``parameter.grad`` as torch itself has it, without completing the parameter."""
    if type(parameter) is nn.Parameter:
        return parameter.grad
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def set_raw_grad(parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
    if type(parameter) is nn.Parameter:
        parameter.grad = grad
        return
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = grad


def is_pending(parameter: nn.Parameter) -> bool:
    return id(parameter) in _accesses


def clear_raw_grad(parameter: torch.Tensor, set_to_none: bool) -> bool:
    """Clear one gradient as ``Optimizer.zero_grad`` does; return whether there was one."""
    grad = raw_grad(parameter)
    if grad is None:
        return False
    if set_to_none:
        set_raw_grad(parameter, None)
        return True
    if grad.grad_fn is not None:
        grad.detach_()
    elif grad.requires_grad:
        grad.requires_grad_(False)
    grad.zero_()
    return True


def _is_cleared_by_its_module(parameter: nn.Parameter) -> bool:
    """Return whether ``Module.zero_grad`` reads the gradient, and need not wait for it."""
    reader, access = sys._getframe(2), _accesses.get(id(parameter))
    if reader.f_code is not _MODULE_ZERO_GRAD or access is None:
        return False
    return access.cleared(bool(reader.f_locals["set_to_none"]))


def _is_replaced(parameter: nn.Parameter, grad: torch.Tensor | None) -> bool:
    """Return whether the gradient has been set, without waiting for the one that was to come."""
    access = _accesses.get(id(parameter))
    return access is not None and access.replaced(grad)


def _tensors_in(tree: Any, kind: type[torch.Tensor]) -> Iterator[Any]:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors_in(item, kind)
