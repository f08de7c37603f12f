"""Rank 0's coordinator thread: what becomes of the ranks when it fails."""

import socket
import threading
from multiprocessing.connection import Client, Listener

import pytest

from commsched.runtime.coordinator import Coordinator, receive, send


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_the_coordinator_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    listener = Listener(("127.0.0.1", 0), "AF_INET", authkey=b"key")
    address, coordinator = listener.address, Coordinator(listener, 2, 30.0)
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
