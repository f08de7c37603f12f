"""The port on which a rank of an elastic job hears of new hosts: strangers cannot hold it, nor cost much."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest

from commsched.elastic import recovery
from tests.support.needs import needs_horovod

pytestmark = needs_horovod
SECONDS = 100  # that a busy machine may take


class Told:
    """A state, and the server of horovodrun that is given the rank's addresses and key."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int]] = []

    def on_hosts_updated(self, timestamp: int, update: int) -> None:
        self.updates.append((timestamp, update))

    def put(self, scope: str, key: str, value: bytes) -> None:
        from horovod.runner.common.util import codec

        assert (scope, key) == ("worker_addresses", "localhost:0")
        self.addresses, self.key = codec.loads_base64(value)

    def announce(self) -> None:
        """Do what the driver does when a host comes."""
        from horovod.runner.elastic.worker import WorkerNotificationClient

        WorkerNotificationClient(self.addresses, self.key, 0).notify_hosts_updated(7, 2)
        assert self.updates == [(7, 2)]

    def dial(self) -> socket.socket:
        ((address,),) = self.addresses.values()
        return socket.create_connection(address, timeout=SECONDS)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch):
    told = Told()
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    monkeypatch.setattr(recovery, "detect_launch", lambda *_: SimpleNamespace(node="localhost", local_rank=0))
    monkeypatch.setattr(recovery, "launcher_server", lambda: told)
    with recovery._notified_of_hosts(told, elastic=True):
        yield told


def closed(clients: list[socket.socket]) -> int:
    return len(select.select(clients, [], [], 0)[0])


def test_many_silent_clients(told: Told) -> None:
    """Each held a thread and a descriptor until the function ended."""
    before = threading.active_count()
    silent = [told.dial() for _ in range(200)]
    end = time.monotonic() + SECONDS
    while closed(silent) < 200 - 64 or threading.active_count() > before + 64:
        assert time.monotonic() < end, (closed(silent), before, threading.active_count())
        time.sleep(0.05)
    told.announce()
    for client in silent:
        client.close()


@pytest.mark.parametrize("sends", ["nothing", "a byte now and then"])
def test_a_client_has_so_many_seconds(told: Told, sends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commsched.elastic.host_updates.GUEST_SECONDS", 1.0, raising=False)
    end = time.monotonic() + 30
    with told.dial() as client:
        while not closed([client]):
            assert time.monotonic() < end, "it is not closed"
            time.sleep(0.1)
            if sends != "nothing":
                client.sendall(b"x") if not closed([client]) else None
    told.announce()


@pytest.mark.parametrize("length", [2**31 - 1, 65537, -1], ids=str)
def test_no_more_is_read_than_a_request_has(told: Told, length: int) -> None:
    """It read 2 GB, or all there was, before it looked at the digest."""
    with told.dial() as client:
        client.sendall(bytes(32) + struct.pack("i", length))
        client.settimeout(30)
        assert client.recv(1) == b""
    told.announce()


@pytest.mark.parametrize(
    "garbage", [b"", b"GET / HTTP/1.0\r\n\r\n", bytes(32) + struct.pack("i", 3) + b"abc"]
)
def test_garbage_leaves_no_trace(told: Told, garbage: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with told.dial() as client:
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    told.announce()
    assert capfd.readouterr() == ("", "")


def test_other_networks_cannot_reach_it(told: Told) -> None:
    """The driver dials one address, and the port was open on all."""
    ((address,),) = told.addresses.values()
    assert address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", address[1]), timeout=SECONDS)
