"""The backend for buckets in the host's memory: the C++ engine moves them on a thread of its own."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy.typing as npt
import torch

import comm_core
from commsched.backends.interface import Backend, StepWork
from commsched.backends.ranks import Ranks
from commsched.backends.transports import OVER_GROUPS, make_transport
from commsched.collectives.current_carrier import epoch
from commsched.collectives.process_sets import ProcessSet, registered_id
from commsched.env import settings
from commsched.errors import CommError
from commsched.process import failure_monitor

# Elements per rank of the message that precedes each timed one.
_FILLER = 1 << 16
# Each optimizer has its own connections, so that messages of two engines cannot mix. All ranks of a process
# set make its optimizers in the same order, so that the numbers agree.
_channels: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(lambda: itertools.count(1))


def new_channel(process_set: ProcessSet) -> int:
    """Return a number that no other connections of this process set use: the same one on all of its ranks."""
    return next(_channels[epoch(), registered_id(process_set)])


class _Translated:
    """A context manager that turns the engine's errors into ``CommError``; cheaper than a generator."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, comm_core.EngineError):
            raise CommError(str(error)) from None


translated = _Translated()


class EngineBackend(Backend):
    """The engine of one optimizer over one transport."""

    device = torch.device("cpu")

    def __init__(self, ranks: Ranks, name: str, transport: Any, timeout: float) -> None:
        self.ranks, self.name, self.timeout, self._transport = ranks, name, timeout, transport
        self.uneven_parts = name != "horovod"
        self.by_rows = isinstance(transport, comm_core.DirectTransport)
        self._outside = 0  # all-gathers outside of the steps
        with translated:
            self.engine = comm_core.Engine(transport, ranks.rank, ranks.size, timeout)

    def install(self, work: StepWork) -> None:
        engine, gathered, scaling = self.engine, work.gathered, work.scaling
        with translated:
            engine.wait_all()
            engine.clear_buckets()
            for piece in work.buffers.layout.slices:
                data = work.buffers.bucket(piece.number)
                sent, sums = work.residuals.get(piece.number, (None, None))
                # Parameters, another bucket's gradients that this one corrects, or (None) its own.
                target = (work.buffers.corrected if gathered is None else gathered.bucket)(piece.number)
                engine.add_bucket(
                    data,
                    gather=target,
                    wire_dtype=scaling.wire_type(data.dtype) if sent is None else scaling.wire_dtype,
                    prescale=scaling.before,
                    postscale=scaling.after,
                    needs_update=gathered is not None,
                    name=f"bucket {piece.number}",
                    ends=piece.ends,
                    row=piece.row,
                    sent_residual=sent,
                    sum_residual=sums,
                    changed=work.changed.get(piece.number),
                )
            for number, flags in enumerate(work.flags):
                engine.add_bucket(flags, name=f"flags of bucket {number - 1}" if number else "flags")
            engine.install(work.order)

    def begin_step(self) -> None:
        with translated:
            self.engine.begin_step()

    def put(self, param: int, grad: torch.Tensor, slot: torch.Tensor) -> None:
        if grad.data_ptr() != slot.data_ptr():
            slot.copy_(grad)

    def mark_ready(self, bucket: int) -> None:
        try:
            self.engine.mark_ready(bucket)
        except comm_core.EngineError as error:
            raise CommError(str(error)) from None

    def mark_updated(self, bucket: int) -> None:
        with translated:
            self.engine.mark_updated(bucket)

    def wait_reduced(self, bucket: int) -> None:
        with translated:
            self.engine.wait_rs(bucket)

    def wait_gathered(self, bucket: int) -> None:
        with translated:
            self.engine.wait_ag(bucket)

    def is_gathered(self, bucket: int) -> bool:
        with translated:
            return self.engine.ag_done(bucket)

    def gather_now(self, buffer: torch.Tensor, ends: Sequence[int] = ()) -> None:
        """All-gather now. The engine must be idle or wait for an update: both use the transport."""
        self._outside += 1
        with translated:
            self._transport.all_gather(buffer, step=-self._outside, ends=list(ends))

    def exchange_seconds(self, size: int) -> float:
        transport, unit = self._transport, self.ranks.size * 64
        data, filler = torch.zeros(-(-size // (4 * unit)) * unit), torch.zeros(self.ranks.size * _FILLER)
        seconds = []
        with translated:
            for _ in range(3):
                # A shaped link sends at full speed after a pause: this message uses that burst up.
                transport.all_gather(filler)
                start = time.monotonic()
                transport.reduce_scatter(data)
                transport.all_gather(data)
                seconds.append((time.monotonic() - start) / 2)
        return median(seconds)

    def events(self, clear: bool = True) -> npt.NDArray[Any]:
        return self.engine.events(clear)

    def failure(self) -> str | None:
        return self.engine.error()

    def abort(self, reason: str) -> None:
        self.engine.abort(reason)

    def close(self, orderly: bool = True) -> None:
        self.engine.close()


def engine_backend(process_set: ProcessSet, transport: str | None) -> EngineBackend:
    """Return the engine over new connections among the ranks of a process set. Collective."""
    timeout, number = settings().timeout, new_channel(process_set)
    name, carrier = make_transport(transport, process_set, number, timeout)
    backend = EngineBackend(Ranks(process_set, number), name, carrier, timeout)
    if name in OVER_GROUPS:  # the other transports notice a lost rank themselves
        failure_monitor.register(backend, process_set.ranks or ())
    return backend
