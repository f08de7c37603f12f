"""The rules of a data-parallel step."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.ir.actions import Action, Kind
from scheduler.ir.endless_order import position
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.validate.common import cover, deadlock, model, once, one_order, reduce_before_gather
from scheduler.validate.engine import RuleSet, Violation, placed, violation


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


def sharded(program: Program, _: Profile | None) -> Iterator[Violation]:
    """With gather="parameters" no bucket is all-reduced."""
    if program.gather != "parameters":
        return
    for rank in range(len(program.kernel)):
        for place, action in placed(program, rank):
            if action.kind is Kind.AR:
                yield violation(
                    "once",
                    f"{action} gathers gradients; a program that gathers parameters needs RS{action.index}"
                    f" and AG{action.index}",
                    place,
                )


def step(program: Program, _: Profile | None) -> Iterator[Violation]:
    """With gather="parameters" and without ``early_step``, every AG comes after the last RS."""
    if program.gather != "parameters" or program.early_step:
        return
    for rank, lanes in enumerate(program.kernel):
        for lane, order in lanes.items():
            reduces = [place for place, action in enumerate(order) if action.kind is Kind.RS]
            last = max(reduces, key=lambda place: position(order, place), default=None)
            for place, action in enumerate(order):
                if (
                    action.kind is Kind.AG
                    and last is not None
                    and position(order, place) < position(order, last)
                ):
                    yield violation(
                        "step",
                        f"{action} gathers updated parameters before the last RS; the step may need every"
                        " gradient (clipping, loss scale): move it behind, or allow early_step",
                        (rank, lane, place),
                        (rank, lane, last),
                    )


RULES: RuleSet = (
    (cover, model),
    (sharded, once(_wanted, _allowed)),
    (reduce_before_gather, step, one_order(lambda program: [(range(len(program.kernel)), None)])),
    (deadlock,),
)
