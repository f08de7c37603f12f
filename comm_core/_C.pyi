from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CUDA_BUILT: bool
_T = TypeVar("_T")

class Channel:
    """Point-to-point messages between the ranks of one engine."""

class TcpChannel(Channel):
    """Connections to the other ranks; `comm_core.tcp_channel()` and `local_channels()` make them.

    `connections` has (data, keepalive, host) for each rank: two file descriptors, which the channel closes
    (-1: none), and the other end's address for errors.
    """

    def __init__(self, rank: int, connections: Sequence[tuple[int, int, str]]) -> None: ...

class PendingMessages:
    """Messages in flight. The channel keeps their buffers until they are over, also if this object goes."""

    def wait(self) -> None:
        """Return when all have arrived and left; `EngineError` names the operation and the rank at fault.

        The time-out begins anew whenever bytes of these messages move.
        """

    def watch(self) -> None:
        """Move the short ones in the background too, and end their turn on the link when they are over."""

    def done(self) -> bool: ...

class MessageChannel:
    """See `comm_core.MessageChannel`. `connections` is as for `TcpChannel`."""

    SHORT: int
    """Most bytes of a short message, whose buffers are free as soon as it is sent."""
    TURN_PATIENCE: float
    """Seconds that less urgent messages wait for a more urgent one that is not over."""

    def __init__(self, rank: int, connections: Sequence[tuple[int, int, str]]) -> None: ...
    def exchange(
        self,
        sends: Sequence[tuple[int, Sequence[Tensor]]],
        receives: Sequence[tuple[int, Sequence[Tensor]]],
        lane: int,
        operation: str,
        traffic: Traffic | None = None,
    ) -> PendingMessages:
        """Start messages, each with its peer and the contiguous tensors that it is made of.

        `traffic` is their kind at the link's gate: less urgent messages wait until these are over. None: no
        message waits for them, and they wait for none.
        """

    def set_timeout(self, seconds: float) -> None: ...
    def abort(self, reason: str) -> None:
        """End every wait with an error, now and later, here and at the other ranks. From any thread."""

    def close(self) -> None:
        """Send what can be sent, say farewell, and give back the connections and the thread."""

def alias_of(
    flat: Tensor, offset: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype | None = None
) -> Tensor:
    """Return a tensor over the elements of the flat tensor from `offset` on, with a storage of its own.

    The storage reaches from the tensor's first to its last element and keeps the flat tensor's memory alive.
    `offset` counts elements of `flat`, the strides those of the result: `dtype` may be another type of the
    same memory, such as complex64 over pairs of float32. `record_stream()` of the result has no effect:
    torch reuses the memory only once the flat tensor's storage ends.
    """

def changed_rows(part: Tensor, whole: Tensor, changed: Tensor) -> None:
    """Write into `changed` in how many rows, and which, `whole` has other bits than `part + 0`."""

def overlapping(tensors: list[Tensor]) -> list[int]:
    """Return the indices of tensors that share memory with others of them (``a.data = b.data``)."""

def write_into(slot: Tensor, gradient: Tensor) -> None:
    """Write a gradient into its slot, unless autograd has written it there itself."""

def source_addresses(tensors: list[Tensor | None], needed: list[int], like: Tensor) -> list[int] | None:
    """Return the address of each tensor's first element, 0 for None and for a tensor without elements.

    Return None if a tensor has another type, another device or too few elements.
    """

def foreign_users(parameters: list[Tensor]) -> list[int]:
    """Return the indices of the parameters with `foreign_uses`."""

def foreign_uses(parameter: Tensor) -> int:
    """Return how many C++ references to a parameter exist besides its Python object and its AccumulateGrad.

    Traced and scripted modules and DDP's reducer hold such references as long as they exist, views of the
    parameter (their `_base`) too, and a graph in which the parameter is saved, up to its backward; with
    `retain_graph=True` as long as the graph exists. Detached tensors, `.data`, hooks, Python's references,
    copies and optimizers hold none.
    """

def gradients_held(parameters: list[Tensor]) -> list[int]:
    """Return the indices of the parameters whose gradient something besides the parameter refers to.

    That is a variable that holds `p.grad`, a view or a detached tensor of it, its storage, a NumPy array of
    it, or a graph that saved it.
    """

def complete_late_by(complete: Callable[[list[Tensor]], None]) -> None:
    """Let operators call this with those of their tensors that `set_late` has marked, before they run.

    If tensors are marked afterwards, the operator runs as if they were not.
    """

def ignore_late(ignore: bool) -> bool:
    """Let the dispatcher pass the mark of `set_late` over in this thread, or not; return which it did."""

def instances_of(type: type[_T]) -> list[_T]:
    """Return the instances of a class among all objects that the garbage collector knows."""

def lost_host(descriptor: int, address: str) -> str:
    """Return why the host of a keepalive connection is lost, "" if only its process has ended.

    Call it for a connection that poll() reports.
    """

def move_out(tensor: Tensor) -> None:
    """Give the tensor's storage fresh memory with a copy of its bytes.

    All tensors with this storage keep their values and leave the memory that they had. On a GPU the copy runs
    in the current stream. Addresses taken before cannot follow: a NumPy array, DLPack, a captured CUDA graph.
    """

def quantise_blocks(
    values: Tensor,
    wire_dtype: torch.dtype,
    residual: Tensor | None = None,
    scale: float = 1.0,
    baseline: bool = False,
) -> Tensor:
    """Return the bytes that stand for `values * scale + residual`; `residual` then holds what rounding lost.

    For each 256 float32 values: a float32 scale, then their codes, as `add_bucket(wire_dtype=)` sends them.
    `baseline`: with the code for any x86-64, though the processor may have more.
    """

def set_late(tensor: Tensor, late: bool) -> bool:
    """Mark a tensor, or not; return whether it was. Operators that take it call what `complete_late_by` has.

    Views, `.data` and detached tensors of it that are made under `ignore_late` have the mark, too.
    """

def set_warning(seconds: float) -> None:
    """Let waits of this process say after so many seconds for whom they wait.

    0: after a tenth of their time-out, at most 30 s, as by default.
    """

def shares_storage(one: Tensor, other: Tensor) -> bool:
    """Return whether both tensors have the same storage; False for sparse tensors."""

def storage_holders(tensor: Tensor) -> int:
    """Return how many tensors and storage objects refer to the tensor's storage; 0 for a sparse tensor.

    Python variables of the same tensor object count once: see `gradients_held` for those.
    """

def storages_held(tensors: list[Tensor], expected: Sequence[int]) -> list[int]:
    """Return the indices of the tensors whose `storage_holders` exceed the expected number."""

def sum_blocks(
    parts: Sequence[Tensor], count: int, wire_dtype: torch.dtype, scale: float = 1.0, baseline: bool = False
) -> Tensor:
    """Return the float32 sum, in this order, of parts of `count` quantised values, times `scale`."""

class Traffic(Enum):
    """The kind of a message; lower numbers are more urgent."""

    halo = 0
    activation = 1
    gradient = 2

class LinkGate:
    """Delays less urgent messages of this process while more urgent ones are on the link."""

    def begin(self, traffic: Traffic, bytes: int, patience: float) -> int:
        """Wait until no more urgent message is in flight, then let this one start; return a number for end().

        Less urgent messages wait for end(), but at most `patience` seconds.
        """

    def end(self, number: int) -> None: ...
    def passing(self, traffic: Traffic, bytes: int) -> None:
        """Wait like begin(), then let a message start for which no other message waits."""

    def held_back(self) -> int:
        """Return how many messages wait for more urgent ones."""

    def record(self, on: bool) -> None:
        """Record messages from now on; with `on=False` stop and discard the records."""

    def passages(self, clear: bool = True) -> npt.NDArray[np.void]:
        """Return the messages since record().

        Fields: traffic (the number of a Traffic), waiting (number of more urgent messages in flight when it
        started), asked, start, end (seconds of time.monotonic()) and bytes.
        """

def link_gate() -> LinkGate:
    """Return the gate of this process."""

class Transport:
    """Carries out single operations for an engine; its methods run one directly, without an engine."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def set_timeout(self, seconds: float) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self, reason: str = "the transport is closed") -> None:
        """End operations in progress, and give back connections and memory.

        Later operations raise the reason.
        """

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return flat zeros, in memory that the ranks of one host share if the exchange has some."""

    def reduce_scatter(
        self, tensor: Tensor, postscale: float = 1.0, step: int = 0, ends: Sequence[int] = ()
    ) -> None:
        """Leave the sum of all ranks' flat `tensor`, scaled, in this rank's shard of it.

        `ends`: where each rank's shard ends; by default all are equally long.
        """

    def all_gather(
        self, tensor: Tensor, postscale: float = 1.0, step: int = 0, ends: Sequence[int] = ()
    ) -> None:
        """Fill every shard of the flat `tensor` with its owner's."""

    def all_reduce(
        self, tensor: Tensor, postscale: float = 1.0, step: int = 0, ends: Sequence[int] = ()
    ) -> None:
        """Fill the flat `tensor` with the scaled sum of all ranks'."""

class DirectTransport(Transport):
    """Every rank sends each other rank its part at once; sums are taken in rank order."""

    def __init__(
        self, channel: Any, rank: int, size: int, segment_bytes: int = 262144, depth: int = 4
    ) -> None: ...

class RingTransport(Transport):
    """Parts travel around a ring, added on the way; reproducible, but not in rank order."""

    def __init__(
        self, channel: Any, rank: int, size: int, segment_bytes: int = 262144, depth: int = 4
    ) -> None: ...

class TwoTierTransport(Transport):
    """Memory inside each host, messages between hosts: sums in rank order, then in host order.

    `hosts` has each rank's host, numbered from 0 without gaps; `boards` the open files of this host's ranks
    (see `comm_core.open_boards`), which may be closed afterwards. `memory`, with one host: such files for
    buckets, in which zeros() lie; all ranks have them, or none.
    """

    def __init__(
        self,
        channel: Any,
        rank: int,
        hosts: Sequence[int],
        boards: Sequence[int],
        segment_bytes: int = 131072,
        depth: int = 4,
        memory: Sequence[int] = (),
    ) -> None: ...
    @staticmethod
    def board_bytes(size: int, segment_bytes: int = 131072, depth: int = 4) -> int:
        """Return the length of the file of one rank's board among `size` ranks."""

class PythonTransport(Transport):
    """The collectives of a Python object, called on the engine's thread, each blocking until it is done.

    Methods: scatter_sum(full, shard, name), gather(shard, full, name), sum(full, name).
    Attributes: rank, size.
    """

    def __init__(self, collectives: Any) -> None: ...

class Engine:
    def __init__(
        self,
        transport: Transport,
        rank: int,
        size: int,
        timeout_seconds: float = 300.0,
        max_events: int = 32768,
    ) -> None: ...
    def add_bucket(
        self,
        reduce: Tensor,
        gather: Tensor | None = None,
        wire_dtype: torch.dtype | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        needs_update: bool = False,
        name: str = "",
        ends: Sequence[int] = (),
        row: int = 0,
        sent_residual: Tensor | None = None,
        sum_residual: Tensor | None = None,
        changed: Tensor | None = None,
    ) -> int:
        """Add a bucket and return its number. Call it between steps only.

        `reduce` is the flat gradient buffer, its length a multiple of the number of ranks unless `ends` says
        where each rank's part ends; `gather` is the buffer that the AG fills (default: `reduce`).
        With `row`, the buffer holds rows of so many elements, and only rows with a nonzero bit travel.

        With `changed`, the rows that any rank has changed are summed anew and written over those of `gather`,
        which another bucket has gathered before. The int32 tensor holds how many rows this rank has changed,
        then their numbers, ascending (see `changed_rows`); after the RS those of all ranks.

        With `wire_dtype=torch.int8` or `torch.float8_e4m3fn`, float32 gradients travel in blocks of 256 such
        elements with one scale. What rounding loses is kept in the residuals, which are float32 like the
        buffer (`sent_residual`) and like this rank's part of it (`sum_residual`), and added to the next
        step's values.
        """

    def clear_buckets(self) -> None: ...
    def install(self, plan: Sequence[tuple[str, int]]) -> None:
        """Replace the plan, in link order: ("RS"|"AG"|"AR", bucket). Call it between steps only."""

    def begin_step(self) -> int:
        """Start the next step and return its number; each operation runs once its bucket is marked."""

    def mark_ready(self, bucket: int) -> None:
        """Declare the bucket's gradients complete. Do not touch its buffers until its AG is done."""

    def mark_updated(self, bucket: int) -> None:
        """Declare this rank's shard of the bucket's parameters updated, so that its AG may run."""

    def ag_done(self, bucket: int) -> bool: ...
    def wait_rs(self, bucket: int) -> None:
        """Block until the bucket's RS in the step begun last is done.

        Fails once the engine has made no progress for its time-out. Like all waits for other ranks, it runs
        Python's handlers of signals, whose exceptions (KeyboardInterrupt) end it.
        """

    def wait_ag(self, bucket: int) -> None: ...
    def wait_all(self) -> None:
        """Block until all steps begun so far are finished."""

    def abort(self, reason: str) -> None: ...
    def close(self, reason: str = "the engine is closed") -> None:
        """Abort operations in flight; give back the thread, the connections and the buckets' memory.

        Never raises and never hangs. Later calls raise the reason; buckets that have arrived stay readable.
        """

    def error(self) -> str | None: ...
    def events(self, clear: bool = True) -> npt.NDArray[np.void]:
        """Return the operations completed since the last clearing call.

        Fields: step, op (index into OPS), bucket, ready, start, end (seconds of time.monotonic()) and bytes
        (sent by this rank).
        """

    @property
    def step(self) -> int: ...
