"""Programs: the actions of every rank, in order, on each resource.

A program is what a policy returns and what the simulator, the validator, the trace writer and the runtime
read. A data-parallel step has two lanes, ``compute`` and ``link``, and every rank does the same. A program
repeats its **kernel** for ever; ``unroll`` derives how a run starts and ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

from scheduler.ir.actions import COMPUTE, Action, Kind, format_actions, parse_actions
from scheduler.ir.buckets import Bucket
from scheduler.ir.codec import JsonFile, register
from scheduler.ir.inputs import Layers
from scheduler.ir.layout import Layout, stages_in
from scheduler.ir.profile import Border

COMPUTE_LANE = "compute"
LINK_LANE = "link"
RECV_LANE = "recv"

Lanes = Mapping[str, tuple[Action, ...]]
"""Actions by resource, for one rank."""


def check_step(gather: str, early_step: bool) -> None:
    """Raise ``ValueError`` unless a step can be done like this."""
    if gather not in ("gradients", "parameters"):
        raise ValueError(f"gather must be 'gradients' or 'parameters', got {gather!r}")
    if early_step and gather != "parameters":
        raise ValueError(
            "early_step needs gather='parameters'; with gathered gradients the step never waits for it"
        )


@dataclass(frozen=True)
class Program(JsonFile):
    """``kernel[r]`` are rank r's lanes; a data-parallel program has one entry that holds for all ``ranks``.

    ``gather`` says what the all-gathers move: gradients (every rank updates everything, after AG) or
    parameters (the shard is updated between RS and AG). With parameters, the update waits for the end of the
    backward unless ``early_step``. ``meta`` holds what a reader may want to know and the hash ignores.
    ``pipeline`` is the layout of a program with stages, ``borders`` what its tiles exchange at each layer
    (None: nothing).
    """

    FORMAT: ClassVar[int] = 2
    HASHED: ClassVar[bool] = True
    UNHASHED: ClassVar[frozenset[str]] = frozenset({"meta"})

    policy: str
    buckets: tuple[Bucket, ...]
    kernel: tuple[Lanes, ...]
    layers: Layers
    ranks: int = 2
    gather: str = "gradients"
    early_step: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    pipeline: Layout | None = None
    borders: tuple[Border | None, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(self.buckets))
        frozen = ({name: tuple(actions) for name, actions in lanes.items()} for lanes in self.kernel)
        object.__setattr__(self, "kernel", tuple(map(MappingProxyType, frozen)))
        check_step(self.gather, self.early_step)
        object.__setattr__(self, "borders", tuple(self.borders))
        if self.borders and len(self.borders) != self.layers:
            raise ValueError(
                f"borders need an entry (or None) for each of {self.layers} layers, got {len(self.borders)}"
            )
        if self.ranks < 1 or len(self.kernel) not in (1, self.ranks):
            raise ValueError(
                f"a program for {self.ranks} ranks needs 1 or {self.ranks} kernels, got {len(self.kernel)}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the lanes as dictionaries: a mapping proxy cannot be pickled, and plans cross processes."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["kernel"] = tuple(dict(lanes) for lanes in self.kernel)
        return type(self), tuple(values.values())

    @property
    def layout(self) -> Layout:
        """The layout of a program with stages; a ``ValueError`` for the others."""
        if self.pipeline is None:
            raise ValueError(f"program {self.policy!r} has no stages; this is for pipeline programs")
        return self.pipeline

    def lanes(self, rank: int = 0) -> Lanes:
        return self.kernel[rank if len(self.kernel) > 1 else 0]

    @property
    def link(self) -> tuple[Action, ...]:
        """The order of a data-parallel program's communication: what the runtime executes."""
        return self.lanes().get(LINK_LANE, ())

    @property
    def plan(self) -> str:
        """The communication order as text, for example ``RS0 RS1 AG0 AG1``."""
        return format_actions(self.link)

    @cached_property
    def hash(self) -> str:
        """Sixteen hex digits that differ whenever anything that ranks must agree on differs."""
        return str(self.to_dict()["hash"])


register(
    Lanes,
    lambda lanes: {name: format_actions(actions) for name, actions in lanes.items()},
    lambda lanes: {name: parse_actions(text) for name, text in lanes.items()},
)


def buckets_of(program: Program) -> dict[int, list[int]]:
    """The numbers of each stage's buckets, in the order in which its backward fills them."""
    numbers: dict[int, list[int]] = {stage: [] for stage in range(program.layout.stages)}
    for number, bucket in enumerate(program.buckets):
        for stage in stages_in(program.layout, bucket.layers, program.layers):
            numbers[stage].append(number)
    return numbers


def data_parallel_program(
    policy: str,
    buckets: Sequence[Bucket],
    link: Sequence[Action],
    layers: int,
    ranks: int = 2,
    gather: str = "gradients",
    early_step: bool = False,
    meta: Mapping[str, Any] | None = None,
) -> Program:
    """A data-parallel step: forward, backward, and ``link`` as the order of communication.

    The kernel starts with the backward, so that an all-gather stands before the forward it serves: ``F`` of
    the next iteration is written ``F0+1``.
    """
    lanes = {COMPUTE_LANE: _step_compute(layers), LINK_LANE: tuple(link)}
    return Program(policy, tuple(buckets), (lanes,), layers, ranks, gather, early_step, meta=meta or {})


@lru_cache(maxsize=16)
def _step_compute(layers: int) -> tuple[Action, ...]:
    backward = [Action(Kind.B, layer) for layer in reversed(range(layers))]
    return (*backward, *(Action(Kind.F, layer, shift=1) for layer in range(layers)))


# -- a kernel unrolled into a run of a given number of periods -----------------------------------------------

Run = list[dict[str, tuple[Action, ...]]]
"""Every rank's lanes, unrolled."""


def reach(kernel: Iterable[Lanes]) -> tuple[int, int]:
    """The largest negative and the largest positive shift of a kernel, both as numbers of periods."""
    shifts = [action.shift for lanes in kernel for order in lanes.values() for action in order]
    return max(0, -min(shifts, default=0)), max(0, max(shifts, default=0))


def depth(program: Program) -> int:
    """The iterations that a run needs beyond its periods to fill and to drain the pipeline."""
    return sum(reach(program.kernel))


def unroll(program: Program, periods: int, only: Sequence[str] | None = None) -> Run:
    """Every rank's lanes (or ``only`` some) over a whole run, as actions whose shift is their period, from 0
    to ``periods - 1``.

    The first and last iterations of the kernel are incomplete: actions of periods outside the run are left
    out.
    """
    back, ahead = reach(program.kernel)
    iterations = range(-ahead, periods + back)
    return [
        {
            lane: tuple(
                action.at(iteration + action.shift)
                for iteration in iterations
                for action in order
                if 0 <= iteration + action.shift < periods
            )
            for lane, order in lanes.items()
            if only is None or lane in only
        }
        for lanes in program.kernel
    ]


def version(action: Action, period: int | None = None) -> int:
    """The weight version that an unrolled action computes with: the number of optimizer steps before it."""
    return max(0, (action.shift if period is None else period) + (action.version or 0))


# -- weight versions: which one each micro-batch computes with, and how many are alive -----------------------


def delays(program: Program) -> tuple[int, ...]:
    """By stage, how many steps old the gradients are that a STEP applies, once the pipeline is full.

    If micro-batches of one period differ (no generator makes such programs), the oldest counts.
    """
    layout = program.pipeline
    if layout is None:
        return (0,)
    oldest = [0] * layout.stages
    for lanes in program.kernel:
        for action in lanes.get(COMPUTE_LANE, ()):
            if action.kind in (Kind.B, Kind.W) and action.stage is not None:
                oldest[action.stage] = max(oldest[action.stage], -(action.version or 0))
    return tuple(oldest)


@dataclass(frozen=True, slots=True)
class Moment:
    """Versions and activations of one stage that are alive during one action, and after it."""

    action: Action
    stage: int
    versions: int
    activations: int
    versions_after: int
    activations_after: int


def moments(order: tuple[Action, ...], stage: int) -> Iterator[Moment]:
    """Count a stage's live versions and activations at each action of an unrolled compute lane.

    A version lives from the step that makes it to its last use; a step may write into the buffer of a version
    that nothing needs any more. Activations live from the forward to the last use by B or W.
    """
    mine = [action for action in order if action.stage == stage]
    last_use: dict[int, int] = {}
    last_read: dict[tuple[int, int], int] = {}
    for place, action in enumerate(mine):
        if action.kind in COMPUTE:
            last_use[version(action)] = place
            last_read[action.index, action.shift] = place
    newest, made, kept = 0, {0}, set[tuple[int, int]]()
    for place, action in enumerate(mine):
        key = action.index, action.shift
        if action.kind is Kind.F:
            kept.add(key)
        elif action.kind is Kind.STEP:
            before, newest = newest, max(newest, action.shift + 1)
            made.add(action.shift + 1)
            for number in (before, action.shift + 1):
                if number != newest and last_use.get(number, -1) < place:
                    made.discard(number)
        during = len(made), len(kept)
        if action.kind in COMPUTE:
            if last_read[key] == place:
                kept.discard(key)
            used = version(action)
            if used != newest and last_use[used] == place:
                made.discard(used)
        yield Moment(action, stage, *during, len(made), len(kept))


def live(program: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The most weight versions, and micro-batches with activations, that each stage keeps at once."""
    layout = program.pipeline
    assert layout is not None
    orders = [lanes[COMPUTE_LANE] for lanes in unroll(program, settled(program), (COMPUTE_LANE,))]
    versions, activations = [], []
    for stage in range(layout.stages):
        # Replicas mostly have the same order: walk each distinct order once.
        different = {orders[rank] for rank in layout.members(stage)}
        walked = [moment for order in different for moment in moments(order, stage)]
        versions.append(max((moment.versions for moment in walked), default=1))
        activations.append(max((moment.activations for moment in walked), default=0))
    return tuple(versions), tuple(activations)


def settled(program: Program) -> int:
    """A number of periods that is enough for a run to fill, repeat its kernel at rest, and drain."""
    return depth(program) + max(delays(program), default=0) + 2
