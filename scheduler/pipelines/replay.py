"""A run of a program slot by slot, every computation taking one: for tables, and for executing a program in
one process.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.ir.actions import Action, Kind
from scheduler.ir.layout import Layout
from scheduler.ir.program import COMPUTE_LANE, Program
from scheduler.ir.unroll import unroll

Slot = list[tuple[int, Action]]
"""What runs at the same time: rank and action (whose shift is its period)."""


def replay(program: Program, periods: int) -> Iterator[Slot]:
    """The slots of a run. A step takes no time: it stands in the slot of the action before it."""
    layout = program.pipeline
    if layout is None:
        raise ValueError("only programs with stages can be replayed slot by slot")
    queues = [list(reversed(lanes[COMPUTE_LANE])) for lanes in unroll(program, periods)]
    done: set[tuple[int, Action]] = set()
    while any(queues):
        slot: Slot = []
        for rank, queue in enumerate(queues):
            if queue and _ready(layout, rank, queue[-1], done):
                slot.append((rank, queue.pop()))
                while queue and queue[-1].kind is Kind.STEP:
                    slot.append((rank, queue.pop()))
        if not slot:
            heads = ", ".join(f"{queue[-1]} of rank {rank}" for rank, queue in enumerate(queues) if queue)
            raise ValueError(f"the program deadlocks: nothing can run before {heads}")
        done |= {(rank, _bare(action)) for rank, action in slot}
        yield slot


def _ready(layout: Layout, rank: int, action: Action, done: set[tuple[int, Action]]) -> bool:
    stage = action.stage
    assert stage is not None
    other = {Kind.F: stage - 1, Kind.B: stage + 1}.get(action.kind)
    if other is not None and 0 <= other < layout.stages:
        wanted = Action(action.kind, action.index, other, shift=action.shift)
        if not all((peer, wanted) in done for peer in layout.overlaps(stage, rank, other)):
            return False
    before = {Kind.B: Kind.F, Kind.W: Kind.B}.get(action.kind)
    if before is None:
        return True
    return (rank, Action(before, action.index, stage, shift=action.shift)) in done


def _bare(action: Action) -> Action:
    return Action(action.kind, action.index, action.stage, shift=action.shift)


def table(program: Program, periods: int = 1) -> str:
    """A run as a table: a row per rank, a column per slot. Micro-batches are numbered through all periods;
    the stage stands in front where a rank holds several, and ``!`` behind the last action before a step.
    """
    layout = program.pipeline
    assert layout is not None
    several = layout.stages > layout.positions
    rows: list[list[str]] = [[] for _ in range(layout.world)]
    for slot in replay(program, periods):
        for row in rows:
            row.append("")
        for rank, action in slot:
            if action.kind is Kind.STEP:
                rows[rank][-1] += "!"
                continue
            number = action.index + layout.microbatches * action.shift
            rows[rank][-1] = f"{action.stage if several else ''}{action.kind}{number}"
    width = max(len(cell) for row in rows for cell in row)
    lines = [" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
    return "".join(f"{rank} | {line}\n" for rank, line in enumerate(lines))
