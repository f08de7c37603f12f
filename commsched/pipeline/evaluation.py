"""Batches outside of training: the forwards of the program, with the newest weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from commsched.pipeline.exchange import Exchange
from commsched.pipeline.fabric import Fabric
from commsched.pipeline.inputs import Inputs, tellers
from commsched.pipeline.losses import Losses
from commsched.pipeline.messages import receive_object, receive_tree, send_object, send_tree
from commsched.pipeline.stage import Loss, Saved, Stage
from scheduler.ir.actions import Action, Kind, position
from scheduler.ir.program import COMPUTE_LANE, RECV_LANE, Program

EVALUATED = -1
"""The period of a batch that is evaluated."""


class Evaluation:
    """Runs the forwards of one period, on a message lane of its own: training messages may be in flight."""

    def __init__(
        self, program: Program, fabric: Fabric, stages: dict[int, Stage], inputs: Inputs, losses: Losses
    ) -> None:
        self.layout, self.rank, self.stages = program.layout, fabric.rank, stages
        self.inputs, self.losses = inputs, losses
        self.exchange = Exchange(self.layout, fabric, stages, "evaluation")
        self._fabric, self._lane = fabric, fabric.lane("counts")
        self._forwards = self._of_one_period(program, COMPUTE_LANE, Kind.F)
        self._receives = self._of_one_period(program, RECV_LANE, Kind.RECVF)

    def _of_one_period(self, program: Program, lane: str, kind: Kind) -> list[Action]:
        order = program.kernel[self.rank].get(lane, ())
        places = [n for n, a in enumerate(order) if a.kind is kind and a.index < self.layout.microbatches]
        return [
            order[place].at(EVALUATED) for place in sorted(places, key=lambda place: position(order, place))
        ]

    def run(self) -> float:
        """The mean loss of the batch that ``exchange.shares`` has of period ``EVALUATED``."""
        self.losses.begin()
        self._pass_forward(None)
        if self.inputs.tells:
            self.losses.tell(EVALUATED)
        total = self.losses.total()
        self._forget()
        self.losses.settle()
        return total

    def count(self, count: Loss) -> Tensor:
        """The sum over that batch of what ``count`` returns, in the same order of ranks everywhere."""
        mine, found = self._pass_forward(count), []
        sent = []
        if self.inputs.tells:
            peers = [peer for peer in range(self._fabric.size) if peer != self.rank]
            sent = [pending for peer in peers for pending in send_object(self._lane, peer, mine)]
        for rank in tellers(self.layout):
            found.append(mine if rank == self.rank else receive_object(self._lane, rank))
        self._forget()
        for pending in sent:
            pending.wait()
        return _sum([value for value in found if value is not None])

    @torch.no_grad()
    def _pass_forward(self, count: Loss | None) -> Tensor | None:
        """Runs all forwards; the sum of the counts on this rank, if any."""
        exchange = self.exchange
        exchange.inbox.expect([action for action in self._receives if self._comes(action)])
        counted: list[Tensor] = []
        self._share_buffers()
        with self._evaluating():
            for action in self._forwards:
                self._forward(action, count, counted)
                exchange.inbox.pump()
        return _sum(counted) if counted else None

    def _share_buffers(self) -> None:
        """Replicas take the running statistics of their first one, which the saved model has too. Mirrored
        ones keep their own.
        """
        pending = []
        for number, stage in () if self.layout.mirror else self.stages.items():
            ranks = self.layout.members(number)
            if len(ranks) == 1 or not (mine := dict(stage.module.named_buffers())):
                continue
            if self.rank == ranks[0]:
                pending += [p for peer in ranks[1:] for p in send_tree(self._lane, peer, mine)]
            else:
                stage.load_buffers(receive_tree(self._lane, ranks[0]))
        for sent in pending:
            sent.wait()

    def _forget(self) -> None:
        exchange = self.exchange
        exchange.outbox.settle()
        exchange.outputs.clear()
        exchange.came.clear()
        exchange.to_come.clear()
        exchange.shares.settle()
        exchange.shares.clear()

    def _comes(self, action: Action) -> bool:
        """Whether an action of the recv lane has rows in this batch."""
        assert action.stage is not None
        low, high = self.exchange.rows(action.stage, self.rank, (action.index, EVALUATED))
        return low < high and self.exchange.moves(action)

    def _forward(self, action: Action, count: Loss | None, counted: list[Tensor]) -> None:
        assert action.stage is not None
        number, micro, exchange = action.stage, (action.index, EVALUATED), self.exchange
        stage, (low, high) = self.stages[number], exchange.rows(number, self.rank, micro)
        if low == high:
            return
        leaves, spec, cuts = self.inputs.arguments(exchange, number, micro)
        head = self.inputs.head(exchange, number, micro, count)
        outputs = stage.run(Saved(stage.versions.newest, leaves, spec, head, [], micro, cuts))
        if head is not None and count is not None:
            if head.counts:
                counted.append(outputs[0].double().cpu())
            return
        if head is not None:
            stage.losses[EVALUATED] += float(outputs[0]) * head.weight if head.counts else 0.0
            return
        exchange.put_out(number, micro, outputs, [False] * len(outputs))
        for peer in exchange.peers(number, number + 1, micro[0]):
            send = Action(Kind.SENDF, micro[0], number, peer=peer, shift=EVALUATED)
            if peer != self.rank and exchange.moves(send):
                exchange.send_forward(send)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [
            (part, part.training)
            for stage in self.stages.values()
            for module in stage.modules
            for part in module.modules()
        ]
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def _sum(values: list[Tensor]) -> Tensor:
    """The sum in this order."""
    return sum(values[1:], start=values[0])
