"""Whether point-to-point messages on streams can deadlock, as NCCL's do: a send ends when it is received.

The host launches everything without waiting. A message blocks the stream of its communicator on both ranks
until both have come to it. What runs is then fixed by the order of each stream and by what each operation
needs: it ends in all interleavings or in none, and it ends unless these form a circle.

- ``directed``: one communicator for each pair of ranks and direction. No schedule deadlocks.
- ``paired``: one for each pair of ranks. A rank's sends and receives block each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from scheduler import pipelines
from scheduler.ir.actions import RECVS, SENDS, Action, Kind, peer_of, stage_of
from scheduler.ir.layout import far_stage
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE, Program, unroll
from scheduler.pipelines import generate

REPLICAS = [  # of each stage
    *((replicas,) * stages for stages in (1, 2, 3, 4) for replicas in (1, 2)),
    *((1, 2), (3, 1), (2, 3), (2, 1, 2), (1, 2, 2, 1)),
]
PERIODS = 4
COMPUTED = {Kind.SENDF: Kind.F, Kind.RECVF: Kind.F, Kind.SENDB: Kind.B, Kind.RECVB: Kind.B}

Node = Hashable


def programs(schedule: str) -> Iterator[tuple[str, Program]]:
    for replicas in REPLICAS:
        stages, even = len(replicas), len(set(replicas)) == 1
        mesh = f"{stages}x{replicas[0]}" if even else " and ".join(map(str, replicas))
        if schedule == "bundle" and stages != 2:
            continue
        for micro in (1, 2, 4, 8):
            if schedule in ("ashpipe", "bundle") and micro > 1:
                continue
            if schedule in ("interleaved", "2bw", "wpipe") and micro < stages:
                continue
            yield (
                f"{schedule} {mesh}, {micro}",
                generate(schedule, stages, micro, replicas=replicas),
            )


def computation(action: Action) -> Node:
    """The forward or backward that a message comes from or is for."""
    return COMPUTED[action.kind], action.stage, action.index, action.shift


def message(program: Program, rank: int, action: Action) -> Node:
    """The same for the send and the receive of a message."""
    number, far = stage_of(action), far_stage(action, program.layout)
    ends = (rank, peer_of(action), far) if action.kind in SENDS else (peer_of(action), rank, number)
    return "message", COMPUTED[action.kind], action.index, action.shift, *ends


def graph(program: Program, paired: bool) -> tuple[dict[Node, set[Node]], dict[Node, list[list[Node]]]]:
    """What each operation waits for; and for each communicator the messages in the order of each end."""
    after: defaultdict[Node, set[Node]] = defaultdict(set)
    streams: defaultdict[Node, list[list[Node]]] = defaultdict(list)
    for rank, lanes in enumerate(unroll(program, PERIODS)):
        mine: defaultdict[Node, list[Node]] = defaultdict(list)
        coming, going = (
            deque(action for action in lanes.get(lane, ()) if action.kind in kinds)
            for lane, kinds in ((RECV_LANE, RECVS), (LINK_LANE, SENDS))
        )
        needed = Counter(map(computation, coming))

        def launch(action: Action, rank: int = rank, mine: dict[Node, list[Node]] = mine) -> Node:
            found = message(program, rank, action)
            ends = (rank, peer_of(action)) if action.kind in SENDS else (peer_of(action), rank)
            mine[frozenset(ends) if paired else ends].append(found)
            return found

        before: Node | None = None
        done: set[Node] = set()
        for action in lanes[COMPUTE_LANE]:
            key = action.kind, action.stage, action.index, action.shift
            node = rank, *key
            after[node] |= {before} if before else set()
            while needed[key]:  # receives are posted in the order of their lane
                needed[computation(coming[0])] -= 1
                after[(rank, *computation(coming[0]))].add(launch(coming.popleft()))
            done.add(key)
            while going and computation(going[0]) in done:  # and so are sends
                sent = computation(going[0])
                after[launch(going.popleft())].add((rank, *sent))
            before = node
        assert not coming and not going, f"messages that belong to no computation: {coming} {going}"
        for communicator, order in mine.items():
            streams[communicator].append(order)
            for one, following in zip(order, order[1:]):
                after[following].add(one)
    return after, streams


def deadlock(program: Program, paired: bool) -> str:
    """Return a circle of operations that wait for each other; "" if there is none."""
    try:
        tuple(TopologicalSorter(graph(program, paired)[0]).static_order())
    except CycleError as error:
        return " <- ".join(map(str, error.args[1]))
    return ""


@pytest.mark.parametrize("schedule", pipelines.names())
def test_a_communicator_for_each_direction_cannot_deadlock(schedule: str) -> None:
    for name, program in programs(schedule):
        assert not deadlock(program, paired=False), f"{name}: {deadlock(program, paired=False)}"


@pytest.mark.parametrize("schedule", pipelines.names())
def test_both_ends_of_a_direction_have_one_order(schedule: str) -> None:
    """NCCL matches messages by their order alone."""
    for name, program in programs(schedule):
        for communicator, orders in graph(program, paired=False)[1].items():
            assert len(orders) == 2 and orders[0] == orders[1], f"{name}: {communicator}"


def test_one_communicator_for_both_directions_deadlocks() -> None:
    """A stage sends an activation while its neighbour sends a gradient."""
    found = {
        name for schedule in pipelines.names() for name, each in programs(schedule) if deadlock(each, True)
    }
    assert "1f1b 2x1, 4" in found and "gpipe 2x1, 4" not in found, sorted(found)
