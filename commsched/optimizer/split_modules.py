"""The modules that may be split, and the node by which each joins the model's graph.

The module's own graph stands behind that node and starts at a copy of the input, so that its two halves can
run apart. ``split_backward`` decides when.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from commsched.optimizer.bit_comparison import Digest, has_bits, same_bits
from commsched.optimizer.hooks import Owner

_FORWARDS = frozenset(
    kind.forward
    for kind in (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
    )
)
"""Forwards whose kernels make the gradients of input and weight one by one, from nothing but the input."""


_PRIVATE = ("_get_current_graph_task_keep_graph", "_top_saved_tensors_default_hooks")


def _is_known(module: nn.Module) -> bool:
    forward = type(module).forward
    if forward in _FORWARDS:
        return True
    library: Any = sys.modules.get("transformers.pytorch_utils")
    return library is not None and forward is library.Conv1D.forward


class Splitter(Protocol):
    """What the hooks and the node of a split module call."""

    def splits(self, part: Part, module: nn.Module, args: Any) -> bool: ...

    def joined(self, part: Part, x: Tensor, inside: Tensor, out: Tensor) -> Tensor: ...

    def differentiated(self) -> None: ...

    def backward(self, call: Call, grad: Tensor) -> list[Tensor | None]: ...


class Part:
    """A module that may be split: its ``weight``, and the ``others`` of its parameters, by index."""

    def __init__(self, module: nn.Module, weight: int, others: tuple[int, ...]) -> None:
        self.module = weakref.ref(module)
        self.weight, self.others = weight, others
        self.tried = False
        self.refused = False
        self.share = 0.0  # of the weight gradient in the module's backward
        self.kept = 0  # bytes of the input or of the output's gradient, whichever is larger
        self.entered: tuple[Tensor, Tensor] | None = None  # the input and its copy, while the forward runs
        self.last: weakref.ref[Call] | None = None
        self.expected: Tensor | None = None
        self.check: Check | None = None  # only this keeps the weight's node alive, which knows of the check
        self.places = (0, 0, 0)  # in the plan: of W, of B, of the B behind it

    @property
    def passed(self) -> bool:
        return self.tried and not self.refused


@dataclass(eq=False)
class Input:
    """The memory of an input: how many modules' backwards, and how many of their weights', will read it."""

    bytes: int
    modules: int = 0
    weights: int = 0


class Call:
    """One forward of a split module: its own graph, from the copy of its input to its output."""

    def __init__(self, part: Part, inside: Tensor, out: Tensor, params: Sequence[Tensor]) -> None:
        self.part, self.inside, self.params = part, inside, params
        self.edge = get_gradient_edge(out)  # not the output itself: the model may not need it any more
        self.value: Tensor | None = out.data
        self.input = Input(0)
        self.whole = False  # to be run as an unsplit backward would
        self.done = False  # whether its backward has begun

    def gradients(self, grad: Tensor, of: Sequence[Tensor], keep: bool) -> list[Tensor | None]:
        """Return the gradients of these tensors, None where none is needed."""
        wanted = [tensor for tensor in of if tensor.requires_grad]
        found = iter(torch.autograd.grad([self.edge], wanted, [grad], keep) if wanted else ())
        return [next(found) if tensor.requires_grad else None for tensor in of]

    def tried(self, grad: Tensor, room: int, keep: bool) -> tuple[list[Tensor | None], bool]:
        """Return all gradients, and whether a split backward's have the same bits.

        ``room``: bytes for these; larger ones are compared by a hash, one after the other.
        """
        tensors = [self.inside, *self.params]
        fit = sum(tensor.nbytes for tensor in tensors) <= room

        def half(of: Sequence[Tensor]) -> list[Tensor | Digest | None]:
            found = self.gradients(grad, of, True)
            return [*found] if fit else [one if one is None else Digest.of(one) for one in found]

        (inputs, *others), weight = half([self.inside, *self.params[1:]]), half(self.params[:1])
        whole = self.gradients(grad, tensors, keep)
        return whole, all(map(has_bits, whole, [inputs, *weight, *others]))


class Join(torch.autograd.Function):
    """Joins a module's own graph to the model's."""

    @staticmethod
    def forward(ctx: Any, split: Splitter, call: Call, x: Tensor, *params: Tensor) -> Tensor:
        ctx.split, ctx.call = split, call
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        ctx.save_for_backward(x, *params)
        value, call.value = call.value, None
        assert value is not None
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            ctx.split.differentiated()
            return None, None, *_differentiable(ctx, grad)
        call = ctx.call
        if call is None:
            _ = ctx.saved_tensors  # raises autograd's error: the graph was not kept for a second backward
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None  # autograd frees what it has saved, but not the input that the call holds
        return None, None, *ctx.split.backward(call, grad)


def _differentiable(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """Return gradients that can be differentiated again, from a second forward in the model's own graph."""
    x, *params = ctx.saved_tensors
    module = ctx.call.part.module()
    enabled, dtype = ctx.autocast
    with torch.autocast(x.device.type, dtype, enabled=enabled, cache_enabled=False):
        out = type(module).forward(module, x)
    of = [tensor for tensor in (x, *params) if tensor.requires_grad]
    found = iter(torch.autograd.grad(out, of, grad, create_graph=True))
    return [next(found) if tensor.requires_grad else None for tensor in (x, *params)]


class Before:
    """A forward pre-hook; copies and pickles of the module get a hook that does nothing."""

    def __init__(self, split: Splitter | None, part: Part | None) -> None:
        self._split, self._part = split, part

    def __call__(self, module: nn.Module, args: Any) -> Any:
        if self._split is None or self._part is None or not self._split.splits(self._part, module, args):
            return None
        inside = args[0].detach().requires_grad_(args[0].requires_grad)
        self._part.entered = args[0], inside
        return (inside,)

    def __reduce__(self) -> Any:
        return type(self), (None, None)


class After(Before):
    """The forward hook that follows."""

    def __call__(self, module: nn.Module, args: Any, out: Any = None) -> Any:
        part, split = self._part, self._split
        if part is None or split is None or part.entered is None:
            return None
        (x, inside), part.entered = part.entered, None
        return split.joined(part, x, inside, out)


class Check:
    """Looks at a weight's gradient while its module is tried: the whole gradient must be the module's."""

    def __init__(self, part: Part, weight: Tensor) -> None:
        self._part, self._node = part, get_gradient_edge(weight).node

    def follow(self) -> RemovableHandle:
        return self._node.register_prehook(self)

    def __call__(self, grads: Sequence[Tensor]) -> None:
        expected, self._part.expected = self._part.expected, None
        if expected is None or not same_bits(grads[0], expected):
            self._part.refused = True


@cache
def supported() -> bool:
    """Return whether this torch has what a split backward needs: 2.6 takes no edges for ``backward()``."""
    autograd = torch._C._autograd
    if not all(hasattr(autograd, name) for name in _PRIVATE):
        return False
    x = torch.zeros(1, requires_grad=True)
    try:
        torch.autograd.backward([get_gradient_edge(x * 1)], [torch.ones(1)], inputs=[x])
    except (TypeError, AttributeError, RuntimeError):
        return False
    return True


def candidates(params: Sequence[Tensor], owners: Sequence[Owner]) -> list[Part]:
    if not supported():
        return []
    found = []
    times: dict[int, int] = {}
    for _, own in owners:
        for i in own:
            times[i] = times.get(i, 0) + 1
    for module, own in owners:
        weight = module._parameters.get("weight")
        index = [i for i in own if params[i] is weight]
        if _is_known(module) and index and all(times[i] == 1 for i in own):
            others = tuple(i for i in own if i != index[0])
            found.append(Part(module, index[0], others))
    return found
