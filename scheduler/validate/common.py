"""Rules of every kind of program: it is for this model, does everything once, reduces before it gathers, has
one order of collectives, and nothing waits for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from scheduler.ir.actions import COLLECTIVE, Action, Kind
from scheduler.ir.buckets import check_cover
from scheduler.ir.endless_order import position
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program
from scheduler.simulate.simulator import lower
from scheduler.simulate.task_graph import EVERY_RANK
from scheduler.validate.engine import Place, Rule, Violation, placed, violation


def model(program: Program, profile: Profile | None) -> Iterator[Violation]:
    """The program is for a model of these layers."""
    if profile is not None and program.layers != len(profile.layers):
        yield Violation(
            "model",
            f"the plan is for a model of {program.layers} layers, profile {profile.name!r} has"
            f" {len(profile.layers)}",
        )


def cover(program: Program, profile: Profile | None) -> Iterator[Violation]:
    """Every gradient byte stands in one bucket, and a bucket holds layers of one group."""
    groups = None if profile is None else [layer.group for layer in profile.layers]
    if profile is None:
        reached = Counter[int]()
        for bucket in program.buckets:
            for piece in bucket.pieces:
                reached[piece.layer] = max(reached[piece.layer], piece.stop)
        sizes = [reached[layer] for layer in range(program.layers)]
    else:
        sizes = list(profile.sizes)
    if len(sizes) != program.layers:
        return
    try:
        check_cover(program.buckets, sizes, groups)
    except ValueError as error:
        yield Violation("cover", str(error))


def once(
    wanted: Callable[[Program, int], set[Action]],
    allowed: Callable[[Program, int], set[Action]] = lambda program, rank: set(),
    lanes: Mapping[str, frozenset[Kind]] | None = None,
) -> Rule:
    """A rule: each rank does every ``wanted`` action once, each ``allowed`` action at most once, and no
    other; ``lanes`` names the lane of each kind of action.
    """

    def rule(program: Program, _: Profile | None) -> Iterator[Violation]:
        for rank in range(len(program.kernel)):
            places: dict[Action, list[Place]] = {}
            for place, action in placed(program, rank):
                places.setdefault(bare(action), []).append(place)
                if lanes is not None and action.kind not in lanes.get(place[1], frozenset()):
                    yield violation("once", f"{action} does not belong in lane {place[1]!r}", place)
            needed = wanted(program, rank)
            known = needed | allowed(program, rank)
            for action in sorted(needed - set(places), key=str):
                yield Violation("once", f"rank {rank} never does {action}; every period needs it once")
            for action, where in places.items():
                if action not in known:
                    message = f"{action} does not belong to rank {rank} of this program"
                    yield violation("once", message, *where)
                elif len(where) > 1:
                    yield violation(
                        "once", f"{action} stands {len(where)} times; a period does it once", *where
                    )

    return rule


def bare(action: Action) -> Action:
    """The action without its version and period."""
    return Action(action.kind, action.index, action.stage, peer=action.peer)


def reduce_before_gather(program: Program, _: Profile | None) -> Iterator[Violation]:
    """RS before AG of the same bucket, in each lane."""
    for rank, lanes in enumerate(program.kernel):
        for lane, order in lanes.items():
            reduced = {action.index: place for place, action in enumerate(order) if action.kind is Kind.RS}
            for place, action in enumerate(order):
                rs = reduced.get(action.index)
                if action.kind is Kind.AG and rs is not None and position(order, rs) > position(order, place):
                    yield violation(
                        "order",
                        f"{action} stands before {order[rs]} and gathers what is not reduced yet",
                        (rank, lane, place),
                        (rank, lane, rs),
                    )


Group = tuple[Sequence[int], frozenset[int] | None]
"""Ranks, and the stages whose collectives they share (None: all)."""


def one_order(groups: Callable[[Program], Iterable[Group]]) -> Rule:
    """A rule: the ranks of each group run their collectives in the same order, lane by lane."""

    def rule(program: Program, _: Profile | None) -> Iterator[Violation]:
        for (first, *others), stages in groups(program):
            for rank in others:
                for lane in {**program.kernel[first], **program.kernel[rank]}:
                    yield from _same_order(program, lane, first, rank, stages)

    return rule


def _same_order(
    program: Program, lane: str, first: int, rank: int, stages: frozenset[int] | None
) -> Iterator[Violation]:
    theirs, mine = (_collectives(program, each, lane, stages) for each in (first, rank))
    for number, ((where, one), (place, other)) in enumerate(zip(theirs, mine, strict=False)):
        if one != other:
            yield violation(
                "one order",
                f"collective {number} of lane {lane!r} is {one} on rank {first} and {other} on rank {rank};"
                " the ranks of a group must have one order",
                where,
                place,
            )
            return
    if len(mine) != len(theirs):
        yield Violation(
            "one order",
            f"lane {lane!r} has {len(theirs)} collectives on rank {first}, {len(mine)} on rank {rank}",
        )


def _collectives(
    program: Program, rank: int, lane: str, stages: frozenset[int] | None
) -> list[tuple[Place, Action]]:
    return [
        (place, action)
        for place, action in placed(program, rank, lane)
        if action.kind in COLLECTIVE and (stages is None or action.stage in stages)
    ]


def deadlock(program: Program, profile: Profile | None) -> Iterator[Violation]:
    """No action waits for itself, directly or through others."""
    if profile is None:
        profile = Profile("any", tuple(Layer(str(layer), 0.0, 0.0, 0) for layer in range(program.layers)))
    try:
        graph = lower(program, profile, Link(0.0, 0.0), len(program.kernel))
    except ValueError as error:
        yield Violation("deadlock", str(error))
        return
    stuck = {graph.tasks[task] for task in graph.stuck()}
    if not stuck:
        return
    waiting = {(task.rank, task.lane, task.action) for task in stuck}
    places = [
        place
        for rank in range(len(program.kernel))
        for place, action in placed(program, rank)
        if not waiting.isdisjoint({(rank, place[1], action), (EVERY_RANK, place[1], action)})
    ]
    some = ", ".join(sorted(map(str, stuck))[:8])
    yield violation(
        "deadlock", f"{len(places)} actions wait for each other and can never run: {some}", *places
    )
