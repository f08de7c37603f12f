"""The rules of a step on tiles: a data-parallel step with a halo for every border."""

from __future__ import annotations

from scheduler.ir.actions import Action, Kind
from scheduler.ir.program import Program
from scheduler.simulate.lower_tiles import halo_actions
from scheduler.validate.common import cover, deadlock, model, once, one_order, reduce_before_gather
from scheduler.validate.engine import RuleSet


def _wanted(program: Program, _: int) -> set[Action]:
    compute = {Action(kind, layer) for kind in (Kind.F, Kind.B) for layer in range(program.layers)}
    collectives = {Action(kind, b) for kind in (Kind.RS, Kind.AG) for b in range(len(program.buckets))}
    return compute | collectives | set(halo_actions(program))


RULES: RuleSet = (
    (cover, model),
    (once(_wanted),),
    (reduce_before_gather, one_order(lambda program: [(range(len(program.kernel)), None)])),
    (deadlock,),
)
