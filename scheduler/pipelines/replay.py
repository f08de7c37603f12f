"""Unroll a program into slots in which every computation takes one slot.

Tables show these slots, and tests execute programs in one process in this order.
"""

from __future__ import annotations

from scheduler.ir.actions import Action, Kind
from scheduler.ir.program import COMPUTE_LANE, Program, unroll
from scheduler.simulate.simulator import run
from scheduler.simulate.task_graph import OTHER, GraphBuilder, Task, TaskGraph

_BEFORE = {Kind.B: (Kind.F,), Kind.W: (Kind.B,)}

Slot = list[tuple[int, Action]]
"""The (rank, action) pairs that run at the same time; an action's shift is its period."""


def replay(program: Program, periods: int) -> list[Slot]:
    """The slots of a run. A STEP takes no time: it is in the slot of the action before it."""
    graph = _run_graph(program, periods)
    # An action belongs to the slot in which it ends.
    result = run(graph, 1)
    slots: list[Slot] = [[] for _ in range(round(result.end.max(initial=0.0)))]
    for number, task in enumerate(graph.tasks):
        slots[round(result.end[0, number]) - 1].append((task.rank, task.action))
    return slots


def _run_graph(program: Program, periods: int) -> TaskGraph:
    """Every computation of a run as a task of one slot, tied to what it needs."""
    layout, graph = program.layout, GraphBuilder()
    known: dict[tuple[int, Kind, int | None, int, int], int] = {}
    for rank, lanes in enumerate(unroll(program, periods, (COMPUTE_LANE,))):
        before = -1
        for action in lanes[COMPUTE_LANE]:
            task = Task(action, COMPUTE_LANE, rank)
            number = graph.task(task, 0.0 if action.kind is Kind.STEP else 1.0, OTHER)
            if before >= 0:
                graph.edges.add((before, number, 0))
            before = known[rank, action.kind, action.stage, action.index, action.shift] = number
    for (rank, kind, stage, index, shift), number in known.items():
        assert stage is not None
        needs = [(rank, before, stage) for before in _BEFORE.get(kind, ())]
        other = stage + {Kind.F: -1, Kind.B: 1}.get(kind, 0)
        if other != stage and 0 <= other < layout.stages:
            needs += [(peer, kind, other) for peer in layout.overlaps(stage, rank, other, index)]
        for peer, before_kind, place in needs:
            graph.edges.add((known[peer, before_kind, place, index, shift], number, 0))
    return graph.build()


def table(program: Program, periods: int = 1) -> str:
    """A run as a table: a row per rank, a column per slot. Micro-batches are numbered through all periods;
    the stage stands in front where a rank holds several, and ``!`` after the last action before a step.
    """
    layout = program.layout
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
