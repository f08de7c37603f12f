"""The ranks that train one model together, and the small agreements among them.

While some of the ranks have called ``join()``, agreements go over connections of their own: see
``PrivateObjects``. A rank that has joined may have several optimizers and does not know which of them the
others step next. So it never waits for an agreement that they may reach late: they publish each one that it
has to take part in (``tell_joined``), and it looks for that from time to time (``next_order``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, Store

from commsched.collectives.carrier import carrier
from commsched.collectives.job import ProcessSet, registered_id
from commsched.collectives.operations import (
    Average,
    Sum,
    allgather_object,
    allreduce_,
    broadcast_object,
    dumps,
    loads,
    sparse_allreduce_async,
    synchronize,
)
from commsched.collectives.private_groups import PrivateObjects
from commsched.errors import CommError


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
        self._orders = 0
        self.rank, self.size = int(process_set.rank()), int(process_set.size())  # type: ignore[arg-type]
        self.own = slice(self.rank, self.rank + 1)  # the ranks for which this process answers
        # Root ranks are global ones, as in Horovod.
        self._root = min(process_set.ranks) if process_set.ranks else 0
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
        if self.joined:
            return self.all_values(value if self.rank == 0 else None)[0]
        return broadcast_object(value, self._root, "commsched.agreement", self.process_set)

    def all_values(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        if not self.joined:
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
        """Return the sum or mean of a gradient that is sparse on at least one rank."""
        if grad is None:
            grad = torch.sparse_coo_tensor(
                torch.zeros((1, 0), dtype=torch.int64, device=like.device),
                like.new_zeros((0, *like.shape[1:])),
                like.shape,
                device=like.device,
            )
        elif not grad.is_sparse:
            grad = grad.to_sparse(1)
        if self.joined:
            rows = self.all_values((grad._indices().cpu(), grad._values().cpu()))
            indices = torch.cat([one for one, _ in rows], 1).to(like.device)
            values = torch.cat([one for _, one in rows]).to(like.device)
            values = values / self.size if mean else values
            return torch.sparse_coo_tensor(
                indices, values, grad.shape, device=like.device, check_invariants=False
            ).coalesce()
        op = Average if mean else Sum
        handle = sparse_allreduce_async(
            grad, name=f"commsched.{self.number}.sparse.{name}", op=op, process_set=self.process_set
        )
        return synchronize(handle).coalesce()

    # -- orders to ranks that have joined --------------------------------------------------------------------

    def tell_joined(self, order: Any) -> None:
        """Publish what the ranks that have not joined are about to do; each of them must call. No wait.

        The order before the last one is deleted: all ranks take part in what an order announces before the
        second one after it is published.
        """
        number, self._orders = self._orders, self._orders + 1
        joined = self.joined
        if self.rank == next(rank for rank in range(self.size) if rank not in joined):
            store = self._store()
            with _store_errors(self.rank):
                store.set(str(number), dumps(order).numpy().tobytes())  # type: ignore[arg-type]
                if number > 1:
                    store.delete_key(str(number - 2))

    def next_order(self) -> Any:
        """Return the next order, None if it is not there yet; for a rank that has joined. No wait."""
        with _store_errors(self.rank):
            store, key = self._store(), str(self._orders)
            if not store.check([key]):
                return None
            data = store.get(key)
        self._orders += 1
        return loads(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _store(self) -> Store:
        set_id, number = self.key
        return PrefixStore(f"orders/{set_id}/{number}", carrier().meeting.store)


@contextmanager
def _store_errors(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommError(
            f"rank {rank}: the job's store does not answer, because rank 0's process has ended or its host is"
            f" lost: {str(error).splitlines()[0]}"
        ) from error


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
