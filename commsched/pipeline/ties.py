"""Parameters that several stages use (tied embeddings): every stage gets the sum of all their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from commsched.pipeline.fabric import Lane, to_host
from commsched.pipeline.reduction import summed_over
from commsched.pipeline.stage import Stage
from scheduler.ir.program import Program, delays


@dataclass(frozen=True)
class Tie:
    """One parameter on several stages: this rank's (stage, place), all ranks that have it, and the ``first``
    one of its first stage.
    """

    mine: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    first: int


def checked_ties(
    tied: Iterable[Mapping[int, str]], program: Program, stages: Mapping[int, Stage]
) -> list[Tie]:
    """The ties that this rank is part of, in the same order on every rank; asynchronous schedules refuse any.
    ``tied``: of each parameter the stages that use it, with its name there.
    """
    assert program.pipeline is not None
    late, tied = delays(program), list(tied)
    if tied and any(late):
        names = [next(iter(users.values())) for users in tied]
        using = sorted({stage for users in tied for stage in users})
        raise ValueError(
            f"{', '.join(names)} is used by stages {using}, and schedule {program.policy!r} is asynchronous"
            f" (delays {late}): the stages would step it with gradients of different steps; use a synchronous"
            " schedule, cut so that one stage has all its uses, or give the model an output layer of its own"
        )
    ties = []
    for users in tied:
        mine = [(n, stages[n].versions.places[name]) for n, name in users.items() if n in stages]
        if mine:
            ranks = {rank for number in users for rank in program.layout.members(number)}
            ties.append(Tie(tuple(mine), tuple(sorted(ranks)), program.layout.members(min(users))[0]))
    return ties


@torch.no_grad()
def share_ties(ties: Sequence[Tie], stages: Mapping[int, Stage], lane: Lane, rank: int) -> None:
    """All copies of a shared parameter start with the value that its first stage has: ranks that are not
    seeded alike have made others.
    """
    for tie in ties:
        copies = [stages[number].versions.newest.leaves[place].data for number, place in tie.mine]
        if rank == tie.first:
            value = to_host(copies[0])
            for sent in [lane.send(peer, [value]) for peer in tie.ranks if peer != rank]:
                sent.wait()
        else:
            value = torch.empty(copies[0].shape, dtype=copies[0].dtype)
            lane.receive(tie.first, [value]).wait()
        for copy in copies:
            copy.copy_(value)


def sum_ties(ties: Sequence[Tie], stages: Mapping[int, Stage], lane: Lane, rank: int, period: int) -> None:
    """Gives every copy of a shared parameter the sum of all its gradients; None where nobody used it."""
    for tie in ties:
        number, place = tie.mine[0]
        mine = [stages[n].grads[period][p] for n, p in tie.mine]
        # Sparse gradients of an embedding join the dense ones of an output layer.
        grads = [grad.to_dense() for grad in mine if grad is not None]
        total = grads[0] if grads else torch.zeros_like(stages[number].versions.newest.leaves[place])
        for grad in grads[1:]:
            total += grad
        used = torch.tensor([len(grads)], dtype=torch.int32)
        summed_over(lane, rank, tie.ranks, [total, used])
        for number, place in tie.mine:
            stages[number].grads[period][place] = total if used.item() else None
