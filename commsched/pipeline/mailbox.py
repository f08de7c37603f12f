"""Messages between stages: activations forward, gradients backward.

Shapes are agreed on when they first occur: the first message of a kind brings a description with it, after
which the receiver can post its buffers ahead and nothing but the tensors travels.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from commsched.errors import CommError
from commsched.pipeline.fabric import Lane, to_host
from commsched.pipeline.messages import Description, receive_object, send_object
from commsched.pipeline.parts import Cuts
from commsched.transport.channel import Pending
from scheduler.ir.actions import Action, Kind

_POSTED_AHEAD = 3

Sent = tuple[Action, Pending]


class Outbox:
    """Sends without waiting. A message stays in memory until ``answered`` tells that the other side has it,
    or ``settle`` waits until it has left.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._known: dict[tuple[int, Hashable], tuple[Description, list[Any]]] = {}
        self._sent: defaultdict[int, list[Sent]] = defaultdict(list)  # by peer, in order

    def forward(
        self,
        action: Action,
        key: Hashable,
        leaves: Sequence[Any],
        spec: Any,
        grads: Sequence[bool],
        cuts: Sequence[Cuts],
    ) -> Description:
        """Sends leaves; the description is of the gradients that will come back."""
        peer, outline = _peer(action), _outline(leaves, grads)
        if (peer, key) not in self._known:
            described = Description.of(leaves, spec, grads, cuts)
            back = Description(None, tuple(leaf for leaf in described.leaves if leaf.grad))
            self._known[peer, key] = back, outline
            self._sent[peer] += [(action, part) for part in send_object(self.lane, peer, described)]
        back, known = self._known[peer, key]
        if known != outline:
            raise ValueError(
                f"stage {action.stage} put out {outline} for micro-batch {action.index} of step"
                f" {action.shift}, and {known} for an earlier micro-batch of the same input shapes; shapes at"
                " a cut may only depend on the shapes of the batch"
            )
        self.send(action, leaves)
        return back

    def send(self, action: Action, leaves: Sequence[Any]) -> None:
        buffers = [to_host(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        peer = _peer(action)
        try:
            self._sent[peer].append((action, self.lane.send(peer, buffers)))
        except CommError as error:
            raise _naming(action, error) from None

    def back(self, peer: int, key: Hashable) -> Description | None:
        """The gradients that answer a message, where one like it has been sent."""
        known = self._known.get((peer, key))
        return None if known is None else known[0]

    def answered(self, answer: Action) -> None:
        """A gradient came: its sender has the activations, and all that was sent to it before them."""
        sent = self._sent[_peer(answer)]
        place = answer.stage, answer.index, answer.shift
        for number, (action, _) in reversed(list(enumerate(sent))):
            if action.kind is Kind.SENDF and (action.stage, action.index, action.shift) == place:
                for _, pending in sent[: number + 1]:
                    _wait(pending, answer)
                del sent[: number + 1]
                return

    def settle(self, period: int | None = None) -> None:
        """Waits for the messages of all steps up to this one."""
        for peer, sent in self._sent.items():
            for action, pending in sent:
                if period is None or action.shift <= period:
                    _wait(pending, action)
            self._sent[peer] = [] if period is None else [one for one in sent if one[0].shift > period]

    @property
    def held(self) -> int:
        """How many messages are kept in memory."""
        return sum(map(len, self._sent.values()))


@dataclass
class Posted:
    action: Action
    described: Description
    buffers: list[Tensor]
    pending: Pending


Known = Callable[[Action], "Description | None"]


class Inbox:
    """Receives in each sender's order, a few messages ahead of their use.

    ``key(action)`` says which messages have the same shapes; where it is None, ``describe(action)`` tells the
    shapes as soon as they are known here (a gradient's, when its forward is done). ``waited``: seconds that
    ``take`` has needed so far.
    """

    def __init__(
        self, rank: int, lane: Lane, timeout: float, describe: Known, key: Callable[[Action], Hashable]
    ) -> None:
        self.rank, self.lane, self.timeout = rank, lane, timeout
        self._describe, self._key = describe, key
        self._known: dict[tuple[int, Hashable], Description] = {}
        self._expected: defaultdict[int, deque[Action]] = defaultdict(deque)
        self._posted: defaultdict[int, deque[Posted]] = defaultdict(deque)
        self.arrived: dict[Action, tuple[Description, list[Tensor]]] = {}
        self.waited = 0.0

    def expect(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._expected[_peer(action)].append(action)

    def pump(self) -> None:
        """Posts what can be posted."""
        for peer in self._expected:
            self._pump(peer)

    def _pump(self, peer: int) -> None:
        expected, posted = self._expected[peer], self._posted[peer]
        while expected and len(posted) < _POSTED_AHEAD:
            action = expected[0]
            described = self._description(action, peer)
            if described is None:
                return
            expected.popleft()
            buffers = described.buffers()
            posted.append(Posted(action, described, buffers, self.lane.receive(peer, buffers)))

    def _description(self, action: Action, peer: int) -> Description | None:
        key = self._key(action)
        return self._describe(action) if key is None else self._known.get((peer, key))

    def take(self, action: Action) -> tuple[Description, list[Tensor]]:
        """The message, as soon as it is there; ``CommError`` after the time-out."""
        peer, start = _peer(action), perf_counter()
        try:
            while action not in self.arrived:
                self._next(peer)
        except CommError as error:
            raise CommError(
                f"rank {self.rank} waits for {action} (step {action.shift}, stage {action.stage}, micro-batch"
                f" {action.index}) and nothing came from rank {peer} within {self.timeout:g} s"
                f" (COMMSCHED_TIMEOUT) or its connection is lost; look for the first error on rank {peer}"
                f" ({error})"
            ) from error
        self.waited += perf_counter() - start
        return self.arrived.pop(action)

    def _next(self, peer: int) -> None:
        """One more message from this rank."""
        posted = self._posted[peer]
        if not posted:
            self._pump(peer)
        if posted:
            first = posted.popleft()
            first.pending.wait()
            self.arrived[first.action] = first.described, first.buffers
            return
        if not self._expected[peer]:
            raise CommError(f"the program has no further message from rank {peer}")
        action = self._expected[peer][0]
        key = self._key(action)
        if key is None:
            raise CommError(f"{action} comes before the forward that it answers")
        self._known[peer, key] = receive_object(self.lane, peer)

    def drain(self) -> None:
        """Takes in everything that is expected."""
        for peer in list(self._expected):
            while self._expected[peer] or self._posted[peer]:
                self._next(peer)


def _outline(leaves: Sequence[Any], grads: Sequence[bool]) -> list[Any]:
    """The shapes and types that all micro-batches must share; quicker to make than a description."""
    return [
        (tuple(leaf.shape), leaf.dtype, grad) if isinstance(leaf, Tensor) else leaf
        for leaf, grad in zip(leaves, grads, strict=True)
    ]


def _wait(pending: Pending, action: Action) -> None:
    """Waits until a message has left; an error names the action."""
    try:
        pending.wait()
    except CommError as error:
        raise _naming(action, error) from None


def _naming(action: Action, error: CommError) -> CommError:
    """The error, with the message that it concerns."""
    place = f"step {action.shift}, stage {action.stage}, micro-batch {action.index}"
    return CommError(f"{action} ({place}): {error}")


def _peer(action: Action) -> int:
    assert action.peer is not None
    return action.peer
