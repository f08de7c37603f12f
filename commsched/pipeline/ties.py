"""Parameters that several stages use (tied embeddings): every stage gets the sum of all their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from commsched.pipeline.chain import Chain
from commsched.pipeline.fabric import Lane
from commsched.pipeline.reduction import summed_over
from commsched.pipeline.stage import Stage
from scheduler.ir.program import Program
from scheduler.ir.weight_versions import delays


@dataclass(frozen=True)
class Tie:
    """One parameter on several stages: this rank's (stage, place), and all ranks that have it."""

    mine: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]


def checked_ties(chain: Chain, program: Program, rank: int, stages: dict[int, Stage]) -> list[Tie]:
    """Parameters on several stages; asynchronous schedules refuse them."""
    assert program.pipeline is not None
    tied, late = chain.tied(program.pipeline.cuts), delays(program)
    if tied and any(late):
        names = [name for name, p in chain.model.named_parameters() if id(p) in tied]
        users = sorted({stage for found in tied.values() for stage in found})
        raise ValueError(
            f"{', '.join(names)} is used by stages {users}, and schedule {program.policy!r} is asynchronous"
            f" (delays {late}): the stages would step it with gradients of different steps; use a synchronous"
            " schedule, cut so that one stage has all its uses, or give the model an output layer of its own"
        )
    return _make_ties(chain, program, rank, stages)


def _make_ties(chain: Chain, program: Program, rank: int, stages: dict[int, Stage]) -> list[Tie]:
    """In the same order on every rank; only those that this rank is part of."""
    layout, ties = program.layout, []
    for key, users in chain.tied(layout.cuts).items():
        places = []
        for number in users:
            if number in stages:
                name = _name_of(chain, key, layout.layers(number, len(chain)))
                places.append((number, stages[number].versions.names.index(name)))
        ranks = sorted({r for number in users for r in layout.members(number)})
        if places:
            ties.append(Tie(tuple(places), tuple(ranks)))
    return ties


def _name_of(chain: Chain, key: int, layers: range) -> str:
    for layer in layers:
        for name, parameter in chain.layer_parameters(layer).items():
            if id(parameter) == key:
                return name
    raise ValueError("a shared parameter is missing in a stage that uses it")


def sum_ties(ties: Sequence[Tie], stages: Mapping[int, Stage], lane: Lane, rank: int, period: int) -> None:
    """Gives every copy of a shared parameter the sum of all its gradients."""
    for tie in ties:
        number, place = tie.mine[0]
        mine = [stages[n].grads[period][p] for n, p in tie.mine]
        grads = [grad for grad in mine if grad is not None]
        total = grads[0] if grads else torch.zeros_like(stages[number].versions.newest.leaves[place])
        for grad in grads[1:]:
            total += grad
        summed_over(lane, rank, tie.ranks, [total])
        for number, place in tie.mine:
            stages[number].grads[period][place] = total
