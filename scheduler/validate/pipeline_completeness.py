"""Completeness: a period of a program with stages does everything that belongs to it, once."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.ir.actions import COLLECTIVE, COMPUTE, RECVS, SENDS, Action, Kind
from scheduler.ir.layout import Layout
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, Program
from scheduler.pipelines.passes.traffic import RECV_LANE
from scheduler.simulate.lower_pipeline import buckets_of, stages_in
from scheduler.validate.engine import Place, Problem

_LANES = {COMPUTE_LANE: COMPUTE | {Kind.STEP}, LINK_LANE: SENDS | COLLECTIVE, RECV_LANE: RECVS}


def layout_rules(program: Program, profile: Profile | None) -> Iterator[Problem]:
    """Ranks, stages and buckets fit together."""
    layout = layout_of(program)
    if program.ranks != layout.world or len(program.kernel) != layout.world:
        yield Problem(
            "layout",
            f"the layout has {layout.world} ranks, the program {program.ranks}"
            f" with {len(program.kernel)} kernels",
        )
    if layout.cuts[-1] >= program.layers:
        yield Problem(
            "layout", f"the last stage starts at layer {layout.cuts[-1]} of {program.layers} layers"
        )
        return
    for number, bucket in enumerate(program.buckets):
        if len(stages_in(layout, bucket.layers, program.layers)) > 1:
            yield Problem("layout", f"bucket {number} holds layers of several stages: {bucket.layers}")


def once(program: Program, _: Profile | None) -> Iterator[Problem]:
    """A period does everything that belongs to it once, in the right lane, and nothing else."""
    for rank in range(len(program.kernel)):
        places: dict[Action, list[Place]] = {}
        for place, action in placed(program, rank):
            places.setdefault(bare(action), []).append(place)
            if action.kind not in _LANES.get(place[1], frozenset()):
                yield problem("once", f"{action} does not belong in lane {place[1]!r}", place)
        wanted = _wanted(program, rank)
        for action in sorted(wanted - set(places), key=str):
            yield Problem("once", f"rank {rank} never does {action}; every period needs it once")
        for action, where in places.items():
            if action not in wanted:
                yield problem("once", f"{action} does not belong to rank {rank} of this program", *where)
            elif len(where) > 1:
                yield problem("once", f"{action} stands {len(where)} times; a period does it once", *where)


def _wanted(program: Program, rank: int) -> set[Action]:
    layout, buckets = layout_of(program), buckets_of(program)
    present = {action.stage for _, action in placed(program, rank) if action.kind is Kind.W}
    wanted: set[Action] = set()
    for stage in layout.held_by(rank):
        kinds = [Kind.F, Kind.B, Kind.W] if stage in present else [Kind.F, Kind.B]
        for index in range(layout.microbatches):
            wanted |= {Action(kind, index, stage) for kind in kinds}
            wanted |= set(_messages(layout, rank, stage, index))
        wanted.add(Action(Kind.STEP, stage=stage))
        if layout.replicas(stage) > 1:
            reduce = (Kind.RS, Kind.AG) if layout.reduction == "scatter" else (Kind.AR,)
            wanted |= {Action(kind, bucket, stage) for kind in reduce for bucket in buckets[stage]}
        wanted |= set(_tokens(layout, rank, stage))
    return wanted


def _messages(layout: Layout, rank: int, stage: int, index: int) -> Iterator[Action]:
    for other, sent, received in (
        (stage + 1, Kind.SENDF, Kind.RECVB),
        (stage - 1, Kind.SENDB, Kind.RECVF),
    ):
        if 0 <= other < layout.stages:
            for peer in layout.overlaps(stage, rank, other):
                if peer != rank:
                    yield Action(sent, index, stage, peer=peer)
                    yield Action(received, index, stage, peer=peer)


def _tokens(layout: Layout, rank: int, stage: int) -> Iterator[Action]:
    if layout.placement != "aligned":
        return
    group, place = divmod(stage, layout.positions)
    index, first = layout.microbatches + group, group * layout.positions
    if place and layout.replicas(stage) > 1:
        yield Action(Kind.RECVF, index, stage, peer=layout.ranks[first][0])
    elif not place and layout.ranks[stage][0] == rank:
        for other in range(first + 1, first + layout.positions):
            if layout.replicas(other) > 1:
                for peer in layout.ranks[other]:
                    yield Action(Kind.SENDF, index, stage, peer=peer)


def bare(action: Action) -> Action:
    """What an action does, whatever its version and period."""
    return Action(action.kind, action.index, action.stage, peer=action.peer)


def layout_of(program: Program) -> Layout:
    assert program.pipeline is not None
    return program.pipeline


def placed(program: Program, rank: int, only: str | None = None) -> Iterator[tuple[Place, Action]]:
    for lane, actions in program.kernel[rank].items():
        if only is None or lane == only:
            for number, action in enumerate(actions):
                yield (rank, lane, number), action


def problem(rule: str, message: str, *places: Place) -> Problem:
    return Problem(rule, message, frozenset(places))
