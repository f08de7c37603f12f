"""This host's addresses, a first connection to rank 0, and horovodrun's key-value server. No torch."""

from __future__ import annotations

import errno
import fcntl
import http.client
import os
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import closing

from commsched.errors import CommError

_SIOCGIFADDR = 0x8915
_POLL_SECONDS = 0.05


class HeldPort:
    """A TCP port of this host that no other process is given until ``close()``; a context manager.

    Ranks need seconds to start. A port that is looked up and released may be another process's by then. This
    one stays bound. It does not listen, and both sides allow the reuse of addresses (torch's stores do), so a
    store can listen on it all the same.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number = int(self._socket.getsockname()[1])

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of the network interface `name`, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def chosen_interface() -> str | None:
    """Return the interface that the environment names for gloo, or None."""
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("HOROVOD_GLOO_IFACE")
    return named.split(",")[0].strip() if named else None


def own_addresses(one_host: bool) -> list[str]:
    """Return addresses at which other ranks may reach this host, best first."""
    name = chosen_interface()
    if name:
        address = interface_address(name)
        if address is None:
            raise CommError(
                f"network interface {name!r} (GLOO_SOCKET_IFNAME or HOROVOD_GLOO_IFACE) has no IPv4 address "
                f"here; this host has: {', '.join(n for _, n in socket.if_nameindex())}"
            )
        # horovodrun names the loopback interface for one host: wrong as soon as there are several.
        if one_host or not is_loopback(address):
            return [address]
    if one_host:
        return ["127.0.0.1"]
    found = (interface_address(n) for _, n in socket.if_nameindex())
    return [address for address in found if address and not is_loopback(address)] or ["127.0.0.1"]


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def first_reachable(addresses: Iterable[str], port: int, timeout: float) -> tuple[str, str]:
    """Return the first of `addresses` that accepts a connection on `port`, and this host's address on it."""
    candidates = list(addresses)
    if all(":" in address for address in candidates):
        raise CommError(
            f"rank 0 is at {' or '.join(candidates)}, of IPv6, and ranks meet over IPv4: give the launcher a"
            " host name or an IPv4 address (MASTER_ADDR)"
        )
    deadline, reasons = time.monotonic() + timeout, dict.fromkeys(candidates, "")
    while True:
        for address in candidates:
            try:
                # Names of pods appear late: ask for the address in each round.
                ipv4 = _ipv4(address)
                with socket.create_connection((ipv4, port), min(3.0, timeout)) as connection:
                    return connection.getpeername()[0], connection.getsockname()[0]
            except OSError as error:
                reasons[address] = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise CommError(
                f"rank 0 did not answer on {' or '.join(candidates)}, port {port}, within {timeout:g} s "
                f"(COMMSCHED_START_TIMEOUT): {'; '.join(reasons.values())}; is it running, and can this host "
                "reach that address? GLOO_SOCKET_IFNAME chooses another network interface"
            )
        time.sleep(_POLL_SECONDS)


def _ipv4(name: str) -> str:
    """Return a host's address of IPv4, on which gloo and the coordinator listen, also for `localhost`."""
    try:
        return socket.gethostbyname(name)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: longer than names may be
        raise OSError(
            f"this host cannot resolve the name {name!r} ({error}): check rank 0's address"
        ) from error


class _Connection(http.client.HTTPConnection):
    """A connection that is tried anew every few seconds until its time-out.

    After a host was cut off, the kernel would wait as long as the cut has lasted before it tries once more.
    Knows no proxy, which would not know the hosts of the job.
    """

    timeout: float

    def connect(self) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                self.sock = socket.create_connection((self.host, self.port), min(3.0, self.timeout))
                return self.sock.settimeout(self.timeout)
            except OSError as error:
                is_cut_off = isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH
                if not is_cut_off or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)


class KeyValueServer:
    """The HTTP key-value server of horovodrun, through which its ranks find each other."""

    def __init__(self, address: str, port: int, timeout: float) -> None:
        self.root, self._place, self._timeout = f"http://{address}:{port}", (address, port), timeout

    def put(self, scope: str, key: str, value: bytes) -> None:
        self.request("PUT", scope, key, value)

    def clear(self, scope: str, key: str, tries: int) -> None:
        """Delete `key` until horovodrun's server has emptied the scope, at most `tries` times."""
        while tries and self.request("GET", scope, key) is not None:
            self.request("DELETE", scope, key)
            tries -= 1

    def ask(self, scope: str, key: str) -> bytes:
        """Return the answer to a question that the server answers once all ranks have asked."""
        answer = self.request("GET", scope, key)
        if answer is None:
            raise CommError(
                f"horovodrun's server ({self.root}) does not know {scope}/{key}; does this process belong to"
                " the job that horovodrun runs?"
            )
        return answer

    def request(self, method: str, scope: str, key: str, value: bytes | None = None) -> bytes | None:
        """Return the server's answer; None where it does not know the `key` that is read."""
        try:
            with closing(_Connection(*self._place, timeout=self._timeout)) as connection:
                connection.request(method, f"/{scope}/{key}", value)
                reply = connection.getresponse()
                if method == "GET" and reply.status == 404:
                    return None
                if reply.status != 200:
                    raise OSError(f"status {reply.status}")
                return reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise CommError(
                f"horovodrun's server ({self.root}) did not answer {method} {scope}/{key} within"
                f" {self._timeout:g} s (COMMSCHED_TIMEOUT or COMMSCHED_START_TIMEOUT): {error}; has"
                " horovodrun ended, can this host not reach it, or does a rank still wait elsewhere?"
            ) from error

    def wait(self, scope: str, key: str) -> bytes:
        """Wait until another rank has put a value under `key`, and return it."""
        deadline = time.monotonic() + self._timeout
        while True:
            value = self.request("GET", scope, key)
            if value is not None:
                return value
            if time.monotonic() > deadline:
                raise CommError(
                    f"rank 0 did not publish its address through horovodrun ({self.root}) within "
                    f"{self._timeout:g} s (COMMSCHED_START_TIMEOUT); has it stopped?"
                )
            time.sleep(_POLL_SECONDS)
