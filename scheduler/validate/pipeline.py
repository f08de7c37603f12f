"""The rules of programs with stages.

Every action of a period once; messages received in the order in which they are sent; collectives of a group
in one order; a backward sees the version of its forward, and a forward only versions that exist; RS before
STEP before AG before the first forward of the new version; versions, activations and bytes within what the
layout declares; nothing waits for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from scheduler.ir.actions import COLLECTIVE, COMPUTE, HALOS, RECVS, SENDS, Action, Kind
from scheduler.ir.endless_order import GRADIENTS, position
from scheduler.ir.layout import Layout, stages_in
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE, Program, buckets_of
from scheduler.ir.weight_versions import live
from scheduler.simulate.memory import memory_by_rank
from scheduler.validate.common import cover, deadlock, model, once, one_order, reduce_before_gather
from scheduler.validate.engine import Place, RuleSet, Violation, placed, violation

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
    """What a rank does in one period."""
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


def versions(program: Program, _: Profile | None) -> Iterator[Violation]:
    """A backward sees its forward's version; a period's micro-batches and a stage's replicas one version."""
    first: dict[int, tuple[Action, Place]] = {}
    for rank in range(len(program.kernel)):
        compute = [
            (place, action)
            for place, action in placed(program, rank, COMPUTE_LANE)
            if action.stage is not None
        ]
        forwards = {
            (action.stage, action.index): (place, action)
            for place, action in compute
            if action.kind is Kind.F
        }
        for place, action in compute:
            if action.kind in GRADIENTS:
                where, forward = forwards[action.stage, action.index]
                if (forward.version or 0) != (action.version or 0):
                    yield violation(
                        "version",
                        f"{action} sees other weights than its forward {forward}: a backward must see the"
                        " version of its forward",
                        place,
                        where,
                    )
        for place, action in forwards.values():
            assert action.stage is not None
            known, where = first.setdefault(action.stage, (action, place))
            if (known.version or 0) != (action.version or 0):
                yield violation(
                    "version",
                    f"{action} of rank {place[0]} and {known} of rank {where[0]} feed one step with gradients"
                    " of two versions",
                    place,
                    where,
                )


def order(program: Program, _: Profile | None) -> Iterator[Violation]:
    """The gradient before STEP, STEP before the forwards that use its version; RS before AG."""
    for rank, lanes in enumerate(program.kernel):
        compute = lanes[COMPUTE_LANE]
        steps = {action.stage: place for place, action in enumerate(compute) if action.kind is Kind.STEP}
        for place, action in enumerate(compute):
            step = steps.get(action.stage, place)
            here, there = (rank, COMPUTE_LANE, place), (rank, COMPUTE_LANE, step)
            if action.kind in GRADIENTS and position(compute, place) > position(compute, step):
                message = f"{compute[step]} stands before {action}, which it needs"
                yield violation("order", message, here, there)
            if action.kind is Kind.F:
                made = position(compute, step, (action.version or 0) - 1)
                if made > position(compute, place):
                    yield violation(
                        "order",
                        f"{action} uses a version that {compute[step]} makes only later; its version must be"
                        f" at most {_newest(compute, place, step)}",
                        here,
                        there,
                    )


def _newest(compute: tuple[Action, ...], place: int, step: int) -> int:
    """The newest version, relative to its period, that the forward at ``place`` can have."""
    return (position(compute, place) - position(compute, step)) // len(compute) + 1


def messages(program: Program, _: Profile | None) -> Iterator[Violation]:
    """From one rank to another, messages arrive in the order in which they are sent."""
    layout = program.layout
    for sender in range(layout.world):
        for receiver in range(layout.world):
            sent = _queue(program, sender, receiver, LINK_LANE, SENDS)
            received = _queue(program, receiver, sender, RECV_LANE, RECVS)
            # Endless queues are equal if each message stands as far behind its twin as the others do.
            behind = [there[0] - here[0] for here, there in zip(sent, received, strict=True)]
            usual = Counter(behind).most_common(1)[0][0] if behind else 0
            odd = [number for number, gap in enumerate(behind) if gap != usual]
            if odd:
                (one, at), (other, there) = sent[odd[0]][1:], received[odd[0]][1:]
                yield violation(
                    "messages",
                    f"rank {sender} sends {one} in another order than rank {receiver} receives {other}; a"
                    " wire delivers messages in the order in which they are sent",
                    at,
                    there,
                )


def _queue(
    program: Program, rank: int, peer: int, lane: str, kinds: frozenset[Kind]
) -> list[tuple[int, Action, Place]]:
    """The messages between two ranks with their position in the endless queue, in one order at both ends."""
    queue = [(place, a) for place, a in placed(program, rank, lane) if a.kind in kinds and a.peer == peer]
    found = [
        (number - action.shift * len(queue), action, place) for number, (place, action) in enumerate(queue)
    ]
    return sorted(found, key=lambda item: _content(program, item[1]))


def _content(program: Program, action: Action) -> tuple[bool, int, int]:
    """The content of a message: output or input gradient, of which stage and micro-batch."""
    assert action.stage is not None
    layout, backward = program.layout, action.kind in (Kind.SENDB, Kind.RECVB)
    if action.index >= layout.microbatches:
        return backward, action.stage // layout.positions, action.index
    received = {Kind.RECVF: -1, Kind.RECVB: 1}.get(action.kind, 0)
    return backward, action.stage + received, action.index


def memory(program: Program, profile: Profile | None) -> Iterator[Violation]:
    """Versions, activations and bytes stay within what the layout declares."""
    layout = program.layout
    versions, activations = live(program)
    for what, found, declared in (
        ("weight versions", versions, layout.versions),
        ("micro-batches' activations", activations, layout.activations),
    ):
        for stage, (needs, allowed) in enumerate(zip(found, declared, strict=True)):
            if needs > allowed:
                yield Violation(
                    "memory", f"stage {stage} keeps {needs} {what} at once, {allowed} are declared"
                )
    if profile is not None and layout.memory is not None:
        for rank, (needs, allowed) in enumerate(
            zip(memory_by_rank(program, profile), layout.memory, strict=True)
        ):
            if needs > allowed:
                yield Violation("memory", f"rank {rank} needs {needs} bytes, {allowed} are declared")


def _groups(program: Program) -> list[tuple[Sequence[int], frozenset[int]]]:
    """Ranks that hold the same stages, and these."""
    stages: dict[tuple[int, ...], set[int]] = {}
    for stage in range(program.layout.stages):
        stages.setdefault(program.layout.members(stage), set()).add(stage)
    return [(ranks, frozenset(held)) for ranks, held in sorted(stages.items())]


RULES: RuleSet = (
    (cover, model),
    (fits_layout,),
    (once(wanted, lanes=LANES),),
    (versions, order, reduce_before_gather, messages, one_order(_groups)),
    (deadlock,),
    (memory,),
)
