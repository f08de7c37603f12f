"""One optimizer's own connection to the other ranks: engine, transport, flags, and small agreements.

Everything here that fails because of another rank raises ``CommError``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

import comm_core
from commsched.backends.transports import OVER_GROUPS, make_transport
from commsched.collectives.current_carrier import epoch
from commsched.collectives.handles import synchronize
from commsched.collectives.objects import broadcast_object, gather_objects
from commsched.collectives.process_sets import ProcessSet, registered_id
from commsched.collectives.reductions import Average, Sum, sparse_allreduce_async
from commsched.env import settings
from commsched.errors import CommError
from commsched.optimizer.bucket_layout import ALIGN, Buffers
from commsched.process import lost_ranks as losses
from scheduler.ir.actions import Kind
from scheduler.ir.program import Program

# Each optimizer has its own connections: messages of two engines must never meet. The optimizers of one
# process set are made in the same order on all of its ranks, as everything collective is.
_channels: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(lambda: itertools.count(1))


@contextmanager
def translated() -> Iterator[None]:
    """Turns the engine's errors into ``CommError``."""
    try:
        yield
    except comm_core.EngineError as error:
        raise CommError(str(error)) from None


class Wire:
    """The engine of one optimizer, and what it needs to know to fill its buckets."""

    def __init__(
        self,
        process_set: ProcessSet,
        transport: str | None,
        prescale: float,
        postscale: float,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.process_set = process_set
        self.rank, self.size = int(process_set.rank()), int(process_set.size())  # type: ignore[arg-type]
        # Horovod's root ranks are global ones.
        self._root = min(process_set.ranks) if process_set.ranks else 0
        self.prescale, self.postscale, self.wire_dtype = prescale, postscale, wire_dtype
        self.timeout = settings().timeout
        self._outside = 0
        self.transport_name, self.transport = make_transport(
            transport, process_set, next(_channels[epoch(), registered_id(process_set)]), self.timeout
        )
        with translated():
            self.engine = comm_core.Engine(self.transport, self.rank, self.size, self.timeout)
        if self.transport_name in OVER_GROUPS:
            losses.abort_without(process_set.ranks or (), self.engine)

    @property
    def carry_factor(self) -> float:
        """What this rank multiplies an already reduced gradient by, so that reducing it again leaves it as
        it is.
        """
        return 1.0 / (self.prescale * self.postscale) if self.rank == 0 else 0.0

    # -- plans -----------------------------------------------------------------------------------------------

    def room(self) -> AbstractContextManager[Any]:
        """Within it, the next plan's buckets are made."""
        return nullcontext()

    def install(
        self, program: Program, buffers: Buffers, params: int, gathered: Buffers | None = None
    ) -> torch.Tensor:
        """Hands buckets and plan to the engine. Returns the flags, one per parameter, that every round
        sums.
        """
        flags = torch.zeros(_padded(params, self.size), dtype=torch.int32)
        with translated():
            self.engine.wait_all()
            self.engine.clear_buckets()
            for piece in buffers.layout.slices:
                data = buffers.bucket(piece.number)
                self.engine.add_bucket(
                    data,
                    gather=None if gathered is None else gathered.bucket(piece.number),
                    wire_dtype=self._wire_dtype(data.dtype),
                    prescale=self.prescale,
                    postscale=self.postscale,
                    needs_update=gathered is not None,
                    name=f"bucket {piece.number}",
                )
            self._flags_bucket = self.engine.add_bucket(flags, name="flags")
            self._early_flags = {}
            if program.early_step:
                for piece in buffers.layout.slices:
                    own = torch.zeros(_padded(len(piece.params), self.size), dtype=torch.int32)
                    number = self.engine.add_bucket(own, name=f"flags of bucket {piece.number}")
                    self._early_flags[piece.number] = (number, own)
            self.engine.install(_plan(program, self._flags_bucket, self._early_flags))
        return flags

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        return self.wire_dtype if dtype in (torch.float32, torch.float64) else None

    # -- rounds ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        with translated():
            self.engine.begin_step()

    def mark_ready(self, bucket: int) -> None:
        with translated():
            self.engine.mark_ready(bucket)

    def mark_early_flags(self, bucket: int, flags: torch.Tensor) -> None:
        """Sends these flags of the bucket's parameters behind it."""
        number, own = self._early_flags[bucket]
        own.zero_()[: len(flags)].copy_(flags)
        self.mark_ready(number)

    def wait_early_flags(self, bucket: int) -> list[int]:
        number, own = self._early_flags[bucket]
        self.wait_gathered(number)
        return own.tolist()

    def mark_flags_ready(self) -> None:
        self.mark_ready(self._flags_bucket)

    def mark_updated(self, bucket: int) -> None:
        with translated():
            self.engine.mark_updated(bucket)

    def wait_reduced(self, bucket: int) -> None:
        with translated():
            self.engine.wait_rs(bucket)

    def wait_gathered(self, bucket: int) -> None:
        with translated():
            self.engine.wait_ag(bucket)

    def wait_flags(self) -> None:
        self.wait_gathered(self._flags_bucket)

    def is_gathered(self, bucket: int) -> bool:
        with translated():
            return bool(self.engine.ag_done(bucket))

    def flags_arrived(self) -> bool:
        return self.is_gathered(self._flags_bucket)

    def gather_now(self, buffer: torch.Tensor) -> None:
        """An all-gather outside of the plan, while the engine has nothing to do or waits for an update."""
        self._outside += 1
        with translated():
            self.transport.all_gather(buffer, step=-self._outside)

    def gather_scalars(self, value: torch.Tensor) -> torch.Tensor:
        """Every rank's number, in rank order, where this rank's is."""
        numbers = value.new_zeros(self.size)
        numbers[self.rank] = value
        self.gather_now(numbers)
        return numbers

    def reduce_sparse(
        self, grad: torch.Tensor | None, like: torch.Tensor, name: str, mean: bool
    ) -> torch.Tensor:
        """The sum or mean of a gradient that is sparse on at least one rank."""
        if grad is None:
            grad = torch.sparse_coo_tensor(
                torch.zeros((1, 0), dtype=torch.int64), like.new_zeros((0, *like.shape[1:])), like.shape
            )
        elif not grad.is_sparse:
            grad = grad.to_sparse(1)
        op = Average if mean else Sum
        handle = sparse_allreduce_async(
            grad, name=f"commsched.sparse.{name}", op=op, process_set=self.process_set
        )
        return synchronize(handle).coalesce()

    # -- agreements ------------------------------------------------------------------------------------------

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return broadcast_object(value, self._root, "commsched.agreement", self.process_set)

    def all_values(self, value: Any) -> list[Any]:
        return gather_objects(value, "commsched.agreement", self.process_set)

    def agree(self, what: str, value: str, advice: str) -> None:
        """Raises ``CommError`` on every rank unless all have the same value."""
        values = self.all_values(value)
        others = [rank for rank, other in enumerate(values) if other != values[0]]
        if others:
            raise CommError(
                f"rank {self.rank}: {what} must be the same on all ranks, but rank 0 has {values[0]} and"
                f" {', '.join(f'rank {rank} has {values[rank]}' for rank in others[:4])}; {advice}"
            )

    def close(self, orderly: bool = True) -> None:
        """``orderly``: the script did not end with an exception."""
        self.engine.close()


def _plan(program: Program, flags: int, early: dict[int, tuple[int, torch.Tensor]]) -> list[tuple[str, int]]:
    """The program's order for the engine, flags included.

    They are known when the backward has ended, which is when the first layer's gradients are. Right behind
    those they stand, not behind the last reduction: a schedule may put that one late, behind all-gathers that
    the forward needs sooner, and no parameter may be used before the flags are there.
    """
    plan: list[tuple[str, int]] = []
    place, first_layer = 0, program.layers
    for action in program.link:
        if action.kind not in (Kind.RS, Kind.AG, Kind.AR):
            continue
        plan.append((action.kind.value, action.index))
        if action.kind is Kind.AG:
            continue
        if action.index in early:
            plan.append(("AR", early[action.index][0]))
        layer = min(piece.layer for piece in program.buckets[action.index].pieces)
        if layer <= first_layer:
            place, first_layer = len(plan), layer
    plan.insert(place, ("AR", flags))
    return plan


def _padded(count: int, size: int) -> int:
    """A whole number of aligned shards."""
    return -(-max(count, 1) // (size * ALIGN)) * size * ALIGN


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
