"""From a pipeline program to a task graph: who waits for whom.

    F        waits for its inputs (RECVF, or F of the stage before on the same rank) and for the STEP of its
             version; with a sharded step for the AGs, bucket by bucket unless they are placed ``eager``
    B        waits for F, and for RECVB (or B of the next stage on the same rank); W for B
    SEND     waits for what it sends; RECV for the SEND of the peer
    RS, AR   wait for the stage's gradient of every micro-batch, in the last backward only for their part;
             ``aligned``: also for the message that the group's first stage is done
    STEP     waits for all RS or AR of the stage, or for its gradient where there are no replicas
    AG       waits for the STEP
    HALO     what a micro-batch's interiors do not hide of its halos: waits for what F waits for and for the
             computation before F, and F waits for it; HALOB waits for B, and so does SENDB for HALOB

A collective or halo is a task of each member; they begin together, once all that any of them waits for is
done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scheduler.ir.actions import COLLECTIVE, HALOS, SENDS, TRANSFER, Action, Kind
from scheduler.ir.endless_order import first_forward, last_gradient
from scheduler.ir.layout import is_token
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE, Program, buckets_of
from scheduler.simulate.durations import SEND_LANE, Durations, Wires, stage_of
from scheduler.simulate.task_graph import COMPUTE, HIDDEN_LANE, LINK, OTHER, GraphBuilder, Task, TaskGraph

Name = tuple[int, Kind, int, int, int]
"""Rank, kind, stage, index and peer (-1 for none): every action of a kernel has a name of its own."""


def lower_pipeline(
    program: Program, profile: Profile, link: Wires, handling: Sequence[float] = ()
) -> TaskGraph:
    """The task graph of all ranks of a program with stages. ``handling``: seconds that each rank needs for an
    action of its compute lane beside the computation itself.
    """
    lowering = _Lowering(program, profile, link, handling)
    lowering.place()
    lowering.depend()
    return lowering.graph.build()


class _Lowering:
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
        assert action.stage is not None
        eager = self.layout.placement == "eager" and action.kind is Kind.F
        if len(self.layout.members(action.stage)) == 1 or eager or self.layout.reduction == "masters":
            return [1.0]
        sizes = [self.program.buckets[bucket].bytes for bucket in self.buckets[action.stage]]
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
        stage, peer = stage_of(action), action.peer
        assert peer is not None
        if is_token(action, self.layout) and action.kind in SENDS:
            return self._last_gradient(rank, stage)
        if action.kind in SENDS:
            return (rank, Kind.F if action.kind is Kind.SENDF else Kind.B, stage, action.index, -1)
        if is_token(action, self.layout):
            first = stage // self.layout.positions * self.layout.positions
            return (peer, Kind.SENDF, first, action.index, rank)
        if action.kind is Kind.RECVF:
            return (peer, Kind.SENDF, stage - 1, action.index, rank)
        return (peer, Kind.SENDB, stage + 1, action.index, rank)

    def _gradient_ready(self, rank: int, action: Action) -> None:
        stage = stage_of(action)
        number = list(self.buckets[stage]).index(action.index) if action.index in self.buckets[stage] else 0
        name = self._last_gradient(rank, stage)
        parts = len(self.nodes[name])
        self._wait(rank, action, name, before_part=number if parts > 1 else -1)
        token = self.layout.microbatches + stage // self.layout.positions
        for peer in self.layout.ranks[stage // self.layout.positions * self.layout.positions]:
            self._wait(rank, action, (rank, Kind.RECVF, stage, token, peer))

    def _last_gradient(self, rank: int, stage: int) -> Name:
        """The action that completes a stage's gradient, the last of those that add to it."""
        order = self.program.kernel[rank][COMPUTE_LANE]
        return _name(rank, order[last_gradient(order, stage)])


def _name(rank: int, action: Action) -> Name:
    peer = -1 if action.peer is None else action.peer
    return rank, action.kind, stage_of(action), action.index, peer
