"""Lower a data-parallel program to a task graph: durations and dependencies.

    F(l), B(l)      wait for the layer before them; B of the last layer for its F
    RS(b), AR(b)    wait for the backward of every layer with bytes in bucket b (its W, where that is apart)
    AG(b)           waits for RS(b); with gather="parameters" also for the update of b and, without
                    early_step, for the whole backward
    F(l) (next)     waits for the AG or AR of every bucket with bytes of layer l, or of one needed by it

On tiles, F(l) is two tasks: its interior, and its border, which also waits for HALO(l). In B(l) the border
comes first; HALOB(l) follows it, the interior hides HALOB(l), and B(l-1) waits for both.

Where a program does not list its updates, they run in the compute lane before the first forward that needs
them (``gather="gradients"``), or in a lane of their own, in the order of the RS, on ``1 / ranks`` of the
bytes (``gather="parameters"``).
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.ir.actions import COLLECTIVE, HALOS, Action, Kind, traffic_class
from scheduler.ir.link import Links, named_link
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, Lanes, Program
from scheduler.simulate.durations import HALO_LANE
from scheduler.simulate.task_graph import COMPUTE, EVERY_RANK, LINK, OTHER, GraphBuilder, Task, TaskGraph

UPDATE_LANE = "update"

_MESSAGES = COLLECTIVE | HALOS
_BY_LAYER = HALOS | {Kind.F, Kind.B, Kind.W}

Key = tuple[Kind, int]


def lower_data_parallel(
    program: Program, profile: Profile, link: Links, ranks: int = 1, *, ordered: bool = True
) -> TaskGraph:
    """Return the task graph of ``ranks`` ranks that all do a data-parallel step.

    Without ``ordered`` all messages that the step needs compete for the link by their traffic class.
    """
    return _Lowering(program, profile, link).run(ranks, ordered)


def halo_actions(program: Program) -> list[Action]:
    """Return the halo exchanges that the borders of a program need."""
    borders = [(layer, border) for layer, border in enumerate(program.borders) if border is not None]
    forward = [Action(Kind.HALO, layer) for layer, border in borders if border.forward]
    return forward + [Action(Kind.HALOB, layer) for layer, border in borders if border.backward]


class _Lowering:
    def __init__(self, program: Program, profile: Profile, link: Links) -> None:
        self.program, self.profile, self.link = program, profile, link
        self.graph = GraphBuilder()
        self.shared: dict[Key, tuple[int, ...]] = {}
        compute = program.lanes().get(COMPUTE_LANE, ())
        self.split = {action.index for action in compute if action.kind is Kind.W}

    def run(self, ranks: int, ordered: bool) -> TaskGraph:
        for rank in range(ranks):
            lanes = _with_updates(self.program, self.profile, self.program.lanes(rank))
            own: dict[Key, tuple[int, ...]] = {}
            for lane, actions in lanes.items():
                tasks = [task for action in actions for task in self._place(rank, lane, action, own)]
                self.graph.lane(tasks)
            if not ordered:
                buckets = range(len(self.program.buckets))
                collectives = [Action(kind, b) for kind in (Kind.RS, Kind.AG) for b in buckets]
                for action in [*halo_actions(self.program), *collectives]:
                    self._place(rank, LINK_LANE, action, own, (0,), traffic_class(action))
            self._depend(own)
        return self.graph.build()

    def _place(
        self,
        rank: int,
        lane: str,
        action: Action,
        own: dict[Key, tuple[int, ...]],
        servers: Sequence[int] = (),
        urgency: int = 0,
    ) -> tuple[int, ...]:
        """Add an action's tasks to ``own``; the first rank that has a message adds it for all."""
        key, message = (action.kind, action.index), action.kind in _MESSAGES
        if key in own:
            raise ValueError(f"{action} stands twice in the kernel of rank {rank}; one action, one place")
        if key in self.shared:
            own[key] = self.shared[key]
            return own[key]
        task = Task(action, lane, EVERY_RANK if message else rank)
        resource = LINK if message else COMPUTE if lane == COMPUTE_LANE else OTHER
        parts = self._seconds(action, lane)
        own[key] = tuple(self.graph.task(task, part, resource, servers, urgency) for part in parts)
        if message:
            self.shared[key] = own[key]
        return own[key]

    def _seconds(self, action: Action, lane: str) -> tuple[float, ...]:
        """Return the seconds of an action's tasks: two for the compute of a layer that has a border."""
        kind, index, program = action.kind, action.index, self.program
        if kind not in _MESSAGES | _BY_LAYER | {Kind.UPDATE} or action.stage is not None:
            raise ValueError(f"{action} in lane {lane!r} is no action of a data-parallel program")
        limit, what = (program.layers, "layers") if kind in _BY_LAYER else (len(program.buckets), "buckets")
        if index >= limit:
            raise ValueError(f"{action} in lane {lane!r}: the program has {limit} {what}")
        if kind in COLLECTIVE:
            return (named_link(self.link, lane).cost(kind, program.buckets[index].bytes),)
        if kind is Kind.UPDATE:
            share = program.ranks if program.gather == "parameters" else 1
            return (self.profile.update_per_byte * program.buckets[index].bytes / share,)
        layer, border = self.profile.layers[index], program.borders[index] if program.borders else None
        if kind in HALOS:
            if border is None:
                raise ValueError(f"{action}: layer {index} has no border")
            size = border.forward if kind is Kind.HALO else border.backward
            return (named_link(self.link, HALO_LANE, LINK_LANE).cost(kind, size),)
        if kind is Kind.W:
            return (layer.weight_backward,)
        if kind is Kind.F:
            seconds = layer.forward
            return (seconds,) if border is None else (seconds * (1 - border.share), seconds * border.share)
        seconds = layer.backward - (layer.weight_backward if index in self.split else 0.0)
        return (seconds,) if border is None else (seconds * border.share, seconds * (1 - border.share))

    def _depend(self, own: dict[Key, tuple[int, ...]]) -> None:
        """Add the edges between one rank's tasks that come from what they read and write."""

        def wait(after: Key, before: Key, lag: int = 0, part: int = 0, before_part: int = -1) -> None:
            if after in own and before in own:
                self.graph.edge(own[before][before_part], own[after][part], lag)

        for layer in range(self.program.layers):
            wait((Kind.F, layer), (Kind.F, layer - 1))
            wait((Kind.B, layer), (Kind.B, layer + 1))
            wait((Kind.W, layer), (Kind.B, layer + 1))
            wait((Kind.F, layer), (Kind.HALO, layer), part=-1)
            wait((Kind.HALO, layer), (Kind.F, layer - 1))
            wait((Kind.HALOB, layer), (Kind.B, layer), before_part=0)
            wait((Kind.B, layer - 1), (Kind.HALOB, layer))
        wait((Kind.HALO, 0), (Kind.B, 0), lag=1)
        wait((Kind.B, self.program.layers - 1), (Kind.F, self.program.layers - 1))
        sharded = self.program.gather == "parameters"
        # Compute runs in the order of its lane, so waiting for the last backward waits for all of them.
        backward = [key for key in own if key[0] in (Kind.B, Kind.W)]
        for number, bucket in enumerate(self.program.buckets):
            rs, ag, ar, update = ((kind, number) for kind in (Kind.RS, Kind.AG, Kind.AR, Kind.UPDATE))
            for layer in bucket.layers:
                gradient = (Kind.W, layer) if (Kind.W, layer) in own else (Kind.B, layer)
                wait(rs, gradient)
                wait(ar, gradient)
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
