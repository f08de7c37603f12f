"""Hooks: autograd's for gradients that have arrived, modules' for parameters that are about to be used.

The modules that own the parameters are given (``model=``) or found among the live objects, so that Horovod's
call with only ``named_parameters=`` overlaps with the forward too. ``pending`` completes a parameter that is
used without its module's forward (attention's output projection, ``F.linear(x, other.weight)``).
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from comm_core import instances_of
from commsched.optimizer.gradient import Tied
from commsched.optimizer.pending import CompiledParameter, PendingParameter, complete_value, keep_class
from commsched.optimizer.planner import Owner
from commsched.optimizer.round import Round, State


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
            for place, hooks in zip(places, before, strict=True):
                for key, hook in hooks.items():
                    if isinstance(hook, (_BeforeForward, _AfterForward)):
                        place.pop(key, None)  # the collector may have freed its optimizer meanwhile
            try:
                return function(module, *args)
            finally:
                for place, hooks in zip(places, before, strict=True):
                    place.clear()
                    place.update(hooks)

        return run

    for name in ("get_hook_stubs", "infer_concrete_type_builder"):
        setattr(recursive, name, without_ours(getattr(recursive, name)))


def _hook_of(param: nn.Parameter, hook: Callable[..., None]) -> list[RemovableHandle]:
    """Let a hook see a parameter's gradients, also one that may be trained later: torch refuses those."""
    trained = param.requires_grad
    if not trained and (param.is_inference() or not (param.is_floating_point() or param.is_complex())):
        return []  # it never has a gradient
    param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(hook)
    param.requires_grad_(trained)
    return [handle]


class Hooks:
    """All hooks of one optimizer, and the order of the forward that they have seen."""

    def __init__(
        self,
        now: Round,
        modules: Sequence[Owner],
        graph_bytes: int | None = None,
        tied: TiedWeights | None = None,
    ) -> None:
        _hide_from_scripting()
        self.round = now
        self._tied = tied or TiedWeights(now, {}, {})
        self.graph_bytes = graph_bytes or 0  # of a piece, if the user has given a bucket size
        self.compiled = False  # whether a graph was compiled that must find every parameter complete
        self.order: list[int] = []  # layers by first use in a forward
        self.order_changed = False
        self._place: dict[int, int] = {}  # module numbers by first use
        self._round, self._last = -1, -1
        self._used: set[int] = set()
        self._handles: list[RemovableHandle] = []
        # A module, or a piece of a compiled graph (None), and the layers that it is.
        self.owners: list[tuple[nn.Module | None, tuple[int, ...]]] = []
        for number, (module, params) in enumerate(modules):
            before = _BeforeForward(self, number, params)
            here = self._tied.layers_of(module)
            self.owners.append((module, tuple(here.get(i, i) for i in params)))
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        for gradient in now.gradients:
            self._handles += _hook_of(gradient.param, partial(now.on_grad, gradient.number))
        self._graphs: dict[tuple[int, ...], int] = {}  # the numbers of pieces of compiled graphs, by layers
        self.graphs_wait = follow(self, now.params)

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
        if now.backend.has_streams:
            now.backend.enter()

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
        unfollow(self)


# -- compiled models wait for their parameters ---------------------------------------------------------------

# Two functions of dynamo are wrapped, once in a process. Every graph that dynamo hands to its backend passes
# the first: a graph that reads parameters of a distributed optimizer is cut in pieces of about a bucket, as
# DDP does it, and each piece waits for its own parameters before it runs. Each piece has a backward of its
# own, so that gradients arrive piece by piece too. Every frame that dynamo compiles passes the second:
# tracing must not meet a pending parameter.

FIRST_PIECE, SMALLEST_PIECE, LARGEST_PIECE = 1 << 20, 1 << 20, 25 << 20  # bytes
PIECES = 24
NEAR_INPUT = 8  # the smallest piece there is this part of the largest
LOOK_UPS = (nn.functional.embedding, nn.functional.embedding_bag)

Graph = Callable[..., Any]


class _Entry:
    """One parameter, the hooks that follow it, and its index there."""

    def __init__(self, param: nn.Parameter, reader: Hooks, index: int) -> None:
        self.param, self.reader, self.index = weakref.ref(param), weakref.ref(reader), index


_entries: dict[int, _Entry] = {}  # by the parameter's id


def follow(reader: Hooks, params: Sequence[nn.Parameter]) -> bool:
    """Let compiled graphs wait for these parameters; return False if this torch does not allow it."""
    if not _wrap_dynamo():
        return False
    for index, param in enumerate(params):
        _entries[id(param)] = _Entry(param, reader, index)
    if torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        # Graphs that were compiled earlier do not wait. Another class makes them compile again.
        for param in params:
            keep_class(param)
    return True


def unfollow(reader: Hooks) -> None:
    # Other threads may follow and unfollow at the same time, and the collector may unfollow wherever objects
    # are made. list(items()) makes a tuple for each item, a list of the keys makes none.
    for key in list(_entries):
        entry = _entries.get(key)
        if entry is not None and entry.reader() in (reader, None):
            _entries.pop(key, None)


def _entry_of(thing: Any) -> _Entry | None:
    entry = _entries.get(id(thing))
    return entry if entry is not None and entry.param() is thing else None


def _readers_of(params: Sequence[Any]) -> dict[Hooks, tuple[int, ...]]:
    """Return the hooks that follow some of these parameters, with their indices there."""
    readers: dict[Hooks, list[int]] = {}
    for param in params:
        if (entry := _entry_of(param)) is not None and (reader := entry.reader()) is not None:
            readers.setdefault(reader, []).append(entry.index)
    return {reader: tuple(indices) for reader, indices in readers.items()}


# -- the pieces of a graph -----------------------------------------------------------------------------------


def _in_pieces(backend: Callable[..., Graph]) -> Callable[..., Graph]:
    """Return a backend that compiles each piece of a graph with ``backend`` and waits before the piece."""

    @wraps(backend, updated=())
    def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Graph:
        places = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        found = {name: thing for name, thing in zip(places, inputs, strict=True) if _entry_of(thing)}
        if not found:
            return backend(gm, inputs, **options)

        def compile_piece(piece: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Graph:
            nodes = [node for node in piece.graph.nodes if node.op == "placeholder"]
            places = [i for i, node in enumerate(nodes) if node.name in found]
            tables = [i for i in places if _is_table(nodes[i])]
            return _waiting(backend(piece, inputs, **options), places, tables)

        compiled = _split(gm, inputs, compile_piece, _size_of_pieces(gm, found), options)
        for param in found.values():
            keep_class(param)
        return compiled

    return compile_graph


def _waiting(compiled: Graph, places: Sequence[int], tables: Sequence[int]) -> Graph:
    """Tell the hooks when a piece runs that has parameters at these places, of which some are tables."""

    def run(*args: Any) -> Any:
        readers, looked_up = (_readers_of([args[i] for i in which]) for which in (places, tables))
        for reader, params in readers.items():
            reader.before_graph(params, looked_up.get(reader, ()))
        with torch._C.DisableTorchFunctionSubclass():
            out = compiled(*args)
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for reader, params in readers.items():
            reader.after_graph(params, looked_up.get(reader, ()), outputs)
        return out

    return run


def _bytes(param: torch.Tensor) -> int:
    return param.numel() * param.element_size()


def _is_table(place: torch.fx.Node) -> bool:
    """Return whether a graph looks rows up in an input."""
    return any(user.target in LOOK_UPS for user in place.users)


class _Size:
    """The bytes at which a piece ends, on the way from the output to the input.

    That is a bucket size that was given, or one that makes about two dozen pieces, up to DDP's size.
    Without a given one, pieces near the input are smaller: half of the bytes still to come, down to an
    eighth of that size. Their backward comes last, and the next forward needs their parameters first, so
    there is the least compute to hide them; in a convolutional network those few bytes are half of the
    compute. Tables are no bytes to come, because they hardly compute.
    """

    def __init__(self, given: int, total: int, to_come: Mapping[str, int]) -> None:
        """``to_come``: the bytes of all parameters but tables, by name."""
        self.largest = given or min(max(total // PIECES, SMALLEST_PIECE), LARGEST_PIECE)
        self._smallest = self.largest // (1 if given else NEAR_INPUT)
        self._to_come = dict(to_come)
        self.left = sum(to_come.values())

    def passed(self, name: str) -> None:
        """Note that a piece has got a parameter."""
        self.left -= self._to_come.pop(name, 0)

    @property
    def now(self) -> int:
        return min(self.largest, max(self.left // 2, self._smallest))


def _size_of_pieces(gm: torch.fx.GraphModule, found: Mapping[str, Any]) -> _Size:
    given = next((reader.graph_bytes for reader in _readers_of([*found.values()]) if reader.graph_bytes), 0)
    places = [node for node in gm.graph.nodes if node.op == "placeholder" and node.name in found]
    to_come = {str(node.target): _bytes(found[node.name]) for node in places if not _is_table(node)}
    return _Size(given, sum(map(_bytes, found.values())), to_come)


def _split(gm: Any, inputs: Any, compile_piece: Any, size: _Size, options: dict[str, Any]) -> Graph:
    from torch._dynamo.backends.distributed import Bucket, DDPOptimizer

    class Splitter(DDPOptimizer):
        def add_param(self, bucket: Bucket, param: nn.Parameter, name: str) -> None:
            # DDP's counts the whole storage, which parameters on shards have in common.
            bucket.size += _bytes(param)
            bucket.params.append(name)
            bucket.param_ids.append(id(param))
            size.passed(name)
            self.bucket_bytes_cap = size.now

    try:
        splitter = Splitter(size.largest, compile_piece, first_bucket_cap=min(size.largest, FIRST_PIECE))
        return splitter.compile_fn(gm, inputs, **options)
    except NotImplementedError:  # torch before 2.7 does not split graphs with higher-order operators
        return compile_piece(gm, inputs, **options)


# -- dynamo --------------------------------------------------------------------------------------------------


@cache
def _wrap_dynamo() -> bool:
    try:
        from torch._dynamo import convert_frame
        from torch._dynamo.output_graph import OutputGraph

        compile_frame, call_compiler = convert_frame._compile, OutputGraph.call_user_compiler
    except (ImportError, AttributeError):
        return False

    @wraps(compile_frame)
    def compile_complete(*args: Any, **kwargs: Any) -> Any:
        with _tracing():
            return compile_frame(*args, **kwargs)

    @wraps(call_compiler)
    def call_in_pieces(output: Any, *args: Any, **kwargs: Any) -> Any:
        if output.export or not getattr(_depth, "value", 0):
            return call_compiler(output, *args, **kwargs)  # to look at, not to run here: it stays whole
        backend = output.compiler_fn
        output.compiler_fn = _in_pieces(backend)
        try:
            return call_compiler(output, *args, **kwargs)
        finally:
            output.compiler_fn = backend

    convert_frame._compile = compile_complete
    OutputGraph.call_user_compiler = call_in_pieces  # type: ignore[method-assign,assignment]
    return True


_depth = threading.local()


@contextmanager
def _tracing() -> Iterator[None]:
    """Complete all parameters, and let dynamo see those that keep their class as ordinary ones."""
    depth = getattr(_depth, "value", 0)
    if depth == 0:
        for reader in {entry.reader() for entry in list(_entries.values())} - {None}:
            reader.before_tracing()  # type: ignore[union-attr]
        CompiledParameter.intercept(False)
    _depth.value = depth + 1
    try:
        yield
    finally:
        _depth.value = depth
        if depth == 0:
            CompiledParameter.intercept(True)
