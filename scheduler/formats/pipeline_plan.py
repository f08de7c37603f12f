"""Plan files: how a model is cut and replicated, what the planner expects of that, and which model it is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from scheduler.ir.profile import Profile, read_json
from scheduler.ir.program import Program
from scheduler.pipelines.build import generate

FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """A pipeline for one model. ``sizes``: weight bytes of its layers, by which the model is recognised.
    ``cuts``: each stage's first layer. ``devices``: the cluster's device of each rank. ``period``: seconds
    per step as simulated; ``bottleneck``: of the slowest stage; ``memory``: bytes by rank, without optimizer
    state.
    """

    model: str
    sizes: tuple[int, ...]
    schedule: str
    microbatches: int
    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    recompute: tuple[bool, ...]
    placement: str
    devices: tuple[int, ...]
    period: float
    bottleneck: float
    memory: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("sizes", "cuts", "replicas", "recompute", "devices", "memory"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        ranks = sum(self.replicas)
        for name, wanted in (
            ("replicas", len(self.cuts)),
            ("recompute", len(self.cuts)),
            ("devices", ranks),
            ("memory", ranks),
        ):
            if len(getattr(self, name)) != wanted:
                raise ValueError(f"field {name!r} must have {wanted} entries, got {len(getattr(self, name))}")

    @property
    def ranks(self) -> int:
        return sum(self.replicas)

    def check_model(self, sizes: tuple[int, ...] | list[int]) -> None:
        """Raises ``ValueError`` unless a model has the layers that this plan was made for."""
        if len(sizes) != len(self.sizes):
            raise ValueError(
                f"the plan is for {self.model!r} of {len(self.sizes)} layers, this model has {len(sizes)};"
                " profile this model and make a plan for it"
            )
        for layer, (has, needs) in enumerate(zip(sizes, self.sizes, strict=True)):
            if has != needs:
                raise ValueError(
                    f"the plan is for {self.model!r}, whose layer {layer} has {needs} bytes; this model's has"
                    f" {has}; profile this model and make a plan for it"
                )

    def program(self, profile: Profile) -> Program:
        """The program of this plan for a profile of the same model."""
        self.check_model(profile.sizes)
        return self.program_of(profile)

    def program_of(self, profile: Profile) -> Program:
        """For a profile whose sizes are not the model's, as where several stages share parameters."""
        return generate(
            self.schedule,
            len(self.cuts),
            self.microbatches,
            replicas=self.replicas,
            profile=profile,
            cuts=self.cuts,
            recompute=self.recompute,
            placement=self.placement,
        )

    def to_dict(self) -> dict[str, Any]:
        content = {"format": FORMAT, **asdict(self)}
        return {**content, "hash": _digest(content)}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_dict(cls, data: Any, where: str = "plan") -> Plan:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected a JSON object, got {type(data).__name__}")
        if data.get("format") != FORMAT:
            raise ValueError(
                f"{where}: field 'format' is {data.get('format')!r}; this version reads format {FORMAT}"
            )
        names = {field.name for field in fields(cls)}
        content = {name: value for name, value in data.items() if name not in ("format", "hash")}
        if set(content) != names:
            missing, unknown = sorted(names - set(content)), sorted(set(content) - names)
            raise ValueError(f"{where}: missing fields {missing}, unknown fields {unknown}")
        stated = data.get("hash", _digest({"format": FORMAT, **content}))
        if stated != _digest({"format": FORMAT, **content}):
            raise ValueError(f"{where}: field 'hash' does not fit the content; the file was changed")
        try:
            return cls(**content)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
