"""Check whether all ranks can run a program for any number of iterations.

    validate(program, profile)        # raises InvalidProgram, a ValueError that shows the actions at fault
    violations(program, profile)      # the same as a list

One engine and, for each kind of program, a set of rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from scheduler.ir.actions import (
    COLLECTIVE,
    COMPUTE,
    GRADIENTS,
    HALOS,
    RECVS,
    SENDS,
    Action,
    Kind,
    position,
    stage_of,
)
from scheduler.ir.buckets import check_cover
from scheduler.ir.layout import Layout, far_stage, stages_in
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE, Program, buckets_of, live
from scheduler.simulate.costs import memory_by_rank
from scheduler.simulate.simulator import lower
from scheduler.simulate.task_graph import EVERY_RANK

__all__ = ["InvalidProgram", "Violation", "grid", "validate", "violations"]


MOST = 50  # violations that are shown: a damaged file can have as many as it says that it has layers


def validate(program: Program, profile: Profile | None = None) -> None:
    """Raise ``InvalidProgram`` if the program breaks a rule or, with a profile, is for another model."""
    broken = violations(program, profile)
    if broken:
        raise InvalidProgram(program, broken)


def violations(program: Program, profile: Profile | None = None) -> list[Violation]:
    """The first ``MOST`` violations of the first group of rules that the program breaks."""
    rules = DATA_PARALLEL_RULES if program.pipeline is None else PIPELINE_RULES
    for group in rules:
        found = ((name, *each) for name, rule in group for each in rule(program, profile))
        if broken := [Violation(name, what, frozenset(where)) for name, what, where in islice(found, MOST)]:
            return broken
    return []


# -- what rules are made of: violations, places in a kernel and their picture --------------------------------

Place = tuple[int, str, int]
"""Rank, lane and position of an action in a kernel."""

_AROUND = 4
_RANKS = 8


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: what is wrong, and where."""

    rule: str
    message: str
    places: frozenset[Place] = frozenset()


Broken = tuple[str, Sequence[Place]]
"""What is wrong, and where."""
Rule = Callable[[Program, Profile | None], Iterator[Broken]]
RuleSet = Sequence[Sequence[tuple[str, Rule]]]
"""Groups of rules. Rule groups after the first failing one are skipped, because their rules rely on it."""


class InvalidProgram(ValueError):
    """A program that breaks a rule. ``violations`` holds all that were found; the message shows them."""

    def __init__(self, program: Program, found: list[Violation]) -> None:
        self.violations = found
        shown = [f"{each.message}\n{grid(program, each.places)}" for each in found]
        super().__init__("\n".join(shown).rstrip())


def placed(program: Program, rank: int, only: str | None = None) -> Iterator[tuple[Place, Action]]:
    """The actions of a rank (or of one of its lanes) with their places."""
    for lane, actions in program.kernel[rank].items():
        if only is None or lane == only:
            for number, action in enumerate(actions):
                yield (rank, lane, number), action


def grid(program: Program, marked: Iterable[Place] = ()) -> str:
    """The kernel as a table with a row per rank and lane; marked actions are written ``>action<``.

    Long rows show only the part around their first mark; of many ranks, only those with marks are shown.
    """
    marks = set(marked)
    ranks = sorted({rank for rank, _, _ in marks}) or range(len(program.kernel))
    rows: list[tuple[str, str]] = []
    for rank in list(ranks)[:_RANKS]:
        for lane, actions in program.kernel[rank].items():
            here = [place[2] for place in marks if place[:2] == (rank, lane)]
            if here or not marks:
                rows.append((f"rank {rank} {lane}", _row(rank, lane, actions, marks, min(here, default=0))))
    width = max((len(head) for head, _ in rows), default=0)
    return "".join(f"  {head:<{width}} | {row}\n" for head, row in rows)


def _row(rank: int, lane: str, actions: tuple[Action, ...], marks: set[Place], centre: int) -> str:
    first, last = max(0, centre - _AROUND), min(len(actions), centre + 3 * _AROUND + 1)
    cells = ["..."] if first else []
    for place in range(first, last):
        text = str(actions[place])
        cells.append(f">{text}<" if (rank, lane, place) in marks else text)
    return " ".join([*cells, "..."] if last < len(actions) else cells)


# -- rules of every kind of program --------------------------------------------------------------------------


def model(program: Program, profile: Profile | None) -> Iterator[Broken]:
    """The program is for a model of these layers."""
    if profile is not None and program.layers != len(profile.layers):
        theirs = f"profile {profile.name!r} has {len(profile.layers)}"
        yield f"the plan is for a model of {program.layers} layers, {theirs}", ()


def cover(program: Program, profile: Profile | None) -> Iterator[Broken]:
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
        yield str(error), ()


def once(
    wanted: Callable[[Program, int], set[Action]],
    allowed: Callable[[Program, int], set[Action]] = lambda program, rank: set(),
    lanes: Mapping[str, frozenset[Kind]] | None = None,
) -> Rule:
    """A rule: each rank does every ``wanted`` action once, each ``allowed`` action at most once, and no
    other; ``lanes`` names the lane of each kind of action.
    """

    def rule(program: Program, _: Profile | None) -> Iterator[Broken]:
        for rank in range(len(program.kernel)):
            places: dict[Action, list[Place]] = {}  # of each action without its version and period
            for place, action in placed(program, rank):
                bare = Action(action.kind, action.index, action.stage, peer=action.peer)
                places.setdefault(bare, []).append(place)
                if lanes is not None and action.kind not in lanes.get(place[1], frozenset()):
                    yield f"{action} does not belong in lane {place[1]!r}", [place]
            needed = wanted(program, rank)
            known = needed | allowed(program, rank)
            for action in sorted(needed - set(places), key=str):
                yield f"rank {rank} never does {action}; every period needs it once", ()
            for action, where in places.items():
                if action not in known:
                    yield f"{action} does not belong to rank {rank} of this program", where
                elif len(where) > 1:
                    yield f"{action} stands {len(where)} times; a period does it once", where

    return rule


def reduce_before_gather(program: Program, _: Profile | None) -> Iterator[Broken]:
    """RS before AG of the same bucket, in each lane."""
    for rank, lanes in enumerate(program.kernel):
        for lane, order in lanes.items():
            reduced = {action.index: place for place, action in enumerate(order) if action.kind is Kind.RS}
            for place, action in enumerate(order):
                rs = reduced.get(action.index)
                if action.kind is Kind.AG and rs is not None and position(order, rs) > position(order, place):
                    message = f"{action} stands before {order[rs]} and gathers what is not reduced yet"
                    yield message, [(rank, lane, place), (rank, lane, rs)]


Group = tuple[Sequence[int], frozenset[int] | None]
"""Ranks, and the stages whose collectives they share (None: all)."""


def one_order(groups: Callable[[Program], Iterable[Group]]) -> Rule:
    """A rule: the ranks of each group run their collectives in the same order, lane by lane."""

    def rule(program: Program, _: Profile | None) -> Iterator[Broken]:
        for (first, *others), stages in groups(program):
            for rank in others:
                for lane in {**program.kernel[first], **program.kernel[rank]}:
                    yield from _same_order(program, lane, first, rank, stages)

    return rule


def _same_order(
    program: Program, lane: str, first: int, rank: int, stages: frozenset[int] | None
) -> Iterator[Broken]:
    theirs, mine = (_collectives(program, each, lane, stages) for each in (first, rank))
    for number, ((where, one), (place, other)) in enumerate(zip(theirs, mine, strict=False)):
        if one != other:
            which = f"is {one} on rank {first} and {other} on rank {rank}"
            must = "the ranks of a group must have one order"
            yield f"collective {number} of lane {lane!r} {which}; {must}", [where, place]
            return
    if len(mine) != len(theirs):
        counts = f"{len(theirs)} collectives on rank {first}, {len(mine)} on rank {rank}"
        yield f"lane {lane!r} has {counts}", ()


def _collectives(
    program: Program, rank: int, lane: str, stages: frozenset[int] | None
) -> list[tuple[Place, Action]]:
    return [
        (place, action)
        for place, action in placed(program, rank, lane)
        if action.kind in COLLECTIVE and (stages is None or action.stage in stages)
    ]


def deadlock(program: Program, profile: Profile | None) -> Iterator[Broken]:
    """No action waits for itself, directly or through others."""
    if profile is None:
        profile = Profile("any", tuple(Layer(str(layer), 0.0, 0.0, 0) for layer in range(program.layers)))
    try:
        graph = lower(program, profile, Link(0.0, 0.0), len(program.kernel))
    except ValueError as error:
        yield str(error), ()
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
    yield f"{len(places)} actions wait for each other and can never run: {some}", places


# -- the rules of a data-parallel step -----------------------------------------------------------------------


def _wanted(program: Program, rank: int) -> set[Action]:
    """Every layer's forward and backward; every bucket's AR, or its RS and AG."""
    whole = {action.index for _, action in placed(program, rank) if action.kind is Kind.AR}
    wanted = {Action(kind, layer) for kind in (Kind.F, Kind.B) for layer in range(program.layers)}
    for bucket in range(len(program.buckets)):
        kinds = (Kind.AR,) if bucket in whole else (Kind.RS, Kind.AG)
        wanted |= {Action(kind, bucket) for kind in kinds}
    return wanted


def _allowed(program: Program, _: int) -> set[Action]:
    """Actions that a program may list or leave out: updates."""
    return {Action(Kind.UPDATE, bucket) for bucket in range(len(program.buckets))}


def sharded(program: Program, _: Profile | None) -> Iterator[Broken]:
    """With gather="parameters" no bucket is all-reduced."""
    if program.gather != "parameters":
        return
    for rank in range(len(program.kernel)):
        for place, action in placed(program, rank):
            if action.kind is Kind.AR:
                needs = f"a program that gathers parameters needs RS{action.index} and AG{action.index}"
                yield f"{action} gathers gradients; {needs}", [place]


def step(program: Program, _: Profile | None) -> Iterator[Broken]:
    """With gather="parameters" and without ``early_step``, every AG comes after the last RS."""
    if program.gather != "parameters" or program.early_step:
        return
    for rank, lanes in enumerate(program.kernel):
        for lane, order in lanes.items():
            reduces = [place for place, action in enumerate(order) if action.kind is Kind.RS]
            if not reduces:
                continue
            last = max(reduces, key=lambda place: position(order, place))
            for place, action in enumerate(order):
                if action.kind is Kind.AG and position(order, place) < position(order, last):
                    message = (
                        f"{action} gathers updated parameters before the last RS; the step may need every"
                        " gradient (clipping, loss scale): move it after that RS, or allow early_step"
                    )
                    yield message, [(rank, lane, place), (rank, lane, last)]


DATA_PARALLEL_RULES: RuleSet = (
    (("cover", cover), ("model", model)),
    (("once", sharded), ("once", once(_wanted, _allowed))),
    (
        ("order", reduce_before_gather),
        ("step", step),
        ("one order", one_order(lambda program: [(range(len(program.kernel)), None)])),
    ),
    (("deadlock", deadlock),),
)


# -- the rules of programs with stages -----------------------------------------------------------------------

LANES = {COMPUTE_LANE: COMPUTE | {Kind.STEP}, LINK_LANE: SENDS | COLLECTIVE | HALOS, RECV_LANE: RECVS}


def fits_layout(program: Program, profile: Profile | None) -> Iterator[Broken]:
    """Ranks, stages and buckets fit together."""
    layout = program.layout
    if program.ranks != layout.world or len(program.kernel) != layout.world:
        has = f"the program {program.ranks} with {len(program.kernel)} kernels"
        yield f"the layout has {layout.world} ranks, {has}", ()
    if layout.cuts[-1] >= program.layers:
        yield f"the last stage starts at layer {layout.cuts[-1]} of {program.layers} layers", ()
        return
    for number, bucket in enumerate(program.buckets):
        if len(stages_in(layout, bucket.layers, program.layers)) > 1:
            yield f"bucket {number} holds layers of several stages: {bucket.layers}", ()


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
    return wanted


def _messages(layout: Layout, rank: int, stage: int, index: int) -> Iterator[Action]:
    for other, sent, received in ((stage + 1, Kind.SENDF, Kind.RECVB), (stage - 1, Kind.SENDB, Kind.RECVF)):
        if 0 <= other < layout.stages:
            for peer in layout.overlaps(stage, rank, other, index):
                if peer != rank:
                    yield Action(sent, index, stage, peer=peer)
                    yield Action(received, index, stage, peer=peer)


def versions(program: Program, _: Profile | None) -> Iterator[Broken]:
    """A backward sees its forward's version; a period's micro-batches and a stage's replicas one version."""
    first: dict[int, tuple[Action, Place]] = {}
    for rank in range(len(program.kernel)):
        compute = list(placed(program, rank, COMPUTE_LANE))
        forwards = {(a.stage, a.index): (place, a) for place, a in compute if a.kind is Kind.F}
        for place, action in compute:
            if action.kind in GRADIENTS:
                where, forward = forwards[action.stage, action.index]
                if (forward.version or 0) != (action.version or 0):
                    message = f"{action} sees other weights than its forward {forward}"
                    yield f"{message}: a backward must see the version of its forward", [place, where]
        for place, action in forwards.values():
            known, where = first.setdefault(stage_of(action), (action, place))
            if (known.version or 0) != (action.version or 0):
                both = f"{action} of rank {place[0]} and {known} of rank {where[0]}"
                yield f"{both} feed one step with gradients of two versions", [place, where]


def order(program: Program, _: Profile | None) -> Iterator[Broken]:
    """The gradient before STEP, STEP before the forwards that use its version; RS before AG."""
    for rank, lanes in enumerate(program.kernel):
        compute = lanes[COMPUTE_LANE]
        steps = {action.stage: place for place, action in enumerate(compute) if action.kind is Kind.STEP}
        for place, action in enumerate(compute):
            step = steps.get(action.stage, place)
            here, there = (rank, COMPUTE_LANE, place), (rank, COMPUTE_LANE, step)
            if action.kind in GRADIENTS and position(compute, place) > position(compute, step):
                yield f"{compute[step]} stands before {action}, which it needs", [here, there]
            if action.kind is Kind.F:
                newest = (position(compute, place) - position(compute, step)) // len(compute) + 1
                if (action.version or 0) > newest:  # relative to its period
                    message = f"{action} uses a version that {compute[step]} makes only later"
                    yield f"{message}; its version must be at most {newest}", [here, there]


def messages(program: Program, _: Profile | None) -> Iterator[Broken]:
    """From one rank to another, messages arrive in the order in which they are sent."""
    layout = program.layout
    for sender in range(layout.world):
        for receiver in range(layout.world):
            sent = _queue(program, sender, receiver, LINK_LANE, SENDS)
            received = _queue(program, receiver, sender, RECV_LANE, RECVS)
            # Endless queues are equal if each message stands as far after its twin as the others do.
            gaps = [there[0] - here[0] for here, there in zip(sent, received, strict=True)]
            usual = Counter(gaps).most_common(1)[0][0] if gaps else 0
            odd = [number for number, gap in enumerate(gaps) if gap != usual]
            if odd:
                (one, at), (other, there) = sent[odd[0]][1:], received[odd[0]][1:]
                message = f"rank {sender} sends {one} in another order than rank {receiver} receives {other}"
                why = "a wire delivers messages in the order in which they are sent"
                yield f"{message}; {why}", [at, there]


def _queue(
    program: Program, rank: int, peer: int, lane: str, kinds: frozenset[Kind]
) -> list[tuple[int, Action, Place]]:
    """The messages between two ranks with their position in the endless queue, in one order at both ends."""
    queue = [(place, a) for place, a in placed(program, rank, lane) if a.kind in kinds and a.peer == peer]
    numbered = [
        (number - action.shift * len(queue), action, place) for number, (place, action) in enumerate(queue)
    ]
    return sorted(numbered, key=lambda item: _content(program, item[1]))


def _content(program: Program, action: Action) -> tuple[bool, int, int]:
    """The content of a message: output or input gradient, of which stage and micro-batch."""
    stage = stage_of(action) if action.kind in SENDS else far_stage(action)
    return action.kind in (Kind.SENDB, Kind.RECVB), stage, action.index


def memory(program: Program, profile: Profile | None) -> Iterator[Broken]:
    """Versions, activations and bytes stay within what the layout declares."""
    layout = program.layout
    versions, activations = live(program)
    for what, found, declared in (
        ("weight versions", versions, layout.versions),
        ("micro-batches' activations", activations, layout.activations),
    ):
        for stage, (needs, allowed) in enumerate(zip(found, declared, strict=True)):
            if needs > allowed:
                yield f"stage {stage} keeps {needs} {what} at once, {allowed} are declared", ()
    if profile is not None and layout.memory is not None:
        both = zip(memory_by_rank(program, profile), layout.memory, strict=True)
        for rank, (needs, allowed) in enumerate(both):
            if needs > allowed:
                yield f"rank {rank} needs {needs} bytes, {allowed} are declared", ()


def _groups(program: Program) -> list[tuple[Sequence[int], frozenset[int]]]:
    """Ranks that hold the same stages, and these."""
    stages: dict[tuple[int, ...], set[int]] = {}
    for stage in range(program.layout.stages):
        stages.setdefault(program.layout.members(stage), set()).add(stage)
    return [(ranks, frozenset(held)) for ranks, held in sorted(stages.items())]


PIPELINE_RULES: RuleSet = (
    (("cover", cover), ("model", model)),
    (("layout", fits_layout),),
    (("once", once(wanted, lanes=LANES)),),
    (
        ("version", versions),
        ("order", order),
        ("order", reduce_before_gather),
        ("messages", messages),
        ("one order", one_order(_groups)),
    ),
    (("deadlock", deadlock),),
    (("memory", memory),),
)
