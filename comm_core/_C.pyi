from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CUDA_BUILT: bool

def pack(tensors: Sequence[Tensor], buffer: Tensor, scale: float = 1.0) -> None:
    """Write scale * all tensors, flattened, one after the other, into the flat `buffer`; zero the rest."""

class Channel:
    """Point-to-point messages between the ranks of one engine."""

class C10dChannel(Channel):
    """Tagged isend / irecv of a c10d backend such as torch.distributed.ProcessGroupGloo."""

    def __init__(self, backend: Any) -> None: ...

class TcpChannel(Channel):
    """Own connections between the ranks; comm_core.tcp_channel() makes one."""

class TcpMesh:
    """Listens for the other ranks, so that its address can be told to them before join()."""

    def __init__(self, rank: int, size: int, host: str) -> None: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    def join(
        self,
        addresses: Sequence[tuple[str, int]],
        token: str,
        timeout_seconds: float = 300.0,
        host_timeout_seconds: float = 25.0,
    ) -> TcpChannel:
        """Connect to every rank, given all ranks' addresses and 32 secret characters that they share."""

    def connect(
        self,
        addresses: Sequence[tuple[str, int]],
        token: str,
        timeout_seconds: float = 300.0,
        host_timeout_seconds: float = 25.0,
    ) -> list[tuple[int, int]]:
        """The same, as file descriptors that belong to the caller: data and keepalive for each rank, -1 for
        this one."""

def abort_message(work: Any) -> None:
    """End a c10d group's send or receive, for whoever waits for it: its wait() then returns False."""

HOST_TIMEOUT: float

def set_keepalive(descriptor: int, seconds: float) -> None:
    """Make an idle TCP connection fail when the other host's kernel has not answered for about `seconds`."""

def peer_address(descriptor: int) -> str:
    """The address of a connection's other end, for errors."""

def lost_host(descriptor: int, address: str) -> str:
    """What is wrong with the host behind a keepalive connection that poll() reports; "" where its process has
    ended."""

class HubChannel(Channel):
    """One rank's end of a Hub."""

class Traffic(Enum):
    """What a message is, the most urgent first."""

    halo = 0
    activation = 1
    gradient = 2

class LinkGate:
    """Lets halos go before activations, and activations before gradients."""

    def begin(self, traffic: Traffic, bytes: int, patience: float) -> int:
        """A message starts, once nothing more urgent is on its way; less urgent ones now wait for `end`.

        They do so for `patience` seconds at most. Returns the number for `end`.
        """

    def end(self, number: int) -> None: ...
    def passing(self, traffic: Traffic, bytes: int) -> None:
        """A message starts, in its turn, that nobody has to wait for."""

    def held_back(self) -> int:
        """How many messages have asked for the link and wait for more urgent ones."""

    def record(self, on: bool) -> None:
        """Keep what happens from now on; off forgets it."""

    def passages(self, clear: bool = True) -> npt.NDArray[np.void]:
        """The messages since `record`.

        Fields: traffic (the number of a Traffic), waiting (more urgent ones that were on their way when it
        started), asked, start, end (seconds of time.monotonic()) and bytes.
        """

def link_gate() -> LinkGate:
    """The gate of this process."""

class Hub:
    """Joins ranks that are threads of one process, for tests; can delay, lose or cut off what one sends."""

    def __init__(self, size: int) -> None: ...
    @property
    def size(self) -> int: ...
    def channel(self, rank: int) -> HubChannel: ...
    def disconnect(self, rank: int) -> None: ...
    def set_faults(
        self,
        rank: int,
        delay_seconds: float = 0.0,
        seed: int = 0,
        drop_after: int = -1,
        disconnect_after: int = -1,
    ) -> None: ...

class Transport:
    """Carries out single operations; the methods here run one at once, outside of any engine."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def set_timeout(self, seconds: float) -> None: ...
    def abort(self, reason: str) -> None: ...
    def reduce_scatter(
        self,
        tensor: Tensor,
        wire_dtype: torch.dtype | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        step: int = 0,
    ) -> None:
        """Leave the sum of all ranks' flat `tensor`, scaled, in this rank's shard of it."""

    def all_gather(
        self,
        tensor: Tensor,
        wire_dtype: torch.dtype | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        step: int = 0,
    ) -> None:
        """Fill every shard of the flat `tensor` with its owner's."""

    def all_reduce(
        self,
        tensor: Tensor,
        wire_dtype: torch.dtype | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        step: int = 0,
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

class PythonTransport(Transport):
    """The collectives of a Python object, called on the engine's thread, each blocking until it is done.

    Methods: scatter_sum(full, shard, name), gather(shard, full, name), sum(full, name).
    Attributes: rank, size. Optional methods: abort(reason), set_timeout(seconds).
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
    ) -> int:
        """Describe a bucket, between steps only; returns its number.

        `reduce` is the flat gradient buffer, its length a multiple of the number of ranks;
        `gather` is what AG fills (default: `reduce`).
        """

    def clear_buckets(self) -> None: ...
    def install(self, plan: Sequence[tuple[str, int]]) -> None:
        """Replace the plan, between steps only: ("RS"|"AG"|"AR"|"UPDATE", bucket), in the link's order."""

    def begin_step(self) -> int:
        """The next step's operations may run, each as soon as its bucket is marked; returns its number."""

    def mark_ready(self, bucket: int) -> None:
        """The bucket's gradients are complete, and the engine's until its AG is done."""

    def mark_updated(self, bucket: int) -> None:
        """This rank's shard of the bucket's parameters is updated, so it may be gathered."""

    def rs_done(self, bucket: int, step: int | None = None) -> bool: ...
    def ag_done(self, bucket: int, step: int | None = None) -> bool: ...
    def wait_rs(self, bucket: int, timeout: float | None = None, step: int | None = None) -> None:
        """Block until the bucket's sum is there.

        `step` is by default the one begun last. Without `timeout` it fails when nothing
        happens for the engine's own time-out.
        """

    def wait_ag(self, bucket: int, timeout: float | None = None, step: int | None = None) -> None: ...
    def wait_all(self, timeout: float | None = None) -> None:
        """Block until all steps begun so far are finished."""

    def abort(self, reason: str) -> None: ...
    def close(self) -> None:
        """End the thread and abort what is in flight. Never hangs."""

    def error(self) -> str | None: ...
    def events(self, clear: bool = True) -> npt.NDArray[np.void]:
        """The operations done lately.

        Fields: step, op (index into OPS), bucket, ready, start, end (seconds of time.monotonic()) and bytes
        (sent by this rank).
        """

    @property
    def step(self) -> int: ...
