"""Hooks: autograd's for gradients that have arrived, modules' for parameters that are about to be used.

The modules that own the parameters are given (``model=``) or found among the live objects, so that Horovod's
call with only ``named_parameters=`` overlaps with the forward too. ``pending`` completes a parameter that is
used without its module's forward (attention's output projection, ``F.linear(x, other.weight)``).
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from comm_core import instances_of
from commsched.optimizer import compiled_graphs
from commsched.optimizer.gradient import Tied
from commsched.optimizer.pending import PendingParameter, complete_value
from commsched.optimizer.round import Round, State
from commsched.optimizer.row_traffic import Owner


def owners(params: Sequence[nn.Parameter], model: nn.Module | None = None) -> list[Owner]:
    """Return the modules that own parameters of the optimizer, each with the indices of these.

    Modules of TorchScript run no hooks. Their parameters are complete after each step: see
    ``Round.readable_unnoticed``.
    """
    index = {id(param): i for i, param in enumerate(params)}
    live = (module for module in instances_of(nn.Module) if "_parameters" in module.__dict__)
    modules = model.modules() if model is not None else live
    found = []
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            continue
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


# -- tied weights --------------------------------------------------------------------------------------------

NODES = 64
"""So many nodes behind the head's output are looked at: a head is one product, with casts and views."""

_engine: Any = torch.autograd.Variable._execution_engine


class TiedWeights:
    """Sees the head's part of a tied weight's gradient as soon as autograd has computed it.

    A tied weight belongs to an embedding and to one other module, the head: an output matrix such as GPT-2's
    or BERT's. After the forward of the head, or of the piece of a compiled graph that contains it, the
    autograd node that makes its part of the gradient is found behind the output, and gets a hook. Where it is
    not found, nothing is sent early. ``layers``: the number of each parameter's head among the layers.
    """

    def __init__(self, now: Round, heads: Mapping[int, nn.Module], layers: Mapping[int, int]) -> None:
        self._round = now
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
        if not isinstance(self._round.gradients[i].payload, Tied) and self._round.watch is None:
            return  # the plan sends the whole gradient, and nobody times the head
        if torch._C._current_graph_task_id() != -1:
            return  # checkpointing computes this forward again
        nodes = [out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None]
        found = _node_before(nodes, self._round.params[i])
        if found is not None:
            node, place = found
            node.register_hook(partial(self._seen, i, place))

    def _seen(self, i: int, place: int, grads: Sequence[Tensor | None], _: Any) -> None:
        part = grads[place]
        # Only a whole backward() accumulates; grad() and backward(inputs=...) want what they have named.
        if part is None or torch.is_grad_enabled() or not _engine.is_checkpoint_valid():
            return
        if self._round.watch is not None:
            self._round.watch.grad(self.layers[i])
        self._round.on_part(i, part)


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


# -- modules and parameters ----------------------------------------------------------------------------------


class _BeforeForward:
    """A module's forward pre-hook; copies and pickles of the module get a hook that does nothing."""

    def __init__(self, hooks: Hooks | None, number: int, params: tuple[int, ...]) -> None:
        self._hooks, self._number, self._params = hooks, number, params

    def __call__(self, module: nn.Module, args: Any) -> None:
        hooks = self._hooks
        if hooks is None or (hooks.graphs_wait and torch.compiler.is_compiling()):
            return
        if hooks.round.others:
            after = hooks.after_others()
            if after is not None:  # this hook has been replaced
                for hook in list(module._forward_pre_hooks.values()):
                    if isinstance(hook, _BeforeForward) and hook._hooks is after:
                        hook(module, args)
                return
        hooks.before_forward(self._number, self._params)

    def __reduce__(self) -> Any:
        return _BeforeForward, (None, -1, ())


@cache
def _hide_from_scripting() -> None:
    """Let ``torch.jit.script`` not see this package's hooks: it would compile them.

    Scripted code cannot notice that a parameter is pending. Those that it reads are complete now, and after
    each later step: see ``Round.readable_unnoticed``. torch offers no other way to leave a hook out.
    """
    recursive: Any = torch.jit._recursive

    def without_ours(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any) -> Any:
            places: list[Any] = [module._forward_pre_hooks, module._forward_hooks]
            before = [dict(place) for place in places]
            for param in module._parameters.values():
                if isinstance(param, PendingParameter):
                    complete_value(param)
            for place in places:
                for key, hook in list(place.items()):
                    if isinstance(hook, (_BeforeForward, _AfterForward)):
                        del place[key]
            try:
                return function(module, *args)
            finally:
                for place, hooks in zip(places, before, strict=True):
                    place.clear()
                    place.update(hooks)

        return run

    for name in ("get_hook_stubs", "infer_concrete_type_builder"):
        setattr(recursive, name, without_ours(getattr(recursive, name)))


class Hooks:
    """All hooks of one optimizer, and the order of the forward that they have seen."""

    def __init__(
        self,
        now: Round,
        modules: Sequence[Owner],
        graph_bytes: int | None = None,
        tied: TiedWeights | None = None,
        outgrown: Callable[[], Callable[[], Hooks] | None] = lambda: None,
    ) -> None:
        """``outgrown``: a weak reference to what makes a new plan for parameters that are trained now."""
        _hide_from_scripting()
        self.round = now
        self._tied = tied or TiedWeights(now, {}, {})
        self.graph_bytes = graph_bytes or 0
        self._outgrown = outgrown
        self._looked = -1  # the last round before which parameters outside of the plan were looked at
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
        for i, param in enumerate(now.params):
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(partial(now.on_grad, i)))
        self._graphs: dict[tuple[int, ...], int] = {}  # the numbers of pieces of compiled graphs, by layers
        self.graphs_wait = compiled_graphs.follow(self, now.params)

    def after_others(self) -> Hooks | None:
        """Let a plan be made before a forward if parameters have been unfrozen; return its hooks.

        Later is too late: without hooks of ours their gradients would stay on this rank until the step.
        """
        now = self.round
        if self._looked == now.number or not now.can_be_replaced or not torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return None
        self._looked = now.number
        if not any(param.requires_grad for param in now.others):
            return None
        make = self._outgrown()
        return None if make is None else make()

    def before_tracing(self) -> None:
        """Complete all parameters, because dynamo is about to look at any of them."""
        state = self.round.state
        if state is State.IDLE or (state is State.SENT and self.round.mode.readable):
            self.round.complete_all()

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
        now = self.round
        if now.watch is not None:
            now.watch.forward(number)
        if number not in self._place:
            self._place[number] = len(self._place)
            self.order.extend(self.owners[number][1])
        if now.pending:
            self._check_order(number)
            now.needed(params)

    def _check_order(self, number: int) -> None:
        """Warn once when a forward takes its modules in another order than the plan expects."""
        if self.round.number != self._round:
            self._round, self._last = self.round.number, -1
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
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._tied.remove()
        compiled_graphs.unfollow(self)
