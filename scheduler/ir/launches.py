"""The order in which ranks launch messages that block both of their ends, as NCCL's do."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence

from scheduler.ir.actions import (
    GRADIENTS,
    RECVS,
    SENDS,
    SENT_AS,
    Action,
    Kind,
    format_actions,
    peer_of,
    stage_of,
)
from scheduler.ir.layout import Layout, far_stage
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE, Lanes, Program, reach

COMPUTED = {Kind.SENDF: Kind.F, Kind.RECVF: Kind.F, Kind.SENDB: Kind.B, Kind.RECVB: Kind.B}
_RECEIVED_AS = {sent: received for received, sent in SENT_AS.items()}


def computation(action: Action) -> Hashable:
    """The forward or backward that a message comes from or is for, or the action itself, without its rank."""
    return COMPUTED.get(action.kind, action.kind), action.stage, action.index, action.shift


def can_block(program: Program) -> bool:
    """Whether a step's messages all end within the step, and none waits for a sum of replicas."""
    return reach(program.kernel) == (0, 0) and program.layout.placement == "bubble"


def directions(program: Program) -> list[tuple[int, int]]:
    """Each pair of ranks of which the first sends the second anything, in one order."""
    lanes = enumerate(program.kernel)
    return sorted({(r, peer_of(a)) for r, each in lanes for a in each.get(LINK_LANE, ()) if a.kind in SENDS})


def launches(lanes: Sequence[Lanes], layout: Layout) -> list[list[list[Action]]]:
    """By rank, the messages to launch before each action of its compute lane, and after the last one.

    [Note: one sequence]
    A message of NCCL occupies a stream on both ranks until both have launched it, and any call of CUDA may
    make the host wait for all that it has launched (the first use of a kernel does, and freed memory). If
    sends are launched once they are computed and receives when they are needed, ranks can wait for each
    other::

        rank 0    F0 send F0   F1 send F1   (its host waits for both sends)   receive B0
        rank 1    receive F0   F0 B0 send B0   (its host waits for this send)   receive F1

    So all computations and messages of all ranks are put into one sequence. A message is one event of both
    its ranks, after the computation that it comes from and before the one that needs it. A computation on
    tiles is one event of all of them, and a step comes after the last gradients of all replicas. Each rank
    launches its part of the sequence, in this order. Then the first event that is not over waits for no later
    one, even where each rank waits for each launch to end before it goes on. So ranks never wait for each
    other in a circle, whatever streams and hosts wait for, and both ends of a direction have its messages in
    one order.

    The sequence: in each round every rank computes one action if all that it needs is there; then all
    messages that have become possible travel. So receives are launched while their senders compute.
    """
    orders = [each[COMPUTE_LANE] for each in lanes]
    going = [deque(a for a in each.get(LINK_LANE, ()) if a.kind in SENDS) for each in lanes]
    coming = [
        {(*_key(a), peer_of(a)): a for a in each.get(RECV_LANE, ()) if a.kind in RECVS} for each in lanes
    ]
    missing = [Counter(map(computation, each.values())) for each in coming]
    gradients = Counter((a.stage, a.shift) for order in orders for a in order if a.kind in GRADIENTS)
    found: list[list[list[Action]]] = [[[]] for _ in lanes]
    done: list[set[Hashable]] = [set() for _ in lanes]

    def prepared(rank: int) -> Action | None:
        """The next computation of a rank, if all that it needs is there."""
        place = len(found[rank]) - 1
        if place == len(orders[rank]):
            return None
        action = orders[rank][place]
        waits = gradients[action.stage, action.shift] if action.kind is Kind.STEP else 0
        return None if waits or missing[rank][computation(action)] else action

    def following(rank: int) -> Action | None:
        """The same, if the other tiles can compute it as well: they exchange halos meanwhile."""
        action = prepared(rank)
        others = () if action is None else layout.tiles_with(rank, action)
        return action if all(prepared(other) == action for other in others) else None

    while ready := [(rank, action) for rank in range(len(lanes)) if (action := following(rank)) is not None]:
        for rank, action in ready:
            found[rank].append([])
            done[rank].add(computation(action))
            gradients[action.stage, action.shift] -= action.kind in GRADIENTS
        for rank, _ in ready:
            while going[rank] and computation(going[rank][0]) in done[rank]:
                send = going[rank].popleft()
                peer, far = peer_of(send), far_stage(send)
                receive = coming[peer].pop((_RECEIVED_AS[send.kind], far, send.index, send.shift, rank))
                missing[peer][computation(receive)] -= 1
                found[rank][-1].append(send)
                found[peer][-1].append(receive)
    for rank, order in enumerate(orders):
        left = order[len(found[rank]) - 1 :]
        if left or going[rank] or coming[rank]:
            messages = format_actions([*going[rank], *coming[rank].values()])
            raise ValueError(
                f"rank {rank} waits for ever: it has {format_actions(left) or 'nothing'} to compute and"
                f" {messages or 'nothing'} to send or receive"
            )
    return found


def _key(action: Action) -> tuple[Kind, int, int, int]:
    return action.kind, stage_of(action), action.index, action.shift
