"""Profiles of models, per layer in forward order: measured times and sizes; what tiles exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from scheduler.ir.actions import Kind
from scheduler.ir.codec import JsonFile, check_numbers


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: seconds and bytes. ``weight_backward`` is the part of ``backward`` that only makes the
    weight gradient; ``fixed`` the part of both that stays where fewer rows are computed (0 to 1).

    ``needed_by``: the earlier layer whose forward needs this one's gradients too (-1: none), because both
    hold parts of one gradient. That layer's part then corrects this one's, once both have been gathered.

    ``rs_share``: bytes that the RS of a stage's replicas moves for each byte of the parameters: 2 where
    bfloat16 parameters have float32 sums, less than 1 where gradients travel in a narrower type.
    ``grad_share``: bytes of the gradient in memory for each byte of the parameters, 2 for such sums.
    """

    name: str
    forward: float
    backward: float
    bytes: int
    activation_bytes: int = 0
    weight_backward: float = 0.0
    group: int = 0
    fixed: float = 0.0
    needed_by: int = -1
    rs_share: float = 1.0
    grad_share: float = 1.0

    def __post_init__(self) -> None:
        where = f"layer {self.name!r}"
        check_numbers(
            self, where, "forward", "backward", "bytes", "activation_bytes", "weight_backward", "fixed"
        )
        check_numbers(self, where, "rs_share", "grad_share")
        for field in ("bytes", "activation_bytes", "group"):
            if int(getattr(self, field)) != getattr(self, field):
                raise ValueError(f"{where}: {field} must be a whole number, got {getattr(self, field)!r}")
        if self.fixed > 1:
            raise ValueError(f"{where}: fixed is a part, 0 to 1, got {self.fixed}")
        if self.weight_backward > self.backward:
            raise ValueError(
                f"{where}: weight_backward ({self.weight_backward}) is part of backward ({self.backward}) and"
                " cannot be larger"
            )

    def moved(self, kind: Kind, size: float) -> float:
        """Bytes of the message in which a stage's replicas exchange ``size`` bytes of the layer's parameters:
        AG moves parameters, RS and each half of AR sums of gradients.
        """
        return size if kind is Kind.AG else self.rs_share * size

    def exchanged(self, sharded: bool) -> float:
        """Bytes of one step between a stage's replicas: RS and AG or, not ``sharded``, both halves of AR."""
        return self.moved(Kind.RS, self.bytes) + self.moved(Kind.AG if sharded else Kind.AR, self.bytes)


@dataclass(frozen=True)
class Profile(JsonFile):
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
        check_numbers(self, f"profile {self.name!r}", "update_per_byte", "traffic_per_byte")
        for place, layer in enumerate(self.layers):
            if not -1 <= layer.needed_by < place:
                raise ValueError(
                    f"layer {layer.name!r}: needed_by must name a layer before this one, which is layer"
                    f" {place}, or be -1, got {layer.needed_by}"
                )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Gradient bytes per layer."""
        return tuple(layer.bytes for layer in self.layers)

    @cached_property
    def needed(self) -> tuple[int, ...]:
        """For each layer the one whose forward needs its gradients first: itself or ``needed_by``."""
        return tuple(place if la.needed_by < 0 else la.needed_by for place, la in enumerate(self.layers))

    def whole(self) -> Profile:
        """Return the profile with gradients that are sent once they are whole, in the layer that is first."""
        layers = list(self.layers)
        for place, layer in enumerate(self.layers):
            if layer.needed_by >= 0:
                first = layers[layer.needed_by]
                layers[layer.needed_by] = replace(first, bytes=layer.bytes, group=layer.group)
                layers[place] = replace(layer, bytes=0, needed_by=-1)
        return replace(self, layers=tuple(layers))

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def compute(self) -> float:
        """Seconds of one forward and backward."""
        return sum(layer.forward + layer.backward for layer in self.layers)


@dataclass(frozen=True)
class Border:
    """Bytes that a tile exchanges before a layer's forward and after its backward, and the ``share`` of the
    layer's work (0 to 1) that needs or makes them.
    """

    forward: float
    backward: float
    share: float

    def __post_init__(self) -> None:
        if not (self.forward >= 0 and self.backward >= 0 and 0 <= self.share <= 1):
            raise ValueError(f"a border has bytes of at least 0 and a share from 0 to 1, got {self}")
