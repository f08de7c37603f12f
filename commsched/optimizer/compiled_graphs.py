"""Waits for parameters in compiled models.

Two functions of dynamo are wrapped, once in a process. Every graph that dynamo hands to its backend passes
the first: a graph that reads parameters of a distributed optimizer is cut in pieces of about a bucket, as DDP
does it, and each piece waits for its own parameters before it runs. Each piece has a backward of its own, so
that gradients arrive piece by piece too. Every frame that dynamo compiles passes the second: tracing must not
meet a pending parameter.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Protocol

import torch
from torch import nn

from commsched.optimizer.pending import CompiledParameter, keep_class

FIRST, SMALLEST, LARGEST = 1 << 20, 1 << 20, 25 << 20
PIECES = 24
NEAR_INPUT = 8  # the smallest piece there is this part of the largest
LOOK_UPS = (nn.functional.embedding, nn.functional.embedding_bag)

Graph = Callable[..., Any]


class Reader(Protocol):
    """Completes the parameters of one optimizer before they are read."""

    graph_bytes: int  # of a piece, if the user has given a bucket size

    def before_tracing(self) -> None: ...

    def before_graph(self, params: tuple[int, ...], looked_up: tuple[int, ...]) -> None: ...

    def after_graph(
        self, params: tuple[int, ...], looked_up: tuple[int, ...], outputs: Sequence[Any]
    ) -> None: ...


class _Entry:
    """One parameter, the reader that follows it, and its index there."""

    def __init__(self, param: nn.Parameter, reader: Reader, index: int) -> None:
        self.param, self.reader, self.index = weakref.ref(param), weakref.ref(reader), index


_entries: dict[int, _Entry] = {}  # by the parameter's id


def follow(reader: Reader, params: Sequence[nn.Parameter]) -> bool:
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


def unfollow(reader: Reader) -> None:
    # Other threads may follow and unfollow at the same time: copy, and delete what is still there.
    for key, entry in list(_entries.items()):
        if entry.reader() in (reader, None):
            _entries.pop(key, None)


def _entry_of(thing: Any) -> _Entry | None:
    entry = _entries.get(id(thing))
    return entry if entry is not None and entry.param() is thing else None


def _readers_of(params: Sequence[Any]) -> dict[Reader, tuple[int, ...]]:
    """Return the readers that follow some of these parameters, with their indices there."""
    readers: dict[Reader, list[int]] = {}
    for param in params:
        entry = _entry_of(param)
        reader = entry.reader() if entry is not None else None
        if entry is not None and reader is not None:
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
    """Tell the readers when a piece runs that has parameters at these places, of which some are tables."""

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
        self.largest = given or min(max(total // PIECES, SMALLEST), LARGEST)
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
    given = 0
    for param in found.values():
        entry = _entry_of(param)
        reader = entry.reader() if entry is not None else None
        given = given or (reader.graph_bytes if reader is not None else 0)
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
        splitter = Splitter(size.largest, compile_piece, first_bucket_cap=min(size.largest, FIRST))
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
            return call_compiler(
                output, *args, **kwargs
            )  # a graph to look at, not to run here: it stays whole
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
