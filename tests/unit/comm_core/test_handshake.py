"""The handshake of TCP connections: ranks need the job's token, and a lost rank ends each wait."""

from __future__ import annotations

import random
import re
import resource
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore

from comm_core import EngineError, tcp, tcp_connections
from comm_core.handshake import GREETING, NONCE, Member, _let_in, _make_room, none_lost
from tests.support.engines import on_ranks

ROOT = Path(__file__).resolve().parents[3]
HOST = "127.0.0.1"
LONG = 3600.0  # seconds that no test waits


def read(connection: socket.socket, count: int = 1 << 20) -> bytes:
    """Read this many bytes, or up to the end."""
    data = b""
    with suppress(ConnectionResetError):
        while len(data) < count and (piece := connection.recv(count - len(data))):
            data += piece
    return data


class Store(HashStore):
    """Runs `first` with the address of rank 0's listener before rank 1 may connect."""

    def __init__(self, first: Callable[[tuple[str, int]], object]) -> None:
        super().__init__()
        self.first, self.ended = first, threading.Event()

    def run(self, port: int) -> None:
        try:
            self.first((HOST, port))
        finally:
            self.ended.set()

    def set(self, key: str, value: str) -> None:
        if key == "address/0":
            threading.Thread(target=self.run, args=(int(value.split()[1]),)).start()
        if key == "address/1":
            assert self.ended.wait(240)
        super().set(key, value)


def false_greeting(what: str, token: bytes, challenge: bytes) -> bytes:
    rank = Member(token, 1, 3 if what == "another number of ranks" else 2)
    greeting = rank.greeting(1 if what == "for another rank" else 0, False)
    if what == "another token":
        rank = Member(secrets.token_hex(16).encode(), 1, 2)
    if what == "replayed":
        challenge = secrets.token_bytes(NONCE)
    role = b"accept" if what == "another role" else b"dial"
    return greeting + rank.proof(role, challenge, greeting)


@pytest.mark.parametrize(
    "what", ["another token", "replayed", "another role", "for another rank", "another number of ranks"]
)
def test_a_false_rank_is_refused_and_the_real_ones_connect(what: str) -> None:
    replies: list[bytes] = []

    def impostor(address: tuple[str, int]) -> None:
        with socket.create_connection(address, 60) as connection:
            challenge = read(connection, NONCE)
            connection.sendall(false_greeting(what, store.get("token"), challenge))
            replies.append(read(connection))

    store = Store(impostor)
    first, second = on_ranks(2, lambda rank: tcp_connections(store, rank, 2, HOST, timeout_seconds=60))
    assert replies == [b""], "the impostor got an answer"
    assert first[1] is not None and second[0] is not None
    first[1].data.sendall(b"to rank 1")
    assert read(second[0].data, 9) == b"to rank 1"


class Tap(HashStore):
    """Rank 1 reaches rank 0 through a relay, which records every byte."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []
        self.listener = socket.create_server((HOST, 0))

    def set(self, key: str, value: str) -> None:
        if key == "address/0":
            target = HOST, int(value.split()[1])
            threading.Thread(target=self.relay, args=(target,), daemon=True).start()
            value = f"{HOST} {self.listener.getsockname()[1]}"
        super().set(key, value)

    def relay(self, target: tuple[str, int]) -> None:
        for _ in range(2):
            ends = self.listener.accept()[0], socket.create_connection(target)
            for one, other in (ends, ends[::-1]):
                threading.Thread(target=self.copy, args=(one, other), daemon=True).start()

    def copy(self, source: socket.socket, target: socket.socket) -> None:
        with source, suppress(OSError):
            while piece := source.recv(1 << 16):
                self.seen.append(piece)
                target.sendall(piece)


def test_who_reads_the_store_is_no_rank_of_a_job_with_a_secret(monkeypatch: Any) -> None:
    monkeypatch.setenv("COMMSCHED_JOB_TOKEN", "the job's secret")
    test_a_false_rank_is_refused_and_the_real_ones_connect("nothing: it has read the token in the store")


def test_ranks_with_different_secrets_say_so(monkeypatch: Any) -> None:
    store, problems = HashStore(), dict[int, EngineError]()

    def connect(rank: int) -> None:
        with pytest.raises(EngineError) as raised:
            lost = (lambda awaited: "rank 1 has ended" if problems else "") if rank == 0 else none_lost
            tcp_connections(store, rank, 2, HOST, timeout_seconds=60, lost=lost)
        problems[rank] = raised.value

    secrets_of_ranks = iter("ab")
    monkeypatch.setattr(tcp, "_with_secret", lambda token: next(secrets_of_ranks).encode())
    on_ranks(2, connect)
    assert "ranks that differ in COMMSCHED_JOB_TOKEN" in str(problems[1])


def test_the_token_is_not_sent() -> None:
    store = Tap()
    with store.listener:
        on_ranks(2, lambda rank: tcp_connections(store, rank, 2, HOST, timeout_seconds=60))
    sent, token = b"".join(store.seen), store.get("token")
    assert len(sent) == 2 * (NONCE + GREETING.size + NONCE + NONCE)
    assert token not in sent and bytes.fromhex(token.decode()) not in sent


@pytest.mark.parametrize("answer, problem", [(b"", "closed the connection"), (b"x" * NONCE, "does not have")])
def test_a_listener_without_the_token_is_an_error(answer: bytes, problem: str, monkeypatch: Any) -> None:
    """It also learns nothing: its challenge gets a proof that is of no use with any other."""
    monkeypatch.setattr("comm_core.handshake.TRIES", 3)
    with socket.create_server((HOST, 0)) as listener:

        def impostor() -> None:
            for _ in range(1 if answer else 3):
                with listener.accept()[0] as guest:
                    guest.sendall(b"c" * NONCE)
                    read(guest, GREETING.size + NONCE)
                    guest.sendall(answer)

        thread = threading.Thread(target=impostor, daemon=True)
        thread.start()
        with pytest.raises(EngineError, match=rf"rank 0 at 127\.0\.0\.1:\d+ .*{problem}") as caught:
            tcp_connections(rank_0_at(listener), 1, 2, HOST, timeout_seconds=LONG)
        thread.join(60)
        assert not thread.is_alive(), "rank 1 did not dial again"
    assert (caught.value.kind, caught.value.peer) == ("peer_lost", 0)


def rank_0_at(listener: socket.socket) -> HashStore:
    store = HashStore()
    store.set("token", secrets.token_hex(16))
    store.set("address/0", f"{HOST} {listener.getsockname()[1]}")
    return store


@pytest.mark.parametrize("waits_for", ["address", "answer", "connection"])
def test_a_lost_rank_ends_each_wait(waits_for: str) -> None:
    polls: Iterator[str] = chain([""] * 3, repeat("rank 5 of the job died"))
    with socket.create_server((HOST, 0)) as silent:
        store = rank_0_at(silent) if waits_for == "answer" else HashStore()
        rank = 0 if waits_for == "connection" else 1
        with pytest.raises(EngineError, match=r"^rank 5 of the job died$") as caught:
            tcp_connections(store, rank, 2, HOST, timeout_seconds=LONG, lost=lambda awaited: next(polls))
    assert caught.value.kind == "peer_lost"


@pytest.mark.parametrize("waits_for", ["address", "connection"])
def test_a_rank_that_has_left_ends_the_wait_for_its_connection(waits_for: str) -> None:
    rank = 0 if waits_for == "connection" else 1
    with pytest.raises(EngineError, match=rf"^rank \[{1 - rank}\] has left the job$") as caught:
        left = lambda awaited: f"rank {[*awaited]} has left the job" if awaited else ""  # noqa: E731
        tcp_connections(HashStore(), rank, 2, HOST, timeout_seconds=LONG, lost=left)
    assert caught.value.kind == "peer_lost"


def test_a_rank_that_has_connected_may_leave_before_the_others_have() -> None:
    """What it has sent is there to be read."""
    left, store = threading.Event(), HashStore()

    def lost(awaited: Sequence[int]) -> str:
        return "rank 1 has left" if left.is_set() and 1 in awaited else ""

    def connect(rank: int) -> object:
        if rank == 2:
            assert left.wait(60)
        ends = tcp_connections(
            store, rank, 3, HOST, timeout_seconds=60, lost=lost if rank == 0 else none_lost, star=True
        )
        if rank == 1:
            left.set()
        return ends

    first, *_ = on_ranks(3, connect)
    assert first[0] is None and None not in first[1:]


def test_a_rank_that_gives_up_closes_the_connections_that_it_has() -> None:
    """Those ranks have all connections that they need, and would wait for its messages."""
    connected = threading.Event()

    def rank_1() -> bytes:
        connection = tcp_connections(store, 1, 3, HOST, timeout_seconds=60, star=True)[0]
        assert connection is not None
        connected.set()
        return read(connection.data)

    def rank_0() -> EngineError:
        lost = lambda awaited: "rank 2 died" if connected.is_set() else ""  # noqa: E731
        with pytest.raises(EngineError, match="rank 2 died") as caught:
            tcp_connections(store, 0, 3, HOST, timeout_seconds=60, lost=lost, star=True)
        return caught.value

    store = HashStore()
    error, received = on_ranks(2, lambda rank: [rank_0, rank_1][rank]())
    assert isinstance(error, EngineError) and received == b""


def test_a_store_that_has_ended_is_an_error_that_says_so() -> None:
    class Ended(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise DistNetworkError("recv: got 0 bytes\nframe #0: ...")

    with pytest.raises(EngineError, match=r"store does not answer: recv: got 0 bytes; look for .* rank 0's"):
        tcp_connections(Ended(), 1, 2, HOST, timeout_seconds=LONG)


# -- strangers on the port -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sends", [b"", b"x"])
def test_a_stranger_that_does_not_prove_itself_is_closed(sends: bytes, monkeypatch: Any) -> None:
    """Silent, or a byte now and then: neither keeps its connection."""
    monkeypatch.setattr("comm_core.handshake.GUEST_SECONDS", 0.3)
    ends: list[bytes] = []

    def stranger(address: tuple[str, int]) -> None:
        with socket.create_connection(address, 60) as connection:
            read(connection, NONCE)
            connection.settimeout(0.05)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(sends)
                with suppress(TimeoutError):
                    ends.append(read(connection))
                    return

    store = Store(stranger)
    first, _ = on_ranks(2, lambda rank: tcp_connections(store, rank, 2, HOST, timeout_seconds=120))
    assert ends == [b""] and first[1] is not None


def test_strangers_do_not_always_close_the_oldest_connection() -> None:
    """Ranks on slow links were the oldest each time, before their answers arrived."""
    oldest_was_kept = 0
    for _ in range(40):
        with ExitStack() as ends, selectors.PollSelector() as selector:

            def accept() -> tuple[socket.socket, None]:
                near, far = map(ends.enter_context, socket.socketpair())
                return near, None

            listener: Any = SimpleNamespace(accept=accept)
            for _ in range(8):
                _let_in(listener, selector, 8)
            oldest = next(iter(selector.get_map().values())).fileobj
            for _ in range(8):
                _let_in(listener, selector, 7)
            assert len(selector.get_map()) == 8
            oldest_was_kept += any(key.fileobj is oldest for key in selector.get_map().values())
    assert 0 < oldest_was_kept < 40


def test_a_rank_whose_connection_strangers_close_dials_again(monkeypatch: Any) -> None:
    """It raised, and the job did not start."""
    accepted = []

    def let_in(listener: socket.socket, selector: Any, most: int) -> str:
        refused = _let_in(listener, selector, most)
        accepted.append(refused)
        if len(accepted) in (1, 3):  # as for a stranger that comes before the rank's answer
            assert _make_room(selector)
        return refused

    monkeypatch.setattr("comm_core.handshake._let_in", let_in)
    store = HashStore()
    first, second = on_ranks(2, lambda rank: tcp_connections(store, rank, 2, HOST, timeout_seconds=60))
    assert first[1] is not None and second[0] is not None and len(accepted) == 4


PROGRAM = """
import os, resource, sys, time
from comm_core import EngineError, tcp, tcp_connections
from tests.support.engines import on_ranks
from tests.unit.comm_core.test_handshake import HOST, Store, read

def until_told(address):
    print(address[1], flush=True)
    sys.stdin.readline()

def without_descriptors(address):
    try:
        while True:
            os.dup(0)
    except OSError:
        until_told(address)
"""

CROWD = """
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
store = Store(until_told)
first, second = on_ranks(2, lambda rank: tcp_connections(store, rank, 2, HOST, timeout_seconds=240))
first[1].data.sendall(b"to rank 1")
print(read(second[0].data, 9).decode())
"""

FULL = """
store = Store(without_descriptors)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
before = time.process_time()
try:
    tcp_connections(store, 0, 2, HOST, timeout_seconds=6)
except EngineError as error:
    print(error)
print(time.process_time() - before)
"""


@contextmanager
def listening(program: str) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """A process of its own, which runs a part of PROGRAM, and the address of its listener."""
    command = [sys.executable, "-c", PROGRAM + program]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process, (HOST, int(process.stdout.readline()))
        finally:
            process.kill()


@contextmanager
def many_descriptors(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), max(hard, count)))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_999_strangers_at_256_descriptors() -> None:
    """Silent ones and ones that send garbage, there before the last rank. They used up the descriptors of a
    rank, whose loop then span.
    """
    dice = random.Random(0)
    with many_descriptors(2048), listening(CROWD) as (process, address), ExitStack() as strangers:
        for number in range(999):
            stranger = strangers.enter_context(socket.create_connection(address, 240))
            with suppress(OSError):
                stranger.sendall(dice.randbytes(number % 200) if number % 2 else b"")
        said, _ = process.communicate("\n", timeout=240)
    assert process.returncode == 0 and said == "to rank 1\n"


def test_a_rank_without_descriptors_waits_and_says_so() -> None:
    """It takes no processor time, although the listener stays readable."""
    with listening(FULL) as (process, address), socket.create_connection(address, 60):
        message, seconds = process.communicate("\n", timeout=240)[0].splitlines()
    assert re.fullmatch(
        r"ranks \[1\] did not connect \(this process cannot accept connections: Too many open files; raise"
        r" `ulimit -n`\) within 6 s; look for an error in the other ranks' output",
        message,
    )
    assert float(seconds) < 3
