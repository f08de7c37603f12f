"""Connects two ranks that have the same secret token, and keeps all others out.

    dialling rank                                   accepting rank
                     <- challenge (random)
    greeting (nonce, from, to, size, keepalive),
    HMAC(token, "dial", challenge, greeting) ->
                     <- HMAC(token, "accept", challenge, greeting)

The token itself is never sent, and no recorded answer fits another challenge.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from errno import EINPROGRESS, EMFILE, ENFILE, ENOBUFS, ENOMEM
from functools import partial
from typing import Any, NamedTuple

from comm_core.errors import EngineError
from comm_core.forks import close_in_children

POLL_SECONDS = 0.02  # between two calls of `lost`
GUESTS, GUEST_SECONDS = 64, 30.0  # connections without proof, and how long each may take for it
TRIES = 50  # of a rank whose connection is closed without an answer
NO_ROOM = EMFILE, ENFILE, ENOBUFS, ENOMEM
NONCE = 32  # bytes of a challenge, and of a proof
GREETING = struct.Struct("32sIIII")  # nonce, from rank, to rank, number of ranks, 1: keepalive connection


Lost = Callable[[Sequence[int]], str]
"""Return why another rank is lost, or why one of these ranks has left and will not connect; "" if none is."""


def none_lost(awaited: Sequence[int]) -> str:
    return ""


class Waiting:
    """Limits this rank's wait for the others."""

    def __init__(self, rank: int, seconds: float, lost: Lost = none_lost) -> None:
        self.rank, self.seconds, self.lost = rank, seconds, lost
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds until the time limit; negative after it."""
        return self._deadline - time.monotonic()

    def next(self, peer: int, late: str, awaited: Sequence[int] = ()) -> float:
        """Return how many seconds to wait before the next call.

        Raise if a rank is lost, or if one of the `awaited` ranks, which have not connected yet, has left. (A
        rank that has connected may leave: what it has sent can still be read.) After the time limit raise
        with the text `late` about `peer`.
        """
        reason = self.lost(awaited)
        if reason:
            raise EngineError(reason, kind="peer_lost", rank=self.rank)
        left = self.left
        if left <= 0:
            message = f"{late} within {self.seconds:g} s; look for an error in the other ranks' output"
            raise EngineError(message, kind="timeout", rank=self.rank, peer=peer)
        return min(left, POLL_SECONDS)


class Guest(NamedTuple):
    """A connection that has not proved yet who it is."""

    challenge: bytes
    answer: bytearray
    deadline: float


class Member(NamedTuple):
    """A rank that has the job's token."""

    token: bytes
    rank: int
    size: int

    def proof(self, role: bytes, challenge: bytes, greeting: bytes) -> bytes:
        return hmac.digest(self.token, role + challenge + greeting, "sha256")

    def greeting(self, peer: int, keepalive: bool) -> bytes:
        return GREETING.pack(secrets.token_bytes(NONCE), self.rank, peer, self.size, keepalive)

    def guest(self, challenge: bytes, answer: bytes) -> tuple[int, bool]:
        """Return the rank that answers, -1 without proof, and whether this is its keepalive connection."""
        greeting, proof = answer[: GREETING.size], answer[GREETING.size :]
        if hmac.compare_digest(proof, self.proof(b"dial", challenge, greeting)):
            _, peer, addressee, size, keepalive = GREETING.unpack(greeting)
            if (addressee, size) == (self.rank, self.size):
                return peer, bool(keepalive)
        return -1, False


def dial(
    address: tuple[str, int], peer: int, keepalive: bool, own: Member, waiting: Waiting
) -> socket.socket:
    """Return a connection to `peer` over which both ranks have proved that they have the job's token.

    A rank that many strangers dial closes connections at random, this one perhaps before it has read the
    proof: so dial again. A rank that refuses the proof closes it too: so dial at most `TRIES` times.
    """
    where = f"rank {peer} at {address[0]}:{address[1]}"
    pause = partial(waiting.next, peer, f"{where} did not answer")
    greeting = own.greeting(peer, keepalive)
    family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    tries = 0
    while True:
        connection = close_in_children(socket.socket(family, kind, protocol))
        try:
            _connect(connection, target, pause)
            challenge = _receive(connection, NONCE, pause)
            connection.sendall(greeting + own.proof(b"dial", challenge, greeting))
            answer = _receive(connection, NONCE, pause)
            if not hmac.compare_digest(answer, own.proof(b"accept", challenge, greeting)):
                message = f"{where} does not have this job's token: is that the address of another program,"
                message += " or do the ranks differ in COMMSCHED_JOB_TOKEN?"
                raise EngineError(message, kind="peer_lost", rank=own.rank, peer=peer)
            return connection
        except OSError as error:
            connection.close()
            tries += 1
            closed = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
            if not closed or tries == TRIES:
                message = f"{where} cannot be reached: {error}; look for an error in its output"
                if closed:
                    message += ", and for ranks that differ in COMMSCHED_JOB_TOKEN"
                raise EngineError(message, kind="peer_lost", rank=own.rank, peer=peer) from error
        except BaseException:
            connection.close()
            raise
        time.sleep(pause())


def _connect(connection: socket.socket, target: Any, pause: Callable[[], float]) -> None:
    connection.setblocking(False)
    problem = connection.connect_ex(target)
    if problem == EINPROGRESS:
        _until(connection, selectors.EVENT_WRITE, pause)
        problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))


def _receive(connection: socket.socket, count: int, pause: Callable[[], float]) -> bytes:
    data = b""
    while len(data) < count:
        _until(connection, selectors.EVENT_READ, pause)
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return data


def _until(connection: socket.socket, event: int, pause: Callable[[], float]) -> None:
    with selectors.PollSelector() as selector:
        selector.register(connection, event)
        while not selector.select(pause()):
            pass


def accept_all(
    listener: socket.socket,
    own: Member,
    peers: Iterable[int],
    found: dict[tuple[int, bool], socket.socket],
    waiting: Waiting,
) -> None:
    """Add both connections of each of these ranks to `found`. No number of strangers delays them.

    A guest, which has not proved yet who it is, is closed after `GUEST_SECONDS`. Beside the connections that
    are awaited there are at most `GUESTS`: one more closes one of them at random. If it closed the oldest,
    strangers that come fast enough would end each rank's connection before the proof arrives.
    """
    missing = {(peer, keepalive) for peer in peers for keepalive in (False, True)}
    refused = ""
    listener.setblocking(False)
    with selectors.PollSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while missing:
                ranks = sorted({peer for peer, _ in missing})
                pause = waiting.next(ranks[0], f"ranks {ranks} did not connect{refused}", ranks)
                # The listener last: a guest that has answered must not be closed to make room.
                for key, _ in sorted(selector.select(pause), key=lambda event: event[0].data is None):
                    if key.data is None:
                        refused = _let_in(listener, selector, len(missing) + GUESTS)
                        continue
                    who = _identify(key, selector, own, missing)
                    if who is not None:
                        found[who] = key.fileobj  # type: ignore[assignment]
                        missing.remove(who)
                while (oldest := _oldest(selector)) and oldest.data.deadline < time.monotonic():
                    _dismiss(oldest, selector)
        finally:
            while oldest := _oldest(selector):
                _dismiss(oldest, selector)


def _let_in(listener: socket.socket, selector: selectors.BaseSelector, most: int) -> str:
    """Accept a guest. Return why that is impossible, as a part of a sentence; "" if it is possible."""
    if len(selector.get_map()) > most:
        _make_room(selector)
    try:
        guest = close_in_children(listener.accept()[0])
    except OSError as error:
        if error.errno not in NO_ROOM:
            return ""  # the other end has closed already
        # The listener stays readable: without a pause the loop would spin.
        if not _make_room(selector):
            time.sleep(POLL_SECONDS)
        return f" (this process cannot accept connections: {error.strerror}; raise `ulimit -n`)"
    challenge = secrets.token_bytes(NONCE)
    try:
        guest.setblocking(False)
        guest.sendall(challenge)
    except OSError:
        guest.close()
        return ""
    deadline = time.monotonic() + GUEST_SECONDS
    selector.register(guest, selectors.EVENT_READ, Guest(challenge, bytearray(), deadline))
    return ""


def _make_room(selector: selectors.BaseSelector) -> bool:
    """Close one guest's connection, and return whether there was any."""
    guests = [key for key in selector.get_map().values() if key.data is not None]
    if guests:
        _dismiss(secrets.choice(guests), selector)  # the user has seeded `random`: its numbers are theirs
    return bool(guests)


def _oldest(selector: selectors.BaseSelector) -> selectors.SelectorKey | None:
    """Return the guest that came first; the selector keeps the order of registration."""
    return next((key for key in selector.get_map().values() if key.data is not None), None)


def _dismiss(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    selector.unregister(key.fileobj)
    key.fileobj.close()  # type: ignore[union-attr]


def _identify(
    key: selectors.SelectorKey, selector: selectors.BaseSelector, own: Member, missing: set[tuple[int, bool]]
) -> tuple[int, bool] | None:
    """Read from a guest. Return who it is once it has proved that; close the connections of others."""
    guest: Any = key.fileobj
    challenge, answer, _ = key.data
    piece = b""
    with suppress(OSError):
        piece = guest.recv(GREETING.size + NONCE - len(answer))
    answer.extend(piece)
    if piece and len(answer) < GREETING.size + NONCE:
        return None
    selector.unregister(guest)
    who = own.guest(challenge, bytes(answer))
    with suppress(OSError):
        if who in missing:
            guest.sendall(own.proof(b"accept", challenge, bytes(answer[: GREETING.size])))
            return who
    guest.close()
    return None
