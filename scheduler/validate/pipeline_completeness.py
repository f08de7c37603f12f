"""The actions of one period of a program with stages: each stands once, in its lane."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.ir.actions import COLLECTIVE, COMPUTE, HALOS, RECVS, SENDS, Action, Kind
from scheduler.ir.layout import Layout, stages_in
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE, Program, buckets_of
from scheduler.validate.engine import Violation, placed

LANES = {COMPUTE_LANE: COMPUTE | {Kind.STEP}, LINK_LANE: SENDS | COLLECTIVE | HALOS, RECV_LANE: RECVS}


def fits_layout(program: Program, profile: Profile | None) -> Iterator[Violation]:
    """Ranks, stages and buckets fit together."""
    layout = program.layout
    if program.ranks != layout.world or len(program.kernel) != layout.world:
        yield Violation(
            "layout",
            f"the layout has {layout.world} ranks, the program {program.ranks}"
            f" with {len(program.kernel)} kernels",
        )
    if layout.cuts[-1] >= program.layers:
        yield Violation(
            "layout", f"the last stage starts at layer {layout.cuts[-1]} of {program.layers} layers"
        )
        return
    for number, bucket in enumerate(program.buckets):
        if len(stages_in(layout, bucket.layers, program.layers)) > 1:
            yield Violation("layout", f"bucket {number} holds layers of several stages: {bucket.layers}")


def wanted(program: Program, rank: int) -> set[Action]:
    layout, buckets = program.layout, buckets_of(program)
    present = {action.stage for _, action in placed(program, rank) if action.kind is Kind.W}
    wanted: set[Action] = set()
    for stage in layout.held_by(rank):
        kinds = [Kind.F, Kind.B, Kind.W] if stage in present else [Kind.F, Kind.B]
        if layout.tile_count(stage) > 1:
            kinds += HALOS
        for index in layout.computed_by(rank, stage):
            wanted |= {Action(kind, index, stage) for kind in kinds}
            wanted |= set(_messages(layout, rank, stage, index))
        wanted.add(Action(Kind.STEP, stage=stage))
        if len(layout.members(stage)) > 1:
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
            for peer in layout.overlaps(stage, rank, other, index):
                if peer != rank:
                    yield Action(sent, index, stage, peer=peer)
                    yield Action(received, index, stage, peer=peer)


def _tokens(layout: Layout, rank: int, stage: int) -> Iterator[Action]:
    if layout.placement != "aligned":
        return
    group, place = divmod(stage, layout.positions)
    index, first = layout.microbatches + group, group * layout.positions
    if place and len(layout.members(stage)) > 1:
        yield Action(Kind.RECVF, index, stage, peer=layout.ranks[first][0])
    elif not place and layout.ranks[stage][0] == rank:
        for other in range(first + 1, first + layout.positions):
            if len(layout.members(other)) > 1:
                for peer in layout.ranks[other]:
                    yield Action(Kind.SENDF, index, stage, peer=peer)
