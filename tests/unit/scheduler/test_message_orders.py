"""Whether point-to-point messages on streams can deadlock, as NCCL's do: a send ends when it is received.

A message occupies the stream of its communicator on both ranks until both have come to it. What runs is then
fixed by the order of each stream and by what each operation needs: it ends in all interleavings or in none,
and it ends unless these form a circle. Three cases:

- ``directed``: the host launches everything without waiting; one communicator for each pair of ranks and
  direction.
- ``paired``: one for each pair of ranks. A rank's sends and receives block each other.
- ``blocking``: the host of a rank waits for each launch to end before the next one, as any call of CUDA may
  make it wait. Whatever streams, communicators and hosts wait for, they wait for no more than this.

Two orders in which a rank launches: sends as soon as they are computed and receives when they are needed; and
that of ``scheduler.ir.launches``, in which pipelines launch messages between devices.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import product

import pytest

from scheduler import pipelines
from scheduler.ir.actions import GRADIENTS, RECVS, SENDS, TRANSFER, Action, Kind, peer_of, stage_of
from scheduler.ir.launches import can_block, computation, directions, launches
from scheduler.ir.layout import Samples, Tiles, far_stage
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE, Lanes, Program, unroll
from scheduler.pipelines import generate

REPLICAS = [  # of each stage
    *((replicas,) * stages for stages in (1, 2, 3, 4) for replicas in (1, 2)),
    *((1, 2), (3, 1), (2, 3), (2, 1, 2), (1, 2, 2, 1)),
]
PLACEMENTS = [
    (Samples(), Samples()),
    (Tiles((2, 2)), Samples()),
    (Tiles((1, 2)), Tiles((2, 1)), Samples(2)),
    (Samples(), Tiles((1, 3))),
]
SYNCHRONOUS = ("gpipe", "1f1b", "interleaved", "zero_bubble")
PERIODS = 4

Node = Hashable
Orders = Sequence[Sequence[Action]]
"""What each rank launches, in its order: computations and messages."""


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
    if schedule in SYNCHRONOUS:
        for placements in PLACEMENTS:
            for replicas, mirrored in product((1, 2), (False, True)):
                options = {"replicas": replicas, "placements": placements, "mirrored": mirrored}
                micro = len(placements)
                yield f"{schedule} {options}", generate(schedule, micro, micro, **options)


def as_needed(program: Program) -> Orders:
    """Sends as soon as they are computed, receives when they are needed, each in the order of their lane."""
    orders = []
    for lanes in unroll(program, PERIODS):
        order: list[Action] = []
        coming, going = (
            deque(action for action in lanes.get(lane, ()) if action.kind in kinds)
            for lane, kinds in ((RECV_LANE, RECVS), (LINK_LANE, SENDS))
        )
        needed, done = Counter(map(computation, coming)), set()
        for action in lanes[COMPUTE_LANE]:
            while needed[computation(action)]:
                needed[computation(coming[0])] -= 1
                order.append(coming.popleft())
            order.append(action)
            done.add(computation(action))
            while going and computation(going[0]) in done:
                order.append(going.popleft())
        assert not coming and not going, f"messages that belong to no computation: {coming} {going}"
        orders.append(order)
    return orders


def as_launched(program: Program) -> Orders:
    """As pipelines launch: one order in every period. Where periods overlap, that of a whole run."""
    if not can_block(program):
        return joined(unroll(program, PERIODS), program)
    kernel = joined(program.kernel, program)
    return [[action.at(period) for period in range(PERIODS) for action in order] for order in kernel]


def joined(lanes: Sequence[Lanes], program: Program) -> Orders:
    found = zip(launches(lanes, program.layout), lanes, strict=True)
    return [
        [*messages[0], *(a for pair in zip(each[COMPUTE_LANE], messages[1:]) for a in (pair[0], *pair[1]))]
        for messages, each in found
    ]


def message(program: Program, rank: int, action: Action) -> Node:
    """The same for the send and the receive of a message."""
    number, far = stage_of(action), far_stage(action)
    ends = (rank, peer_of(action), far) if action.kind in SENDS else (peer_of(action), rank, number)
    kind, _, index, shift = computation(action)
    return "message", kind, index, shift, *ends


def streams(program: Program, orders: Orders, paired: bool = False) -> dict[Node, list[list[Node]]]:
    """For each communicator the messages, in the order of each end."""
    found: defaultdict[Node, list[list[Node]]] = defaultdict(list)
    for rank, order in enumerate(orders):
        mine: defaultdict[Node, list[Node]] = defaultdict(list)
        for action in order:
            if action.kind in TRANSFER:
                peer = peer_of(action)
                ends = (rank, peer) if action.kind in SENDS else (peer, rank)
                mine[frozenset(ends) if paired else ends].append(message(program, rank, action))
        for communicator, messages in mine.items():
            found[communicator].append(messages)
    return found


def deadlock(program: Program, orders: Orders, case: str) -> str:
    """Return a circle of operations that wait for each other; "" if there is none."""
    after: defaultdict[Node, set[Node]] = defaultdict(set)
    for rank, order in enumerate(orders):
        computed: Node | None = None
        launched: Node | None = None
        for action in order:
            own = computed_by(program, rank, action)
            if action.kind in TRANSFER:
                node = message(program, rank, action)
                if action.kind in SENDS:
                    after[node].add(own)
                else:
                    after[own].add(node)
            else:
                node = own
                after[node] |= {computed} if computed else set()
                computed = node
                if action.kind is Kind.STEP:  # sums come from all replicas
                    after[node] |= gradients(program, orders, action)
            if case == "blocking" and launched:
                after[node].add(launched)
            launched = node
    for ends in streams(program, orders, case == "paired").values():
        for messages in ends:
            for one, following in zip(messages, messages[1:]):
                after[following].add(one)
    try:
        tuple(TopologicalSorter(after).static_order())
    except CycleError as error:
        return " <- ".join(map(str, error.args[1]))
    return ""


def computed_by(program: Program, rank: int, action: Action) -> Node:
    """A computation: tiles exchange halos in it, so that theirs is one."""
    return program.layout.tiles_with(rank, action) or rank, *computation(action)


def gradients(program: Program, orders: Orders, step: Action) -> set[Node]:
    return {
        computed_by(program, rank, action)
        for rank in program.layout.members(stage_of(step))
        for action in orders[rank]
        if action.kind in GRADIENTS and (action.stage, action.shift) == (step.stage, step.shift)
    }


@pytest.mark.parametrize("order", [as_needed, as_launched])
@pytest.mark.parametrize("schedule", pipelines.names())
def test_a_communicator_for_each_direction_cannot_deadlock(
    schedule: str, order: Callable[[Program], Orders]
) -> None:
    for name, program in programs(schedule):
        found = deadlock(program, order(program), "directed")
        assert not found, f"{name}: {found}"


@pytest.mark.parametrize("schedule", pipelines.names())
def test_launched_in_one_sequence_no_wait_of_a_host_deadlocks(schedule: str) -> None:
    for name, program in programs(schedule):
        found = deadlock(program, as_launched(program), "blocking")
        assert not found, f"{name}: {found}"


def test_launched_as_needed_a_wait_of_a_host_deadlocks() -> None:
    """Rank 0 sends the second activation while rank 1 sends the first gradient."""
    program = generate("1f1b", 2, 4)
    assert deadlock(program, as_needed(program), "blocking")


@pytest.mark.parametrize("order", [as_needed, as_launched])
@pytest.mark.parametrize("schedule", pipelines.names())
def test_both_ends_of_a_direction_have_one_order(schedule: str, order: Callable[[Program], Orders]) -> None:
    """NCCL matches messages by their order alone."""
    for name, program in programs(schedule):
        found = streams(program, order(program))
        assert sorted(found) == directions(program), name
        for communicator, orders in found.items():
            assert len(orders) == 2 and orders[0] == orders[1], f"{name}: {communicator}"


@pytest.mark.parametrize("schedule", pipelines.names())
def test_each_message_is_launched_once_and_computations_stay_in_order(schedule: str) -> None:
    for name, program in programs(schedule):
        for lanes, order in zip(unroll(program, PERIODS), as_launched(program), strict=True):
            wanted = [*lanes.get(LINK_LANE, ()), *lanes.get(RECV_LANE, ())]
            wanted = [action for action in wanted if action.kind in TRANSFER]
            assert Counter(wanted) == Counter(a for a in order if a.kind in TRANSFER), name
            assert [a for a in order if a.kind not in TRANSFER] == list(lanes[COMPUTE_LANE]), name


def test_receives_are_launched_while_their_senders_compute() -> None:
    """Rank 1 launches the receive of micro-batch 1 before the backward of 0."""
    first, last = joined(generate("1f1b", 2, 3).kernel, generate("1f1b", 2, 3))
    assert " ".join(map(str, first)) == (
        "0F0 0SENDF0>1 0F1 0SENDF1>1 0RECVB0<1 0B0 0F2 0SENDF2>1 0RECVB1<1 0B1 0RECVB2<1 0B2 0STEP"
    )
    assert " ".join(map(str, last)) == (
        "1RECVF0<0 1F0 1RECVF1<0 1B0 1SENDB0>0 1F1 1B1 1RECVF2<0 1SENDB1>0 1F2 1B2 1SENDB2>0 1STEP"
    )


def test_a_program_that_waits_for_ever_is_refused() -> None:
    program = generate("gpipe", 2, 1)
    lanes = [dict(each) for each in program.kernel]
    lanes[1][LINK_LANE] = ()
    with pytest.raises(
        ValueError, match="rank 0 waits for ever: it has 0B0 0STEP to compute and 0RECVB0<1 to"
    ):
        launches(lanes, program.layout)


def test_one_communicator_for_both_directions_deadlocks() -> None:
    """A stage sends an activation while its neighbour sends a gradient."""
    found = {
        name
        for schedule in pipelines.names()
        for name, each in programs(schedule)
        if deadlock(each, as_needed(each), "paired")
    }
    assert "1f1b 2x1, 4" in found and "gpipe 2x1, 4" not in found, sorted(found)
