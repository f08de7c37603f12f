"""Ordered messages between ranks: their carriers, tensors with descriptions, and the stages' mailbox."""

from __future__ import annotations

import itertools
import pickle
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import comm_core
from commsched.backends.cpu import tiers_between
from commsched.backends.nccl import NcclDirection, PeerConnections, abort_in_turn
from commsched.channels import (
    Channel,
    DeviceMessages,
    Pending,
    ProcessChannel,
    SilentChannel,
    Staging,
    ThreadHub,
    staging_of,
    start,
)
from commsched.collectives.carrier import carrier, epoch
from commsched.collectives.private_groups import connected, messages_between, nccl_between
from commsched.devices import device_of
from commsched.env import settings
from commsched.errors import CommError
from commsched.pipeline.rows import CONSTANTS, UNCUT, Cuts
from commsched.process import failure_monitor
from commsched.process.groups import device_name, nccl_usable
from scheduler.ir.actions import Action, Kind, peer_of
from scheduler.ir.launches import directions
from scheduler.ir.program import Program

# -- carriers of messages, and transports for engines --------------------------------------------------------

# Between processes, messages go over the pipeline's own connections; between threads, through queues.

_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
_BLOCKS = 4  # that a message over NCCL may take of a GPU, also while it waits for its sender; not measured


class Lane(Protocol):
    """Messages between ranks; those from one rank to another arrive in the order in which they are sent."""

    def send(self, peer: int, buffers: Sequence[Tensor]) -> Pending: ...

    def receive(self, peer: int, buffers: Sequence[Tensor]) -> Pending: ...


class Fabric(Protocol):
    """The ranks that a pipeline runs on, and their connections."""

    rank: int
    size: int
    timeout: float
    own_generator: bool  # False: the ranks are threads, which share torch's default generator

    def lane(self, name: str, traffic: comm_core.Traffic | None = None) -> Lane:
        """Messages that no other lane's can be taken for; every rank makes the same lanes in the same order.
        ``traffic``: what is less urgent lets them go first.
        """

    def transport(self, name: str, ranks: Sequence[int]) -> Any:
        """For an engine over these ranks, each of which must call. In two tiers where some share a host."""

    def channel(self, name: str, ranks: Sequence[int]) -> Channel:
        """For what the tiles of a stage exchange; each of these ranks must call."""

    def staging(self, device: torch.device) -> Staging | None:
        """Copies between a device and host memory; None for the CPU."""

    def direct(self, devices: Collection[torch.device], program: Program) -> DeviceMessages | None:
        """Messages between devices, if every rank has one of its own; every rank must call. ``devices``: of
        this rank's stages.
        """

    def abort(self, reason: str) -> None:
        """This rank gives up: the others need not wait for it, and hear the reason."""


def flat(buffers: Sequence[Tensor]) -> list[Tensor]:
    """The buffers that are not empty, as vectors."""
    return [buffer.view(-1) for buffer in buffers if buffer.numel()]


class ProcessLane:
    """A lane of the connections between processes."""

    def __init__(
        self, messages: comm_core.MessageChannel, number: int, name: str, traffic: comm_core.Traffic | None
    ) -> None:
        self.messages, self.number, self.name, self.traffic = messages, number, name, traffic

    def send(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        # A short message needs no turn on the link: it is in the socket before another one could go first.
        long = sum(buffer.nbytes for buffer in buffers) > self.messages.SHORT
        traffic = self.traffic if long else None
        return start(self.messages, [(peer, buffers)], [], self.number, self.name, traffic)

    def receive(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        # Without a turn: a receive that waits for its sender does not use the link.
        return start(self.messages, [], [(peer, buffers)], self.number, self.name)


class ProcessFabric:
    """The ranks of ``commsched.init()``. ``timeout``: seconds that a message may take (COMMSCHED_TIMEOUT)."""

    own_generator = True

    def __init__(self, timeout: float | None = None) -> None:
        launch = carrier().launch
        self.rank, self.size = launch.rank, launch.size
        self.timeout = settings().timeout if timeout is None else timeout
        self._number = next(_numbers[epoch()])
        self._name = f"pipeline {self._number}"
        self._lanes = itertools.count()
        self._messages: comm_core.MessageChannel | None = None
        self._direct: DeviceMessages | None = None
        if self.size > 1:
            self._messages = messages_between(f"{self._name}/messages", range(self.size), self.timeout)
        self._meeting = self.lane("connections")

    def lane(self, name: str, traffic: comm_core.Traffic | None = None) -> Lane:
        if self._messages is None:
            return NoLane()
        return ProcessLane(self._messages, next(self._lanes), f"{self._name}: {name}", traffic)

    def transport(self, name: str, ranks: Sequence[int]) -> Any:
        everyones(self._meeting, self.rank, ranks, None)  # a rank that gives up before ends this wait
        channel = connected(comm_core.tcp_channel, f"{self._name}/{name}", ranks, self.timeout)
        asked, transport = (settings().transport or "auto").lower(), None
        if asked in ("auto", "tiers"):
            transport = tiers_between(channel, ranks, asked, "direct")
        if transport is None:
            transport = comm_core.DirectTransport(channel, list(ranks).index(self.rank), len(ranks))
        transport.set_timeout(self.timeout)
        return transport

    def channel(self, name: str, ranks: Sequence[int]) -> Channel:
        if self._messages is None:
            return SilentChannel()
        return ProcessChannel(self._messages, self.rank, ranks, name)

    def staging(self, device: torch.device) -> Staging | None:
        return staging_of(device_of(device))

    def direct(self, devices: Collection[torch.device], program: Program) -> DeviceMessages | None:
        pairs = directions(program)
        if self._messages is None or not pairs:
            return None
        chosen = (settings().transport or "auto").lower() != "auto"
        able = not chosen and len(devices) == 1 and NcclDirection.can_tell()
        mine = [torch.empty(0, device=device) for device in devices if able]
        ranks = range(self.size)
        names = everyones(self.lane("devices"), self.rank, ranks, device_name(mine, carrier().launch.node))
        if nccl_usable(names):
            self._direct = self._over_nccl(mine[0].device, pairs, self._messages)
        return self._direct

    def _over_nccl(
        self, device: torch.device, pairs: Sequence[tuple[int, int]], messages: comm_core.MessageChannel
    ) -> DeviceMessages:
        # All ranks have one order of pairs, so that none waits for another in a circle.
        mine = {
            pair: NcclDirection(nccl_between(f"{self._name}/{pair}", pair, device, _BLOCKS))
            for pair in pairs
            if self.rank in pair
        }
        going, coming = (
            {pair[1 - end]: each for pair, each in mine.items() if pair[end] == self.rank} for end in (0, 1)
        )
        ranks = range(self.size)
        peers = PeerConnections(
            self.rank,
            connected(comm_core.tcp_connections, f"{self._name}/peers", ranks, self.timeout),
            lambda: next(filter(None, (each.failure() for each in mine.values())), None),
        )

        def end(reason: str) -> None:
            peers.close(farewell=not reason)
            if reason:
                messages.abort(reason)
                abort_in_turn([*going.values()], [*coming.values()], reason)
            else:
                for each in mine.values():
                    each.close()

        direct = DeviceMessages(device_of(device), going, coming, end)
        failure_monitor.register(direct, ranks, peers.problem)
        weakref.finalize(direct, peers.close, True)  # a process that ends in order says so
        for source, target in mine:  # NCCL connects with the first message, and hosts wait for that
            if source == self.rank:
                direct.send(target, [torch.zeros(1, device=device)])
            else:
                direct.receive(source, lambda empty: [empty(1)])[1].wait()
        direct.confirm()
        return direct

    def abort(self, reason: str) -> None:
        reason = f"rank {self.rank} has given up {self._name}: {reason}"
        if self._direct is not None:
            self._direct.abort(reason)
        if self._messages is not None:
            self._messages.abort(reason)


class StagedLane:
    """A lane for messages from a device's memory."""

    def __init__(self, lane: Lane, staging: Staging) -> None:
        self._lane, self._staging = lane, staging

    def send(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        return self._staging.send(buffers, lambda hosts: self._lane.send(peer, hosts))

    def receive(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        return self._lane.receive(peer, buffers)


class NoLane:
    """One rank alone."""

    def send(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        raise ValueError(f"there is no rank {peer}: this job has one rank")

    receive = send


class ThreadWorld:
    """Ranks that are threads of one process, for tests and for trying things out."""

    def __init__(self, size: int, timeout: float = 20.0) -> None:
        self.size, self.timeout = size, timeout
        self._lock = threading.Lock()
        self._aborted = False
        self._hubs: dict[str, ThreadHub] = {}
        self._transports: dict[tuple[str, tuple[int, ...]], list[comm_core.Transport]] = {}

    def fabric(self, rank: int) -> ThreadFabric:
        return ThreadFabric(self, rank)

    def hub(self, name: str, size: int) -> ThreadHub:
        with self._lock:
            hub = self._hubs.setdefault(name, ThreadHub(size, self.timeout))
            self._break()
            return hub

    def transports(self, name: str, ranks: tuple[int, ...]) -> list[comm_core.Transport]:
        with self._lock:
            if (name, ranks) not in self._transports:
                self._transports[name, ranks] = [
                    comm_core.DirectTransport(channel, place, len(ranks))
                    for place, channel in enumerate(comm_core.local_channels(len(ranks)))
                ]
            self._break()
            return self._transports[name, ranks]

    def abort(self) -> None:
        """Whoever waits for a message, now or later, gets an error."""
        with self._lock:
            self._aborted = True
            self._break()

    def _break(self) -> None:
        """Under the lock: what is asked for after the end is born broken, or its rank would wait in vain."""
        if self._aborted:
            for hub in self._hubs.values():
                hub.broken.set()
            for transports in self._transports.values():
                for transport in transports:
                    transport.abort("another rank has ended")


class ThreadLane:
    def __init__(self, hub: ThreadHub, name: str, rank: int) -> None:
        self.channel, self.name = hub.channel(rank), name

    def send(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        return self.channel.exchange([(peer, buffer) for buffer in flat(buffers)], [], self.name)

    def receive(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        return self.channel.exchange([], [(peer, buffer) for buffer in flat(buffers)], self.name)


class ThreadFabric:
    own_generator = False

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank, self.size, self.timeout = world, rank, world.size, world.timeout
        self._made = 0

    def lane(self, name: str, traffic: comm_core.Traffic | None = None) -> Lane:
        self._made += 1
        return ThreadLane(self.world.hub(f"{self._made} {name}", self.size), name, self.rank)

    def transport(self, name: str, ranks: Sequence[int]) -> Any:
        # A number per rank would differ between ranks: only lanes are made by all of them alike.
        transport = self.world.transports(f"{self._made} {name}", tuple(ranks))[list(ranks).index(self.rank)]
        transport.set_timeout(self.timeout)
        return transport

    def channel(self, name: str, ranks: Sequence[int]) -> Channel:
        hub = self.world.hub(f"{self._made} {name} {list(ranks)}", len(ranks))
        return hub.channel(list(ranks).index(self.rank))

    def staging(self, device: torch.device) -> Staging | None:
        return staging_of(device_of(device))

    def direct(self, devices: Collection[torch.device], program: Program) -> DeviceMessages | None:
        return None

    def abort(self, reason: str) -> None:
        self.world.abort()


def to_host(tensor: Tensor) -> Tensor:
    """Contiguous, with its values in host memory, where messages travel from."""
    return tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg()


def from_host(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if device.type == "cpu" else tensor.to(device)


# -- messages between ranks: tensors, and descriptions by which they can be received -------------------------

_MOST_KNOWN = 4096  # descriptions that both sides of a lane remember, for each direction and peer


@dataclass(frozen=True)
class Leaf:
    """One tensor of a message; ``grad``: a gradient will come back; ``cuts``: how tiles cut it in the
    sender's stage and in the receiver's. Or a constant.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    grad: bool = False
    constant: Any = None
    cuts: Cuts = UNCUT


@dataclass(frozen=True)
class Description:
    """The structure of a message (a pytree with the leaves' numbers) and its leaves, for its receiver."""

    structure: Any
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(
        cls, leaves: Sequence[Any], spec: Any, grads: Sequence[bool], cuts: Sequence[Cuts] | None = None
    ) -> Description:
        structure = None if spec is None else tree_unflatten(range(len(leaves)), spec)
        each = zip(leaves, grads, cuts or [UNCUT] * len(leaves), strict=True)
        return cls(structure, tuple(_leaf(leaf, grad, cut) for leaf, grad, cut in each))

    @cached_property
    def spec(self) -> Any:
        return tree_flatten(self.structure)[1]

    def __reduce__(self) -> Any:
        # Structures travel: torch's specifications are not meant to be pickled.
        return Description, (self.structure, self.leaves)

    def buffers(self, empty: Callable[..., Tensor] = torch.empty) -> list[Tensor]:
        return [empty(shape, dtype=kind) for shape, kind in self._tensors]

    @cached_property
    def _tensors(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(leaf.shape, leaf.dtype) for leaf in self.leaves if leaf.dtype is not None]

    def fill(
        self, buffers: Sequence[Tensor], device: torch.device, staging: Staging | None = None
    ) -> list[Any]:
        """The message's leaves, of what has arrived."""
        if staging is None:
            buffers = [from_host(buffer, device) for buffer in buffers]
        else:
            buffers = staging.bring(buffers)
        coming = iter(buffers)
        return [leaf.constant if leaf.dtype is None else next(coming) for leaf in self.leaves]

    def __str__(self) -> str:
        return ", ".join(
            repr(leaf.constant) if leaf.dtype is None else f"{list(leaf.shape)} {leaf.dtype}"
            for leaf in self.leaves
        )


def no_gradient(like: Tensor) -> Tensor:
    """Stands for a gradient that is None, because messages have fixed sizes: all bytes are 0xFF, a NaN that
    no operation makes.
    """
    data = torch.full((like.numel() * like.element_size(),), 0xFF, dtype=torch.uint8, device=like.device)
    return data.view(like.dtype).view(like.shape)


def is_gradient(buffer: Tensor) -> bool:
    """Whether a message is a gradient, and does not stand for None."""
    flat = buffer.view(-1)
    first = flat[0].item() if len(flat) else 0.0
    # Only a NaN differs from itself, so ordinary gradients cost one comparison.
    return first == first or not (flat.view(torch.uint8) == 0xFF).all()


def _leaf(value: Any, grad: bool, cuts: Cuts) -> Leaf:
    if isinstance(value, Tensor):
        return Leaf(tuple(value.shape), value.dtype, grad, cuts=cuts)
    if isinstance(value, CONSTANTS):
        return Leaf(constant=value)
    raise ValueError(
        f"only tensors, numbers, strings and None can cross the border of a stage, got"
        f" {type(value).__name__}; cut the model elsewhere"
    )


def in_words(leaves: Sequence[Any]) -> str:
    """A stage's inputs, for its errors."""
    try:
        return str(Description.of(leaves, None, [False] * len(leaves)))
    except ValueError:
        return "the batch"


def send_tree(lane: Lane, peer: int, tree: Any) -> list[Pending]:
    """A pytree of tensors, which arrive in host memory, and of anything that can be pickled."""
    outline = tree_map_only(Tensor, lambda tensor: Leaf(tuple(tensor.shape), tensor.dtype), tree)
    tensors = [to_host(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [*send_object(lane, peer, outline), lane.send(peer, tensors)]


def receive_tree(lane: Lane, peer: int) -> Any:
    leaves, spec = tree_flatten(receive_object(lane, peer))
    found = [
        torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") if isinstance(leaf, Leaf) else leaf
        for leaf in leaves
    ]
    lane.receive(peer, [leaf for leaf in found if isinstance(leaf, Tensor)]).wait()
    return tree_unflatten(found, spec)


def send_object(lane: Lane, peer: int, value: Any) -> list[Pending]:
    """Anything that can be pickled."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [lane.send(peer, [torch.tensor([len(data)])]), lane.send(peer, [data])]


def receive_object(lane: Lane, peer: int) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    lane.receive(peer, [size]).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    lane.receive(peer, [data]).wait()
    return pickle.loads(data.numpy().tobytes())


def everyones(
    lane: Lane,
    rank: int,
    ranks: Sequence[int],
    value: Any,
    send: Callable[[Lane, int, Any], list[Pending]] = send_object,
    receive: Callable[[Lane, int], Any] = receive_object,
) -> list[Any]:
    """Every rank's value, in the order of ``ranks``; all of them must call."""
    pending = [part for peer in ranks if peer != rank for part in send(lane, peer, value)]
    values = [value if peer == rank else receive(lane, peer) for peer in ranks]
    for sent in pending:
        sent.wait()
    return values


def from_first(
    lane: Lane,
    rank: int,
    ranks: Sequence[int],
    value: Any,
    send: Callable[[Lane, int, Any], list[Pending]] = send_tree,
    receive: Callable[[Lane, int], Any] = receive_tree,
) -> Any:
    """The value of the first of ``ranks``, on each of them; the others' are not read."""
    if rank != ranks[0]:
        return receive(lane, ranks[0])
    for sent in [part for peer in ranks[1:] for part in send(lane, peer, value)]:
        sent.wait()
    return value


# -- the mailbox: activations forward, gradients backward ----------------------------------------------------

# Shapes are agreed on when they first occur: the first message of a kind brings a description with it, after
# which the receiver can post its buffers ahead and nothing but the tensors travels.

_POSTED_AHEAD = 3

Sent = tuple[Action, Pending]


class Outbox:
    """Sends without waiting. A message stays in memory until ``answered`` tells that the other side has it,
    or ``settle`` waits until it has left. ``direct``: tensors go from device to device, and by the lane what
    hosts read: descriptions, and of which tensors there is a gradient.
    """

    def __init__(
        self, lane: Lane, staging: Staging | None = None, direct: DeviceMessages | None = None
    ) -> None:
        self.lane = lane if staging is None else StagedLane(lane, staging)
        self._direct = direct
        self._ready: Callable[[Tensor], Tensor] = to_host if staging is None else Tensor.detach
        if direct is not None:
            self._ready = lambda leaf: leaf.detach().to(direct.device.device)
        self._known: defaultdict[int, dict[Hashable, tuple[Description, list[Any]]]] = defaultdict(dict)
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
        peer, outline = peer_of(action), _outline(leaves, grads)
        if key not in self._known[peer]:
            described = Description.of(leaves, spec, grads, cuts)
            back = Description(None, tuple(leaf for leaf in described.leaves if leaf.grad))
            remember(self._known[peer], key, (back, outline))
            self._sent[peer] += [(action, part) for part in send_object(self.lane, peer, described)]
        back, known = self._known[peer][key]
        if known != outline:
            raise ValueError(
                f"stage {action.stage} put out {outline} for micro-batch {action.index} of step"
                f" {action.shift}, and {known} for an earlier micro-batch of the same input shapes; what"
                " crosses a cut may only depend on the shapes of the batch: after a change of the model that"
                " changes it (a hook, a frozen stage), make a new Pipeline"
            )
        self.send(action, leaves)
        return back

    def send(self, action: Action, leaves: Sequence[Any], given: Sequence[bool] = ()) -> None:
        """``given``: for each gradient whether it is one, and does not stand for None."""
        buffers = [self._ready(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        peer = peer_of(action)
        try:
            if self._direct is None:
                self._sent[peer].append((action, self.lane.send(peer, buffers)))
                return
            if action.kind is Kind.SENDB:
                flags = torch.tensor(given, dtype=torch.bool)
                self._sent[peer].append((action, self.lane.send(peer, [flags])))
            self._sent[peer].append((action, self._direct.send(peer, buffers)))
        except CommError as error:
            raise _naming(action, error) from None

    def back(self, peer: int, key: Hashable) -> Description | None:
        """The gradients that answer a message, where one like it has been sent."""
        known = self._known[peer].get(key)
        return None if known is None else known[0]

    def answered(self, answer: Action) -> None:
        """A gradient came: its sender has the activations, and all that was sent to it before them."""
        sent = self._sent[peer_of(answer)]
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
    given: tuple[Tensor, Pending] | None = None  # which gradients there are, where the sender's host tells


Known = Callable[[Action], "Description | None"]


class Inbox:
    """Receives in each sender's order, a few messages ahead of their use.

    ``key(action)`` says which messages have the same shapes; where it is None, ``describe(action)`` tells the
    shapes as soon as they are known here (a gradient's, when its forward is done). ``waited``: seconds that
    ``take`` has needed so far.
    """

    def __init__(
        self,
        rank: int,
        lane: Lane,
        timeout: float,
        describe: Known,
        key: Callable[[Action], Hashable],
        empty: Callable[..., Tensor] = torch.empty,
        direct: DeviceMessages | None = None,
    ) -> None:
        self.rank, self.lane, self.timeout, self._direct = rank, lane, timeout, direct
        self._describe, self._key = describe, key
        self._empty = empty  # makes the buffers
        self._known: defaultdict[int, dict[Hashable, Description]] = defaultdict(dict)
        self._expected: defaultdict[int, deque[Action]] = defaultdict(deque)
        self._posted: defaultdict[int, deque[Posted]] = defaultdict(deque)
        self.arrived: dict[Action, tuple[Description, list[Tensor]]] = {}
        self.given: dict[Action, list[bool]] = {}  # of gradients that have arrived directly
        self.waited = 0.0

    def expect(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._expected[peer_of(action)].append(action)

    def pump(self) -> None:
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
            buffers = described.buffers(self._empty)
            posted.append(Posted(action, described, buffers, self.lane.receive(peer, buffers)))

    def launch(self, action: Action) -> None:
        """Receive a message directly. The host waits for the description of the first one of a kind."""
        assert self._direct is not None
        peer, key = peer_of(action), self._key(action)
        if key is not None and key not in self._known[peer]:
            remember(self._known[peer], key, receive_object(self.lane, peer))
        described, given = self._description(action, peer), None
        assert described is not None, f"{action} comes before the forward that it answers"
        if action.kind is Kind.RECVB:
            flags = torch.empty(len(described.leaves), dtype=torch.bool)
            given = flags, self.lane.receive(peer, [flags])
        buffers, pending = self._direct.receive(peer, described.buffers)
        self._posted[peer].append(Posted(action, described, buffers, pending, given))

    def _description(self, action: Action, peer: int) -> Description | None:
        key = self._key(action)
        return self._describe(action) if key is None else self._known[peer].get(key)

    def take(self, action: Action) -> tuple[Description, list[Tensor]]:
        """The message, as soon as it is there; ``CommError`` after the time-out."""
        peer, start = peer_of(action), perf_counter()
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
            if first.given is not None:
                flags, told = first.given
                told.wait()
                self.given[first.action] = flags.tolist()
            return
        if not self._expected[peer]:
            raise CommError(f"the program has no further message from rank {peer}")
        action = self._expected[peer][0]
        key = self._key(action)
        if key is None:
            raise CommError(f"{action} comes before the forward that it answers")
        remember(self._known[peer], key, receive_object(self.lane, peer))

    def drain(self) -> None:
        """Takes in everything that is expected."""
        for peer in list(self._expected):
            while self._expected[peer] or self._posted[peer]:
                self._next(peer)


def remember(known: dict[Any, Any], key: Hashable, value: Any, most: int = _MOST_KNOWN) -> None:
    """Keeps the newest entries: numbers among a batch's inputs may make others in every step."""
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]


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
    place = f"step {action.shift}, stage {action.stage}, micro-batch {action.index}"
    return CommError(f"{action} ({place}): {error}")
