"""Programs: the actions of every rank, in order, on each resource.

A program is what a policy returns and what the simulator, the validator, the trace writer and the runtime
read. A data-parallel step has two lanes, ``compute`` and ``link``, and every rank does the same. A program
repeats its **kernel** for ever; ``unroll`` derives how a run starts and ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

from scheduler.ir.actions import Action, Kind, format_actions, parse_actions
from scheduler.ir.buckets import Bucket
from scheduler.ir.codec import JsonFile, register
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
    layers: int
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

    def with_meta(self, **meta: Any) -> Program:
        return replace(self, meta={**self.meta, **meta})


register(
    Lanes,
    lambda lanes: {name: format_actions(actions) for name, actions in lanes.items()},
    lambda lanes: {name: parse_actions(text) for name, text in lanes.items()},
)


def buckets_of(program: Program) -> dict[int, list[int]]:
    """The numbers of each stage's buckets, in the order in which its backward fills them."""
    found: dict[int, list[int]] = {stage: [] for stage in range(program.layout.stages)}
    for number, bucket in enumerate(program.buckets):
        for stage in stages_in(program.layout, bucket.layers, program.layers):
            found[stage].append(number)
    return found


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
