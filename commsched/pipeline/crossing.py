"""What crosses the borders of a rank's stages, whether the neighbour is on this rank or another.

Replicas of neighbouring stages may differ in number: each pair exchanges the rows that both have.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from comm_core import Traffic
from commsched.pipeline.fabric import Fabric
from commsched.pipeline.mailbox import Inbox, Outbox
from commsched.pipeline.messages import Description, Leaf
from commsched.pipeline.rows import Range, Share, common
from commsched.pipeline.stage import Job, Stage
from scheduler.ir.actions import Action, Kind
from scheduler.ir.layout import Layout, is_token

Place = tuple[int, Job]
"""Stage, and micro-batch and period."""

_TOKEN = Description(None, (Leaf((1,), torch.int8),))


class Crossings:
    """``shares[p]``: the rows of period p. ``outputs`` and ``input_grads``: what F and B have put out and
    nobody has taken; their keys say what has been computed.
    """

    def __init__(self, layout: Layout, fabric: Fabric, stages: dict[int, Stage]) -> None:
        self.layout, self.rank, self.stages = layout, fabric.rank, stages
        self.shares: dict[int, Share] = {}
        self._uneven = len({layout.replicas(stage) for stage in range(layout.stages)}) > 1
        # Gradients of replicas let messages go first, except where the program says the opposite.
        reduces = any(layout.replicas(stage) > 1 for stage in range(layout.stages))
        urgent = reduces and layout.placement != "eager"
        self.outbox = Outbox(fabric.lane("stages", Traffic.activation if urgent else None))
        self.inbox = Inbox(self.rank, self.outbox.lane, fabric.timeout, self._coming_gradient, self._key)
        self.outputs: dict[Place, tuple[list[Any], Any, list[bool]]] = {}
        self.input_grads: dict[Place, list[Tensor | None]] = {}
        self.to_come: dict[tuple[int, Job, int], Description] = {}  # gradients, by peer
        self._answers: list[Action] = []  # gradients whose activations have not been let go
        self.came: dict[Place, list[tuple[int, Range | None]]] = {}  # inputs: from whom, which rows
        self.zeros: dict[Place, list[Any]] = {}  # inputs, for those that get no gradient

    # Rows

    def rows(self, stage: int, rank: int, job: Job) -> Range:
        """The rows of a micro-batch that a rank holds in a stage."""
        ranks = self.layout.ranks[stage]
        return self.shares[job[1]].within(job[0], ranks.index(rank), len(ranks))

    def given(self, stage: int, job: Job) -> Range:
        """The same for this rank, counted in the batch it was given."""
        ranks = self.layout.ranks[stage]
        return self.shares[job[1]].given(job[0], ranks.index(self.rank), len(ranks))

    def _shared(self, stage: int, other: int, peer: int, job: Job) -> Range | None:
        """Which of this rank's rows of ``stage`` a peer of stage ``other`` has; None for exactly the same."""
        if not self._uneven:
            return None
        mine, its = self.rows(stage, self.rank, job), self.rows(other, peer, job)
        return None if mine == its else common(mine, its)

    def moves(self, action: Action) -> bool:
        """Whether an action of the link or recv lane has anything to do: messages without rows have not."""
        if action.kind in (Kind.SENDF, Kind.RECVB):
            step = 1
        elif action.kind in (Kind.SENDB, Kind.RECVF):
            step = -1
        else:
            return True
        if is_token(action, self.layout):
            return True
        assert action.stage is not None and action.peer is not None
        rows = self._shared(action.stage, action.stage + step, action.peer, (action.index, action.shift))
        return rows is None or rows[0] < rows[1]

    # Towards the loss

    def arguments(self, number: int, job: Job) -> tuple[list[Any], Any]:
        """What stage ``number`` (not the first) computes a micro-batch from: leaves and structure."""
        if self.rank in self.layout.ranks[number - 1]:
            leaves, spec, flags = self.outputs[number - 1, job]
            leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        else:
            leaves, spec, flags = self._received(number, job)
        for leaf, flag in zip(leaves, flags, strict=True):
            if flag:
                leaf.requires_grad_()
        return leaves, spec

    def _received(self, number: int, job: Job) -> tuple[list[Any], Any, list[bool]]:
        parts, came = [], []
        for peer in self.layout.overlaps(number, self.rank, number - 1):
            action = Action(Kind.RECVF, job[0], number, peer=peer, shift=job[1])
            if self.moves(action):
                described, buffers = self.inbox.take(action)
                parts.append(described.fill(buffers, self.stages[number].device))
                came.append((peer, self._shared(number, number - 1, peer, job)))
        self.came[number, job] = came
        leaves = [_joined(values) for values in zip(*parts, strict=True)]
        return leaves, described.spec, [leaf.grad for leaf in described.leaves]

    def put_out(self, number: int, job: Job, leaves: list[Any]) -> None:
        """A forward has ended."""
        stage = self.stages[number]
        flags = stage.needs_grad(leaves, stage.saved[job].leaves)
        self.outputs[number, job] = leaves, stage.output_spec, flags

    def send_forward(self, action: Action) -> bool:
        """Sends a forward's output if it is there."""
        number, job, peer = _place(action)
        if (number, job) not in self.outputs:
            return False
        leaves, spec, flags = self.outputs[number, job]
        part = [_piece(leaf, self._shared(number, number + 1, peer, job), number) for leaf in leaves]
        back = self.outbox.forward(action, self._shapes(number, action), part, spec, flags)
        self.to_come[number, job, peer] = back
        return True

    # Back

    def output_grads(self, number: int, job: Job) -> list[Tensor | None]:
        """The gradients of what a stage (not the last) has put out."""
        if self.rank in self.layout.ranks[number + 1]:
            self.outputs.pop((number, job))
            return self.input_grads.pop((number + 1, job))
        flags = self.outputs.pop((number, job))[2]
        parts = []
        for peer in self.layout.overlaps(number, self.rank, number + 1):
            action = Action(Kind.RECVB, job[0], number, peer=peer, shift=job[1])
            if self.moves(action):
                described, buffers = self.inbox.take(action)
                parts.append(described.fill(buffers, self.stages[number].device))
                del self.to_come[number, job, peer]
                self._answers.append(action)
        grads = iter([_joined(values) for values in zip(*parts, strict=True)])
        return [next(grads) if flag else None for flag in flags]

    def put_back(self, number: int, job: Job, leaves: list[Any], grads: list[Tensor | None]) -> None:
        """A backward has ended; ``leaves`` were its inputs."""
        if number == 0:
            return
        self.input_grads[number, job] = grads
        if (number, job) in self.came:
            needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
            self.zeros[number, job] = [leaf if need else None for leaf, need in zip(leaves, needs)]

    def send_backward(self, action: Action) -> bool:
        """Sends a backward's result if it is there."""
        number, job, peer = _place(action)
        if (number, job) not in self.input_grads:
            return False
        grads, came = self.input_grads[number, job], self.came[number, job]
        rows = dict(came)[peer]
        sent = [
            _piece(torch.zeros_like(leaf) if grad is None else grad, rows, number)
            for leaf, grad in zip(self.zeros[number, job], grads, strict=True)
            if leaf is not None
        ]
        self.outbox.send(action, sent)
        came.remove((peer, rows))
        if not came:
            del self.input_grads[number, job], self.came[number, job], self.zeros[number, job]
        return True

    def send_token(self, action: Action) -> None:
        self.outbox.send(action, [torch.zeros(1, dtype=torch.int8)])

    # Shapes

    def _coming_gradient(self, action: Action) -> Description | None:
        if is_token(action, self.layout):
            return _TOKEN
        assert action.stage is not None and action.peer is not None
        known = self.to_come.get(_place(action))
        return known or self.outbox.back(action.peer, self._shapes(action.stage, action))

    def _key(self, action: Action) -> Hashable:
        if action.kind is Kind.RECVB or is_token(action, self.layout):
            return None
        assert action.stage is not None
        return self._shapes(action.stage - 1, action)

    def _shapes(self, stage: int, action: Action) -> Hashable:
        """What decides the shapes of a stage's output."""
        share = self.shares[action.shift]
        return stage, share.key, share.size(action.index)

    def let_go(self) -> None:
        """Frees what has been sent and answered."""
        for answer in self._answers:
            self.outbox.answered(answer)
        self._answers.clear()

    def forget(self, before: int) -> None:
        """Nothing of earlier periods is left to do."""
        self.outbox.settle(before - 1)
        for period in [p for p in self.shares if p < before]:
            del self.shares[period]


def _place(action: Action) -> tuple[int, Job, int]:
    assert action.stage is not None and action.peer is not None
    return action.stage, (action.index, action.shift), action.peer


def _piece(leaf: Any, rows: Range | None, stage: int) -> Any:
    if rows is None or not isinstance(leaf, Tensor):
        return leaf
    if leaf.dim() == 0 or leaf.shape[0] < rows[1]:
        raise ValueError(
            f"stage {stage} has another number of replicas than its neighbour, so what they exchange is cut"
            f" by rows; it must have the batch as its first dimension, got shape {list(leaf.shape)}"
        )
    return leaf[rows[0] : rows[1]]


def _joined(values: Sequence[Any]) -> Any:
    return torch.cat(list(values)) if len(values) > 1 and isinstance(values[0], Tensor) else values[0]
