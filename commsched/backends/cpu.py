"""The backend for buckets in the host's memory: the C++ engine moves them on a thread of its own.

The engine sends messages over a transport: ``direct`` and ``ring`` over TCP connections of their own,
``tiers`` over such connections between hosts and over shared memory inside a host, and ``horovod`` calls
Horovod's operations. Horovod and the launcher keep start-up and control whatever moves the bytes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import numpy.typing as npt
import torch

import comm_core
from commsched.backends.interface import Backend, StepWork, as_real
from commsched.backends.ranks import Ranks
from commsched.collectives.carrier import carrier, epoch
from commsched.collectives.job import ProcessSet, registered_id
from commsched.collectives.operations import Sum, allgather, allreduce_, reducescatter
from commsched.collectives.private_groups import (
    data_board,
    data_channel,
    hosts_of,
    hosts_of_ranks,
    ranks_of,
    tier_exchanges,
)
from commsched.env import settings
from commsched.errors import CommError
from commsched.optimizer.buckets import ends_of

NAMES = ("direct", "ring", "tiers", "horovod")

# Up to this many ranks `direct` is faster; beyond it, the fewer connections of a ring win.
_LARGEST_DIRECT = 8

_log = logging.getLogger("commsched")

# Elements that a host sends before each timed message, at least: 256 KB, the burst of a shaped link.
_FILLER = 1 << 16
_UNIT = 64  # the lengths of each rank's part of a timed message and of a filler are multiples of so many
# Each optimizer has its own connections, so that messages of two engines cannot mix. All ranks of a process
# set make its optimizers in the same order, so that the numbers agree.
_channels: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(lambda: itertools.count(1))


def new_channel(process_set: ProcessSet) -> int:
    """Return a number that no other connections of this process set use: the same one on all of its ranks."""
    return next(_channels[epoch(), registered_id(process_set)])


class _EngineErrorsAsCommErrors:
    """A context manager that turns the engine's errors into ``CommError``; cheaper than a generator."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, comm_core.EngineError):
            raise CommError(str(error)) from None


engine_errors_as_comm_errors = _EngineErrorsAsCommErrors()


def closed_text(rank: int) -> str:
    """Return the error of marks and waits after an orderly close()."""
    return (
        f"rank {rank}: the optimizer is closed, and its connections with it: make a new DistributedOptimizer"
        " to train on"
    )


class EngineBuckets:
    """Buckets of an optimizer or of a pipeline's stage, on an engine over one transport."""

    def __init__(self, rank: int, size: int, transport: Any, timeout: float) -> None:
        self._rank, self.timeout, self._transport = rank, timeout, transport
        self._outside = 0  # all-gathers outside of the steps
        with engine_errors_as_comm_errors:
            self.engine = comm_core.Engine(transport, rank, size, timeout)

    def install(self, work: StepWork) -> None:
        engine, gathered, scaling = self.engine, work.gathered, work.scaling
        with engine_errors_as_comm_errors:
            engine.wait_all()
            engine.clear_buckets()
            for piece in work.buffers.layout.slices:
                data = work.buffers.bucket(piece.number)
                sent, sums = work.residuals.get(piece.number, (None, None))
                # Parameters, another bucket's gradients that this one corrects, or (None) its own.
                target = (work.buffers.corrected if gathered is None else gathered.bucket)(piece.number)
                numbers = 2 if data.is_complex() else 1  # of an element
                engine.add_bucket(
                    as_real(data),
                    gather=None if target is None else as_real(target),
                    wire_dtype=scaling.wire_type(data.dtype) if sent is None else scaling.wire_dtype,
                    prescale=scaling.before,
                    postscale=scaling.after,
                    needs_update=gathered is not None,
                    name=f"bucket {piece.number}",
                    ends=[end * numbers for end in piece.ends],
                    row=piece.row * numbers,
                    sent_residual=sent,
                    sum_residual=sums,
                    changed=work.changed.get(piece.number),
                )
            for number, flags in enumerate(work.flags):
                engine.add_bucket(flags, name=f"flags of bucket {number - 1}" if number else "flags")
            engine.install(work.order)

    def now(self) -> float:
        return time.monotonic()

    def seconds(self, mark: float) -> float:
        return mark

    def step_ended(self) -> None:
        pass

    def updates_issued(self) -> None:
        pass

    # Called many times in a step: without the two calls of the context manager.

    def begin_step(self) -> None:
        try:
            self.engine.begin_step()
        except comm_core.EngineError as error:
            raise CommError(str(error)) from None

    def put(self, param: int, grad: torch.Tensor, slot: torch.Tensor) -> None:
        comm_core.write_into(slot, grad)

    def mark_ready(self, bucket: int) -> None:
        try:
            self.engine.mark_ready(bucket)
        except comm_core.EngineError as error:
            raise CommError(str(error)) from None

    def wait_gathered(self, bucket: int) -> None:
        try:
            self.engine.wait_ag(bucket)
        except comm_core.EngineError as error:
            raise CommError(str(error)) from None

    def is_gathered(self, bucket: int) -> bool:
        try:
            return self.engine.ag_done(bucket)
        except comm_core.EngineError as error:
            raise CommError(str(error)) from None

    def mark_updated(self, bucket: int) -> None:
        with engine_errors_as_comm_errors:
            self.engine.mark_updated(bucket)

    def wait_reduced(self, bucket: int) -> None:
        with engine_errors_as_comm_errors:
            self.engine.wait_rs(bucket)

    def gather_now(self, buffer: torch.Tensor, ends: Sequence[int] = ()) -> None:
        """All-gather now. The engine must be idle or wait for an update: both use the transport."""
        self._outside += 1
        numbers = 2 if buffer.is_complex() else 1
        ends = [end * numbers for end in ends]
        try:
            self._transport.all_gather(as_real(buffer), step=-self._outside, ends=ends)
        except comm_core.EngineError as error:
            self.engine.abort(str(error))  # what still comes would be read into memory that is gone
            raise CommError(str(error)) from None

    def events(self, clear: bool = True) -> npt.NDArray[Any]:
        return self.engine.events(clear)

    def failure(self) -> str | None:
        return self.engine.error()

    def abort(self, reason: str) -> None:
        self.engine.abort(reason)

    def close(self, orderly: bool = True) -> None:
        self.engine.close(closed_text(self._rank))


class EngineBackend(EngineBuckets, Backend):
    """The engine of one optimizer over one transport."""

    device = torch.device("cpu")

    def __init__(self, ranks: Ranks, name: str, transport: Any, timeout: float) -> None:
        super().__init__(ranks.rank, ranks.size, transport, timeout)
        self.ranks, self.name = ranks, name
        self.uneven_parts = name != "horovod"
        self.by_rows = isinstance(transport, (comm_core.DirectTransport, comm_core.TwoTierTransport))

    def zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return flat zeros, in memory that neighbours read in place where the transport has some."""
        del device  # the CPU
        with self.room(), engine_errors_as_comm_errors:
            return self._transport.zeros(length, dtype)

    def exchange_seconds(self, size: int) -> float:
        return self._seconds(self._transport, size, shares=self.shares)

    def tier_seconds(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        if self.name != "tiers":
            return []
        with engine_errors_as_comm_errors:
            tiers = tier_exchanges(self.ranks.process_set, self.ranks.number)
        if tiers is None:
            return []
        inside, between = tiers
        try:
            # Inside a host all of a message moves; between hosts each rank's share of it, all at once.
            seconds = [(self._seconds(inside, n), self._seconds(between, m, inside.size)) for n, m in sizes]
            with engine_errors_as_comm_errors:
                # After this, no rank waits for another one over connections that are closed.
                self._transport.all_gather(torch.zeros(self.ranks.size, dtype=torch.float32, device="cpu"))
        finally:
            for tier in tiers:
                tier.close("its link has been timed")
        return seconds

    def _seconds(self, transport: Any, size: int, parts: int = 1, shares: Sequence[int] = ()) -> float:
        """Return the seconds of one RS or AG over a transport of some of the ranks, of a part of a message.

        All ranks begin together and use up the burst that a shaped link sends at full speed after a pause.
        """
        unit = self.ranks.size * _UNIT
        lengths = -(-size // (4 * unit)) * unit // parts, self.ranks.size * self._filler_part()
        data, filler = (self.zeros(length, torch.float32, self.device) for length in lengths)
        seconds, ends = [], ends_of(lengths[0], shares, _UNIT)
        with engine_errors_as_comm_errors:
            for _ in range(3):
                self._transport.all_gather(filler)
                start = time.monotonic()
                transport.reduce_scatter(data, ends=ends)
                transport.all_gather(data, ends=ends)
                seconds.append((time.monotonic() - start) / 2)
        return median(seconds)

    def _filler_part(self) -> int:
        """Return the elements of each rank's part of a filler: the ranks of a host share its link."""
        fewest = 1  # ranks on one host
        if self.name in NAMES:  # the launcher knows nothing of emulated ranks
            with suppress(ValueError):  # contradictory facts, of which ``choose`` tells
                fewest = min(Counter(hosts_of(self.ranks.process_set)).values())
        return -(-_FILLER // (fewest * _UNIT)) * _UNIT


def asked_transport(name: str | None) -> str:
    """Return the transport of argument or ``COMMSCHED_TRANSPORT``, else ``auto``."""
    wanted = (name or settings().transport or "auto").lower()
    if wanted not in ("auto", *NAMES):
        raise ValueError(f"there is no transport {wanted!r}; the transports are auto, {', '.join(NAMES)}")
    return wanted


def flat(size: int, whole: bool = True) -> str:
    """Return the faster transport that knows no hosts; only ``direct`` moves blocks of int8 and fp8."""
    return "direct" if size <= _LARGEST_DIRECT or not whole else "ring"


def choose(process_set: ProcessSet, whole: bool = True) -> str:
    """Return the transport of ``auto``: ``tiers`` where ranks share a host; ``whole`` as in ``flat``."""
    size = int(process_set.size())  # type: ignore[arg-type]
    name = flat(size, whole)
    try:
        hosts = len(set(hosts_of(process_set)))
    except ValueError as error:
        _tell_flat(process_set.rank() == 0, name, _MORE_BYTES, error)
        return name
    return "tiers" if hosts < size else name


# What a flat transport costs ranks of several hosts, and ranks of one.
_MORE_BYTES = "which may put several times the bytes on the link between hosts"
_LOOPBACK = "so the ranks of this host exchange over its loopback"


def _tell_flat(is_first: bool, name: str, cost: str, reason: Exception) -> None:
    """Warn on the first rank, which knows what all ranks know."""
    if is_first:
        _log.warning("transport=%r, not 'tiers', %s: %s", name, cost, reason)


def tiers_between(link: comm_core.TcpChannel, ranks: Sequence[int], asked: str, name: str) -> Any:
    """Return the exchange in two tiers between these ranks of the job, over connections between them.

    None where no ranks share a host, or where no memory can be shared, with a warning that names the flat
    transport `name`; if ``tiers`` were asked for, that raises. Collective.
    """
    cost = _MORE_BYTES
    try:
        hosts = hosts_of_ranks(ranks)
        number = len(set(hosts))
        cost = _MORE_BYTES if number > 1 else _LOOPBACK
        if asked == "tiers" or number < len(hosts):
            return data_board(link, ranks)
    except (ValueError, comm_core.NotShared) as error:
        if asked == "tiers":
            raise CommError(f"transport='tiers' is not possible: {error}") from error
        _tell_flat(carrier().launch.rank == ranks[0], name, cost, error)
    except comm_core.EngineError as error:
        raise CommError(str(error)) from error
    return None


def make_transport(
    name: str | None, process_set: ProcessSet, channel: int, timeout: float, whole: bool = True
) -> tuple[str, Any]:
    """Return the transport's name and object. Collective: every rank of the process set must call."""
    asked = asked_transport(name)
    chosen = choose(process_set, whole) if asked == "auto" else asked
    transport: Any
    if chosen == "horovod":
        transport = comm_core.PythonTransport(HorovodCollectives(process_set))
    elif chosen == "tiers":
        link = data_channel(process_set, channel=channel)
        chosen, transport = _tiers_or_flat(link, process_set, asked, whole)
    else:
        transport = _flat_transport(chosen, data_channel(process_set, channel=channel), process_set)
    transport.set_timeout(timeout)
    return chosen, transport


def _tiers_or_flat(
    link: comm_core.TcpChannel, process_set: ProcessSet, asked: str, whole: bool
) -> tuple[str, Any]:
    """Return ``tiers``, or where no memory can be shared a flat transport; raise if tiers were asked for."""
    ranks = ranks_of(process_set)
    name = flat(len(ranks), whole)
    tiers = tiers_between(link, ranks, asked, name)
    return (name, _flat_transport(name, link, process_set)) if tiers is None else ("tiers", tiers)


def _flat_transport(name: str, link: comm_core.Channel, process_set: ProcessSet) -> Any:
    kind = comm_core.RingTransport if name == "ring" else comm_core.DirectTransport
    return kind(link, int(process_set.rank()), int(process_set.size()))  # type: ignore[arg-type]


class HorovodCollectives:
    """Horovod's operations with the interface of the engine's Python transport: blocking, in place."""

    def __init__(self, process_set: ProcessSet) -> None:
        if carrier().name != "horovod":
            raise ValueError(
                "transport='horovod' needs Horovod to carry this job; start it with horovodrun or set"
                " COMMSCHED_RUNTIME=horovod"
            )
        self._process_set = process_set
        self.rank, self.size = int(process_set.rank()), int(process_set.size())  # type: ignore[arg-type]

    def scatter_sum(self, full: torch.Tensor, shard: torch.Tensor, name: str) -> None:
        shard.copy_(reducescatter(full, op=Sum, name=name, process_set=self._process_set))

    def gather(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        full.copy_(allgather(shard, name=name, process_set=self._process_set))

    def sum(self, full: torch.Tensor, name: str) -> None:
        allreduce_(full, op=Sum, name=name, process_set=self._process_set)


def engine_backend(process_set: ProcessSet, transport: str | None, whole: bool = True) -> EngineBackend:
    """Return the engine over new connections among the ranks of a process set. Collective."""
    timeout, number = settings().timeout, new_channel(process_set)
    name, exchange = make_transport(transport, process_set, number, timeout, whole)
    return EngineBackend(Ranks(process_set, number), name, exchange, timeout)
