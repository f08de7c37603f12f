"""Sees the head's part of a tied weight's gradient as soon as autograd has computed it.

A tied weight belongs to an embedding and to one other module, the head: an output matrix such as GPT-2's or
BERT's. After the forward of the head, or of the piece of a compiled graph that contains it, the autograd node
that makes its part of the gradient is found behind the output, and gets a hook. Where it is not found,
nothing is sent early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from commsched.optimizer.reducer import Reducer

NODES = 64
"""So many nodes behind the head's output are looked at: a head is one product, with casts and views."""

_engine: Any = torch.autograd.Variable._execution_engine


class TiedWeights:
    """The heads of one optimizer. ``layers``: the number of each parameter's head among the layers."""

    def __init__(self, reducer: Reducer, heads: Mapping[int, nn.Module], layers: Mapping[int, int]) -> None:
        self._reducer = reducer
        self.layers = {i: layer for i, layer in layers.items() if i in heads}
        self._heads = {i: heads[i] for i in self.layers}
        self._handles = [
            head.register_forward_hook(_AfterForward(self, i)) for i, head in self._heads.items()
        ]

    def layers_of(self, module: nn.Module) -> dict[int, int]:
        """Return the layers that the tied weights of a head are there."""
        return {i: layer for i, layer in self.layers.items() if self._heads[i] is module}

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def after_forward(self, i: int, outputs: Sequence[Any]) -> None:
        """Follow the head's part of the gradient, if a backward outside of another one will compute it."""
        if torch.compiler.is_compiling():
            return  # the graph that is traced runs later
        if i not in self._reducer.state.corrections and self._reducer.arrivals.watch is None:
            return  # the plan sends the whole gradient, and nobody times the head
        if torch._C._current_graph_task_id() != -1:
            return  # checkpointing computes this forward again
        nodes = [out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None]
        found = _node_before(nodes, self._reducer.params[i])
        if found is not None:
            node, place = found
            node.register_hook(partial(self._seen, i, place))

    def _seen(self, i: int, place: int, grads: Sequence[Tensor | None], _: Any) -> None:
        part = grads[place]
        # Only a whole backward() accumulates; grad() and backward(inputs=...) want what they have named.
        if part is None or torch.is_grad_enabled() or not _engine.is_checkpoint_valid():
            return
        if self._reducer.arrivals.watch is not None:
            self._reducer.arrivals.watch.grad(self.layers[i])
        self._reducer.on_part(i, part)


class _AfterForward:
    """The head's forward hook; copies and pickles of the module get a hook that does nothing."""

    def __init__(self, tied: TiedWeights | None, param: int) -> None:
        self._tied, self._param = tied, param

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._tied is not None:
            self._tied.after_forward(self._param, (out,))

    def __reduce__(self) -> Any:
        return _AfterForward, (None, -1)


def _node_before(last: Iterable[Any], weight: Tensor) -> tuple[Any, int] | None:
    """Return the node whose result is added to the weight's gradient, and the place of that result."""
    coming, seen = deque(last), set(last)
    for _ in range(NODES):
        if not coming:
            return None
        node = coming.popleft()
        for place, (before, _) in enumerate(node.next_functions):
            if getattr(before, "variable", None) is weight:
                return node, place
            if before is not None and before not in seen:
                seen.add(before)
                coming.append(before)
    return None
