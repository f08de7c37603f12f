"""The ranks that train one model together, and the small agreements among them.

While some of the ranks have called ``join()``, agreements go over connections of their own: see
``PrivateObjects``. A rank that has joined may have several optimizers and does not know which of them the
others step next. So it never waits for what they may reach late: they publish each order that it has to
follow (``tell_joined``), and it looks for that from time to time (``next_order``).

Ranks agree on plans at the end of a step whose gradients may still be on their way, and with them the flags
which say who has joined. So they do not wait for those: each puts into the job's store that it has come, and
whether it has joined (``arrive``).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, Store

from comm_core import Waiting, ask_store, in_store_thread
from commsched.collectives.carrier import carrier
from commsched.collectives.job import ProcessSet, registered_id
from commsched.collectives.operations import (
    Sum,
    allgather_object,
    allreduce_,
    dumps,
    loads,
    sparse_allreduce_async,
    synchronize,
)
from commsched.collectives.private_groups import PrivateObjects
from commsched.env import settings
from commsched.errors import CommError
from commsched.process import failure_monitor

_log = logging.getLogger("commsched")
_PAUSE, _LONGEST_PAUSE = 5e-4, 0.02  # seconds between two questions to the store


class Members(Protocol):
    """Ranks that share buckets: those of an optimizer, or the replicas of a pipeline's stage."""

    rank: int
    size: int

    def all_values(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective."""

    def add_up(self, tensor: torch.Tensor, name: str) -> None:
        """Replace a tensor by its sum over the ranks. Collective."""


class Ranks:
    """The ranks of a process set, for one optimizer. Methods are collective unless they say otherwise.

    ``number`` counts the optimizers of the process set, in the order in which all of its ranks make them.
    ``joined``: the ranks that have called ``join()``, by the latest round whose flags have arrived: the same
    on every rank in every agreement.
    """

    def __init__(self, process_set: ProcessSet, number: int = 0) -> None:
        self.process_set, self.number = process_set, number
        self.joined: Sequence[int] = ()
        self._private: PrivateObjects | None = None
        self._orders = self._meetings = 0
        self._some_joined = False  # of the ranks that agree now
        self.rank, self.size = int(process_set.rank()), int(process_set.size())  # type: ignore[arg-type]
        self.own = slice(self.rank, self.rank + 1)  # the ranks for which this process answers
        self.global_own = self.global_rank(self.rank)

    def global_rank(self, rank: int) -> int:
        """Return the rank in the whole job of a rank of the process set."""
        return self.process_set.ranks[rank] if self.process_set.ranks else rank

    @property
    def key(self) -> tuple[int, int]:
        """What names this optimizer on all of its ranks: its process set and its number."""
        return registered_id(self.process_set), self.number

    def share(self, value: Any) -> Any:
        """Return rank 0's value, on every rank."""
        return self.all_values(value if self.rank == 0 else None)[0]

    def all_values(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        if not (self.joined or self._some_joined):
            return allgather_object(value, "commsched.agreement", process_set=self.process_set)
        if self._private is None:
            self._private = PrivateObjects(self.process_set, self.number)
        return self._private.gather(value)

    def agree(self, what: str, value: str, advice: str) -> None:
        """Raise ``CommError`` on every rank unless all have the same value."""
        values = self.all_values(value)
        others = [rank for rank, other in enumerate(values) if other != values[0]]
        if others:
            raise CommError(
                f"rank {self.rank}: {what} must be the same on all ranks, but rank 0 has {values[0]} and"
                f" {', '.join(f'rank {rank} has {values[rank]}' for rank in others[:4])}; {advice}"
            )

    def add_up(self, tensor: torch.Tensor, name: str) -> None:
        """Replace a tensor by its sum over the ranks."""
        if self.joined:
            total = sum(self.all_values(tensor.cpu()))
            tensor.copy_(total)
            return
        allreduce_(tensor, op=Sum, name=f"commsched.{self.number}.{name}", process_set=self.process_set)

    def reduce_sparse(
        self, grad: torch.Tensor | None, like: torch.Tensor, name: str, mean: bool
    ) -> torch.Tensor:
        """Return the sum or mean of a gradient that is sparse on at least one rank.

        A rank's rows are added up first, then the ranks', then it is scaled: the order of a dense gradient.
        """
        if grad is None:
            grad = empty_rows(like)
        grad = add_rows(grad) if grad.is_sparse else grad.to_sparse(1)
        if self.joined:
            rows = self.all_values((grad._indices().cpu(), grad._values().cpu()))
            indices = torch.cat([one for one, _ in rows], 1).to(like.device)
            values = torch.cat([one for _, one in rows]).to(like.device)
            total = torch.sparse_coo_tensor(
                indices, values, grad.shape, device=like.device, check_invariants=False
            )
        else:
            name = f"commsched.{self.number}.sparse.{name}"
            total = synchronize(sparse_allreduce_async(grad, name, op=Sum, process_set=self.process_set))
        total = add_rows(total)
        if mean:
            total.values().mul_(1 / self.size)
        return total

    # -- agreements that wait for nothing else ---------------------------------------------------------------

    def arrive(self, has_joined: bool, seconds: float = math.inf) -> Future[bool]:
        """Come to the next agreement. Once all ranks have, the result tells whether some of them have joined.

        No wait: a thread asks the store, because torch waits without end for one whose process is stopped.
        Ranks that have not come within so many ``seconds`` are an error.
        """
        number, self._meetings = self._meetings, self._meetings + 1
        arguments = self._store("meetings"), number, self.rank, self.size, has_joined, seconds
        return in_store_thread(lambda asked: _met(asked, *arguments))

    @contextmanager
    def together(self, some_joined: bool) -> Iterator[None]:
        """Agree with all ranks, also with those that have joined. All of them have come."""
        self._some_joined = some_joined
        try:
            yield
        finally:
            self._some_joined = False

    # -- orders to ranks that have joined --------------------------------------------------------------------

    def tell_joined(self, order: Any) -> None:
        """Publish what the ranks that have not joined are about to do; each of them must call. No wait.

        The order before the last one is deleted: all ranks take part in what an order announces before the
        second one after it is published.
        """
        number, self._orders = self._orders, self._orders + 1
        joined = self.joined
        if self.rank == next(rank for rank in range(self.size) if rank not in joined):
            store = self._store("orders")
            with _store_errors(self.rank):
                self._ask(store.set, str(number), dumps(order).numpy().tobytes())
                if number > 1:
                    self._ask(store.delete_key, str(number - 2))

    def next_order(self) -> Any:
        """Return the next order, None if it is not there yet; for a rank that has joined. No wait."""
        with _store_errors(self.rank):
            store, key = self._store("orders"), str(self._orders)
            if not self._ask(store.check, [key]):
                return None
            data = self._ask(store.get, key)
        self._orders += 1
        return loads(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer of the job's store, in the process of rank 0 or of its launcher."""
        waiting = Waiting(self.rank, settings().timeout, lambda _: failure_monitor.lost([0]))
        return ask_store(waiting, call, *arguments)

    def _store(self, kind: str) -> Store:
        set_id, number = self.key
        return PrefixStore(f"{kind}/{set_id}/{number}", carrier().meeting.store)


def _met(
    asked: Future[bool], store: Store, number: int, rank: int, size: int, has_joined: bool, seconds: float
) -> bool:
    """Add this rank to a list in the store and wait for all others there; return whether some have joined."""
    key, begin, pause = str(number), time.monotonic(), _PAUSE
    with _store_errors(rank):
        mine = f"{rank} {'joined' if has_joined else 'here'}\n"
        store.append(key, mine)  # type: ignore[attr-defined]  # torch's stub lacks it
        warn_at = min(settings().warning, seconds) if seconds < math.inf else seconds
        # Replaces the value only if it is empty, and returns it: get() asks the store twice.
        while len(here := dict(map(str.split, store.compare_set(key, "", "").decode().splitlines()))) < size:
            if asked.cancelled():
                return False
            waited = time.monotonic() - begin
            if waited > warn_at:
                missing = ranks_text([other for other in range(size) if str(other) not in here])
                told = f"{missing} to agree on a plan, at the end of a step that all ranks take"
                limit = f"{seconds:g} s (COMMSCHED_TIMEOUT)"
                if waited > seconds:
                    raise CommError(f"rank {rank} has waited {limit} for {told}")
                _log.warning("rank %d has waited %.3g s for %s; it waits %s", rank, waited, told, limit)
                warn_at = seconds
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if rank == 0:  # which mostly has the store in its process: the others need not wait for an answer
            store.delete_key(str(number - 1))  # all have read it, since they have come to this one
        return "joined" in here.values()


@contextmanager
def _store_errors(rank: int) -> Iterator[None]:
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        raise CommError(
            f"rank {rank}: the job's store does not answer, because rank 0's process has ended or is stopped,"
            f" or its host is lost: {str(error).splitlines()[0]}"
        ) from error


def add_rows(grad: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient with each row once: rows of one number are added in the order they stand in.

    ``coalesce()`` does not keep that order on CPUs with AVX-512, where torch sorts by other instructions.
    Halves are added in float32 and rounded once.
    """
    if grad.is_coalesced() or not grad.is_cpu:
        return grad.coalesce()
    shape, keys = grad.shape[: grad.sparse_dim()], grad._indices()[0]
    for size, more in zip(shape[1:], grad._indices()[1:], strict=True):
        keys = keys * size + more  # torch.unique() of columns takes 20 times as long
    rows, places = torch.unique(keys, return_inverse=True)
    values = grad._values()
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    sums = wide.new_zeros((len(rows), *wide.shape[1:])).index_add_(0, places, wide).to(values.dtype)
    indices = rows[None] if len(shape) == 1 else torch.stack(torch.unravel_index(rows, shape))
    return torch.sparse_coo_tensor(
        indices, sums, grad.shape, device=grad.device, is_coalesced=True, check_invariants=False
    )


def empty_rows(like: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient without any rows."""
    indices = torch.zeros((1, 0), dtype=torch.int64, device=like.device)
    rows = like.new_zeros((0, *like.shape[1:]))
    return torch.sparse_coo_tensor(indices, rows, like.shape, device=like.device, check_invariants=False)


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
