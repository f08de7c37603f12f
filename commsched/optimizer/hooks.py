"""Hooks: autograd's for gradients that have arrived, modules' for parameters that are about to be used.

The modules that own the parameters are given (``model=``) or found among the live objects, so that Horovod's
call with only ``named_parameters=`` overlaps with the forward too. ``pending`` completes a parameter that is
used without its module's forward (attention's output projection, ``F.linear(x, other.weight)``).
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from comm_core import instances_of
from commsched.optimizer import compiled_graphs
from commsched.optimizer.reducer import Reducer
from commsched.optimizer.row_traffic import Owner
from commsched.optimizer.step_state import Phase
from commsched.optimizer.tied_weights import TiedWeights


def owners(params: Sequence[nn.Parameter], model: nn.Module | None = None) -> list[Owner]:
    """Return the modules that own parameters of the optimizer, each with the indices of these."""
    index = {id(param): i for i, param in enumerate(params)}
    live = (module for module in instances_of(nn.Module) if "_parameters" in module.__dict__)
    modules = model.modules() if model is not None else live
    found = []
    for module in modules:
        mine = tuple(index[id(p)] for p in module._parameters.values() if p is not None and id(p) in index)
        if mine:
            found.append((module, mine))
    # In the order of the parameters, which is the same on all ranks, unlike the garbage collector's.
    return sorted(found, key=lambda item: item[1])


def forward_order(used: Sequence[int], count: int) -> list[int]:
    """Return all parameters by first use; unused ones come after their predecessor in the model."""
    place = {i: position for position, i in reversed(list(enumerate(used)))}
    keys = []
    last = -1
    for i in range(count):
        last = place.get(i, last)
        keys.append((last, i in place, i))
    return [i for _, _, i in sorted((last, not seen, i) for last, seen, i in keys)]


class _BeforeForward:
    """A module's forward pre-hook; copies and pickles of the module get a hook that does nothing."""

    def __init__(self, hooks: Hooks | None, number: int, params: tuple[int, ...]) -> None:
        self._hooks, self._number, self._params = hooks, number, params

    def __call__(self, module: nn.Module, _: Any) -> None:
        if self._hooks is not None and not (self._hooks.graphs_wait and torch.compiler.is_compiling()):
            self._hooks.before_forward(self._number, self._params)

    def __reduce__(self) -> Any:
        return _BeforeForward, (None, -1, ())


class Hooks:
    """All hooks of one optimizer, and the order of the forward that they have seen."""

    def __init__(
        self,
        reducer: Reducer,
        modules: Sequence[Owner],
        graph_bytes: int | None = None,
        tied: TiedWeights | None = None,
    ) -> None:
        self.reducer = reducer
        self._tied = tied or TiedWeights(reducer, {}, {})
        self.graph_bytes = graph_bytes or 0
        self.compiled = False  # whether a graph was compiled that must find every parameter complete
        self.order: list[int] = []  # layers by first use in a forward
        self.order_changed = False
        self._place: dict[int, int] = {}  # module numbers by first use
        self._round, self._last = -1, -1
        self._used: set[int] = set()
        self._handles: list[RemovableHandle] = []
        # A module, or a piece of a compiled graph (None), and the layers that it is.
        self.owners: list[tuple[nn.Module | None, tuple[int, ...]]] = []  # None: a compiled graph
        for number, (module, params) in enumerate(modules):
            before = _BeforeForward(self, number, params)
            here = self._tied.layers_of(module)
            self.owners.append((module, tuple(here.get(i, i) for i in params)))
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        for i, param in enumerate(reducer.params):
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(partial(reducer.on_grad, i)))
        self._graphs: dict[tuple[int, ...], int] = {}  # the numbers of pieces of compiled graphs, by layers
        self.graphs_wait = compiled_graphs.follow(self, reducer.params)

    def before_tracing(self) -> None:
        """Complete all parameters, because dynamo is about to look at any of them."""
        phase, arrivals = self.reducer.state.phase, self.reducer.arrivals
        if phase is Phase.IDLE or (phase is Phase.SENT and self.reducer.gathering.readable):
            arrivals.complete_all()

    def before_graph(self, params: tuple[int, ...], looked_up: Container[int]) -> None:
        """React to a piece of a compiled graph that is about to read these parameters.

        ``looked_up``: those among them that are embeddings there, and not heads.
        """
        heads = self._tied.layers
        layers = tuple(heads[i] if i in heads and i not in looked_up else i for i in params)
        number = self._graphs.get(layers)
        if number is None:
            number = self._graphs[layers] = len(self.owners)
            self.owners.append((None, layers))
        self.before_forward(number, params)

    def after_graph(self, params: Sequence[int], looked_up: Container[int], outputs: Sequence[Any]) -> None:
        """React to the outputs of such a piece."""
        for i in self._tied.layers:
            if i in params and i not in looked_up:
                self._tied.after_forward(i, outputs)

    def before_forward(self, number: int, params: tuple[int, ...]) -> None:
        if torch.compiler.is_compiling():
            self.compiled = True
            return
        arrivals = self.reducer.arrivals
        if arrivals.watch is not None:
            arrivals.watch.forward(number)
        if number not in self._place:
            self._place[number] = len(self._place)
            self.order.extend(self.owners[number][1])
        if self.reducer.state.pending:
            self._check_order(number)
            arrivals.needed(params)

    def _check_order(self, number: int) -> None:
        """Warn once when a forward takes its modules in another order than the plan expects."""
        if self.reducer.state.rounds != self._round:
            self._round, self._last = self.reducer.state.rounds, -1
            self._used.clear()
        place = self._place[number]
        if place < self._last and number not in self._used and not self.order_changed:
            self.order_changed = True
            warnings.warn(
                "the forward takes its modules in another order than in the first iterations: results stay"
                " right, the plan hides less; commsched plans anew when it can",
                stacklevel=3,
            )
        self._used.add(number)
        self._last = max(self._last, place)

    def forward_order(self, layers: int) -> list[int]:
        return forward_order(self.order, layers)

    def forget_order(self) -> None:
        self._place.clear()
        self.order_changed = False
        self.order.clear()

    def remove(self) -> None:
        compiled_graphs.unfollow(self)
        self._tied.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
