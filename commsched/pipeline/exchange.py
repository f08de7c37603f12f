"""Exchange between neighbouring stages, and the batches of the steps in flight."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from comm_core import Traffic
from commsched.pipeline.layers import Arguments
from commsched.pipeline.messages import Description, Fabric, Inbox, Outbox, is_gradient, no_gradient
from commsched.pipeline.rows import (
    Cut,
    Cuts,
    Part,
    Piece,
    Range,
    assembled,
    check_rows,
    common,
    cut,
    entering,
    on_device,
    part_of,
    piece_of,
)
from commsched.pipeline.shares import Shares, Terms
from commsched.pipeline.stage import Head, Loss, Micro, Stage, flattened
from scheduler.ir.actions import HALOS, RECVS, TRANSFER, Action, Kind, peer_of, stage_of
from scheduler.ir.layout import Layout, far_stage
from scheduler.ir.program import Program

# -- exchange, on one rank or between two --------------------------------------------------------------------

# Each pair of ranks exchanges the part of a micro-batch that both hold: rows, tiles, or all of it.

Place = tuple[int, Micro]
"""Stage, and micro-batch and period."""


class Values(NamedTuple):
    """A stage's output: tensors and constants, their structure, which of them get a gradient, and how
    tiles cut them here and in the next stage.
    """

    leaves: list[Any]
    spec: Any
    grads: list[bool]
    cuts: list[Cuts]


class Exchange:
    """``shares[p]``: the rows of period p. ``outputs`` and ``input_grads``: what F and B have put out and
    nobody has taken; their keys say what has been computed. ``program``: one whose messages may go from
    device to device, as they do if there is a ``direct``.
    """

    def __init__(
        self,
        layout: Layout,
        fabric: Fabric,
        stages: dict[int, Stage],
        name: str = "stages",
        program: Program | None = None,
    ) -> None:
        self.layout, self.rank, self.stages = layout, fabric.rank, stages
        self.shares = Shares(layout, fabric, name)
        self.own_generator = fabric.own_generator and fabric.size > 1
        # Each is needed several times for every micro-batch: which range of its rows and which tile a rank
        # has in a stage, of how many ranges; and the ranks of another stage that share a part with this one.
        self.place: Callable[[int, int, int], tuple[int, int, int]] = cache(
            lambda stage, rank, index: (*layout.place(stage, rank, index), layout.replicas(stage))
        )
        self.peers: Callable[[int, int, int], tuple[int, ...]] = cache(
            lambda stage, other, index: tuple(layout.overlaps(stage, fabric.rank, other, index))
        )
        divisions = {(layout.replicas(stage), layout.grid(stage)) for stage in range(layout.stages)}
        self._divides_alike = len(divisions) == 1
        # Gradients that are summed over ranks let messages go first, except where the program says otherwise.
        reduces = any(len(layout.members(stage)) > 1 for stage in range(layout.stages))
        urgent = reduces and layout.placement != "eager"
        device = next((s.device for s in stages.values() if s.device.type != "cpu"), torch.device("cpu"))
        devices = {stage.device for stage in stages.values()}
        self.direct = None if program is None else fabric.direct(devices, program)
        # Between a device and host memory; None where messages are in host memory anyway, or never.
        self._staging = fabric.staging(device) if self.direct is None else None
        lane = fabric.lane(name, Traffic.activation if urgent else None)
        self.outbox = Outbox(lane, self._staging, self.direct)
        empty = torch.empty if self._staging is None else self._staging.device.host_empty
        self.inbox = Inbox(
            self.rank, self.outbox.lane, fabric.timeout, self._coming_gradient, self._key, empty, self.direct
        )
        self.outputs: dict[Place, Values] = {}
        self.input_grads: dict[Place, list[Tensor | None]] = {}
        self.to_come: dict[tuple[int, Micro, int], Description] = {}  # gradients, by peer
        self._answers: list[Action] = []  # gradients whose activations have not been let go
        self.came: dict[Place, list[tuple[int, list[Piece]]]] = {}  # inputs: from whom, and which part
        self.inputs: dict[Place, list[Any]] = {}  # whose shapes those without a gradient send

    # Parts

    def rows(self, stage: int, rank: int, micro: Micro) -> Range:
        """The rows of a micro-batch that a rank holds in a stage."""
        replica, _, replicas = self.place(stage, rank, micro[0])
        return self.shares[micro[1]].within(micro[0], replica, replicas)

    def given(self, stage: int, micro: Micro) -> Range:
        """The same for this rank, counted in the batch it was given."""
        replica, _, replicas = self.place(stage, self.rank, micro[0])
        return self.shares[micro[1]].given(micro[0], replica, replicas)

    def _part(self, stage: int, rank: int, micro: Micro, cuts: Cuts) -> Part:
        grid = self.layout.grid(stage)
        coord = grid.coord(self.place(stage, rank, micro[0])[1]) if grid else ()
        return part_of(self.rows(stage, rank, micro), coord, cuts)

    def _parts(self, stage: int, micro: Micro, cuts: list[Cuts]) -> list[Part]:
        """The parts that this rank has of these tensors; where all stages divide alike nobody reads them."""
        if self._divides_alike:
            return [{}] * len(cuts)
        return [self._part(stage, self.rank, micro, each) for each in cuts]

    def _pieces(self, stage: int, other: int, peer: int, micro: Micro, cuts: list[Cuts]) -> list[Piece]:
        """Which part of each tensor that this rank has in ``stage`` a peer has in stage ``other``. ``cuts``:
        of the tensors in ``stage``, then in ``other``.
        """
        if self._divides_alike:
            return [()] * len(cuts)
        return [
            common(self._part(stage, self.rank, micro, each), self._part(other, peer, micro, each[::-1]))
            for each in cuts
        ]

    def moves(self, action: Action) -> bool:
        """Whether an action of the link or recv lane has anything to do: messages without rows have not, and
        halos are exchanged by the operations of F and B themselves.
        """
        if action.kind not in TRANSFER or self._divides_alike:
            return action.kind not in HALOS
        number, micro, peer = _place(action)
        mine = self.rows(number, self.rank, micro)
        its = self.rows(far_stage(action), peer, micro)
        return max(mine[0], its[0]) < min(mine[1], its[1])

    # Towards the loss

    def arguments(self, number: int, micro: Micro) -> tuple[list[Any], Any, list[Cut | None]]:
        """The inputs of a micro-batch in stage ``number`` (not the first): leaves, structure, and cuts."""
        if self.rank in self.layout.holders(number - 1, micro[0]):
            values = self.outputs[number - 1, micro]
            leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in values.leaves]
            values = values._replace(leaves=leaves)
        else:
            values = self._received(number, micro)
        for leaf, flag in zip(values.leaves, values.grads, strict=True):
            if flag:
                leaf.requires_grad_()
        return values.leaves, values.spec, [there for _, there in values.cuts]

    def _received(self, number: int, micro: Micro) -> Values:
        leaves, described, self.came[number, micro] = self._take(Kind.RECVF, number, number - 1, micro)
        grads, cuts = [leaf.grad for leaf in described.leaves], [leaf.cuts for leaf in described.leaves]
        return Values(leaves, described.spec, grads, cuts)

    def _take(
        self, kind: Kind, number: int, other: int, micro: Micro, cuts: list[Cuts] | None = None
    ) -> tuple[list[Any], Description, list[tuple[int, list[Piece]]]]:
        """The tensors that a neighbouring stage sends, their description, and from whom which part came.
        ``cuts``: of the tensors here and there; None: as the messages say.
        """
        parts, came = [], []
        for peer in self.peers(number, other, micro[0]):
            action = Action(kind, micro[0], number, peer=peer, shift=micro[1])
            if self.moves(action):
                described, buffers = self.inbox.take(action)
                here = [leaf.cuts[::-1] for leaf in described.leaves] if cuts is None else cuts
                pieces = self._pieces(number, other, peer, micro, here)
                device = self.stages[number].device
                here_too = self._staging is not None and device == self._staging.device.device
                leaves = described.fill(buffers, device, self._staging if here_too else None)
                if kind is Kind.RECVB:
                    given = self.inbox.given.pop(action, None) or map(is_gradient, buffers)
                    leaves = [x if there else None for x, there in zip(leaves, given)]
                parts.append(zip(leaves, pieces))
                came.append((peer, pieces))
        wholes = self._parts(number, micro, here)
        return [assembled(leaf, whole) for *leaf, whole in zip(*parts, wholes)], described, came

    def put_out(self, number: int, micro: Micro, leaves: list[Any], grads: list[bool]) -> None:
        """A forward has ended."""
        stage, grid, after = self.stages[number], self.layout.grid(number), self.layout.grid(number + 1)
        if not self._divides_alike and self.layout.replicas(number) != self.layout.replicas(number + 1):
            low, high = self.rows(number, self.rank, micro)
            for leaf in leaves:
                check_rows(leaf, high - low, number)
        cuts = [(cut, entering(leaf, cut, grid, after)) for leaf, cut in zip(leaves, stage.output_cuts)]
        self.outputs[number, micro] = Values(leaves, stage.output_spec, grads, cuts)

    def send_forward(self, action: Action) -> bool:
        number, micro, peer = _place(action)
        if (number, micro) not in self.outputs:
            return False
        values = self.outputs[number, micro]
        pieces = self._pieces(number, number + 1, peer, micro, values.cuts)
        sent = [piece_of(leaf, piece) for leaf, piece in zip(values.leaves, pieces)]
        key = self._shapes(number, action)
        back = self.outbox.forward(action, key, sent, values.spec, values.grads, values.cuts)
        self.to_come[number, micro, peer] = back
        return True

    # Back

    def output_grads(self, number: int, micro: Micro) -> list[Tensor | None]:
        """The gradients of what a stage (not the last) has put out."""
        values = self.outputs.pop((number, micro))
        if self.rank in self.layout.holders(number + 1, micro[0]):
            return self.input_grads.pop((number + 1, micro))
        cuts = [each for each, flag in zip(values.cuts, values.grads) if flag]
        leaves, _, came = self._take(Kind.RECVB, number, number + 1, micro, cuts)
        for peer, _ in came:
            del self.to_come[number, micro, peer]
            self._answers.append(Action(Kind.RECVB, micro[0], number, peer=peer, shift=micro[1]))
        grads = iter(leaves)
        return [next(grads) if flag else None for flag in values.grads]

    def put_back(self, number: int, micro: Micro, leaves: list[Any], grads: list[Tensor | None]) -> None:
        """A backward has ended; ``leaves`` were its inputs."""
        if number == 0:
            return
        self.input_grads[number, micro] = grads
        if (number, micro) in self.came:
            needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
            self.inputs[number, micro] = [leaf if need else None for leaf, need in zip(leaves, needs)]

    def send_backward(self, action: Action) -> bool:
        number, micro, peer = _place(action)
        if (number, micro) not in self.input_grads:
            return False
        grads, came = self.input_grads[number, micro], self.came[number, micro]
        pieces = dict(came)[peer]
        sent = [
            (piece_of(no_gradient(leaf) if grad is None else grad, piece), grad is not None)
            for leaf, grad, piece in zip(self.inputs[number, micro], grads, pieces, strict=True)
            if leaf is not None
        ]
        self.outbox.send(action, [leaf for leaf, _ in sent], [given for _, given in sent])
        came.remove((peer, pieces))
        if not came:
            del self.input_grads[number, micro], self.came[number, micro], self.inputs[number, micro]
        return True

    # From device to device

    def launch(self, action: Action) -> None:
        """Launch a message that is the next one in the order of ``scheduler.ir.launches``."""
        if not self.moves(action):
            return
        if action.kind in RECVS:
            self.inbox.launch(action)
            return
        send = self.send_forward if action.kind is Kind.SENDF else self.send_backward
        if not send(action):
            raise ValueError(f"{action} comes before the computation whose result it sends")

    def confirm(self) -> None:
        """``CommError`` where messages from device to device have failed: see ``DeviceMessages.confirm``."""
        if self.direct is not None:
            self.direct.confirm()

    def close(self, failed: bool) -> None:
        if self.direct is not None:
            if failed:
                self.direct.abort(f"rank {self.rank} has given up its pipeline")
            else:
                self.direct.close()

    # Shapes

    def _coming_gradient(self, action: Action) -> Description | None:
        known = self.to_come.get(_place(action))
        return known or self.outbox.back(peer_of(action), self._shapes(stage_of(action), action))

    def _key(self, action: Action) -> Hashable:
        if action.kind is Kind.RECVB:
            return None
        return self._shapes(stage_of(action) - 1, action)

    def _shapes(self, stage: int, action: Action) -> Hashable:
        """A key that is equal where a stage's output has the same shapes between two ranks."""
        share, mirrored = self.shares[action.shift], self.layout.mirrored(action.index)
        key = stage, share.key, share.size(action.index), mirrored
        return (*key, share.constants, action.index) if share.constants else key

    def free_answered(self) -> None:
        for answer in self._answers:
            self.outbox.answered(answer)
        self._answers.clear()

    def free_before(self, period: int) -> None:
        """Waits for the messages of earlier periods and frees them."""
        self.outbox.settle(period - 1)
        for earlier in [p for p in self.shares if p < period]:
            del self.shares[earlier]


def _place(action: Action) -> tuple[int, Micro, int]:
    return stage_of(action), (action.index, action.shift), peer_of(action)


# -- the batches of the steps in flight: what the first and the last stage take of them ----------------------

Batch = tuple[Any, Any]
"""Inputs and targets: tensors, or tuples, lists and dicts of them; rows are their first dimension."""


class Inputs:
    """``given[p]``: inputs and targets of period p. ``arguments`` makes the forward's arguments of inputs.
    ``tells``: whether this rank adds to the value of the loss; tiles of one replica all have the same, so
    only the first does. ``terms``: by which a step's loss is divided; None: losses are means over rows.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        stages: dict[int, Stage],
        arguments: Arguments,
        terms: Terms | None = None,
    ) -> None:
        self.layout, self.rank, self.stages, self.terms = layout, rank, stages, terms
        self.given: dict[int, Batch] = {}
        self._arguments = arguments
        self._spec: Any = None
        self.tells = rank in tellers(layout)

    def add(self, period: int, batch: Any, copy: bool = False) -> None:
        """Keeps what this rank reads of a batch. ``copy``: keeps copies of its tensors."""
        inputs = targets = None
        if 0 in self.stages:
            inputs = tree_map(_clone, batch[0]) if copy else batch[0]
        if self.layout.stages - 1 in self.stages:
            targets = tree_map(_clone, batch[1]) if copy else batch[1]
        self.given[period] = inputs, targets

    def take(self, exchange: Exchange, period: int, batch: Any, local: bool, counts: bool = True) -> None:
        """The rows of a batch, and its terms if its loss is wanted (``counts``). Nobody is told of a batch
        that this rank refuses: others would take its terms for those of the next one.
        """
        terms = self.terms if counts else None
        counted = None if terms is None else terms.counted(batch[1], local)
        exchange.shares.take(period, batch, local)
        if terms is not None:
            terms.take(period, counted, local)

    def forget(self, period: int) -> None:
        self.given.pop(period, None)
        if self.terms is not None:
            self.terms.forget(period)

    @contextmanager
    def kept(self, period: int, batch: Any) -> Iterator[None]:
        self.add(period, batch)
        try:
            yield
        finally:
            self.forget(period)

    def arguments(self, exchange: Exchange, number: int, micro: Micro) -> tuple[list[Any], Any, list[Any]]:
        """The leaves that a stage takes, their structure, and how tiles cut them."""
        if number:
            return exchange.arguments(number, micro)
        stage, rows = self.stages[0], exchange.given(0, micro)
        arguments = on_device(self._arguments(self._cut(exchange, 0, micro, rows)), stage.device)
        leaves, self._spec = flattened(arguments, self._spec)
        tiled = stage.tiled.get(micro[0])
        if tiled is None:
            return leaves, self._spec, [None] * len(leaves)
        leaves, cuts = tiled.scatter(leaves)
        return leaves, self._spec, cuts

    def head(self, exchange: Exchange, number: int, micro: Micro, count: Loss | None = None) -> Head | None:
        """What the last stage does with its outputs. ``count``: to call instead of the loss."""
        if number + 1 < self.layout.stages:
            return None
        mine = self._cut(exchange, 1, micro, exchange.given(number, micro))
        first = exchange.place(number, self.rank, micro[0])[1] == 0
        weight = 0.0 if count is not None else self._weight(exchange, number, micro)
        return Head(on_device(mine, self.stages[number].device), weight, first, count)

    def _cut(self, exchange: Exchange, which: int, micro: Micro, rows: Range) -> Any:
        """These rows of the inputs (0) or targets (1)."""
        return cut(self.given[micro[1]][which], rows, exchange.shares[micro[1]].passed)

    def _weight(self, exchange: Exchange, number: int, micro: Micro) -> float:
        """The factor that makes this rank's loss of a micro-batch its part of the step's mean."""
        if self.terms is not None:
            return 1 / self.terms[micro[1]]
        low, high = exchange.rows(number, self.rank, micro)
        return (high - low) / exchange.shares[micro[1]].rows


def checked_pair(batch: Any) -> Any:
    """The batch, if it is inputs and targets; None stands for what nobody reads here."""
    if batch is None:
        return None, None
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return tree_map(_as_dict, tuple(batch))
    what = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
    raise ValueError(
        f"a batch is a pair (inputs, targets), and this one is {what}; several inputs are a tuple or a dict"
        " in it: ((x, mask), y)"
    )


def _as_dict(leaf: Any) -> Any:
    """A mapping of a class that pytrees do not know, such as UserDict, as a dict."""
    return tree_map(_as_dict, dict(leaf)) if isinstance(leaf, Mapping) else leaf


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def tellers(layout: Layout) -> list[int]:
    """The ranks that tell the loss: of each range of rows of the last stage, the first tile."""
    last = layout.stages - 1
    found = [ranks[:: layout.tile_count(last)] for ranks in (layout.ranks[last], *layout.mirror[last:])]
    return list(dict.fromkeys(rank for ranks in found for rank in ranks))
