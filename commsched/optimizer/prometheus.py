"""``COMMSCHED_METRICS_PORT``: the figures of this process's optimizers over HTTP, for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

Scalars = dict[str, float]

_PREFIX = "commsched_"
_UNITS = {"steps": "", "link_busy": "_ratio", "predicted_link_busy": "_ratio"}
_UNITS |= {"bytes": "_per_step", "link_rate": "_bytes_per_second"}
_open: dict[int, Endpoint] = {}  # by port: the optimizers of a process share one
_lock = threading.Lock()


class Endpoint:
    """An HTTP server that shows the latest figures of each optimizer. Its threads compute nothing."""

    def __init__(self, port: int, rank: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise ValueError(
                "COMMSCHED_METRICS_PORT is set, but prometheus_client is not installed;"
                " run pip install commsched[metrics], or unset the variable"
            ) from None
        self._port, self._rank, self._made = port, str(rank), 0
        self._shown: dict[int, Scalars] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise ValueError(
                f"rank {rank} cannot serve its metrics on port {port} (COMMSCHED_METRICS_PORT plus its local"
                f" rank): {error}; choose other ports"
            ) from None

    def add(self) -> int:
        """Return the number under which a new optimizer shows its figures."""
        number, self._made = self._made, self._made + 1
        self._shown[number] = {}
        return number

    def show(self, optimizer: int, scalars: Scalars) -> None:
        self._shown[optimizer] = scalars

    def remove(self, optimizer: int) -> None:
        """Take an optimizer's figures away; the last one closes the server."""
        with _lock:
            self._shown.pop(optimizer, None)
            if not self._shown and _open.pop(self._port, None) is self:
                self._server.shutdown()
                self._server.server_close()
                self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Return all figures; called by prometheus_client for each request."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        for optimizer, scalars in sorted(self._shown.items()):
            for name, value in scalars.items():
                rank, name = self._rank, _PREFIX + name + _UNITS.get(name, "_seconds")
                if name not in families:
                    text = "one of the figures of commsched.metrics()"
                    families[name] = GaugeMetricFamily(name, text, labels=["rank", "optimizer"])
                families[name].add_metric([rank, str(optimizer)], value)
        yield from families.values()


def endpoint(port: int, rank: int) -> tuple[Endpoint, int]:
    """Return this process's endpoint on ``port``, and the number of a new optimizer there."""
    with _lock:
        if port not in _open:
            _open[port] = Endpoint(port, rank)
        return _open[port], _open[port].add()
