"""The TCP channel between threads of one process: who gets in, and what the others hear when a rank ends."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch.distributed import HashStore

from comm_core import DirectTransport, Engine, EngineError, TcpChannel, tcp_channel
from comm_core.handshake import GREETING, NONCE
from tests.support.engines import on_ranks, ordered_sum, run_step

HOST = "127.0.0.1"
LONG = 3600.0  # seconds that no test waits


def channels(size: int) -> list[TcpChannel]:
    store = HashStore()
    return on_ranks(size, lambda rank: tcp_channel(store, rank, size, HOST, timeout_seconds=LONG))


def engine_over(channel: TcpChannel, rank: int, size: int, timeout: float = LONG) -> Engine:
    engine = Engine(DirectTransport(channel, rank, size, segment_bytes=1024), rank, size, timeout)
    engine.add_bucket(torch.ones(size * 5000), name="weights")
    engine.install([("RS", 0), ("AG", 0)])
    return engine


def failure(call: Callable[[], object]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_are_in_rank_order_to_the_bit(size: int) -> None:
    data = [torch.randn(size * 30_001, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    found = channels(size)

    def one(rank: int) -> torch.Tensor:
        mine = data[rank].clone()
        DirectTransport(found[rank], rank, size, segment_bytes=4096).all_reduce(mine)
        return mine

    for result in on_ranks(size, one):
        torch.testing.assert_close(result, ordered_sum(data), rtol=0, atol=0)


def test_the_others_hear_which_rank_ended_and_why() -> None:
    found = channels(3)

    def one(rank: int) -> EngineError | None:
        engine = engine_over(found[rank], rank, 3)
        run_step(engine, [0])
        if rank == 2:
            engine.abort("the disk of rank 2 is full")
            return None
        error = failure(lambda: run_step(engine, [0]))
        engine.close()
        return error

    for error in on_ranks(3, one)[:2]:
        assert error is not None and (error.kind, error.peer) == ("peer_lost", 2)
        assert "the disk of rank 2 is full" in str(error)


def test_an_error_that_is_passed_on_says_once_where_to_look() -> None:
    first, second = channels(2)
    engine, leaving = engine_over(first, 0, 2), DirectTransport(second, 1, 2)
    advice = "look at the output of rank 1 for why it ended"
    leaving.abort(f"the connection to rank 1 is lost; {advice}")
    error = failure(lambda: run_step(engine, [0]))
    engine.close()
    assert (error.kind, error.peer) == ("peer_lost", 1) and str(error).count(advice) == 1


def test_a_farewell_writes_nothing_into_the_buffer_that_is_gathered_in_place() -> None:
    """Its text was received into the parameters, which an emergency checkpoint then saved."""
    first, second = channels(2)
    waiting, leaving = DirectTransport(first, 0, 2), DirectTransport(second, 1, 2)
    waiting.set_timeout(LONG)
    leaving.abort("the disk of rank 1 is full")
    parameters = torch.full((2000,), 7.0)
    error = failure(lambda: waiting.all_gather(parameters))
    assert (error.kind, error.peer) == ("peer_lost", 1) and "the disk of rank 1 is full" in str(error)
    torch.testing.assert_close(parameters, torch.full((2000,), 7.0), rtol=0, atol=0)


def test_other_sizes_and_other_steps_are_a_mismatch() -> None:
    first, second = channels(2)

    def one(rank: int) -> EngineError:
        length, channel = (2000, first) if rank == 0 else (2400, second)
        transport = DirectTransport(channel, rank, 2)
        transport.set_timeout(LONG)
        return failure(lambda: transport.all_reduce(torch.ones(length)))

    errors = on_ranks(2, one)
    assert any("do all ranks run the same plan?" in str(error) for error in errors)
    assert all(error.kind in ("mismatch", "peer_lost") for error in errors)


class Store(HashStore):
    """Lets strangers in as soon as rank 0 has published its address."""

    def __init__(self) -> None:
        super().__init__()
        self.strangers: list[socket.socket] = []

    def set(self, key: str, value: str) -> None:
        if key == "address/0":
            host, port = value.split()
            self.strangers = [socket.create_connection((host, int(port))) for _ in range(3)]
            self.strangers[0].sendall(b"x" * (GREETING.size + NONCE))  # as long as a greeting with its proof
            self.strangers[1].sendall(b"GET /")  # too short, and the last one is silent
        super().set(key, value)


def test_strangers_are_kept_out() -> None:
    store = Store()
    joined = on_ranks(2, lambda rank: tcp_channel(store, rank, 2, HOST, timeout_seconds=LONG))
    for stranger in store.strangers:
        with stranger, suppress(ConnectionResetError):
            stranger.settimeout(60)
            assert stranger.recv(NONCE, socket.MSG_WAITALL) and stranger.recv(1) == b"", (
                "more than a challenge"
            )
    values = on_ranks(2, lambda rank: _sum_of_ranks(joined[rank], rank))
    assert values == [[1.0, 1.0]] * 2


def _sum_of_ranks(channel: TcpChannel, rank: int) -> list[float]:
    mine = torch.full((2,), float(rank))
    DirectTransport(channel, rank, 2).all_reduce(mine)
    return mine.tolist()


def test_a_rank_that_never_comes_is_a_time_out() -> None:
    store = HashStore()
    error = failure(lambda: tcp_channel(store, 1, 2, HOST, timeout_seconds=1))
    assert (error.kind, error.peer) == ("timeout", 0) and "did not publish its address" in str(error)
    error = failure(lambda: tcp_channel(store, 0, 2, HOST, timeout_seconds=0.3))
    assert (error.kind, error.peer) == ("timeout", 1) and "ranks [1] did not connect" in str(error)


def test_wrong_addresses_say_so() -> None:
    nowhere = failure(lambda: tcp_channel(HashStore(), 0, 2, "no such host"))
    assert "cannot listen at no such host" in str(nowhere)
    with pytest.raises(ValueError, match=r"rank must be in \[0, size\)"):
        tcp_channel(HashStore(), 2, 2, HOST)
    store = HashStore()
    store.set("address/0", f"{HOST} 1")
    store.set("token", "t" * 32)
    unreachable = failure(lambda: tcp_channel(store, 1, 2, HOST, timeout_seconds=1))
    assert (unreachable.kind, unreachable.peer) == ("peer_lost", 0)
    assert "rank 0 at 127.0.0.1:1 cannot be reached" in str(unreachable)
    with pytest.raises(ValueError, match="needs address="):
        tcp_channel(HashStore(), 0, 2)
