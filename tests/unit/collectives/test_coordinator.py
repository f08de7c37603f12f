"""Rank 0's coordinator thread: ranks do not wait for ever when it fails, or when strangers connect."""

import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from commsched.collectives.torch_carrier.coordinator import Coordinator, RankConnection, send


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_the_coordinator_fails_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    listener = socket.create_server(("127.0.0.1", 0))
    address, coordinator = listener.getsockname(), Coordinator(listener, b"key", 2, 30.0)
    coordinator.start()
    ranks = [RankConnection.open(address, b"key", rank) for rank in range(2)]
    assert [line.receive()["type"] for line in ranks] == ["welcome"] * 2
    send(ranks[0].messages, {"type": "request"})  # of nothing
    for line in ranks:
        assert line.messages.poll(100), "it still waits"
        with pytest.raises((EOFError, ConnectionError)):
            line.receive()
        line.close()
    coordinator.join(100)
    assert not coordinator.is_alive()
    with pytest.raises(OSError), socket.create_connection(address, 1):
        pass


def test_a_silent_stranger_delays_no_rank() -> None:
    """Handshakes used to run one after the other, and each waited for its peer."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, coordinator = listener.getsockname(), Coordinator(listener, b"key", 1, 30.0)
    coordinator.start()
    with socket.create_connection(address), socket.create_connection(address) as another:
        another.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
            Client(address, "AF_INET", authkey=b"another job's")
        rank = RankConnection.open(address, b"key", 0)
        assert rank.messages.poll(100), "it still waits"
        assert rank.receive()["type"] == "welcome"
        send(rank.messages, {"type": "bye"})
        coordinator.join(100)
        assert not coordinator.is_alive()
