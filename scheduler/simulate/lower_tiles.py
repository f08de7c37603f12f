"""Lower a step on tiles to a task graph: the tasks of one rank, which all ranks share.

F(l)      its interior waits for the layer before it, its border also for HALO(l)
B(l)      its border comes first, HALOB(l) follows it; its interior hides HALOB(l)
RS, AG    as in data-parallel steps
"""

from __future__ import annotations

from scheduler.ir.actions import HALOS, Action, Kind, traffic_class
from scheduler.ir.link import Links, named_link
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, Program
from scheduler.simulate.durations import HALO_LANE
from scheduler.simulate.task_graph import COMPUTE, LINK, GraphBuilder, Task, TaskGraph

Name = tuple[Kind, int]


def halo_actions(program: Program) -> list[Action]:
    """The halo exchanges that the borders of a program need."""
    borders = [(layer, border) for layer, border in enumerate(program.borders) if border is not None]
    forward = [Action(Kind.HALO, layer) for layer, border in borders if border.forward]
    return forward + [Action(Kind.HALOB, layer) for layer, border in borders if border.backward]


def lower_tiles(program: Program, profile: Profile, link: Links, *, ordered: bool = True) -> TaskGraph:
    """The task graph of a program with borders. Without ``ordered`` its messages compete for the link by
    their traffic class, whatever its link lane says.
    """
    return _Lowering(program, profile, link).build(ordered)


class _Lowering:
    def __init__(self, program: Program, profile: Profile, link: Links) -> None:
        self.program, self.profile, self.link = program, profile, link
        self.graph = GraphBuilder()
        self.first: dict[Name, int] = {}
        self.last: dict[Name, int] = {}

    def build(self, ordered: bool) -> TaskGraph:
        compute = self._place_compute()
        messages = self.program.link if ordered else self._all_messages()
        for action in messages:
            servers, urgency = ((), 0) if ordered else ((0,), traffic_class(action))
            task = Task(action, LINK_LANE)
            number = self.graph.task(task, self._seconds(action), LINK, servers, urgency)
            self.first[action.kind, action.index] = self.last[action.kind, action.index] = number
        self._depend()
        self.graph.lane(compute)
        if ordered:
            self.graph.lane([self.first[action.kind, action.index] for action in messages])
        return self.graph.build()

    def _all_messages(self) -> list[Action]:
        buckets = range(len(self.program.buckets))
        return halo_actions(self.program) + [Action(kind, b) for kind in (Kind.RS, Kind.AG) for b in buckets]

    def _seconds(self, action: Action) -> float:
        if action.kind not in HALOS:
            size: float = self.program.buckets[action.index].bytes
            return named_link(self.link, LINK_LANE).cost(action.kind, size)
        border = self.program.borders[action.index]
        if border is None:
            raise ValueError(f"{action}: layer {action.index} has no border")
        size = border.forward if action.kind is Kind.HALO else border.backward
        return named_link(self.link, HALO_LANE, LINK_LANE).cost(action.kind, size)

    def _place_compute(self) -> list[int]:
        """Adds two tasks for each forward (interior, border) and each backward (border, interior)."""
        numbers = []
        for action in self.program.lanes().get(COMPUTE_LANE, ()):
            times, border = self.profile.layers[action.index], self.program.borders[action.index]
            share = 0.0 if border is None else border.share
            if action.kind is Kind.F:
                seconds, shares = times.forward, (1 - share, share)
            else:
                seconds, shares = times.backward, (share, 1 - share)
            task = Task(action, COMPUTE_LANE, 0)
            pair = [self.graph.task(task, seconds * part, COMPUTE) for part in shares]
            self.first[action.kind, action.index], self.last[action.kind, action.index] = pair
            numbers += pair
        return numbers

    def _depend(self) -> None:
        first, last = self.first, self.last
        for layer in range(self.program.layers):
            if layer:
                self._wait(first, (Kind.F, layer), (Kind.F, layer - 1))
                self._wait(first, (Kind.B, layer - 1), (Kind.B, layer))
                self._wait(first, (Kind.HALO, layer), (Kind.F, layer - 1))
                self._wait(first, (Kind.B, layer - 1), (Kind.HALOB, layer))
            else:
                self._wait(first, (Kind.HALO, 0), (Kind.B, 0), lag=1)
            self._wait(last, (Kind.F, layer), (Kind.HALO, layer))
            if (Kind.HALOB, layer) in first and (Kind.B, layer) in first:
                self.graph.edge(first[Kind.B, layer], first[Kind.HALOB, layer])
        self._wait(first, (Kind.B, self.program.layers - 1), (Kind.F, self.program.layers - 1))
        for number, bucket in enumerate(self.program.buckets):
            self._wait(first, (Kind.AG, number), (Kind.RS, number))
            for layer in bucket.layers:
                self._wait(first, (Kind.RS, number), (Kind.B, layer))
                self._wait(first, (Kind.F, layer), (Kind.AG, number), lag=1)

    def _wait(self, tasks: dict[Name, int], after: Name, before: Name, lag: int = 0) -> None:
        """Let the first or last task of ``after`` wait for the last task of ``before``, if both exist."""
        if after in tasks and before in self.last:
            self.graph.edge(self.last[before], tasks[after], lag)
