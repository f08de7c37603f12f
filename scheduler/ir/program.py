"""Programs: the actions of every rank, in order, on each resource.

A program is what a policy returns and what the simulator, the validator, the trace writer and the runtime
read. A data-parallel step has two lanes, ``compute`` and ``link``, and every rank does the same. A program
repeats its **kernel** for ever; asynchronous pipelines start with a **prologue** and end with an **epilogue**
of the same form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scheduler.ir.actions import Action, Kind, format_actions, parse_actions
from scheduler.ir.buckets import Bucket, Piece
from scheduler.ir.layout import Layout
from scheduler.ir.profile import read_json

FORMAT = 1
COMPUTE_LANE = "compute"
LINK_LANE = "link"

Lanes = Mapping[str, tuple[Action, ...]]
"""Actions by resource, for one rank."""


def freeze_lanes(lanes: Mapping[str, Sequence[Action]]) -> Lanes:
    return MappingProxyType({name: tuple(actions) for name, actions in lanes.items()})


@dataclass(frozen=True)
class Program:
    """``kernel[r]`` are rank r's lanes; a data-parallel program has one entry that holds for all ``ranks``.

    ``gather`` says what the all-gathers move: gradients (every rank updates everything, after AG) or
    parameters (the shard is updated between RS and AG). With parameters, the update waits for the end of the
    backward unless ``early_step``. ``meta`` holds what a reader may want to know and the hash ignores.
    ``pipeline`` is the layout of a program with stages.
    """

    policy: str
    buckets: tuple[Bucket, ...]
    kernel: tuple[Lanes, ...]
    layers: int
    ranks: int = 2
    gather: str = "gradients"
    early_step: bool = False
    prologue: tuple[Lanes, ...] = ()
    epilogue: tuple[Lanes, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    pipeline: Layout | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(self.buckets))
        for section in ("kernel", "prologue", "epilogue"):
            object.__setattr__(self, section, tuple(freeze_lanes(lanes) for lanes in getattr(self, section)))
        if self.gather not in ("gradients", "parameters"):
            raise ValueError(f"gather must be 'gradients' or 'parameters', got {self.gather!r}")
        if self.early_step and self.gather != "parameters":
            raise ValueError(
                "early_step needs gather='parameters'; with gathered gradients the step never waits for it"
            )
        if self.ranks < 1 or len(self.kernel) not in (1, self.ranks):
            raise ValueError(
                f"a program for {self.ranks} ranks needs 1 or {self.ranks} kernels, got {len(self.kernel)}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Frozen lanes cannot be pickled as they are; plans travel between processes."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for section in ("kernel", "prologue", "epilogue"):
            values[section] = tuple(dict(lanes) for lanes in values[section])
        return type(self), tuple(values.values())

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
        data = self.to_dict()
        data.pop("meta")
        data.pop("hash", None)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def with_meta(self, **meta: Any) -> Program:
        return replace(self, meta={**self.meta, **meta})

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "policy": self.policy,
            "layers": self.layers,
            "ranks": self.ranks,
            "gather": self.gather,
            "early_step": self.early_step,
            "buckets": [
                {"group": bucket.group, "pieces": [[p.layer, p.start, p.stop] for p in bucket.pieces]}
                for bucket in self.buckets
            ],
            **{
                section: [
                    {name: format_actions(actions) for name, actions in lanes.items()}
                    for lanes in getattr(self, section)
                ]
                for section in ("kernel", "prologue", "epilogue")
            },
            **({} if self.pipeline is None else {"pipeline": self.pipeline.to_dict()}),
            "meta": dict(self.meta),
        }

    def to_json(self) -> str:
        return json.dumps({**self.to_dict(), "hash": self.hash}, indent=1)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def from_dict(cls, data: Any, where: str = "program") -> Program:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected a JSON object, got {type(data).__name__}")
        if data.get("format") != FORMAT:
            raise ValueError(
                f"{where}: field 'format' is {data.get('format')!r}; this version reads format {FORMAT}"
            )
        name = "?"
        try:
            name = "buckets"
            buckets = tuple(
                Bucket(tuple(Piece(*map(int, piece)) for piece in row["pieces"]), int(row["group"]))
                for row in data["buckets"]
            )
            sections = {}
            for name in ("kernel", "prologue", "epilogue"):
                sections[name] = tuple(
                    {lane: parse_actions(text) for lane, text in lanes.items()}
                    for lanes in data.get(name, [])
                )
            name = "pipeline"
            pipeline = None if data.get("pipeline") is None else Layout.from_dict(data["pipeline"])
            name = "policy, layers, ranks, gather, early_step or meta"
            program = cls(
                policy=str(data["policy"]),
                buckets=buckets,
                layers=int(data["layers"]),
                ranks=int(data["ranks"]),
                gather=str(data["gather"]),
                early_step=_true_or_false(data.get("early_step", False)),
                meta=dict(data.get("meta", {})),
                pipeline=pipeline,
                **sections,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{where}: field {name!r} is damaged ({type(error).__name__}: {error})"
            ) from None
        stated = data.get("hash", program.hash)
        if stated != program.hash:
            raise ValueError(
                f"{where}: field 'hash' is {stated!r}, the content's hash is {program.hash!r};"
                " the file was changed"
            )
        return program

    @classmethod
    def from_json(cls, text: str, where: str = "program") -> Program:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: is not valid JSON ({error})") from None
        return cls.from_dict(data, where)

    @classmethod
    def load(cls, path: str | Path) -> Program:
        return cls.from_dict(read_json(path), str(path))


def _true_or_false(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"early_step must be true or false, got {value!r}")
    return value


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
