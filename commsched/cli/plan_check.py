"""``commsched plan --check``: every wait that a plan needs on a GPU's streams, and whether it is there.

The GPU's backend runs two steps of the plan for one rank, with CPU tensors and two streams on paper, under
torch's race detector (``commsched.backends.races``). Every part of a layer that a bucket holds has a few
numbers, because sizes do not matter for the order. The detector is then told the same steps again, each time
without one of the waits: it is needed if an access has no order then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from commsched.backends.cuda import StreamBackend, StreamSchedule
from commsched.backends.interface import Scaling, step_work
from commsched.backends.races import COMM, MAIN, Handler, Races, Tape, WatchedDevice, WatchedExchange, told
from commsched.optimizer.buckets import ALIGN, Buffers, build_layout
from scheduler.ir.actions import Kind
from scheduler.ir.buckets import Bucket, Piece
from scheduler.ir.program import Program

_RANKS, _STEPS, _ITEM = 2, 2, 4  # who waits for what does not depend on the number of ranks; bytes of a float
STREAMS = {MAIN: "compute", COMM: "comm"}
_END = "the plan's memory is freed"

Label = tuple[int, str, str]
"""A stream, what it does next, and what it waits for before."""


@dataclass(frozen=True)
class Wait:
    """``stream`` waits before ``operation`` for the end of ``after``.

    ``race``: what the detector says without the wait. Nothing if other waits have the same effect.
    """

    stream: str
    operation: str
    after: str
    is_there: bool
    race: str

    def __str__(self) -> str:
        line = f"{self.stream}: {self.operation} after {self.after}"
        if not self.is_there:
            return f"{line}: MISSING"
        return f"{line}: needed, else {self.race}" if self.race else f"{line}: follows from other waits"


@dataclass(frozen=True)
class Certificate:
    """The waits of a plan, and accesses that no wait orders."""

    waits: tuple[Wait, ...]
    races: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.races and all(wait.is_there for wait in self.waits)

    def __str__(self) -> str:
        missing = sum(not wait.is_there for wait in self.waits)
        needed = sum(bool(wait.race) for wait in self.waits)
        lines = [*map(str, self.waits), *(f"RACE: {race}" for race in self.races)]
        lines.append(
            f"{len(self.waits)} waits in a step: {missing} missing, {needed} needed;"
            f" {len(self.races)} accesses without an order"
        )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {"holds": self.holds, **asdict(self)}


def check(program: Program, names: Sequence[str] = ()) -> Certificate:
    """Return the certificate of a data-parallel plan. ``names``: of the layers."""
    if program.pipeline is not None:
        raise ValueError("--check is for plans of buckets; this one has the stages of a pipeline")
    if program.early_step:
        raise ValueError("--check is for the streams of GPUs, where early_step=True is refused")
    rehearsal = _Rehearsal(program, names or [f"layer {number}" for number in range(program.layers)])
    races = rehearsal.run()
    known = set(_races_without(rehearsal.tape, set()))
    waits = []
    for label in rehearsal.needed():
        stream, operation, after = label
        places = rehearsal.device.places.get(label)
        others = () if places is None else _races_without(rehearsal.tape, places)
        race = next((race for race in others if race not in known), "")
        waits.append(Wait(STREAMS[stream], operation, after, places is not None, race))
    return Certificate(tuple(waits), tuple(map(_readable, races)))


def _races_without(tape: Tape, left_out: set[int]) -> Iterator[str]:
    """Yield the races without what stands at these places of the tape."""
    handler = Handler()
    for place, (what, arguments) in enumerate(tape):
        if place not in left_out:
            for error in handler.tell(what, *arguments) or ():
                yield _readable(told(error, places=False))


def _readable(race: str) -> str:
    for number, name in STREAMS.items():
        race = race.replace(f"on stream {number} ", f"on {name} ")
    return race


class _LabelledDevice(WatchedDevice):
    """Notes in which places of the tape it waits, by label. ``doing``: what the compute stream does."""

    def __init__(self, races: Races, tape: Tape) -> None:
        super().__init__(races)
        self._tape = tape
        self.doing = _END
        self.schedule: StreamSchedule | None = None
        self.places: defaultdict[Label, set[int]] = defaultdict(set)
        self._ends: dict[int, str] = {}  # by event

    def _label(self, stream: int) -> str:
        if stream != COMM:
            return self.doing
        if self.schedule is None or not self.schedule.order:
            return ""
        op, number = self.schedule.order[self.schedule._next - 1]
        return f"{op}{number}"

    def record(self, stream: int) -> int:
        event = super().record(stream)
        self._ends[event] = self._label(stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        super().wait(stream, event)
        if self._tape[-1] == ("wait", (event, stream)):
            self.places[stream, self._label(stream), self._ends[event]].add(len(self._tape) - 1)


class _Rehearsal:
    """Trains weights in steps of a plan; the loss is the sum of all weights."""

    def __init__(self, program: Program, names: Sequence[str]) -> None:
        self.program, self.names, self.tape = program, names, Tape()
        buckets, self.sizes = _small(program)
        self.layout = build_layout(self.sizes, [_ITEM] * len(self.sizes), buckets, _RANKS)
        self.layers = sorted(self.layout.slots)
        self.sharded = program.gather == "parameters"
        self.races = Races(tape=self.tape)
        self.device = _LabelledDevice(self.races, self.tape)

    def needed(self) -> list[Label]:
        """Return the waits that the plan needs in a step, in the order of its operations."""
        found = []
        for action in self.program.link:
            number, name = action.index, f"{action.kind.value}{action.index}"
            params = self.layout.slices[number].params
            if action.kind is not Kind.AG:
                found.append((COMM, name, self._backward(min(params))))
            elif self.sharded:
                update = self._update(number)
                found += [(MAIN, update, f"RS{number}"), (COMM, name, update)]
            if action.kind is not Kind.RS:
                found.append((MAIN, self._forward(min(params)), name))
        return found

    def _backward(self, layer: int) -> str:
        return f"backward of {self.names[layer]}"

    def _forward(self, layer: int) -> str:
        return f"forward of {self.names[layer]}"

    def _update(self, bucket: int) -> str:
        return f"update of this rank's part of bucket {bucket}"

    def run(self) -> list[str]:
        """Run the steps; return the races."""
        with self.races:
            self._train()
            return self.races.found()

    def _train(self) -> None:
        nothing = SimpleNamespace(**dict.fromkeys(_UNUSED, lambda *_: None))
        nothing.name, nothing.ranks = "nothing", SimpleNamespace(rank=0, size=_RANKS)
        backend = StreamBackend(nothing, self.device, WatchedExchange(nothing, self.races))  # type: ignore[arg-type]
        self.device.schedule = backend.schedule
        groups = {bucket.group: (torch.float32, self.device.device) for bucket in self.program.buckets}
        buffers = Buffers(self.layout, groups, backend.zeros)
        gathered = buffers.more() if self.sharded else None
        backend.install(step_work(self.program, buffers, 1, _RANKS, gathered, Scaling(), {}, {}))
        weights = {i: torch.zeros(self.sizes[i], device=self.device.device) for i in self.layers}
        for _ in range(_STEPS):
            self._step(backend, buffers, gathered, weights)
        self.device.doing = _END
        backend.close()

    def _step(self, backend: Any, buffers: Buffers, gathered: Buffers | None, weights: Any) -> None:
        device, layout, order = self.device, self.layout, backend.schedule.order
        missing = {piece.number: set(piece.params) for piece in layout.slices}
        for i in reversed(self.layers):
            device.doing = self._backward(i)
            if i == self.layers[-1]:
                backend.begin_step()
            gradient = torch.ones_like(weights[i])
            backend.put(i, gradient, self._slot(buffers, i))
            del gradient
            for number in layout.slots[i].buckets:
                missing[number].discard(i)
                if not missing[number]:
                    backend.mark_ready(number)
        for op, number in order:
            if gathered is not None and op == "AG":
                device.doing = self._update(number)
                backend.wait_reduced(number)
                part = layout.slices[number].numel // _RANKS
                gathered.bucket(number)[:part].add_(buffers.bucket(number)[:part])
                backend.mark_updated(number)
        backend.step_ended()
        for i in self.layers:
            device.doing = self._forward(i)
            backend.enter()
            for number in layout.slots[i].buckets:
                backend.wait_gathered(number)
            weights[i].add_(self._slot(gathered or buffers, i))
            backend.updates_issued()
            weights[i].sum()

    def _slot(self, buffers: Buffers, layer: int) -> torch.Tensor:
        slot = self.layout.slots[layer]
        return buffers.flat[slot.group].narrow(0, slot.offset, slot.numel)


# What the backend asks of the flags' backend and of the exchange, which do nothing here.
_UNUSED = (
    "install begin_step mark_ready wait_gathered failure abort close reduce_scatter all_gather all_to_all"
).split()


def _small(program: Program) -> tuple[list[Bucket], list[int]]:
    """Return the buckets with few numbers in each piece, and how many numbers each layer then has."""
    size = _RANKS * ALIGN * _ITEM
    pieces: defaultdict[int, set[int]] = defaultdict(set)
    for bucket in program.buckets:
        for piece in bucket.pieces:
            pieces[piece.layer].add(piece.start)
    starts = {layer: sorted(found) for layer, found in pieces.items()}
    buckets = [
        Bucket(
            tuple(
                Piece(piece.layer, place * size, (place + 1) * size)
                for piece in bucket.pieces
                for place in (starts[piece.layer].index(piece.start),)
            ),
            bucket.group,
        )
        for bucket in program.buckets
    ]
    return buckets, [len(starts.get(layer, ())) * size // _ITEM for layer in range(program.layers)]
