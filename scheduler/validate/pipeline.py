"""The validator's rules for programs with stages.

Every action of a period once; messages received in the order in which they are sent; collectives of a group
in one order; a backward sees the version of its forward, and a forward only versions that exist; RS before
STEP before AG before the first forward of the new version; versions, activations and bytes within what the
layout declares; nothing waits for itself; prologue and epilogue are the kernel's ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from scheduler.ir.actions import COLLECTIVE, RECVS, SENDS, Action, Kind
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, Program
from scheduler.ir.unroll import sections
from scheduler.ir.weight_versions import live
from scheduler.pipelines.passes.steps import GRADIENTS, position
from scheduler.pipelines.passes.traffic import RECV_LANE
from scheduler.simulate.lower_pipeline import lower_pipeline
from scheduler.simulate.pipeline_memory import peak_memory
from scheduler.validate.engine import Place, Problem
from scheduler.validate.pipeline_completeness import layout_of, layout_rules, once, placed, problem


def versions(program: Program, _: Profile | None) -> Iterator[Problem]:
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
                    yield problem(
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
                yield problem(
                    "version",
                    f"{action} of rank {place[0]} and {known} of rank {where[0]} feed one step with gradients"
                    " of two versions",
                    place,
                    where,
                )


def order(program: Program, _: Profile | None) -> Iterator[Problem]:
    """The gradient before STEP, STEP before the forwards that use its version; RS before AG."""
    for rank, lanes in enumerate(program.kernel):
        compute, link = lanes[COMPUTE_LANE], lanes[LINK_LANE]
        steps = {action.stage: place for place, action in enumerate(compute) if action.kind is Kind.STEP}
        for place, action in enumerate(compute):
            step = steps.get(action.stage, place)
            here, there = (rank, COMPUTE_LANE, place), (rank, COMPUTE_LANE, step)
            if action.kind in GRADIENTS and position(compute, place) > position(compute, step):
                yield problem("order", f"{compute[step]} stands before {action}, which it needs", here, there)
            if action.kind is Kind.F:
                made = position(compute, step, (action.version or 0) - 1)
                if made > position(compute, place):
                    yield problem(
                        "order",
                        f"{action} uses a version that {compute[step]} makes only later; its version must be"
                        f" at most {_newest(compute, place, step)}",
                        here,
                        there,
                    )
        reduced = {action.index: place for place, action in enumerate(link) if action.kind is Kind.RS}
        for place, action in enumerate(link):
            rs = reduced.get(action.index)
            if action.kind is Kind.AG and rs is not None and position(link, rs) > position(link, place):
                yield problem(
                    "order",
                    f"{action} stands before {link[rs]} and gathers what is not reduced yet",
                    (rank, LINK_LANE, place),
                    (rank, LINK_LANE, rs),
                )


def _newest(compute: tuple[Action, ...], place: int, step: int) -> int:
    """The newest version, relative to its period, that the forward at ``place`` can have."""
    return (position(compute, place) - position(compute, step)) // len(compute) + 1


def messages(program: Program, _: Profile | None) -> Iterator[Problem]:
    """From one rank to another, messages arrive in the order in which they are sent."""
    layout = layout_of(program)
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
                yield problem(
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
    """What a message carries: output or input gradient, of which stage and micro-batch."""
    assert action.stage is not None
    layout, backward = layout_of(program), action.kind in (Kind.SENDB, Kind.RECVB)
    if action.index >= layout.microbatches:
        return backward, action.stage // layout.positions, action.index
    received = {Kind.RECVF: -1, Kind.RECVB: 1}.get(action.kind, 0)
    return backward, action.stage + received, action.index


def one_order(program: Program, _: Profile | None) -> Iterator[Problem]:
    """The members of a group do their collectives in one order."""
    layout = layout_of(program)
    for members in sorted(set(layout.ranks)):
        queues = {
            rank: [(place, a) for place, a in placed(program, rank, LINK_LANE) if a.kind in COLLECTIVE]
            for rank in members
        }
        for rank in members[1:]:
            for (where, one), (place, other) in zip(queues[members[0]], queues[rank], strict=False):
                if one != other:
                    yield problem(
                        "one order",
                        f"rank {members[0]} does {one} where rank {rank} does {other}; a group must have one"
                        " order of collectives",
                        where,
                        place,
                    )
                    break


def deadlock(program: Program, profile: Profile | None) -> Iterator[Problem]:
    """Nothing waits for itself."""
    if profile is None:
        profile = Profile("any", tuple(Layer(str(layer), 0.0, 0.0, 0) for layer in range(program.layers)))
    try:
        graph = lower_pipeline(program, profile, Link(0.0, 0.0))
    except ValueError as error:
        yield Problem("deadlock", str(error))
        return
    stuck = [graph.tasks[task] for task in graph.stuck()]
    if stuck:
        some = ", ".join(sorted({f"{task.action} of rank {task.rank}" for task in stuck})[:8])
        known = {(task.rank, task.lane, task.action) for task in stuck}
        places = [
            place
            for rank in range(len(program.kernel))
            for place, action in placed(program, rank)
            if (*place[:2], action) in known
        ]
        yield problem(
            "deadlock", f"{len(places)} actions wait for each other and can never run: {some}", *places
        )


def memory(program: Program, profile: Profile | None) -> Iterator[Problem]:
    """Versions, activations and bytes stay within what the layout declares."""
    layout = layout_of(program)
    versions, activations = live(program)
    for what, found, declared in (
        ("weight versions", versions, layout.versions),
        ("micro-batches' activations", activations, layout.activations),
    ):
        for stage, (needs, allowed) in enumerate(zip(found, declared, strict=True)):
            if needs > allowed:
                yield Problem("memory", f"stage {stage} keeps {needs} {what} at once, {allowed} are declared")
    if profile is not None and layout.memory is not None:
        for rank, (needs, allowed) in enumerate(
            zip(peak_memory(program, profile), layout.memory, strict=True)
        ):
            if needs > allowed:
                yield Problem("memory", f"rank {rank} needs {needs} bytes, {allowed} are declared")


def ends(program: Program, _: Profile | None) -> Iterator[Problem]:
    """Prologue and epilogue are the kernel's iterations at the ends of a run."""
    for name, stated, made in zip(
        ("prologue", "epilogue"), (program.prologue, program.epilogue), sections(program.kernel), strict=True
    ):
        if len(stated) != len(made):
            yield Problem("ends", f"the {name} has {len(stated)} ranks, the kernel needs {len(made)}")
            continue
        for rank, (has, needs) in enumerate(zip(stated, made, strict=True)):
            for lane, wanted in needs.items():
                actions = has.get(lane, ())
                for number in range(max(len(actions), len(wanted))):
                    one, other = actions[number : number + 1], wanted[number : number + 1]
                    if one != other:
                        yield Problem(
                            "ends",
                            f"action {number} of lane {lane!r} in rank {rank}'s {name} is"
                            f" {one[0] if one else 'missing'}; the kernel makes it"
                            f" {other[0] if other else 'end before'}",
                        )
                        break


RULES = ((layout_rules,), (once,), (versions, order, messages, one_order), (deadlock,), (ends,), (memory,))
"""In groups: rules that need a broken one to be kept are not looked at."""
