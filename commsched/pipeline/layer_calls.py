"""Calls of whole layers in a partial forward: another stage's are skipped, this stage's run undisturbed.

A dry run records what each call of a layer returns. Where nothing else of the call is seen outside of it, a
later forward needs none of its operations: of another stage's layer it takes the recorded shapes, and this
stage's computes as it would anywhere.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from commsched.pipeline.absent import Absent, absent, versions
from commsched.pipeline.forward_mode import ForwardMode

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
                with torch.compiler.set_stance("force_eager"):
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
