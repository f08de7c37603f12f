"""Links: what one collective of a given size costs.

A ``Link`` is the effective cost of one collective on one cluster: a reduce-scatter or an all-gather of a
message of ``n`` bytes takes ``alpha + beta * n`` seconds, and an all-reduce is one of each. ``network_link``
turns the wires of a cluster (``Level``) and an algorithm into that ``Link``; ``fit`` turns
timed messages into one. A ``TwoTierLink`` also knows how long a collective occupies each of two links: the
one inside a host and the one between hosts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from scheduler.ir.actions import Kind
from scheduler.ir.codec import JsonFile, check_numbers
from scheduler.ir.inputs import LARGEST, reading

STARTUP = 2e-4
"""Seconds of start-up that a preset assumes: what a small message over TCP takes on commodity hosts."""

SEGMENT = 128 << 10
"""Bytes of each rank's part that ``transport="tiers"`` moves at once: hosts sum one segment of a bucket while
the one before it travels between them.
"""

FEWEST_SIZES = 5

_PRESET = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>mbit|gbit|gbe)")
_UNITS = {"mbit": 1e6, "gbit": 1e9, "gbe": 1e9}


class Occupancy(NamedTuple):
    """Seconds that one collective occupies links, one after the other: the link inside the host ``before``,
    the link itself, and the link inside the host ``after``. With one link both others are 0.
    """

    before: float
    link: float
    after: float


@dataclass(frozen=True)
class Link(JsonFile):
    """``alpha`` seconds to start one RS or AG, ``beta`` seconds for each byte of its message. ``error`` is
    the fit's, relative.
    """

    alpha: float
    beta: float
    name: str = ""
    error: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, "Link", "alpha", "beta", "error")

    def cost(self, kind: Kind, size: float) -> float:
        """Seconds of one collective, ``size`` being the whole message (the bucket), not one rank's share."""
        once = self.alpha + self.beta * size
        return 2 * once if kind is Kind.AR else once

    @property
    def parts(self) -> tuple[Link | None, Link]:
        """The links that work at the same time: the one inside a host, or None, and the one between ranks."""
        return None, self

    def times(self, kind: Kind, size: float) -> Occupancy:
        """Seconds that one collective occupies each link; each link does one collective at a time."""
        inside, link = self.parts
        beside = 0.0 if inside is None else inside.cost(Kind.RS, size)
        return Occupancy(
            beside * (kind is not Kind.AG), link.cost(kind, size), beside * (kind is not Kind.RS)
        )

    def slower(self, factor: float) -> Link:
        return replace(self, alpha=self.alpha * factor, beta=self.beta * factor)

    def widened(self, factor: float) -> Link:
        """The link with so many times the bandwidth; of two tiers, the link between hosts."""
        return replace(self, beta=self.beta / factor)

    @classmethod
    def from_dict(cls, data: Any, where: str = "") -> Any:
        """Files of two tiers have fields that those of one link have not, and give a ``TwoTierLink``."""
        if cls is Link and isinstance(data, dict) and "between" in data:
            return TwoTierLink.from_dict(data, where or "link")
        return super().from_dict(data, where)

    def __str__(self) -> str:
        return f"alpha={self.alpha:g},beta={self.beta:g}"

    @classmethod
    def parse(cls, text: str) -> Link:
        """A link from ``alpha=2e-4,beta=8e-10``, a preset (``1gbit``, ``250mbit``, ``10gbe``) or a preset
        with another alpha.
        """
        values: dict[str, float] = {}
        has_speed = False
        with reading(f"link {text!r}"):
            for word in filter(None, (word.strip().lower() for word in text.split(","))):
                key, _, number = word.partition("=")
                if speed := _PRESET.fullmatch(word):
                    bits = float(speed["number"]) * _UNITS[speed["unit"]]
                    if not 0 < bits <= LARGEST:
                        raise ValueError(f"{word} moves nothing, or more than {LARGEST:,} bits per second")
                    has_speed, key, number = True, "beta", str(8 / bits)
                if key not in ("alpha", "beta") or not number:
                    raise ValueError(
                        f"cannot read {word!r}; write alpha=SECONDS,beta=SECONDS_PER_BYTE or 10gbit"
                    )
                if key in values:
                    raise ValueError(f"{word} gives {key} a second time")
                try:
                    values[key] = float(number)
                except ValueError:
                    raise ValueError(f"{key} must be a number, got {number!r}") from None
            if has_speed:
                values.setdefault("alpha", STARTUP)
            if set(values) != {"alpha", "beta"}:
                raise ValueError(
                    f"needs both alpha (seconds) and beta (seconds per byte), got {sorted(values)}"
                )
            return cls(**values, name=text)


@dataclass(frozen=True)
class TwoTierLink(Link):
    """The link of several ranks on each of several hosts. An RS or AG uses two links: ``inside`` the host (an
    RS first, an AG last) and ``between`` hosts. Each says what the collective takes on that link alone;
    ``alpha`` and ``beta`` are those of the whole collective, both tiers together.

    An engine that ``overlaps`` works on both links at once, for neighbouring buckets. The others do one
    collective after the other, so that the two links are one with ``alpha`` and ``beta``.

    ``segment``: so many bytes of a message the faster tier moves while the slower one is idle: an RS's first
    ones, an AG's last ones. ``members``: ranks of a host and hosts; empty where nobody has counted them.
    """

    inside: Link = Link(0.0, 0.0)
    between: Link = Link(0.0, 0.0)
    overlaps: bool = False
    segment: float = 0.0
    members: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "Link", "segment")
        if self.members and (len(self.members) != 2 or min(self.members) < 2):
            raise ValueError(f"Link: members must be ranks a host and hosts, 2 or more, got {self.members}")

    @property
    def ramp(self) -> float:
        """Seconds for each byte of the segment."""
        return min(self.inside.beta, self.between.beta) if self.segment else 0.0

    def cost(self, kind: Kind, size: float) -> float:
        alone = self.ramp * min(size, self.segment)
        return super().cost(kind, size) + (2 * alone if kind is Kind.AR else alone)

    @property
    def parts(self) -> tuple[Link | None, Link]:
        return (self.inside, self.between) if self.overlaps else (None, self)

    def as_ring(self) -> Link:
        """One ring through all ranks, host by host; the link itself where ``members`` are not known."""
        tiers = zip(self.members, (self.inside, self.between), strict=False)
        wires = [Level(count, tier.alpha, tier.beta * count / (count - 1)) for count, tier in tiers]
        return ring(wires, prod(self.members)) if wires else self

    def slower(self, factor: float) -> TwoTierLink:
        inside, between = self.inside.slower(factor), self.between.slower(factor)
        alpha, beta = self.alpha * factor, self.beta * factor
        return replace(self, alpha=alpha, beta=beta, inside=inside, between=between)

    def widened(self, factor: float) -> TwoTierLink:
        between = self.between.widened(factor)
        # Only the time between hosts falls; the rest of the collective takes as long as before.
        rest = self.beta - self.between.beta + between.beta
        return replace(self, beta=max(rest, self.inside.beta, 0.0), between=between)

    def __str__(self) -> str:
        both = "at the same time" if self.overlaps else "one bucket after the other"
        return f"{super().__str__()} (inside hosts {self.inside}, between hosts {self.between}, {both})"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a cluster: ``ranks`` members joined by equal wires, each member being one rank or one
    group of the level below.

    ``alpha`` is the start-up of one message, ``beta`` the seconds per byte on a member's own wire (a host's
    network card is one wire, whatever number of ranks share it). ``overhead`` is what each further message of
    a rank costs the sender.
    """

    ranks: int
    alpha: float
    beta: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a level needs at least 1 member, got {self.ranks}")
        check_numbers(self, "Level", "alpha", "beta", "overhead")

    @property
    def share(self) -> float:
        """The part of a message that leaves each member in one RS or AG."""
        return (self.ranks - 1) / self.ranks


Links = Link | Mapping[str, Link]
"""One link for all traffic, or links by name."""


def named_link(links: Links, *names: str) -> Link:
    """The link of the first of these names that there is one for; a lone link serves every name."""
    if isinstance(links, Link):
        return links
    for name in names:
        if name in links:
            return links[name]
    raise ValueError(f"the program uses link {names[-1]!r}; links were given for {sorted(links)}")


def network_link(levels: Sequence[Level], algorithm: str = "ring") -> Link:
    """The cost of one RS or AG of a whole cluster. ``levels`` innermost first: ranks of a host, then hosts.

    - ``ring``: one ring through all ranks, host by host; ``ranks - 1`` messages one after the other.
    - ``direct``: every rank sends its share to every other at once; one start-up, but ranks of a host crowd
      its wire.
    - ``hierarchical``: a ring at each level, one after the other; outer levels move only what inner ones have
      reduced.
    - ``halving``: as ``hierarchical``, but each message halves what is left (an AG doubles what is there),
      so that a level takes ``log2(ranks)`` of them, rounded up. Simulated only: no engine executes it.
    - ``tiers``: ``transport="tiers"``, which moves the same bytes, with one start-up a level. Segments of one
      bucket are inside and between hosts at the same time, neighbouring buckets are not.
    - ``tiers-overlapped``: a bucket inside its host while another one is between hosts.
    """
    if not levels:
        raise ValueError("a network needs at least one level")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {algorithm!r}; the algorithms are {', '.join(ALGORITHMS)}")
    ranks = math.prod(level.ranks for level in levels)
    joined = [level for level in levels if level.ranks > 1]
    link = ALGORITHMS[algorithm](joined, ranks) if joined else Link(0.0, 0.0)
    return replace(link, name=f"{algorithm} of {ranks}")


def ring(levels: Sequence[Level], ranks: int) -> Link:
    """Return the cost of one RS or AG of a ring through so many ranks."""
    # In every round some message crosses the slowest wire, and each wire carries one message a round.
    slowest = max(level.alpha + level.overhead for level in levels)
    return Link((ranks - 1) * slowest, (ranks - 1) / ranks * max(level.beta for level in levels))


def _direct(levels: Sequence[Level], ranks: int) -> Link:
    alpha = max(level.alpha for level in levels) + (ranks - 2) * max(level.overhead for level in levels)
    beta = 0.0
    inside = 1  # ranks that share one wire of the level
    for level in levels:
        # Every rank below the wire sends a share of 1/ranks to each rank that the wire leads to.
        beta = max(beta, level.beta * inside * (ranks - inside) / ranks)
        inside *= level.ranks
    return Link(alpha, beta)


def _hierarchical(levels: Sequence[Level], ranks: int, halving: bool = False) -> Link:
    # The members of a group hold different shares after its level; together they put one whole message on the
    # group's wire.
    rounds = [(level.ranks - 1).bit_length() if halving else level.ranks - 1 for level in levels]
    return Link(
        sum(count * (level.alpha + level.overhead) for count, level in zip(rounds, levels, strict=True)),
        sum(level.share * level.beta for level in levels),
    )


def _tiers(levels: Sequence[Level], ranks: int, overlaps: bool = False) -> Link:
    each = [_direct([level], level.ranks) for level in levels]
    if len(each) == 1:
        return each[0]
    if len(each) > 2:
        raise ValueError(f"tiers are two levels, ranks of a host and hosts; got {len(each)} levels")
    alpha, slow = sum(link.alpha for link in each), max(link.beta for link in each)
    members = tuple(level.ranks for level in levels)
    return TwoTierLink(alpha, slow, "", 0.0, each[0], each[1], overlaps, SEGMENT * ranks, members)


ALGORITHMS: dict[str, Callable[[Sequence[Level], int], Link]] = {
    "ring": ring,
    "direct": _direct,
    "hierarchical": _hierarchical,
    "halving": partial(_hierarchical, halving=True),
    "tiers": _tiers,
    "tiers-overlapped": partial(_tiers, overlaps=True),
}


def fit(sizes: Sequence[float], seconds: Sequence[float], name: str = "") -> Link:
    """The link that fits timed messages best: least squares of the relative error, alpha and beta at least 0.

    Relative, because absolute errors of large messages would drown the start-up that the small ones show.
    ``Link.error`` is the root mean square of ``predicted / measured - 1``.
    """
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    if size.shape != time.shape or size.ndim != 1:
        raise ValueError(f"fit needs as many times as sizes, got {size.shape} sizes and {time.shape} times")
    if len(np.unique(size)) < FEWEST_SIZES:
        raise ValueError(
            f"fit needs messages of at least {FEWEST_SIZES} sizes,"
            f" got {len(np.unique(size))}: {sorted(set(sizes))}"
        )
    for field, values in (("sizes", size), ("seconds", time)):
        bad = values[~(np.isfinite(values) & (values >= 0))]
        if len(bad):
            raise ValueError(f"fit: {field} must be finite numbers of at least 0, got {bad[0]}")
    if not (time > 0).all():
        raise ValueError("fit: a message of 0 seconds was not measured; time more repetitions")
    rows = np.stack([1 / time, size / time], axis=1)
    alpha, beta = _least_squares(rows)
    return Link(alpha, beta, name, float(np.sqrt(np.mean((rows @ (alpha, beta) - 1) ** 2))))


def _least_squares(rows: np.ndarray) -> tuple[float, float]:
    # Two unknowns: where the free optimum leaves the quadrant, the constrained one lies on an edge of it.
    ones = np.ones(len(rows))
    scale = np.linalg.norm(rows, axis=0)
    alpha, beta = np.linalg.lstsq(rows / scale, ones, rcond=None)[0] / scale
    if alpha < 0:
        return 0.0, float(rows[:, 1] @ ones / (rows[:, 1] @ rows[:, 1]))
    if beta < 0:
        return float(rows[:, 0] @ ones / (rows[:, 0] @ rows[:, 0])), 0.0
    return float(alpha), float(beta)


# -- clusters: devices in nested groups, what a message between two of them costs, how much each can hold ----


@dataclass(frozen=True)
class Cluster:
    """``levels`` innermost first, as in ``network_link``: the devices of a host, then the hosts, and so on.
    ``memory``: bytes of each device, or None for no limit. ``devices``: the device of each rank (by default
    all, in order).
    """

    levels: tuple[Level, ...]
    memory: tuple[int, ...] | None = None
    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        if not self.levels:
            raise ValueError("a cluster needs at least one level")
        if self.memory is not None and len(self.memory) != self.size:
            raise ValueError(
                f"memory must have one entry for each of {self.size} devices, got {len(self.memory)}"
            )

    @classmethod
    def flat(cls, devices: int, link: Link, memory: int | Sequence[int] | None = None) -> Cluster:
        """Equal devices, each with a wire of its own."""
        limits = None if memory is None else (memory,) * devices if isinstance(memory, int) else tuple(memory)
        return cls((Level(devices, link.alpha, link.beta),), limits)

    @cached_property
    def size(self) -> int:
        return prod(level.ranks for level in self.levels)

    def at(self, devices: Sequence[int]) -> Cluster:
        """The same cluster with ranks on these devices."""
        return replace(self, devices=tuple(devices))

    def level(self, first: int, last: int) -> Level:
        """The innermost level that joins these two devices: all between them are joined by it too."""
        size = 1
        for level in self.levels:
            size *= level.ranks
            if first // size == last // size:
                return level
        raise ValueError(f"devices {first} and {last} are not both in a cluster of {self.size}")

    def message(self, rank: int, peer: int, size: float) -> float:
        """Seconds that a message between two ranks keeps the sender's wire."""
        level = self.level(*sorted((self._device(rank), self._device(peer))))
        return level.alpha + level.beta * size

    def collective(self, kind: Kind, ranks: Sequence[int], size: float, inside: float = 1.0) -> float:
        """Seconds of an RS or AG of ``size`` bytes as in ``exchange``, or of an AR, which masters make."""
        devices = [self._device(rank) for rank in ranks]
        return self.exchange(devices, kind is not Kind.AR, inside).cost(kind, size)

    def exchange(self, devices: Sequence[int], tiers: bool = True, inside: float = 1.0) -> Link:
        """The cost of an RS or AG among these devices: a ring at the speed of the widest level they span, or
        with ``tiers`` two tiers, if they are several of each of several hosts and as many of each.
        ``inside``: bytes that two tiers move inside a host for each byte of the message between hosts.
        """
        first, widest = self.levels[0], self.level(min(devices), max(devices))
        if tiers and widest is not first:
            hosts = Counter(device // first.ranks for device in devices)
            each = len(devices) // len(hosts)
            if each > 1 and set(hosts.values()) == {each}:
                level = replace(first, ranks=each, beta=first.beta * inside)
                return _tiers([level, replace(widest, ranks=len(hosts))], len(devices))
        return ring([widest], len(devices))

    def _device(self, rank: int) -> int:
        return rank if self.devices is None else self.devices[rank]
