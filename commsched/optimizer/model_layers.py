"""Maps the parameters to the scheduler's layers: in forward order, behind one layer without bytes.

That layer represents the time between two iterations (data loading, the optimizer's own work).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from commsched.backends.interface import Scaling
from commsched.optimizer.bucket_layout import Layout, build_layout
from commsched.optimizer.quantised import BLOCK, SHARE, WIRE, travels_quantised
from scheduler.ir.buckets import Bucket
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile

OUTSIDE = "(between iterations)"


@dataclass(frozen=True)
class Model:
    """The facts about the parameters that the scheduler needs: fixed, and the same on every rank."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    quantised: frozenset[int] = frozenset()  # the parameters that travel in blocks of int8

    @classmethod
    def of(cls, params: Sequence[nn.Parameter], names: Sequence[str], wire: Any = None) -> Model:
        """Return the facts about these parameters, whose gradients travel as ``wire``."""
        quantised = (i for i, p in enumerate(params) if wire is WIRE and travels_quantised(p))
        numels, dtypes = tuple(p.numel() for p in params), tuple(p.dtype for p in params)
        return cls(tuple(names), numels, dtypes, frozenset(quantised))

    @property
    def itemsizes(self) -> list[int]:
        return [dtype.itemsize for dtype in self.dtypes]

    @property
    def _kinds(self) -> list[tuple[torch.dtype, bool]]:
        return [(dtype, i in self.quantised) for i, dtype in enumerate(self.dtypes)]

    @property
    def groups(self) -> list[int]:
        """One bucket holds one dtype, quantised or not: a parameter's group is the place of that pair."""
        kinds = list(dict.fromkeys(self._kinds))
        return [kinds.index(kind) for kind in self._kinds]

    def kind(self, group: int) -> torch.dtype:
        return list(dict.fromkeys(self._kinds))[group][0]

    def quantises(self, group: int) -> bool:
        """Return whether the buckets of a group travel in blocks of int8."""
        return list(dict.fromkeys(self._kinds))[group][1]

    def layout(self, buckets: Sequence[Bucket], ranks: int, owners: Sequence[int] | None = None) -> Layout:
        """Return the places of the gradients in buckets that name parameters."""
        blocks = {group: BLOCK for group in set(self.groups) if self.quantises(group)}
        return build_layout(self.numels, self.itemsizes, buckets, ranks, owners, blocks)

    def bytes(self, i: int) -> int:
        return self.numels[i] * self.dtypes[i].itemsize

    def wire_share(self, wire: torch.dtype | None) -> float:
        """Return the bytes of all gradients in messages as a share of their own."""
        scaling, sent = Scaling(wire_dtype=wire), 0.0
        for i, dtype in enumerate(self.dtypes):
            cast = scaling.wire_type(dtype) or dtype
            sent += self.bytes(i) * SHARE if i in self.quantised else self.numels[i] * cast.itemsize
        return sent / (sum(map(self.bytes, range(len(self.numels)))) or 1.0)

    @property
    def fingerprint(self) -> str:
        """Differs between ranks whose parameters differ in number, size, type or order."""
        text = ";".join(f"{n}:{d}" for n, d in zip(self.numels, self.dtypes, strict=True))
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{len(self.numels)} parameters, {sum(self.numels)} elements, {digest}"

    def profile(
        self,
        order: Sequence[int],
        forward: Sequence[float],
        backward: Sequence[float],
        outside: float,
        source: str,
    ) -> Profile:
        """Return a profile with one layer per parameter, in this order; times are given by parameter."""
        groups = self.groups
        layers = [Layer(OUTSIDE, outside, 0.0, 0)]
        layers += [
            Layer(self.names[i], forward[i], backward[i], self.bytes(i), group=groups[i]) for i in order
        ]
        return Profile("this model", tuple(layers), source=source)

    def guess(self, order: Sequence[int], link: Link) -> Profile:
        """Return a profile without measurements: compute by bytes, as long as all communication."""
        each = [2 * link.beta * self.bytes(i) for i in range(len(self.names))]
        return self.profile(
            order, [t / 3 for t in each], [2 * t / 3 for t in each], 0.0, "a guess from the sizes"
        )

    def fitted(self, profile: Profile, order: Sequence[int]) -> tuple[Profile, list[int]]:
        """Return a user's profile of this model, checked, and its layers' order as parameter indices."""
        index = {name: i for i, name in enumerate(self.names)}
        found = [index.get(layer.name) for layer in profile.layers if layer.bytes]
        missing = sorted(set(self.names) - {layer.name for layer in profile.layers})
        strange = [layer.name for layer in profile.layers if layer.bytes and layer.name not in index]
        wrong = [
            f"{layer.name} has {layer.bytes} bytes there and {self.bytes(index[layer.name])} here"
            for layer in profile.layers
            if layer.name in index and layer.bytes != self.bytes(index[layer.name])
        ]
        if missing or strange or wrong or len(found) != len(set(found)):
            raise ValueError(
                f"profile {profile.name!r} is of another model: {wrong[:3] or ''} parameters without a layer:"
                f" {missing[:3]}, layers without a parameter: {strange[:3]}; write one with"
                " optimizer.profile().save(FILE) in a run of this model"
            )
        if profile.layers[0].bytes:
            profile = replace(profile, layers=(Layer(OUTSIDE, 0.0, 0.0, 0), *profile.layers))
        groups = self.groups
        profile = replace(
            profile,
            layers=tuple(
                replace(la, group=groups[index[la.name]]) if la.name in index else la for la in profile.layers
            ),
        )
        return profile, [index[layer.name] for layer in profile.layers if layer.name in index]
