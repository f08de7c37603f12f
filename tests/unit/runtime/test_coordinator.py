"""Rank 0's coordinator thread: what becomes of the ranks when it fails."""

import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from commsched.runtime.coordinator import Coordinator, receive, send


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_the_coordinator_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    listener = socket.create_server(("127.0.0.1", 0))
    address, coordinator = listener.getsockname(), Coordinator(listener, b"key", 2, 30.0)
    coordinator.start()
    ranks = []
    for rank in range(2):
        connection = Client(address, "AF_INET", authkey=b"key")
        send(connection, {"rank": rank})
        ranks.append(connection)
    assert [receive(connection)["type"] for connection in ranks] == ["welcome"] * 2
    send(ranks[0], {"type": "request"})  # of nothing
    for connection in ranks:
        assert connection.poll(100), "it still waits"
        with pytest.raises((EOFError, ConnectionError)):
            receive(connection)
        connection.close()
    coordinator.join(100)
    assert not coordinator.is_alive()
    with pytest.raises(OSError), socket.create_connection(address, 1):
        pass


def test_a_stranger_keeps_nobody_waiting() -> None:
    """It used to: ranks were greeted one after the other, and one that says nothing is waited for."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, coordinator = listener.getsockname(), Coordinator(listener, b"key", 1, 30.0)
    coordinator.start()
    with socket.create_connection(address), socket.create_connection(address) as another:
        another.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
            Client(address, "AF_INET", authkey=b"another job's")
        rank = Client(address, "AF_INET", authkey=b"key")
        send(rank, {"rank": 0})
        assert rank.poll(100), "it still waits"
        assert receive(rank)["type"] == "welcome"
        send(rank, {"type": "bye"})
        coordinator.join(100)
        assert not coordinator.is_alive()
