"""The validator: is this a program that every rank can run for ever?

    validate(program, profile)        # InvalidProgram, a ValueError, shows the actions at fault in a grid
    problems(program, profile)        # the same as a list

Rules: every gradient byte in one bucket; every layer computed once; every bucket reduced and gathered once,
in that order; no all-gather of updated parameters before the step may be taken; all ranks' collectives in one
order; nothing waits for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from scheduler.ir.actions import COLLECTIVE, Action, Kind
from scheduler.ir.buckets import check_cover
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program
from scheduler.simulate.lower_data_parallel import lower

Place = tuple[int, str, int]
"""Rank, lane and position of an action in a kernel."""

_AROUND = 4
_GRID_RANKS = 8


class InvalidProgram(ValueError):
    """A program that breaks a rule. ``problems`` holds every one found."""

    def __init__(self, program: Program, found: list[Problem]) -> None:
        self.problems = found
        super().__init__(
            "\n".join(f"{problem.message}\n{grid(program, problem.places)}" for problem in found).rstrip()
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule: what is wrong, and where."""

    rule: str
    message: str
    places: frozenset[Place] = frozenset()


Rule = Callable[[Program, Profile | None], Iterator[Problem]]


def validate(program: Program, profile: Profile | None = None) -> None:
    """Raises ``InvalidProgram`` unless the program keeps every rule; with a profile, also that it is for this
    model.
    """
    found = problems(program, profile)
    if found:
        raise InvalidProgram(program, found)


def problems(program: Program, profile: Profile | None = None) -> list[Problem]:
    """Every broken rule; those that need a broken rule to be kept are not looked at."""
    for rules in _rules(program):
        found = [problem for rule in rules for problem in rule(program, profile)]
        if found:
            return found
    return []


def _rules(program: Program) -> Iterable[Iterable[Rule]]:
    """The rules, in groups."""
    if program.pipeline is None:
        return (_buckets, _model), (_once,), (_order, _one_order), (_deadlock,)
    from scheduler.validate.pipeline import RULES

    return (_buckets, _model), *RULES


def _model(program: Program, profile: Profile | None) -> Iterator[Problem]:
    if profile is None:
        return
    if program.layers != len(profile.layers):
        yield Problem(
            "model",
            f"the plan is for a model of {program.layers} layers, profile {profile.name!r} has"
            f" {len(profile.layers)}",
        )
        return
    for number, bucket in enumerate(program.buckets):
        for layer in bucket.layers:
            group = profile.layers[layer].group if layer < program.layers else bucket.group
            if group != bucket.group:
                yield Problem(
                    "groups",
                    f"bucket {number} is of group {bucket.group} and holds bytes of layer {layer}, of group"
                    f" {group}; one bucket holds one group",
                )


def _buckets(program: Program, profile: Profile | None) -> Iterator[Problem]:
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
        check_cover(program.buckets, sizes)
    except ValueError as error:
        yield Problem("cover", str(error))


def _once(program: Program, _: Profile | None) -> Iterator[Problem]:
    """Every layer is computed once; every bucket is reduced and gathered once."""
    for rank in range(len(program.kernel)):
        places: dict[tuple[Kind, int], list[Place]] = {}
        for place, action in _placed(program, rank):
            places.setdefault((action.kind, action.index), []).append(place)
        wanted = {(kind, layer) for kind in (Kind.F, Kind.B) for layer in range(program.layers)}
        for bucket in range(len(program.buckets)):
            whole = (Kind.AR, bucket) in places
            if whole and program.gather == "parameters":
                yield _problem(
                    "once",
                    f"AR{bucket} gathers gradients; a program that gathers parameters needs RS{bucket} and"
                    f" AG{bucket}",
                    places[Kind.AR, bucket],
                )
            wanted |= {(Kind.AR, bucket)} if whole else {(Kind.RS, bucket), (Kind.AG, bucket)}
        known = wanted | {(Kind.W, layer) for layer in range(program.layers)}
        known |= {(Kind.UPDATE, bucket) for bucket in range(len(program.buckets))}
        for kind, index in sorted(wanted - set(places), key=str):
            yield Problem("once", f"rank {rank} never does {kind}{index}; a step needs it once")
        for (kind, index), where in places.items():
            if (kind, index) not in known:
                yield _problem("once", f"{kind}{index} does not belong to this program", where)
            elif len(where) > 1:
                yield _problem("once", f"{kind}{index} stands {len(where)} times; a step does it once", where)


def _order(program: Program, _: Profile | None) -> Iterator[Problem]:
    """AG after its RS; with parameters, and no early step, AG after every RS."""
    step_waits = program.gather == "parameters" and not program.early_step
    for rank in range(len(program.kernel)):
        for lane in program.kernel[rank]:
            reduces: dict[int, tuple[int, Place]] = {}
            gathers: dict[int, tuple[int, Place]] = {}
            for position, (place, action) in enumerate(_placed(program, rank, lane)):
                # An action shifted back by one iteration does what stands one kernel earlier.
                at = position - action.shift * len(program.kernel[rank][lane])
                if action.kind is Kind.RS:
                    reduces[action.index] = (at, place)
                elif action.kind is Kind.AG:
                    gathers[action.index] = (at, place)
            last = max(reduces.values(), default=None)
            for bucket, (at, place) in gathers.items():
                if bucket in reduces and at < reduces[bucket][0]:
                    yield _problem(
                        "order",
                        f"AG{bucket} stands before RS{bucket} and gathers what is not reduced yet",
                        [place, reduces[bucket][1]],
                    )
                elif step_waits and last is not None and at < last[0]:
                    yield _problem(
                        "step",
                        f"AG{bucket} gathers updated parameters before the last RS; the step may need every"
                        " gradient (clipping, loss scale): move it behind, or allow early_step",
                        [place, last[1]],
                    )


def _one_order(program: Program, _: Profile | None) -> Iterator[Problem]:
    """All ranks do their collectives in the order of rank 0."""
    first = {lane: _collectives(program, 0, lane) for lane in program.kernel[0]}
    for rank in range(1, len(program.kernel)):
        for lane in {**first, **program.kernel[rank]}:
            mine, theirs = _collectives(program, rank, lane), first.get(lane, [])
            for position, (a, b) in enumerate(zip(theirs, mine, strict=False)):
                if a[1] != b[1]:
                    yield _problem(
                        "one order",
                        f"collective {position} of lane {lane!r} is {a[1]} on rank 0 and {b[1]} on rank"
                        f" {rank}; all ranks must have one order",
                        [a[0], b[0]],
                    )
                    break
            else:
                if len(mine) != len(theirs):
                    yield Problem(
                        "one order",
                        f"lane {lane!r} has {len(theirs)} collectives on rank 0, {len(mine)} on rank {rank}",
                    )


def _deadlock(program: Program, profile: Profile | None) -> Iterator[Problem]:
    if profile is None:
        profile = Profile("any", tuple(Layer(str(layer), 0.0, 0.0, 0) for layer in range(program.layers)))
    lanes = {lane for kernel in program.kernel for lane in kernel}
    try:
        graph = lower(program, profile, {lane: Link(0.0, 0.0) for lane in lanes}, len(program.kernel))
    except ValueError as error:
        yield Problem("deadlock", str(error))
        return
    stuck = {(graph.tasks[task].action, graph.tasks[task].lane) for task in graph.stuck()}
    if stuck:
        some = ", ".join(sorted(str(action) for action, _ in stuck)[:8])
        places = [
            place
            for rank in range(len(program.kernel))
            for place, action in _placed(program, rank)
            if (action, place[1]) in stuck
        ]
        yield _problem(
            "deadlock",
            f"{len(stuck)} actions wait for each other and can never run: {some}",
            places,
        )


def _placed(program: Program, rank: int, only: str | None = None) -> Iterator[tuple[Place, Action]]:
    for lane, actions in program.kernel[rank].items():
        if only is None or lane == only:
            for position, action in enumerate(actions):
                yield (rank, lane, position), action


def _collectives(program: Program, rank: int, lane: str) -> list[tuple[Place, Action]]:
    return [(place, action) for place, action in _placed(program, rank, lane) if action.kind in COLLECTIVE]


def _problem(rule: str, message: str, places: Iterable[Place]) -> Problem:
    return Problem(rule, message, frozenset(places))


def grid(program: Program, marked: Iterable[Place] = ()) -> str:
    """The kernel as a table, a row per rank and lane; marked actions stand between ``>`` and ``<``.

    Long programs are cut to what stands around the first mark of each row, many ranks to those with marks.
    """
    marks = set(marked)
    ranks = sorted({rank for rank, _, _ in marks}) or range(len(program.kernel))
    rows: list[tuple[str, str]] = []
    for rank in list(ranks)[:_GRID_RANKS]:
        for lane, actions in program.kernel[rank].items():
            here = [place[2] for place in marks if place[:2] == (rank, lane)]
            if here or not marks:
                rows.append((f"rank {rank} {lane}", _row(rank, lane, actions, marks, min(here, default=0))))
    width = max((len(head) for head, _ in rows), default=0)
    return "".join(f"  {head:<{width}} | {row}\n" for head, row in rows)


def _row(rank: int, lane: str, actions: tuple[Action, ...], marks: set[Place], centre: int) -> str:
    first, last = max(0, centre - _AROUND), min(len(actions), centre + 3 * _AROUND + 1)
    cells = ["..."] if first else []
    for position in range(first, last):
        text = str(actions[position])
        cells.append(f">{text}<" if (rank, lane, position) in marks else text)
    return " ".join([*cells, "..."] if last < len(actions) else cells)
