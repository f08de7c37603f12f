"""A step on tiles: halos between the layers, gradients in chunks, one link for both.

    program = plan_spatial(profile, borders, link, longest_wait=2e-3)
    simulate_spatial(program, profile, borders, link).period
    predict(profile, borders, link).hidden      # the part of the halo time that interiors hide

``profile`` holds the seconds of one tile, ``borders[l]`` what layer l exchanges (None: nothing).

    F(l)      its interior waits for the layer before it, its border also for HALO(l)
    B(l)      its border comes first, HALOB(l) follows it; its interior hides HALOB(l)
    RS, AG    as in data-parallel steps, in buckets small enough for halos to slip in between
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.ir.actions import Action, Kind
from scheduler.ir.buckets import ALIGNMENT, Bucket, fuse_by_bytes
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, Program
from scheduler.pipelines.passes.traffic_priority import largest_chunk, urgent_first
from scheduler.simulate.simulator import Result, run
from scheduler.simulate.task_graph import COMPUTE, LINK, GraphBuilder, Task, TaskGraph


@dataclass(frozen=True)
class Border:
    """What a tile exchanges for one layer: bytes before its forward and after its backward, and the ``share``
    of the layer's work (0 to 1) that needs them or makes them.
    """

    forward: float
    backward: float
    share: float

    def __post_init__(self) -> None:
        if not (self.forward >= 0 and self.backward >= 0 and 0 <= self.share <= 1):
            raise ValueError(f"a border has bytes of at least 0 and a share from 0 to 1, got {self}")


Borders = Sequence[Border | None]


def plan_spatial(
    profile: Profile,
    borders: Borders,
    link: Link,
    *,
    wire: Link | None = None,
    ranks: int = 2,
    longest_wait: float = 2e-3,
) -> Program:
    """Halos first, then gradients, in chunks that hold a halo up for ``longest_wait`` seconds at most.

    ``link`` is what RS and AG cost, ``wire`` what a halo's message costs (default: the same).
    """
    chunk = largest_chunk(link, longest_wait)
    # A bucket is closed by the part that fills it, which is cut a little late.
    half = max(chunk / 2 - ALIGNMENT, 1.0)
    buckets = fuse_by_bytes(profile.sizes, half, part=half) if profile.total_bytes else ()
    graph = _Graph(profile, borders, buckets, link, wire or link)
    order = urgent_first(graph.build())
    layers = range(len(profile.layers))
    compute = [Action(Kind.F, layer) for layer in layers] + [Action(Kind.B, layer) for layer in layers[::-1]]
    return Program(
        policy="spatial",
        buckets=buckets,
        kernel=({COMPUTE_LANE: tuple(compute), LINK_LANE: order},),
        layers=len(profile.layers),
        ranks=ranks,
    )


def simulate_spatial(
    program: Program, profile: Profile, borders: Borders, link: Link, *, wire: Link | None = None
) -> Result:
    """Runs a program with halos: its link does what the program lists, in that order."""
    graph = _Graph(profile, borders, program.buckets, link, wire or link)
    expected = sorted((a.kind.value, a.index) for a in graph.messages)
    given = sorted((a.kind.value, a.index) for a in program.link)
    if given != expected:
        missing = [f"{kind}{index}" for kind, index in expected if (kind, index) not in given]
        strange = [f"{kind}{index}" for kind, index in given if (kind, index) not in expected]
        raise ValueError(
            f"the program is not for these borders and buckets: it lacks {missing[:6]}, has {strange[:6]} too"
            " many, and does everything else once"
        )
    return run(graph.build(program.link))


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step: if halos took no time, with halos behind interiors, with halos waited for. And the
    layers whose interiors are too small to hide their halos, forward and backward.
    """

    without: float
    overlapped: float
    waiting: float
    exposed: tuple[Action, ...]

    @property
    def hidden(self) -> float:
        """The part of the halo time that interiors hide; 1 where there is nothing to hide."""
        halos = self.waiting - self.without
        return 1.0 if halos <= 1e-12 else 1.0 - (self.overlapped - self.without) / halos


def predict(
    profile: Profile, borders: Borders, link: Link, *, wire: Link | None = None, longest_wait: float = 2e-3
) -> Prediction:
    """Whether interiors are large enough to hide the halos, gradients on the same link included."""
    wire = wire or link

    def period(these: Borders) -> float:
        program = plan_spatial(profile, these, link, wire=wire, longest_wait=longest_wait)
        return simulate_spatial(program, profile, these, link, wire=wire).period

    waiting = [None if b is None else replace(b, share=1.0) for b in borders]
    exposed = []
    for layer, border in enumerate(borders):
        if border is None:
            continue
        times, interior = profile.layers[layer], 1 - border.share
        if border.forward and wire.cost(Kind.HALO, border.forward) > interior * times.forward:
            exposed.append(Action(Kind.HALO, layer))
        if border.backward and wire.cost(Kind.HALOB, border.backward) > interior * times.backward:
            exposed.append(Action(Kind.HALOB, layer))
    nothing = [None] * len(borders)
    return Prediction(period(nothing), period(borders), period(waiting), tuple(exposed))


class _Graph:
    """The tasks of one rank, which stands for all."""

    def __init__(
        self, profile: Profile, borders: Borders, buckets: Sequence[Bucket], link: Link, wire: Link
    ) -> None:
        if len(borders) != len(profile.layers):
            raise ValueError(
                f"borders need an entry (or None) for each of {len(profile.layers)} layers, got"
                f" {len(borders)}"
            )
        self.profile, self.borders, self.buckets, self.wire = profile, borders, buckets, wire
        self.messages: list[Action] = []
        for kind, name in ((Kind.HALO, "forward"), (Kind.HALOB, "backward")):
            sizes = [(layer, getattr(b, name)) for layer, b in enumerate(borders) if b is not None]
            self.messages += [Action(kind, layer) for layer, size in sizes if size]
        self.messages += [Action(k, b) for k in (Kind.RS, Kind.AG) for b in range(len(buckets))]
        self.link = link

    def build(self, order: Sequence[Action] = ()) -> TaskGraph:
        """The task graph; with an ``order`` of the link's messages, which carry their shifts."""
        graph = GraphBuilder()
        shifts = {(a.kind, a.index): a.shift for a in order}
        numbers = {
            (a.kind, a.index): graph.task(
                Task(replace(a, shift=shifts.get((a.kind, a.index), 0)), LINK_LANE), self._seconds(a), LINK
            )
            for a in self.messages
        }
        entry, leave, compute = self._place_compute(graph)
        self._depend(graph, numbers, entry, leave)
        graph.lane(compute)
        if order:
            graph.lane([numbers[a.kind, a.index] for a in order])
        return graph.build()

    def _seconds(self, action: Action) -> float:
        border = self.borders[action.index] if action.kind in (Kind.HALO, Kind.HALOB) else None
        if border is None:
            return self.link.cost(action.kind, self.buckets[action.index].bytes)
        return self.wire.cost(action.kind, border.forward if action.kind is Kind.HALO else border.backward)

    def _place_compute(
        self, graph: GraphBuilder
    ) -> tuple[dict[tuple[Kind, int], int], dict[tuple[Kind, int], int], list[int]]:
        """Two tasks for each forward and backward: the first and the last of each, and all in turn."""
        entry, leave, compute = {}, {}, []
        layers = range(len(self.profile.layers))
        for kind, layer in [(Kind.F, la) for la in layers] + [(Kind.B, la) for la in layers[::-1]]:
            times, border = self.profile.layers[layer], self.borders[layer]
            seconds = times.forward if kind is Kind.F else times.backward
            share = 0.0 if border is None else border.share
            shares = (1 - share, share) if kind is Kind.F else (share, 1 - share)
            task = Task(Action(kind, layer), COMPUTE_LANE, 0)
            pair = [graph.task(task, seconds * part, COMPUTE) for part in shares]
            entry[kind, layer], leave[kind, layer] = pair
            compute += pair
        return entry, leave, compute

    def _depend(
        self,
        graph: GraphBuilder,
        numbers: dict[tuple[Kind, int], int],
        entry: dict[tuple[Kind, int], int],
        leave: dict[tuple[Kind, int], int],
    ) -> None:
        for layer in range(len(self.profile.layers)):
            if (halo := numbers.get((Kind.HALO, layer))) is not None:
                before, lag = ((Kind.F, layer - 1), 0) if layer else ((Kind.B, 0), 1)
                graph.edge(leave[before], halo, lag)
                graph.edge(halo, leave[Kind.F, layer])
            if (halo := numbers.get((Kind.HALOB, layer))) is not None:
                graph.edge(entry[Kind.B, layer], halo)
                if layer:  # whose gradient is not whole before
                    graph.edge(halo, entry[Kind.B, layer - 1])
        for number, bucket in enumerate(self.buckets):
            rs, ag = numbers[Kind.RS, number], numbers[Kind.AG, number]
            graph.edge(rs, ag)
            for layer in bucket.layers:
                graph.edge(leave[Kind.B, layer], rs)
                graph.edge(ag, entry[Kind.F, layer], 1)
