"""Actions: the one vocabulary for everything a rank does.

An action is one thing one rank does once per iteration. Its text form is short, readable and round-trips:

======================  =====================================================================
``F3`` ``B3`` ``W3``    forward, backward (input gradient), weight gradient of layer 3
``2F1``                 the same for a pipeline: stage 2, micro-batch 1
``2F1@4``               ... with weight version 4 (asynchronous pipelines)
``RS0 AG0 AR0``         reduce-scatter, all-gather, all-reduce of bucket 0
``UPDATE0``             optimizer update of bucket 0 (of the shard, when it stands between RS and AG)
``2STEP``               stage 2 takes an optimizer step: its weights become a new version
``2SENDF1>3``           stage 2 sends the output of forward 1 to rank 3 (``SENDB``: the gradient)
``3RECVF1<2``           stage 3 receives it from rank 2
``2HALO1`` ``2HALOB1``  halo exchange before a forward / backward on tiles
``AG0+1``               the same action of the next iteration (any signed shift)
======================  =====================================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from scheduler.ir.inputs import InputError


class Kind(str, Enum):
    """The kind of an action; the value is its text form."""

    F = "F"
    B = "B"
    W = "W"
    RS = "RS"
    AG = "AG"
    AR = "AR"
    UPDATE = "UPDATE"
    STEP = "STEP"
    SENDF = "SENDF"
    SENDB = "SENDB"
    RECVF = "RECVF"
    RECVB = "RECVB"
    HALO = "HALO"
    HALOB = "HALOB"

    def __str__(self) -> str:
        return self.value

    # Actions are keys of dictionaries everywhere; Enum's own hash is a Python function.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W})
COLLECTIVE = frozenset({Kind.RS, Kind.AG, Kind.AR})
SENDS = frozenset({Kind.SENDF, Kind.SENDB})
RECVS = frozenset({Kind.RECVF, Kind.RECVB})
TRANSFER = SENDS | RECVS
SENT_AS = {Kind.RECVF: Kind.SENDF, Kind.RECVB: Kind.SENDB}
HALOS = frozenset({Kind.HALO, Kind.HALOB})


@dataclass(frozen=True, slots=True)
class Action:
    """One thing one rank does. ``index`` is a layer, a micro-batch or a bucket, as ``kind`` says; -1 for
    none.
    """

    kind: Kind
    index: int = -1
    stage: int | None = None
    version: int | None = None
    peer: int | None = None
    shift: int = 0

    def __post_init__(self) -> None:
        if self.index < 0 and self.kind is not Kind.STEP:
            raise ValueError(f"{self.kind} needs an index of at least 0, got {self.index}")
        if (self.peer is not None) != (self.kind in TRANSFER):
            needs = "needs" if self.kind in TRANSFER else "takes no"
            raise ValueError(f"{self.kind}{self.index} {needs} peer, got {self.peer}")

    def at(self, shift: int) -> Action:
        """The same action with another shift; quicker than ``dataclasses.replace``, which checks it again."""
        new, put = object.__new__(Action), object.__setattr__
        put(new, "kind", self.kind)
        put(new, "index", self.index)
        put(new, "stage", self.stage)
        put(new, "version", self.version)
        put(new, "peer", self.peer)
        put(new, "shift", shift)
        return new

    def __str__(self) -> str:
        parts = [
            "" if self.stage is None else str(self.stage),
            self.kind.value,
            "" if self.index < 0 else str(self.index),
            "" if self.version is None else f"@{self.version}",
            "" if self.peer is None else f"{'>' if self.kind in SENDS else '<'}{self.peer}",
            "" if self.shift == 0 else f"{self.shift:+d}",
        ]
        return "".join(parts)


def stage_of(action: Action) -> int:
    """The stage of an action of a pipeline program."""
    if action.stage is None:
        raise ValueError(f"{action} names no stage; every action of a pipeline program does")
    return action.stage


def peer_of(action: Action) -> int:
    """The rank at the other end of a message."""
    if action.peer is None:
        raise ValueError(f"{action} is no message: it names no peer")
    return action.peer


# Longest names first, or `SENDF` would be read as something shorter. Shifts and versions have few digits:
# a run is unrolled over as many periods as they say.
_KINDS = "|".join(sorted((k.value for k in Kind), key=len, reverse=True))
_TEXT = re.compile(
    rf"(?P<stage>\d{{1,9}})?(?P<kind>{_KINDS})(?P<index>\d{{1,9}})?(?:@(?P<version>-?\d{{1,3}}))?"
    r"(?:(?P<way>[<>])(?P<peer>\d{1,9}))?(?P<shift>[+-]\d{1,3})?",
    re.ASCII,
)


def parse_action(text: str) -> Action:
    """The action that ``str(action)`` wrote, or an ``InputError`` that quotes the text."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InputError(
            f"not an action: {text!r}; expected something like F3, 2B1, RS0, AG0, 2SENDF1>3 or 2STEP, with"
            " numbers of at most 9 digits, versions and shifts of at most 3"
        )
    kind = Kind(match["kind"])
    if match["way"] and (match["way"] == ">") != (kind in SENDS):
        raise InputError(f"not an action: {text!r}; sends are written '>', receives '<'")

    names = ("index", "stage", "version", "peer", "shift")
    numbers = {name: int(match[name]) for name in names if match[name] is not None}
    try:
        return Action(kind, **numbers)
    except ValueError as error:
        raise InputError(f"not an action: {text!r}; {error}") from None


def parse_actions(text: str) -> tuple[Action, ...]:
    return tuple(parse_action(word) for word in text.split())


def format_actions(actions: tuple[Action, ...] | list[Action]) -> str:
    return " ".join(map(str, actions))


# -- positions in an endless run of a kernel's order ---------------------------------------------------------

# Positions in an endless run of a kernel's order, counted from the start of period 0's iteration: an action
# at place ``i`` of an order of ``n`` actions, with shift ``k``, serves period 0 at position ``i - k * n``.

GRADIENTS = frozenset({Kind.B, Kind.W})


def position(order: Sequence[Action], place: int, period: int = 0) -> int:
    """The position at which the action at ``place`` runs for ``period``."""
    return place + (period - order[place].shift) * len(order)


def last_gradient(order: Sequence[Action], stage: int) -> int:
    """The place of the action that completes a stage's gradient."""
    places = (
        place for place, action in enumerate(order) if action.stage == stage and action.kind in GRADIENTS
    )
    return max(places, key=lambda place: position(order, place))


def first_forward(order: Sequence[Action], stage: int) -> int:
    """The place of the first forward that uses the weight version made by the STEP of period 0."""
    places = (place for place, action in enumerate(order) if action.stage == stage and action.kind is Kind.F)
    return min(places, key=lambda place: first_use(order, place))


def first_use(order: Sequence[Action], place: int) -> int:
    """The first position at which the forward at ``place`` uses the version made by the STEP of period 0."""
    # The version after period 0 is number 1: the forwards of period 1 - version use it.
    return position(order, place, 1 - (order[place].version or 0))
