"""The service over which horovodrun's driver tells rank 0 that hosts have changed. Needs Horovod.

A request is Horovod's: a digest under a key that the driver has from this rank, a length, and a pickle, which
is read only if the digest is right. Horovod's own server gives every stranger a thread for as long as it
likes, and reads any length. This one bounds both, as the ranks' handshake does.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import socket
import socketserver
import struct
import time
from contextlib import suppress
from typing import Any

from horovod.runner.common.util import network, secret
from horovod.runner.elastic.worker import WorkerNotificationService
from horovod.runner.util.threads import in_thread

from comm_core import close_in_children
from comm_core.handshake import GUEST_SECONDS, GUESTS

_log = logging.getLogger("commsched")
_CARD = "HOROVOD_GLOO_IFACE"
_HEAD, _MOST_BYTES = secret.DIGEST_LENGTH + 4, 65536  # the driver's requests have about 200 bytes


class HostUpdates(WorkerNotificationService):
    """Horovod's service with another server; calls ``state.on_hosts_updated()`` until ``shutdown()``."""

    def __init__(self, state: Any) -> None:
        self.key, self._state, self._manager, self._port = secret.make_secret_key(), state, self, 0
        self._service_name, self._wire, self._nics = self.NAME, _Wire(self.key), os.environ.get(_CARD)
        # The driver dials these alone. Like the job's store, the server binds one address, or all.
        dialled = [address for card in self._get_local_addresses().values() for address, _ in card]
        self._server = _Server((dialled[0] if len(dialled) == 1 else "", 0), self._make_handler())
        self._port = self._server.server_address[1]
        self._addresses = self._get_local_addresses()
        self._thread = in_thread(target=self._server.serve_forever)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        self._state.on_hosts_updated(timestamp, update_res)


class _Wire(network.Wire):
    def read(self, rfile: Any) -> Any:
        head = rfile.read(_HEAD)
        length = struct.unpack("i", head[-4:])[0] if len(head) == _HEAD else -1
        if not 0 <= length <= _MOST_BYTES:
            raise EOFError(f"a request must say its length, 0 to {_MOST_BYTES} bytes, but says {length}")
        return super().read(io.BytesIO(head + rfile.read(length)))


class _Server(socketserver.ThreadingTCPServer):
    """Closes a connection after ``GUEST_SECONDS``, and one at random where there are ``GUESTS``."""

    daemon_threads = True  # a thread that waits for a silent client must not keep the process
    request_queue_size = socket.SOMAXCONN

    def __init__(self, *arguments: Any) -> None:
        self._guests: dict[Any, float] = {}  # and when each is closed
        super().__init__(*arguments)
        close_in_children(self.socket)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._guests) >= GUESTS:
            self._dismiss(secrets.choice(list(self._guests)))
        self._guests[close_in_children(request)] = time.monotonic() + GUEST_SECONDS
        super().process_request(request, client_address)

    def service_actions(self) -> None:  # called twice a second, and after each connection
        for guest, end in list(self._guests.items()):
            if end < time.monotonic():
                self._dismiss(guest)

    def _dismiss(self, guest: Any) -> None:
        self._guests.pop(guest, None)
        with suppress(OSError):  # its thread has closed it
            guest.shutdown(socket.SHUT_RDWR)  # its thread reads the end

    def close_request(self, request: Any) -> None:
        self._guests.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request of %s about the job's hosts failed", client_address, exc_info=True)
