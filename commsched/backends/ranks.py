"""The ranks that train one model together, and the small agreements among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commsched.collectives.handles import synchronize
from commsched.collectives.objects import allgather_object, broadcast_object
from commsched.collectives.process_sets import ProcessSet
from commsched.errors import CommError


class Ranks:
    """The ranks of a process set. Every method is collective."""

    def __init__(self, process_set: ProcessSet) -> None:
        self.process_set = process_set
        self.rank, self.size = int(process_set.rank()), int(process_set.size())  # type: ignore[arg-type]
        # Root ranks are global ones, as in Horovod.
        self._root = min(process_set.ranks) if process_set.ranks else 0

    def global_rank(self, rank: int) -> int:
        """Return the rank in the whole job of a rank of the process set."""
        return self.process_set.ranks[rank] if self.process_set.ranks else rank

    def share(self, value: Any) -> Any:
        """Return rank 0's value, on every rank."""
        return broadcast_object(value, self._root, "commsched.agreement", self.process_set)

    def all_values(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        return allgather_object(value, "commsched.agreement", process_set=self.process_set)

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
        from commsched.collectives.reductions import Sum, allreduce_

        allreduce_(tensor, op=Sum, name=name, process_set=self.process_set)

    def reduce_sparse(
        self, grad: torch.Tensor | None, like: torch.Tensor, name: str, mean: bool
    ) -> torch.Tensor:
        """Return the sum or mean of a gradient that is sparse on at least one rank."""
        from commsched.collectives.reductions import Average, Sum, sparse_allreduce_async

        if grad is None:
            grad = torch.sparse_coo_tensor(
                torch.zeros((1, 0), dtype=torch.int64, device=like.device),
                like.new_zeros((0, *like.shape[1:])),
                like.shape,
                device=like.device,
            )
        elif not grad.is_sparse:
            grad = grad.to_sparse(1)
        op = Average if mean else Sum
        handle = sparse_allreduce_async(
            grad, name=f"commsched.sparse.{name}", op=op, process_set=self.process_set
        )
        return synchronize(handle).coalesce()


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
