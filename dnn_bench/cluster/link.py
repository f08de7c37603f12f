"""The speed of a link: parsing, and the traffic shaper's commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dnn_bench.cluster.system import ClusterError

PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
MIN_BURST = 256 * 1024  # bytes; several of the 64 KiB segments the kernel hands to a device at once
BURST_SECONDS = 1e-3
QUEUE = "100ms"


@dataclass(frozen=True)
class Link:
    """A full-duplex link; `rate` in bits per second, None when unlimited; `delay` as tc writes it ("1ms")."""

    rate: int | None = None
    delay: str | None = None

    @classmethod
    def parse(cls, text: str, delay: str | None = None) -> Link:
        """`250mbit`, `1gbit`, `2.5gbit`, or `unlimited`."""
        if text == "unlimited":
            return cls(None, delay)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
        if match is None or float(match[1]) == 0:
            raise ClusterError(
                f"a link is a rate in bits such as 250mbit or 1gbit, or unlimited; not {text!r}"
            )
        return cls(round(float(match[1]) * PREFIXES[match[2]]), delay)

    @property
    def bytes_per_second(self) -> float:
        return float("inf") if self.rate is None else self.rate / 8

    def __str__(self) -> str:
        if self.rate is None:
            return "unlimited"
        for prefix, factor in reversed(PREFIXES.items()):
            if self.rate >= factor:
                return f"{self.rate / factor:g}{prefix}bit"
        raise AssertionError(self.rate)

    def advice(self, refused: Sequence[str]) -> str:
        """What to do when the system refuses one of `commands`."""
        if "netem" in refused:
            return "a delay looks like 1ms and needs a kernel with netem; do without --delay"
        return "rates from 1kbit to 10gbit are safe; or take unlimited"

    def commands(self, device: str) -> list[list[str]]:
        """The tc commands that make `device` send at this rate, after this delay."""
        commands, parent = [], ["root"]
        if self.delay is not None:
            delayed = ["root", "handle", "1:", "netem", "delay", self.delay, "limit", "100000"]
            commands.append(["tc", "qdisc", "add", "dev", device, *delayed])
            parent = ["parent", "1:"]
        if self.rate is not None:
            burst = max(MIN_BURST, round(self.rate / 8 * BURST_SECONDS))
            shaper = ["tbf", "rate", f"{self.rate}bit", "burst", str(burst), "latency", QUEUE]
            commands.append(["tc", "qdisc", "add", "dev", device, *parent, *shaper])
        return commands


def links(spec: str | Sequence[str], hosts: int, delay: str | None = None) -> list[Link]:
    """One link per host from one rate for all, or a list (or `a,b,c`) of one each."""
    texts = spec.split(",") if isinstance(spec, str) else list(spec)
    if len(texts) == 1:
        texts *= hosts
    if len(texts) != hosts:
        raise ClusterError(
            f"{hosts} hosts need one link for all or {hosts} links, not {len(texts)}: {spec!r}"
        )
    return [Link.parse(text, delay) for text in texts]
