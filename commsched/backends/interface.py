"""The interface between a round and the backend that moves its buckets between the ranks.

``EngineBackend`` (cpu.py) hands buckets to the C++ engine, ``StreamBackend`` (cuda.py) puts them onto a GPU's
communication stream. In every step a bucket is marked ready, reduced, marked updated (only where parameters
are gathered) and gathered. The flags are further buckets, numbered after those of the layout: small int64
tensors on the host that are summed over the ranks in every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from commsched.backends.ranks import Ranks
from commsched.collectives.compression import block_code
from commsched.optimizer.buckets import ALIGN, Buffers
from commsched.optimizer.measuring import Watch
from scheduler.ir.actions import Kind
from scheduler.ir.program import Program


@dataclass(frozen=True)
class Scaling:
    """Factors before and after the sum over the ranks, and the type in which gradients are sent."""

    before: float = 1.0
    after: float = 1.0
    wire_dtype: torch.dtype | None = None

    def wire_type(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the type of a bucket's messages, if it is another one; quantised buckets have residuals."""
        castable = dtype in (torch.float32, torch.float64) and not block_code(self.wire_dtype)
        return self.wire_dtype if castable else None


@dataclass(frozen=True)
class StepWork:
    """The operations of every step in the link's order, and the memory that they work on."""

    order: Sequence[tuple[str, int]]
    buffers: Buffers
    flags: Sequence[torch.Tensor]
    gathered: Buffers | None = None  # parameters; None where the gradients themselves are gathered
    scaling: Scaling = Scaling()
    # Quantised buckets: what rounding their gradients, and the sums of this rank's shard,
    # has lost so far.
    residuals: Mapping[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    # Buckets that correct others (``Buffers.corrected``): the rows that have changed.
    changed: Mapping[int, torch.Tensor] = field(default_factory=dict)


def step_work(
    program: Program,
    buffers: Buffers,
    flags: int,
    ranks: int,
    gathered: Buffers | None,
    scaling: Scaling,
    residuals: Mapping[int, tuple[torch.Tensor, torch.Tensor | None]],
    changed: Mapping[int, torch.Tensor],
) -> StepWork:
    """Return the program with ``flags`` flags after its backward, and with ``early_step`` after each RS."""
    lengths = [flags]
    if program.early_step:
        lengths += [len(piece.params) for piece in buffers.layout.slices]
    with torch.inference_mode(False):
        tensors = [torch.zeros(padded(n, ranks), dtype=torch.int64, device="cpu") for n in lengths]
    return StepWork(link_order(program), buffers, tensors, gathered, scaling, residuals, changed)


def link_order(program: Program) -> list[tuple[str, int]]:
    """Return the program's order on the link, flags included.

    The flags are known when the backward has ended, which is when the first layer's gradients are complete.
    They stand right after those, not after the last reduction: a schedule may put that one late, after
    all-gathers that the forward needs sooner, and no parameter may be used before the flags are there.
    """
    flags = len(program.buckets)
    order: list[tuple[str, int]] = []
    place, first_layer = 0, program.layers
    for action in program.link:
        if action.kind not in (Kind.RS, Kind.AG, Kind.AR):
            continue
        order.append((action.kind.value, action.index))
        if action.kind is Kind.AG:
            continue
        if program.early_step:
            order.append(("AR", flags + 1 + action.index))
        layer = min(piece.layer for piece in program.buckets[action.index].pieces)
        if layer <= first_layer:
            place, first_layer = len(order), layer
    order.insert(place, ("AR", flags))
    return order


def padded(count: int, ranks: int) -> int:
    """Return the next length that gives every rank a whole number of aligned elements."""
    return -(-max(count, 1) // (ranks * ALIGN)) * ranks * ALIGN


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor's memory as real numbers: sums and real factors act alike on both parts."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class Backend(ABC):
    """Moves the buckets of one optimizer. Failures that other ranks cause raise ``CommError``.

    After ``abort()`` and ``close()``, marks and waits raise ``CommError`` with the reason.
    """

    name: str  # of the transport, for reports
    ranks: Ranks
    device: torch.device
    can_step_early = True  # whether a thread of its own may update shards
    uneven_parts = False  # whether the ranks' parts of a bucket may differ in length
    shares: Sequence[int] = ()  # how long the ranks' parts of a bucket are, one to another; empty: as long
    by_rows = False  # whether buckets of rows may leave out the rows that are zero
    puts_off = False  # step() takes nothing for arrived, as on a GPU whose host is ahead: a CPU's stream
    has_streams = False  # whether ``enter()`` has anything to do

    def room(self) -> AbstractContextManager[Any]:
        """Return the context in which the memory of the next buckets is allocated.

        Tensors made in inference mode could never be written again outside of it.
        """
        return torch.inference_mode(False)

    def zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return flat zeros for buckets."""
        with self.room():
            return torch.zeros(length, dtype=dtype, device=device)

    @abstractmethod
    def install(self, work: StepWork) -> None:
        """Replace the work of every step, between two steps."""

    @abstractmethod
    def begin_step(self) -> None:
        """Allow the next step's operations to run, each as soon as its bucket is marked."""

    # -- hand-overs, from the thread that computes -----------------------------------------------------------

    @abstractmethod
    def put(self, param: int, grad: torch.Tensor, slot: torch.Tensor) -> None:
        """Write ``grad`` into the parameter's slot before a bucket is sent; the last of several calls counts.

        None of the parameter's buckets may be marked ready in this step. The gradient may stay where it is
        until every bucket that holds a part of it is marked ready, so it must not be changed. Code that
        writes into the slot itself calls ``put(param, slot, slot)`` afterwards: on a GPU, the bucket is then
        sent after what the current stream has written.
        """

    def take_back(self, param: int, slot: torch.Tensor) -> None:
        """Write the last gradient of `put()` into ``slot`` now, because another one is added to it.

        None of the parameter's buckets may be marked ready in this step.
        """

    def reads(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory, also without references, until the current stream has done all that it has.

        For tensors that the caller reads and drops: another stream may have allocated them.
        """

    @abstractmethod
    def mark_ready(self, bucket: int) -> None:
        """Hand over a bucket whose gradients are complete."""

    @abstractmethod
    def mark_updated(self, bucket: int) -> None:
        """Hand over a bucket of parameters of which this rank's shard is updated."""

    @abstractmethod
    def wait_reduced(self, bucket: int) -> None:
        """Return when this rank's shard may be read (on a GPU: by later operations on the current stream)."""

    @abstractmethod
    def wait_gathered(self, bucket: int) -> None:
        """Return when the whole bucket may be read, as `wait_reduced()` does for a shard."""

    @abstractmethod
    def is_gathered(self, bucket: int) -> bool:
        """Return whether ``wait_gathered`` would return at once."""

    @abstractmethod
    def step_ended(self) -> None:
        """React to the end of the user's ``step()``; called in its thread."""

    @abstractmethod
    def updates_issued(self) -> None:
        """React to the completion of parameters; called in the thread that needed them."""

    def enter(self) -> None:
        """React to a forward of parameters that may have been completed on another stream."""

    # -- outside of the steps --------------------------------------------------------------------------------

    @abstractmethod
    def gather_now(self, buffer: torch.Tensor, ends: Sequence[int] = ()) -> None:
        """Run an all-gather outside of the step's operations; ``ends``: of each rank's part. Collective."""

    def gather_scalars(self, value: torch.Tensor) -> torch.Tensor:
        """Return every rank's number, in rank order, on the number's device. Collective."""
        with torch.inference_mode(False):
            numbers = torch.zeros(self.ranks.size, dtype=value.dtype, device=value.device)
        with torch.no_grad():
            numbers[self.ranks.rank].copy_(value)
        self.gather_now(numbers)
        return numbers

    @abstractmethod
    def exchange_seconds(self, size: int) -> float:
        """Return the seconds of one RS or AG of a message of ``size`` bytes. Collective."""

    def tier_seconds(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        """Return for each message the seconds of one RS or AG inside the hosts alone, and between them alone.

        Empty where the transport has no tiers. Collective.
        """
        return []

    @abstractmethod
    def events(self, clear: bool = True) -> npt.NDArray[Any]:
        """Return the latest operations: step, op (index into ``OPS``), bucket, ready, start, end, bytes."""

    @abstractmethod
    def now(self) -> Any:
        """Return a mark of this moment, where the model computes: on a GPU after all work so far."""

    @abstractmethod
    def seconds(self, mark: Any) -> float | None:
        """Return a mark's moment on the clock of ``events()``; None before the device has reached it."""

    def watch(self) -> Watch:
        """Return a recorder of one iteration's moments, on the clock of ``events()``."""
        return Watch()

    @abstractmethod
    def failure(self) -> str | None:
        """Return why every operation fails from now on, None while they do not."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End every wait with an error, now and later. May be called from any thread."""

    @abstractmethod
    def close(self, orderly: bool = True) -> None:
        """Give back connections, threads and memory; ``orderly`` is False after an exception in the script.

        Never raises, whatever failed before; a second call does nothing.
        """
