"""Lower a program to a task graph: durations, and which task waits for which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from scheduler.ir.actions import (
    COLLECTIVE,
    HALOS,
    SENDS,
    SENT_AS,
    TRANSFER,
    Action,
    Kind,
    first_forward,
    last_gradient,
    peer_of,
    stage_of,
)
from scheduler.ir.layout import far_stage
from scheduler.ir.link import Links, Occupancy, named_link
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE, Lanes, Program, buckets_of
from scheduler.simulate.costs import SEND_LANE, Durations, Wires
from scheduler.simulate.task_graph import (
    COMPUTE,
    EVERY_RANK,
    HIDDEN_LANE,
    LINK,
    OTHER,
    GraphBuilder,
    Task,
    TaskGraph,
)

# -- a data-parallel step ------------------------------------------------------------------------------------

#     F(l), B(l)      wait for the layer before them; B of the last layer for its F
#     RS(b), AR(b)    wait for the backward of every layer with bytes in bucket b
#     AG(b)           waits for RS(b); with gather="parameters" also for the update of b and, without
#                     early_step, for the whole backward
#     F(l) (next)     waits for the AG or AR of every bucket with bytes of layer l, or of one needed by it
#
# A collective that uses the link inside the host, too (``Link.times``), is a chain of tasks: RS inside and
# then on the link, AG on the link and then inside, AR both. Others wait for the last task of the chain.
#
# Where a program does not list its updates, they run in the compute lane before the first forward that needs
# them (``gather="gradients"``), or in a lane of their own, in the order of the RS, on ``1 / ranks`` of the
# bytes (``gather="parameters"``).

UPDATE_LANE = "update"

_BY_LAYER = {Kind.F, Kind.B}

Key = tuple[Kind, int]


class ActionTasks(NamedTuple):
    """The tasks of one action: on the link inside the host, in the action's lane, inside the host again. All
    are the one in the action's lane where it does not use the link inside the host.
    """

    first: int
    main: int
    last: int


def lower_data_parallel(program: Program, profile: Profile, link: Links, ranks: int = 1) -> TaskGraph:
    """Return the task graph of ``ranks`` ranks that all do a data-parallel step."""
    lowering = _DataParallelLowering(program, profile, link)
    for rank in range(ranks):
        lowering.add_rank(rank)
    return lowering.graph.build()


class _DataParallelLowering:
    def __init__(self, program: Program, profile: Profile, link: Links) -> None:
        self.program, self.profile, self.link = program, profile, link
        self.graph = GraphBuilder()
        self.shared: dict[Key, ActionTasks] = {}  # collectives: tasks of all ranks

    def add_rank(self, rank: int) -> None:
        own: dict[Key, ActionTasks] = {}
        for lane, actions in _with_updates(self.program, self.profile, self.program.lanes(rank)).items():
            chains = [self._place(rank, lane, action, own) for action in actions]
            self.graph.lane([chain.main for chain in chains])
            self.graph.lane(inside_order(actions, chains))
        self._depend(own)

    def _place(self, rank: int, lane: str, action: Action, own: dict[Key, ActionTasks]) -> ActionTasks:
        """Add an action's tasks to ``own``; the first rank that has a collective adds it for all."""
        key, collective = (action.kind, action.index), action.kind in COLLECTIVE
        if key in own:
            raise ValueError(f"{action} stands twice in the kernel of rank {rank}; one action, one place")
        if key in self.shared:
            own[key] = self.shared[key]
            return own[key]
        resource = LINK if collective else COMPUTE if lane == COMPUTE_LANE else OTHER
        beside = "inside" if lane == LINK_LANE else f"{lane} inside"
        before, seconds, after = self._seconds(action, lane)
        task, add = Task(action, lane, EVERY_RANK if collective else rank), self.graph.task
        main = add(task, seconds, resource)
        own[key] = ActionTasks(
            add(replace(task, lane=beside), before, resource) if before else main,
            main,
            add(replace(task, lane=beside), after, resource) if after else main,
        )
        for first, second in pairwise(own[key]):
            if first != second:
                self.graph.edge(first, second)
        if collective:
            self.shared[key] = own[key]
        return own[key]

    def _seconds(self, action: Action, lane: str) -> Occupancy:
        kind, index, program = action.kind, action.index, self.program
        if kind not in COLLECTIVE | _BY_LAYER | {Kind.UPDATE} or action.stage is not None:
            raise ValueError(f"{action} in lane {lane!r} is no action of a data-parallel program")
        limit, what = (program.layers, "layers") if kind in _BY_LAYER else (len(program.buckets), "buckets")
        if index >= limit:
            raise ValueError(f"{action} in lane {lane!r}: the program has {limit} {what}")
        if kind in COLLECTIVE:
            return named_link(self.link, lane).times(kind, program.buckets[index].bytes)
        if kind is Kind.UPDATE:
            share = program.ranks if program.gather == "parameters" else 1
            return Occupancy(0.0, self.profile.update_per_byte * program.buckets[index].bytes / share, 0.0)
        layer = self.profile.layers[index]
        return Occupancy(0.0, layer.forward if kind is Kind.F else layer.backward, 0.0)

    def _depend(self, own: dict[Key, ActionTasks]) -> None:
        """Add the edges between one rank's tasks that come from what they read and write."""

        def wait(after: Key, before: Key, lag: int = 0) -> None:
            if after in own and before in own:
                self.graph.edge(own[before].last, own[after].first, lag)

        for layer in range(self.program.layers):
            wait((Kind.F, layer), (Kind.F, layer - 1))
            wait((Kind.B, layer), (Kind.B, layer + 1))
        wait((Kind.B, self.program.layers - 1), (Kind.F, self.program.layers - 1))
        sharded = self.program.gather == "parameters"
        # Compute runs in the order of its lane, so waiting for the last backward waits for all of them.
        backward = [key for key in own if key[0] is Kind.B]
        for number, bucket in enumerate(self.program.buckets):
            rs, ag, ar, update = ((kind, number) for kind in (Kind.RS, Kind.AG, Kind.AR, Kind.UPDATE))
            for layer in bucket.layers:
                wait(rs, (Kind.B, layer))
                wait(ar, (Kind.B, layer))
            wait(ag, rs)
            if sharded:
                wait(update, rs)
                wait(ag, update)
                if not self.program.early_step and backward:
                    wait(update, backward[-1])
                    wait(ag, backward[-1])
            else:
                wait(update, ag)
                wait(update, ar)
            for layer in bucket.layers:
                for last in (ag, ar) if sharded else (ag, ar, update):
                    wait((Kind.F, self.profile.needed[layer]), last, lag=1)


def inside_order(actions: Sequence[Action], chains: Sequence[ActionTasks]) -> list[int]:
    """The tasks on the link inside the host, in the order of the collectives, except that an RS or AR goes
    there ahead of the AG before it::

        link        RS0   AG0   RS1   AG1
        inside   RS0   RS1   AG0      ...  AG1      the host sums bucket 1 while AG0 is on the link

    Else the link would idle after each AG until that is handed on inside and the next bucket is summed. The
    forward that the AG serves comes after the backward that the RS waits for, so nothing waits in a circle;
    an AG of an earlier iteration than the RS keeps its place.
    """
    order: list[int] = []
    handed_on, shift = list[int](), 0  # what is still to be placed of the collective before
    for action, (first, main, last) in zip(actions, chains, strict=True):
        summed = [first] if first != main else []
        order += summed + handed_on if action.shift == shift else handed_on + summed
        handed_on, shift = [last] if last != main else [], action.shift
    return order + handed_on


def _with_updates(program: Program, profile: Profile, lanes: Lanes) -> dict[str, tuple[Action, ...]]:
    """The lanes with updates added where the program lists none (see the top of this file)."""
    stated = any(action.kind is Kind.UPDATE for actions in lanes.values() for action in actions)
    if stated or profile.update_per_byte == 0:
        return dict(lanes)
    collectives = [action for actions in lanes.values() for action in actions if action.kind in COLLECTIVE]
    if program.gather == "parameters":
        reduces = [action for action in collectives if action.kind is Kind.RS]
        return {**lanes, UPDATE_LANE: tuple(Action(Kind.UPDATE, a.index, shift=a.shift) for a in reduces)}
    due: dict[int, list[int]] = {}
    for action in collectives:
        if action.kind is not Kind.RS and action.index < len(program.buckets):
            layers = program.buckets[action.index].layers
            due.setdefault(min(profile.needed[layer] for layer in layers), []).append(action.index)
    compute: list[Action] = []
    for action in lanes.get(COMPUTE_LANE, ()):
        if action.kind is Kind.F:
            compute += [Action(Kind.UPDATE, b, shift=action.shift - 1) for b in due.get(action.index, ())]
        compute.append(action)
    return {**lanes, COMPUTE_LANE: tuple(compute)}


# -- a pipeline program --------------------------------------------------------------------------------------

#     F        waits for its inputs (RECVF, or F of the stage before on the same rank) and for the STEP of its
#              version; with a sharded step for the AGs, bucket by bucket unless they are placed ``eager``
#     B        waits for F, and for RECVB (or B of the next stage on the same rank); W for B
#     SEND     waits for what it sends; RECV for the SEND of the peer
#     RS, AR   wait for the stage's gradient of every micro-batch, in the last backward only for their part
#     STEP     waits for all RS or AR of the stage, or for its gradient where there are no replicas
#     AG       waits for the STEP
#     HALO     what a micro-batch's interiors do not hide of its halos: waits for what F waits for and for the
#              computation before F, and F waits for it; HALOB waits for B, and so does SENDB for HALOB
#
# A collective or halo is a task of each member; they begin together, once all that any of them waits for is
# done.

Name = tuple[int, Kind, int, int, int]
"""Rank, kind, stage, index and peer (-1 for none): every action of a kernel has a name of its own."""


def lower_pipeline(
    program: Program, profile: Profile, link: Wires, handling: Sequence[float] = ()
) -> TaskGraph:
    """The task graph of all ranks of a program with stages. ``handling``: seconds that each rank needs for an
    action of its compute lane beside the computation itself.
    """
    lowering = _PipelineLowering(program, profile, link, handling)
    lowering.place()
    lowering.depend()
    return lowering.graph.build()


class _PipelineLowering:
    def __init__(self, program: Program, profile: Profile, link: Wires, handling: Sequence[float]) -> None:
        self.program, self.layout = program, program.layout
        self.durations, self.wires = Durations(program, profile, link), link
        self.handling = handling or (0.0,) * program.ranks
        self.graph = GraphBuilder()
        # An action's tasks, one after the other: the parts of a backward that fills several buckets, or of a
        # forward that waits for them; one for everything else.
        self.nodes: dict[Name, tuple[int, ...]] = {}
        self.meetings: dict[tuple[Kind, int, int, int], int] = {}
        self.buckets = buckets_of(program)

    # Tasks

    def place(self) -> None:
        for rank, lanes in enumerate(self.program.kernel):
            order = lanes[COMPUTE_LANE]
            held = [stage for stage in self.layout.held_by(rank) if any(a.stage == stage for a in order)]
            filling = {last_gradient(order, stage) for stage in held}
            waiting = {first_forward(order, stage) for stage in held}
            for lane, actions in lanes.items():
                for place, action in enumerate(actions):
                    in_parts = lane == COMPUTE_LANE and place in (filling | waiting)
                    self._add(rank, lane, action, self._weights(action) if in_parts else [1.0])

    def _weights(self, action: Action) -> list[float]:
        """How a backward divides among its buckets, in the order in which it fills them; a forward needs them
        the other way round.
        """
        stage, eager = stage_of(action), self.layout.placement == "eager" and action.kind is Kind.F
        if len(self.layout.members(stage)) == 1 or eager or self.layout.reduction == "masters":
            return [1.0]
        sizes = [self.program.buckets[bucket].bytes for bucket in self.buckets[stage]]
        total = sum(sizes)
        weights = [size / total for size in sizes] or [1.0]
        return weights[::-1] if action.kind is Kind.F else weights

    def _add(self, rank: int, lane: str, action: Action, weights: list[float]) -> None:
        name = _name(rank, action)
        if name in self.nodes:
            raise ValueError(f"{action} stands twice in the kernel of rank {rank}; one action, one place")
        seconds = self.durations.seconds(rank, action)
        resource = {COMPUTE_LANE: COMPUTE, LINK_LANE: LINK}.get(lane, OTHER)
        task = Task(action, lane, rank)
        beside = self.handling[rank] / len(weights) if lane == COMPUTE_LANE else 0.0
        parts = tuple(self.graph.task(task, seconds * weight + beside, resource) for weight in weights)
        self.nodes[name] = parts
        key = self._meeting(rank, action)
        if key is not None:
            if key not in self.meetings:
                self.meetings[key] = self.graph.task(Task(action, HIDDEN_LANE, rank), 0.0, OTHER)
            self.graph.edges.add((self.meetings[key], parts[0], 0))

    def _meeting(self, rank: int, action: Action) -> tuple[Kind, int, int, int] | None:
        """The key that the members of a collective share, or the tiles that exchange halos."""
        stage = stage_of(action)
        if action.kind in HALOS:
            return action.kind, stage, action.index, self.layout.place(stage, rank, action.index)[0]
        return (action.kind, stage, action.index, 0) if action.kind in COLLECTIVE else None

    # Edges

    def depend(self) -> None:
        for rank, lanes in enumerate(self.program.kernel):
            for lane, actions in lanes.items():
                for queue in self._queues(lane, actions):
                    self._in_turn(rank, queue)
                for action in actions:
                    self._waits(rank, action)

    def _queues(self, lane: str, actions: tuple[Action, ...]) -> Iterable[list[Action]]:
        """The actions of a lane that keep each other waiting: those on one wire, receives from one peer."""
        if lane == RECV_LANE:
            for peer in {action.peer for action in actions}:
                yield [action for action in actions if action.peer == peer]
        elif lane == LINK_LANE:
            apart = SENDS if isinstance(self.wires, Mapping) and SEND_LANE in self.wires else frozenset()
            # Halos pass everything else that waits for the link.
            yield [action for action in actions if action.kind in HALOS]
            yield [action for action in actions if action.kind in apart]
            yield [action for action in actions if action.kind not in HALOS | apart]
        else:
            yield list(actions)

    def _in_turn(self, rank: int, queue: list[Action]) -> None:
        for number, action in enumerate(queue):
            parts = self.nodes[_name(rank, action)]
            for before, after in zip(parts, parts[1:], strict=False):
                self.graph.edges.add((before, after, 0))
            following = queue[(number + 1) % len(queue)]
            wraps = int(number + 1 == len(queue))
            self.graph.edges.add((parts[-1], self._entry(rank, following), wraps))

    def _entry(self, rank: int, action: Action, part: int = 0) -> int:
        """The task that waits when this action waits: where all members meet, if it is a collective."""
        key = self._meeting(rank, action)
        if key is not None:
            return self.meetings[key]
        return self.nodes[_name(rank, action)][part]

    def _wait(
        self, rank: int, action: Action, before: Name, lag: int = 0, part: int = 0, before_part: int = -1
    ) -> None:
        if before in self.nodes:
            source = self.nodes[before][before_part]
            self.graph.edge(source, self._entry(rank, action, part), lag)

    def _waits(self, rank: int, action: Action) -> None:
        stage, index = stage_of(action), action.index
        if action.kind is Kind.F:
            self._inputs(rank, action, Kind.RECVF, (rank, Kind.F, stage - 1, index, -1))
            self._weights_ready(rank, action)
            self._wait(rank, action, (rank, Kind.HALO, stage, index, -1))
        elif action.kind is Kind.HALO:
            self._inputs(rank, action, Kind.RECVF, (rank, Kind.F, stage - 1, index, -1))
            self._computed_before(rank, action)
        elif action.kind is Kind.HALOB:
            self._wait(rank, action, (rank, Kind.B, stage, index, -1))
        elif action.kind is Kind.B:
            self._wait(rank, action, (rank, Kind.F, stage, index, -1))
            self._inputs(rank, action, Kind.RECVB, (rank, Kind.B, stage + 1, index, -1))
        elif action.kind is Kind.W:
            self._wait(rank, action, (rank, Kind.B, stage, index, -1))
        elif action.kind in TRANSFER:
            self._wait(rank, action, self._sent(rank, action))
            if action.kind is Kind.SENDB:
                self._wait(rank, action, (rank, Kind.HALOB, stage, index, -1))
        elif action.kind is Kind.STEP:
            self._wait(rank, action, self._last_gradient(rank, stage))
            for bucket in self.buckets[stage]:
                for kind in (Kind.RS, Kind.AR):
                    self._wait(rank, action, (rank, kind, stage, bucket, -1))
        elif action.kind is Kind.AG:
            self._wait(rank, action, (rank, Kind.STEP, stage, -1, -1))
        else:
            self._gradient_ready(rank, action)

    def _inputs(self, rank: int, action: Action, received: Kind, local: Name) -> None:
        self._wait(rank, action, local)
        other = stage_of(action) + (-1 if received is Kind.RECVF else 1)
        if 0 <= other < self.layout.stages:
            for peer in self.layout.overlaps(stage_of(action), rank, other, action.index):
                self._wait(rank, action, (rank, received, stage_of(action), action.index, peer))

    def _computed_before(self, rank: int, halo: Action) -> None:
        """A halo waits for the rank to come to the forward that it belongs to."""
        order = self.program.kernel[rank][COMPUTE_LANE]
        wanted = (Kind.F, halo.stage, halo.index)
        at = next((n for n, a in enumerate(order) if (a.kind, a.stage, a.index) == wanted), 0)
        before = self.nodes[_name(rank, order[at - 1])][-1]
        # Behind the same queue as the forward itself: one iteration later if that is the first.
        self.graph.edges.add((before, self._entry(rank, halo), int(at == 0)))

    def _weights_ready(self, rank: int, action: Action) -> None:
        stage, lag = stage_of(action), 1 - (action.version or 0)
        self._wait(rank, action, (rank, Kind.STEP, stage, -1, -1), lag)
        parts = len(self.nodes[_name(rank, action)])
        for number, bucket in enumerate(reversed(self.buckets[stage])):
            part = number if parts > 1 else 0
            self._wait(rank, action, (rank, Kind.AG, stage, bucket, -1), lag, part)

    def _sent(self, rank: int, action: Action) -> Name:
        """The computation whose result a send sends, or the send that a receive takes up."""
        if action.kind in SENT_AS:
            return peer_of(action), SENT_AS[action.kind], far_stage(action), action.index, rank
        kind = Kind.F if action.kind is Kind.SENDF else Kind.B
        return rank, kind, stage_of(action), action.index, -1

    def _gradient_ready(self, rank: int, action: Action) -> None:
        stage = stage_of(action)
        number = list(self.buckets[stage]).index(action.index) if action.index in self.buckets[stage] else 0
        name = self._last_gradient(rank, stage)
        parts = len(self.nodes[name])
        self._wait(rank, action, name, before_part=number if parts > 1 else -1)

    def _last_gradient(self, rank: int, stage: int) -> Name:
        """The action that completes a stage's gradient, the last of those that add to it."""
        order = self.program.kernel[rank][COMPUTE_LANE]
        return _name(rank, order[last_gradient(order, stage)])


def _name(rank: int, action: Action) -> Name:
    peer = -1 if action.peer is None else action.peer
    return rank, action.kind, stage_of(action), action.index, peer
