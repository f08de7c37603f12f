"""Lower a data-parallel program to a task graph: durations and dependencies.

    F(l), B(l)      wait for the layer before them; B of the last layer for its F
    RS(b), AR(b)    wait for the backward of every layer with bytes in bucket b
    AG(b)           waits for RS(b); with gather="parameters" also for the update of b and, without
                    early_step, for the whole backward
    F(l) (next)     waits for the AG or AR of every bucket with bytes of layer l, or of one needed by it

Where a program does not list its updates, they run in the compute lane before the first forward that needs
them (``gather="gradients"``), or in a lane of their own, in the order of the RS, on ``1 / ranks`` of the
bytes (``gather="parameters"``).
"""

from __future__ import annotations

from scheduler.ir.actions import COLLECTIVE, Action, Kind
from scheduler.ir.link import Links, named_link
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, Lanes, Program
from scheduler.simulate.task_graph import COMPUTE, EVERY_RANK, LINK, OTHER, GraphBuilder, Task, TaskGraph

UPDATE_LANE = "update"

_BY_LAYER = {Kind.F, Kind.B}

Key = tuple[Kind, int]


def lower_data_parallel(program: Program, profile: Profile, link: Links, ranks: int = 1) -> TaskGraph:
    """Return the task graph of ``ranks`` ranks that all do a data-parallel step."""
    lowering = _Lowering(program, profile, link)
    for rank in range(ranks):
        lowering.add_rank(rank)
    return lowering.graph.build()


class _Lowering:
    def __init__(self, program: Program, profile: Profile, link: Links) -> None:
        self.program, self.profile, self.link = program, profile, link
        self.graph = GraphBuilder()
        self.shared: dict[Key, int] = {}  # collectives: one task of all ranks

    def add_rank(self, rank: int) -> None:
        own: dict[Key, int] = {}
        for lane, actions in _with_updates(self.program, self.profile, self.program.lanes(rank)).items():
            self.graph.lane([self._place(rank, lane, action, own) for action in actions])
        self._depend(own)

    def _place(self, rank: int, lane: str, action: Action, own: dict[Key, int]) -> int:
        """Add an action's task to ``own``; the first rank that has a collective adds it for all."""
        key, collective = (action.kind, action.index), action.kind in COLLECTIVE
        if key in own:
            raise ValueError(f"{action} stands twice in the kernel of rank {rank}; one action, one place")
        if key in self.shared:
            own[key] = self.shared[key]
            return own[key]
        task = Task(action, lane, EVERY_RANK if collective else rank)
        resource = LINK if collective else COMPUTE if lane == COMPUTE_LANE else OTHER
        own[key] = self.graph.task(task, self._seconds(action, lane), resource)
        if collective:
            self.shared[key] = own[key]
        return own[key]

    def _seconds(self, action: Action, lane: str) -> float:
        kind, index, program = action.kind, action.index, self.program
        if kind not in COLLECTIVE | _BY_LAYER | {Kind.UPDATE} or action.stage is not None:
            raise ValueError(f"{action} in lane {lane!r} is no action of a data-parallel program")
        limit, what = (program.layers, "layers") if kind in _BY_LAYER else (len(program.buckets), "buckets")
        if index >= limit:
            raise ValueError(f"{action} in lane {lane!r}: the program has {limit} {what}")
        if kind in COLLECTIVE:
            return named_link(self.link, lane).cost(kind, program.buckets[index].bytes)
        if kind is Kind.UPDATE:
            share = program.ranks if program.gather == "parameters" else 1
            return self.profile.update_per_byte * program.buckets[index].bytes / share
        layer = self.profile.layers[index]
        return layer.forward if kind is Kind.F else layer.backward

    def _depend(self, own: dict[Key, int]) -> None:
        """Add the edges between one rank's tasks that come from what they read and write."""

        def wait(after: Key, before: Key, lag: int = 0) -> None:
            if after in own and before in own:
                self.graph.edge(own[before], own[after], lag)

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
