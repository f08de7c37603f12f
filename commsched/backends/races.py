"""torch's stream race detector (``torch.cuda._sanitizer``), fed with CPU tensors and streams on paper.

Operations run at once, in the order in which the host makes them, so the numbers are those of one stream. The
detector is told on which stream each operation would run on a GPU and what it reads and writes, and reports
two accesses to the same memory that no event orders.

It also checks the reuse of memory. A new tensor's memory may still be in use by earlier operations on the
stream it was allocated on, so the allocation is a write there. When a tensor's storage is freed, torch's
allocator may give it to a later operation on that stream, as soon as the streams named by ``record_stream``
have done what they had to do then. That next owner is a write, too.

A rank may have several threads. Each computes on streams of its own; those that are no GPU's stand for the
host, which reads and writes pinned memory.

[Note: the detector's streams]
A wait costs the detector as much as there are streams, and a wait of the host their square. So a next owner
of memory is a stream only while its write is checked, and one stream stands for the network.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import EventHandler, zip_arguments
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from commsched.backends.nccl import Exchange
from commsched.devices import Device

MAIN, COMM, SIDE, OTHER = 0, 1, 2, 3  # streams
_NEXT_OWNER, _NETWORK = 98, 99  # streams that stand for an allocator's next tensor, and for arriving messages
_LINE = 64  # bytes that are watched together; slots, shards and torch's tensors begin at multiples of it


class _Frame(NamedTuple):
    filename: str
    lineno: int


def _nearest(frames: Iterator[tuple[Any, int]], lookup_lines: bool = True) -> list[_Frame]:
    """Return the nearest frame of this project: whole stacks take longer than all else."""
    for frame, line in frames:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.endswith("races.py"):
            return [_Frame(name, line)]
    return []


_TRACEBACK = SimpleNamespace(walk_stack=traceback.walk_stack, StackSummary=SimpleNamespace(extract=_nearest))


class Race(Exception):
    pass


Tape = list[tuple[str, tuple[Any, ...]]]
"""What a detector was told: see ``Handler.tell``."""


class Handler(EventHandler):
    """Notes all that it is told, in ``tape``, so that it can be told to another one; None: nothing."""

    def __init__(self, tape: Tape | None = None) -> None:
        super().__init__()
        self.tape = tape
        # By stream: accesses, and what the streams of ``record_stream`` had to do.
        self._freed: defaultdict[int, list[tuple[list[Any], dict[int, int]]]] = defaultdict(list)
        _sanitizer.traceback = _TRACEBACK  # type: ignore[assignment]

    def tell(self, what: str, *arguments: Any) -> Any:
        if self.tape is not None:
            self.tape.append((what, arguments))
        return getattr(self, what)(*arguments)

    def launch(self, stream: int, reads: set[int], writes: set[int], what: str) -> list[Any]:
        names: defaultdict[int, list[str]] = defaultdict(lambda: [what])
        return list(self._handle_kernel_launch(stream, reads - writes, writes, set(), what, names))

    def record(self, event: int, stream: int) -> None:
        self._handle_event_record(event, stream)

    def wait(self, event: int, stream: int) -> None:
        self._handle_event_wait(event, stream)

    def host_waits(self, event: int) -> None:
        self._handle_event_synchronization(event)

    def host_waits_for_all(self, stream: int) -> None:
        self._handle_stream_synchronization(stream)

    def allocate(self, lines: Sequence[int]) -> None:
        for line in lines:
            # Not _handle_memory_allocation(), which takes the stack each time.
            self.tensors_accessed.ensure_tensor_does_not_exist(line)
            self.tensors_accessed.create_tensor(line, None)

    def free(self, lines: Sequence[int], stream: int | None, used_on: set[int]) -> None:
        """Note what was done with memory until now; ``stream``: of the allocation, None for pinned memory."""
        infos = [self.tensors_accessed.accesses.pop(line) for line in lines]
        if stream is None:
            return
        elsewhere = [
            info for info in infos if any(a.stream != stream for a in [*info.reads, info.write] if a)
        ]
        if elsewhere:
            until: dict[int, int] = {}
            for other in used_on:
                self.syncs._ensure_stream_exists(other)
                self.syncs._state_wait_for_other(until, self.syncs.current_sync_states[other])
            self._freed[stream].append((elsewhere, until))

    def reuse(self, stream: int) -> list[Any]:
        """Let next owners write to the memory that was freed of this stream, where that is now."""
        syncs, accesses, errors = self.syncs, self.tensors_accessed.accesses, []
        for infos, until in self._freed.pop(stream, ()):
            syncs._ensure_stream_exists(stream)
            syncs.current_sync_states[_NEXT_OWNER] = dict(syncs.current_sync_states[stream])
            syncs._state_wait_for_other(syncs.current_sync_states[_NEXT_OWNER], until)
            places = range(-len(infos), 0)
            accesses.update(zip(places, infos, strict=True))
            errors += self.launch(_NEXT_OWNER, set(), set(places), "the next owner of the memory")
            for place in places:
                del accesses[place]
            del syncs.current_sync_states[_NEXT_OWNER]
        return errors


class _Storage(NamedTuple):
    """Memory that the detector knows. ``stream``: on which it was allocated, None in pinned host memory."""

    reference: StorageWeakRef
    stream: int | None
    used_on: set[int]
    lines: Sequence[int]
    stop: int  # address


class Races(TorchDispatchMode):
    """Watches all operations of the thread that enters it; ``stop`` raises the first race that is found.

    ``at_once``: freed memory may have its next owner at once; False: with the next allocation on its stream,
    for scripts that let streams wait for each other before they use them. ``tape``: where all that the
    detector is told is noted, if anywhere.
    """

    def __init__(self, stop: bool = False, at_once: bool = True, tape: Tape | None = None) -> None:
        super().__init__()
        self.stop, self._at_once = stop, at_once
        self._found: dict[str, None] = {}
        self._handler = Handler(tape)
        # Of events, of streams beyond the first ones, and of streams that stand for a host's threads.
        self._numbers = itertools.count(100)
        self._storages: dict[int, _Storage] = {}
        self._starts: dict[int, int] = {}  # of the storages, by line
        self._lock = threading.RLock()
        self._of_thread = threading.local()
        self._of_thread.stream = MAIN
        self._of_thread.launches = False

    def __enter__(self) -> Any:
        self._of_thread.stream, self._of_thread.launches = MAIN, True
        return super().__enter__()

    def found(self) -> list[str]:
        """Return the races so far, each once."""
        with self._lock:
            self._collect()
            return list(self._found)

    # -- streams ---------------------------------------------------------------------------------------------

    @property
    def stream(self) -> int:
        """The stream on which this thread computes; of a thread that does not, one that is the host's."""
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = next(self._numbers)
        return int(self._of_thread.stream)

    @stream.setter
    def stream(self, stream: int) -> None:
        self._of_thread.stream = stream

    def new_stream(self) -> int:
        return next(self._numbers)

    def record(self, stream: int) -> int:
        with self._lock:
            self._collect()
            event = next(self._numbers)
            self._handler.tell("record", event, stream)
            return event

    def wait(self, stream: int, event: int) -> None:
        with self._lock:
            self._collect()
            self._handler.tell("wait", event, stream)

    def passed(self, event: int) -> None:
        """Order all that the host does from now on after an event, because the host has seen it pass."""
        with self._lock:
            self._collect()
            self._handler.tell("host_waits", event)

    def seen(self, event: int) -> None:
        """Order what this thread does from now on after an event, for which it has waited."""
        if getattr(self._of_thread, "launches", False):
            self.passed(event)
        else:
            self.wait(self.stream, event)

    def uses(self, tensor: torch.Tensor, stream: int) -> None:
        """``tensor.record_stream(stream)``, which has no effect on an ``alias_of``."""
        with self._lock:
            storage = tensor.untyped_storage()
            known = self._storages.get(storage.data_ptr())
            if known is not None and known.reference.cdata == storage._cdata:
                known.used_on.add(stream)

    # -- operations ------------------------------------------------------------------------------------------

    def touch(self, what: str, reads: Any, writes: Any) -> None:
        """Report an operation on the current stream that torch does not dispatch."""
        with self._lock:
            self._access(self.stream, self._lines(reads), self._lines(writes), what)

    def leaves(self, buffers: Sequence[torch.Tensor]) -> None:
        """This thread's host reads a message in pinned memory."""
        self.touch("the host sends", self._pinned(buffers), ())

    def arrives(self, buffers: Sequence[torch.Tensor]) -> None:
        """A message was written into pinned memory, and the thread that computes has waited for that."""
        with self._lock:
            self._access(_NETWORK, set(), self._lines(self._pinned(buffers)), "a message arrives")
            self.passed(self.record(_NETWORK))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads, writes = [], []
        for argument, value in zip_arguments(func._schema, args, kwargs):
            if argument.alias_info is None:
                reads.append(value)
            elif argument.alias_info.is_write:
                writes.append(value)
        name = func.overloadpacket.__name__
        with self._lock:
            self._collect()
            if name == "_local_scalar_dense":  # the host waits
                self._handler.tell("host_waits_for_all", self.stream)
        if name.startswith("new_") or name.endswith("_like"):
            reads = []  # they look at sizes and types
        result = func(*args, **kwargs)
        returned = func._schema.returns
        if returned and returned[0].alias_info is None and not name.startswith(("empty", "new_empty")):
            writes.append(result)
        with self._lock:
            for tensor in _tensors(result):
                self._allocated(tensor)
            self._access(self.stream, self._lines(reads), self._lines(writes), str(func))
        return result

    def _access(self, stream: int, reads: set[int], writes: set[int], what: str) -> None:
        self._note(self._handler.tell("launch", stream, reads, writes, what))

    def _note(self, errors: Sequence[Any]) -> None:
        for error in errors:
            self._found[told(error)] = None
            if self.stop:
                self.stop = False
                raise Race(next(iter(self._found)))

    def _lines(self, value: Any) -> set[int]:
        """Return the watched lines of memory in which the elements of these tensors lie."""
        lines: set[int] = set()
        for tensor in _tensors(value):
            if tensor.numel() and self._is_torchs(tensor):
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                reach = 1 + sum((size - 1) * stride for size, stride in steps)
                start = tensor.data_ptr()
                lines.update(range(start // _LINE, (start + reach * tensor.element_size() - 1) // _LINE + 1))
        return lines

    def _is_torchs(self, tensor: torch.Tensor) -> bool:
        """Return whether torch has allocated the memory, which Python and numpy do otherwise.

        Their memory may lie in the last line of torch's, of which it is no part.
        """
        start = tensor.untyped_storage().data_ptr()
        if start % _LINE == 0:
            return True
        known = self._storages.get(self._starts.get(start // _LINE, -1))
        return known is not None and start < known.stop  # ``alias_of``

    # -- memory ----------------------------------------------------------------------------------------------

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return pinned memory. Torch gives it on once the copies that it has started there are over."""
        with _disable_current_modes():
            made = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with self._lock:
            self._collect()
            self._allocated(made, on_host=True)
        return made

    def _pinned(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        known = (self._storages.get(buffer.untyped_storage().data_ptr()) for buffer in buffers)
        return [b for b, its in zip(buffers, known, strict=True) if its is not None and its.stream is None]

    def _allocated(self, tensor: torch.Tensor, on_host: bool = False) -> None:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        known = self._storages.get(start)
        if start % _LINE or not storage.nbytes() or (known is not None and not known.reference.expired()):
            return
        lines: Sequence[int] = range(start // _LINE, -(-(start + storage.nbytes()) // _LINE))
        if not self._starts.keys().isdisjoint(lines):
            self._collect()  # what was there may have been freed since
        if lines[0] in self._starts:  # the memory of another storage, which it keeps: ``alias_of``
            return
        lines = [line for line in lines if line not in self._starts]
        stream = None if on_host else self.stream
        self._storages[start] = _Storage(
            StorageWeakRef(storage), stream, set(), lines, start + storage.nbytes()
        )
        self._starts.update(dict.fromkeys(lines, start))
        self._handler.tell("allocate", lines)
        if stream is not None:
            self._note(self._handler.tell("reuse", stream))
            self._access(stream, set(), set(lines), "the allocation")

    def _collect(self) -> None:
        """Give freed memory to its next owners."""
        for start in [start for start, known in self._storages.items() if known.reference.expired()]:
            known = self._storages.pop(start)
            for line in known.lines:
                del self._starts[line]
            self._handler.tell("free", known.lines, known.stream, known.used_on)
            if known.stream is not None and self._at_once:
                self._note(self._handler.tell("reuse", known.stream))


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

    def stream(self) -> int:
        return self.races.new_stream()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.races.host_empty(shape, dtype)

    def synchronize(self, event: int) -> None:
        self.races.seen(event)

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


class WatchedExchange:
    """An exchange through the host, whose reads and writes the race detector is told."""

    name, scales = "watched", True

    def __init__(self, inner: Exchange, races: Races) -> None:
        self._inner, self._races = inner, races
        self.abort, self.close = inner.abort, inner.close

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None:
        self._races.touch("RS", [bucket], [bucket])
        self._inner.reduce_scatter(bucket, postscale)

    def all_gather(self, bucket: torch.Tensor) -> None:
        self._races.touch("AG", [bucket], [bucket])
        self._inner.all_gather(bucket)

    def all_to_all(self, received: torch.Tensor, message: torch.Tensor) -> None:
        self._races.touch("all-to-all", [message], [received])
        self._inner.all_to_all(received, message)


def told(error: Any, places: bool = True) -> str:
    """Return in words what the detector reports, and from where in the code."""
    now, before = error.current_access, error.previous_access
    text = (
        f"{now.operator} on stream {now.stream} is {now.type} what {before.operator} on stream"
        f" {before.stream} was {before.type}"
    )
    return f"{text}, at {_place(now)} and {_place(before)}" if places else text


def _place(access: Any) -> str:
    """Return the line of this project from which an operation came."""
    return (
        "?"
        if not access.stack_trace
        else f"{Path(access.stack_trace[0].filename).name}:{access.stack_trace[0].lineno}"
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.layout is torch.strided and leaf.device.type == "cpu"]
