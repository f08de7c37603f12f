"""Profiles of models: what was measured, per layer, in forward order."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: seconds and bytes. ``weight_backward`` is the part of ``backward`` that only makes the
    weight gradient; ``fixed`` the part of both that stays where fewer rows are computed (0 to 1).
    """

    name: str
    forward: float
    backward: float
    bytes: int
    activation_bytes: int = 0
    weight_backward: float = 0.0
    group: int = 0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for field in ("forward", "backward", "bytes", "activation_bytes", "weight_backward", "fixed"):
            value = getattr(self, field)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not math.isfinite(value)
                or value < 0
            ):
                raise ValueError(
                    f"layer {self.name!r}: {field} must be a finite number of at least 0, got {value!r}"
                )
        for field in ("bytes", "activation_bytes", "group"):
            if int(getattr(self, field)) != getattr(self, field):
                raise ValueError(
                    f"layer {self.name!r}: {field} must be a whole number, got {getattr(self, field)!r}"
                )
        if self.fixed > 1:
            raise ValueError(f"layer {self.name!r}: fixed is a part, 0 to 1, got {self.fixed}")
        if self.weight_backward > self.backward:
            raise ValueError(
                f"layer {self.name!r}: weight_backward ({self.weight_backward}) is part of"
                f" backward ({self.backward})"
                " and cannot be larger"
            )


@dataclass(frozen=True)
class Profile:
    """A model as the scheduler sees it. ``update_per_byte`` is optimizer seconds per gradient byte on one
    rank. ``traffic_per_byte``: seconds that a rank cannot compute for each byte it sends in RS and AG, where
    the processor that computes also copies, sums and sends.
    """

    name: str
    layers: tuple[Layer, ...]
    update_per_byte: float = 0.0
    source: str = ""
    traffic_per_byte: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError(f"profile {self.name!r} has no layers; a profile needs at least one")
        for field in ("update_per_byte", "traffic_per_byte"):
            value = getattr(self, field)
            if not math.isfinite(value) or value < 0:
                raise ValueError(
                    f"profile {self.name!r}: {field} must be finite and at least 0, got {value!r}"
                )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Gradient bytes per layer."""
        return tuple(layer.bytes for layer in self.layers)

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def compute(self) -> float:
        """Seconds of one forward and backward."""
        return sum(layer.forward + layer.backward for layer in self.layers)

    def scaled(self, time: float = 1.0, size: float = 1.0) -> Profile:
        """The same model on a machine ``1/time`` as fast, with gradients ``size`` times as large (for example
        0.5 for fp16).
        """
        layers = tuple(
            replace(
                layer,
                forward=layer.forward * time,
                backward=layer.backward * time,
                weight_backward=layer.weight_backward * time,
                bytes=round(layer.bytes * size),
            )
            for layer in self.layers
        )
        return replace(
            self,
            layers=layers,
            update_per_byte=self.update_per_byte * time,
            traffic_per_byte=self.traffic_per_byte * time,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "source": self.source,
            "update_per_byte": self.update_per_byte,
            "traffic_per_byte": self.traffic_per_byte,
            "layers": [asdict(layer) for layer in self.layers],
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "profile") -> Profile:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected a JSON object, got {type(data).__name__}")
        if data.get("format") != FORMAT:
            raise ValueError(
                f"{where}: field 'format' is {data.get('format')!r}; this version reads format {FORMAT}"
            )
        if not isinstance(data.get("layers"), list):
            raise ValueError(f"{where}: field 'layers' must be a list, got {data.get('layers')!r}")
        try:
            return cls(
                name=str(data.get("name", "")),
                layers=tuple(_layers(data["layers"])),
                update_per_byte=float(data.get("update_per_byte", 0.0)),
                traffic_per_byte=float(data.get("traffic_per_byte", 0.0)),
                source=str(data.get("source", "")),
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        return cls.from_dict(read_json(path), str(path))


def _layers(rows: list[Any]) -> Iterable[Layer]:
    known = {field.name for field in fields(Layer)}
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"layers[{number}] must be an object, got {row!r}")
        missing = [key for key in ("name", "forward", "backward", "bytes") if key not in row]
        unknown = sorted(set(row) - known)
        if missing or unknown:
            raise ValueError(f"layers[{number}]: missing fields {missing}, unknown fields {unknown}")
        yield Layer(**row)


def read_json(path: str | Path) -> Any:
    """The JSON in a file, or a ``ValueError`` that names the file and the place of the damage."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not valid JSON ({error})") from None
