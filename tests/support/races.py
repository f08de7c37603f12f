"""torch's stream race detector (``torch.cuda._sanitizer``), fed with CPU tensors and streams on paper.

Operations run at once, in the order in which the host makes them, so the numbers are those of one stream. The
detector is told on which stream each operation would run on a GPU and what it reads and writes, and reports
two accesses to the same memory that no event orders.

It also checks the reuse of memory: when a tensor's storage is freed, torch's allocator may give it to a later
operation on the stream it was allocated on, as soon as the streams named by ``record_stream`` have done what
they had to do then. That next owner is a write like any other.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.cuda._sanitizer import EventHandler, zip_arguments
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commsched.backends.cuda import Device

MAIN, COMM, SIDE = 0, 1, 2  # streams
_LINE = 64  # bytes that are watched together; slots, shards and torch's tensors begin at multiples of it


class Race(Exception):
    pass


class Races(TorchDispatchMode):
    """Watches all operations of the thread that enters it; ``stop`` raises the first race that is found."""

    def __init__(self, stop: bool = False) -> None:
        super().__init__()
        self.stop = stop
        self._found: dict[str, None] = {}
        self.stream = MAIN
        self._handler = EventHandler()
        self._numbers = itertools.count(100)  # of events, and of streams that stand for an allocator
        self._storages: dict[int, tuple[StorageWeakRef, int, set[int], range]] = {}

    def found(self) -> list[str]:
        """Return the races so far, each once."""
        self._collect()
        return list(self._found)

    # -- streams ---------------------------------------------------------------------------------------------

    def record(self, stream: int) -> int:
        self._collect()
        event = next(self._numbers)
        self._handler._handle_event_record(event, stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        self._collect()
        self._handler._handle_event_wait(event, stream)

    def passed(self, event: int) -> None:
        """Order all that the host does from now on after an event, because the host has seen it pass."""
        self._collect()
        self._handler._handle_event_synchronization(event)

    def uses(self, tensor: torch.Tensor, stream: int) -> None:
        """``tensor.record_stream(stream)``."""
        known = self._storages.get(tensor.untyped_storage().data_ptr())
        if known is not None:
            known[2].add(stream)

    # -- operations ------------------------------------------------------------------------------------------

    def touch(self, what: str, reads: Any, writes: Any) -> None:
        """Report an operation on the current stream that torch does not dispatch."""
        self._access(self.stream, _lines(reads), _lines(writes), what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._collect()
        kwargs = kwargs or {}
        reads, writes = [], []
        for argument, value in zip_arguments(func._schema, args, kwargs):
            if argument.alias_info is None:
                reads.append(value)
            elif argument.alias_info.is_write:
                writes.append(value)
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":  # the host waits
            self._handler._handle_stream_synchronization(self.stream)
        if name.startswith("new_") or name.endswith("_like"):
            reads = []  # they look at sizes and types
        result = func(*args, **kwargs)
        returned = func._schema.returns
        if returned and returned[0].alias_info is None and not name.startswith(("empty", "new_empty")):
            writes.append(result)
        for tensor in _tensors(result):
            self._allocated(tensor)
        self._access(self.stream, _lines(reads), _lines(writes), str(func))
        return result

    def _access(self, stream: int, reads: set[int], writes: set[int], what: str) -> None:
        names: defaultdict[int, list[str]] = defaultdict(lambda: [what])
        for error in self._handler._handle_kernel_launch(stream, reads - writes, writes, set(), what, names):
            now, before = error.current_access, error.previous_access
            self._found[
                f"{now.operator} on stream {now.stream} is {now.type} what {before.operator} on stream"
                f" {before.stream} was {before.type}, at {_place(now)} and {_place(before)}"
            ] = None
            if self.stop:
                self.stop = False
                raise Race(next(iter(self._found)))

    # -- memory ----------------------------------------------------------------------------------------------

    def _allocated(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if not start or start in self._storages:
            return
        lines = range(start // _LINE, -(-(start + storage.nbytes()) // _LINE))
        self._storages[start] = StorageWeakRef(storage), self.stream, set(), lines
        for line in lines:
            # Not _handle_memory_allocation(), which takes the stack each time.
            self._handler.tensors_accessed.ensure_tensor_does_not_exist(line)
            self._handler.tensors_accessed.create_tensor(line, None)

    def _collect(self) -> None:
        """Give freed memory to its next owners."""
        gone = [start for start, (reference, *_) in self._storages.items() if reference.expired()]
        for start in gone:
            _, allocated_on, used_on, lines = self._storages.pop(start)
            owner = next(self._numbers)
            for stream in {allocated_on, *used_on}:
                event = next(self._numbers)
                self._handler._handle_event_record(event, stream)
                self._handler._handle_event_wait(event, owner)
            self._access(owner, set(), set(lines), "the next owner of the memory")
            for line in lines:
                self._handler._handle_memory_deallocation(line)


class WatchedDevice(Device):
    """A device whose streams are those of ``races``; they do everything at once."""

    comm = COMM
    asynchronous = True

    def __init__(self, races: Races) -> None:
        super().__init__(torch.device("cpu"))
        self.races, self._asked = races, 0

    def current(self) -> int:
        return self.races.stream

    def record(self, stream: int) -> int:
        return self.races.record(stream)

    def wait(self, stream: int, event: int) -> None:
        self.races.wait(stream, event)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.races.stream = self.races.stream, stream
        try:
            yield
        finally:
            self.races.stream = before

    def has_passed(self, event: int) -> bool:
        """Let the device be behind the host at most times, and with it at others."""
        self._asked += 1
        if self._asked % 3:
            return False
        self.races.passed(event)
        return True

    def moment(self, event: int) -> float:
        self.races.passed(event)
        return float(event)

    def uses(self, tensor: torch.Tensor, stream: int) -> None:
        self.races.uses(tensor, stream)


def _place(access: Any) -> str:
    """Return the line of this project from which an operation came."""
    frames = [frame for frame in access.stack_trace if "/torch/" not in frame.filename]
    own = [frame for frame in frames if not frame.filename.endswith("races.py")]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.layout is torch.strided]


def _lines(value: Any) -> set[int]:
    """Return the watched lines of memory in which the elements of these tensors lie."""
    lines: set[int] = set()
    for tensor in _tensors(value):
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in steps)
            start = tensor.data_ptr()
            lines.update(range(start // _LINE, (start + reach * tensor.element_size() - 1) // _LINE + 1))
    return lines
