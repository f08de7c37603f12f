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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Protocol

import torch
from torch import nn

from commsched.optimizer.pending import CompiledParameter, keep_class

FIRST, SMALLEST, LARGEST = 1 << 20, 1 << 20, 25 << 20
PIECES = 12

Graph = Callable[..., Any]


class Reader(Protocol):
    """Completes the parameters of one optimizer before they are read."""

    graph_bytes: int  # of a piece, if the user has given a bucket size

    def before_tracing(self) -> None: ...

    def before_graph(self, params: tuple[int, ...]) -> None: ...


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
    for key in [key for key, entry in _entries.items() if entry.reader() in (reader, None)]:
        del _entries[key]


def _entry_of(thing: Any) -> _Entry | None:
    entry = _entries.get(id(thing))
    return entry if entry is not None and entry.param() is thing else None


def _about_to_read(params: Sequence[Any]) -> None:
    readers: dict[Reader, list[int]] = {}
    for param in params:
        entry = _entry_of(param)
        reader = entry.reader() if entry is not None else None
        if entry is not None and reader is not None:
            readers.setdefault(reader, []).append(entry.index)
    for reader, indices in readers.items():
        reader.before_graph(tuple(indices))


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
            names = [node.name for node in piece.graph.nodes if node.op == "placeholder"]
            return _waiting(backend(piece, inputs, **options), [i for i, n in enumerate(names) if n in found])

        compiled = _split(gm, inputs, compile_piece, _piece_bytes(found.values()), options)
        for param in found.values():
            keep_class(param)
        return compiled

    return compile_graph


def _waiting(compiled: Graph, places: Sequence[int]) -> Graph:
    def run(*args: Any) -> Any:
        _about_to_read([args[i] for i in places])
        with torch._C.DisableTorchFunctionSubclass():
            return compiled(*args)

    return run


def _piece_bytes(params: Any) -> int:
    """Return the given bucket size, or one that makes about a dozen pieces: DDP's size for large models."""
    total, given = 0, 0
    for param in params:
        entry = _entry_of(param)
        reader = entry.reader() if entry is not None else None
        given = given or (reader.graph_bytes if reader is not None else 0)
        total += param.numel() * param.element_size()
    return given or min(max(total // PIECES, SMALLEST), LARGEST)


def _split(gm: Any, inputs: Any, compile_piece: Any, size: int, options: dict[str, Any]) -> Graph:
    from torch._dynamo.backends.distributed import Bucket, DDPOptimizer

    class Splitter(DDPOptimizer):
        def add_param(self, bucket: Bucket, param: nn.Parameter, name: str) -> None:
            # DDP's counts the whole storage, which parameters on shards have in common.
            bucket.size += param.numel() * param.element_size()
            bucket.params.append(name)
            bucket.param_ids.append(id(param))

    try:
        splitter = Splitter(size, compile_piece, first_bucket_cap=min(size, FIRST))
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
        for reader in {entry.reader() for entry in _entries.values()} - {None}:
            reader.before_tracing()  # type: ignore[union-attr]
        CompiledParameter.intercept(False)
    _depth.value = depth + 1
    try:
        yield
    finally:
        _depth.value = depth
        if depth == 0:
            CompiledParameter.intercept(True)
