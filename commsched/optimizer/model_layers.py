"""Maps the parameters to the scheduler's layers: in forward order, after one layer without bytes.

That layer represents the time between two iterations (data loading, the optimizer's own work). A weight tied
to an output matrix, the head, has two layers: one where the embedding is, and one where the head is. Layers
are named by parameter; the heads' are numbered after the parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from commsched.backends.interface import Scaling
from commsched.collectives.compression import block_code
from commsched.optimizer.buckets import Layout, build_layout
from commsched.optimizer.measuring import Sample
from scheduler.ir.buckets import Bucket
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile

OUTSIDE = "(between iterations)"

BLOCK = 256
"""Elements of a quantised gradient with one scale: comm_core's ``kQuantBlock``."""

SHARE = (BLOCK + 4) / (4 * BLOCK)
"""Bytes of a quantised gradient, as a share of float32's."""

_FEWEST = 2048  # smaller tensors, and those of one dimension (norms, biases), are few bytes


def travels_quantised(param: torch.Tensor) -> bool:
    """Return whether ``Compression.int8`` and ``fp8`` quantise this parameter's gradient."""
    return param.dtype == torch.float32 and param.dim() > 1 and param.numel() >= _FEWEST


class Rows(NamedTuple):
    """Of a parameter that travels by rows: the elements of a row, and the bytes that one RS or AG sends."""

    elements: int
    sent: int


@dataclass(frozen=True)
class Model:
    """The facts about the parameters that the scheduler needs: the same on every rank."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    rows: Mapping[int, Rows] = field(default_factory=dict)  # parameters of which only touched rows travel
    quantised: frozenset[int] = frozenset()  # the parameters that travel in blocks of bytes
    # The tied weights whose heads have layers of their own. Of one that travels by rows the head's part of
    # the gradient is sent first, and then corrected in some rows; the others' gradients are sent whole.
    heads: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: Sequence[nn.Parameter], names: Sequence[str], wire: Any = None) -> Model:
        """Return the facts about these parameters, whose gradients travel as ``wire``."""
        quantised = (i for i, p in enumerate(params) if block_code(wire) and travels_quantised(p))
        numels, dtypes = tuple(p.numel() for p in params), tuple(p.dtype for p in params)
        return cls(tuple(names), numels, dtypes, quantised=frozenset(quantised))

    @property
    def layers(self) -> range:
        """The numbers of all layers: parameters, then heads."""
        return range(len(self.names) + len(self.heads))

    def param(self, i: int) -> int:
        """Return the parameter of a layer."""
        return i if i < len(self.names) else self.heads[i - len(self.names)]

    def name(self, i: int) -> str:
        return self.names[i] if i < len(self.names) else f"{self.names[self.param(i)]} (head)"

    @property
    def head_of(self) -> dict[int, int]:
        """The layer of each tied weight's head."""
        return {i: len(self.names) + place for place, i in enumerate(self.heads)}

    def sent_whole(self) -> Model:
        """Return the model in which the gradients of tied weights are sent when they are whole."""
        return replace(self, rows={i: rows for i, rows in self.rows.items() if i not in self.heads})

    @property
    def groups(self) -> list[int]:
        """The group of each layer: one bucket holds one dtype, quantised or not, or one parameter that
        travels by rows.
        """
        by_layer = [(self.dtypes[self.param(i)], i in self.quantised) for i in self.layers]
        kinds = list(dict.fromkeys(by_layer))
        return [len(kinds) + i if i in self.rows else kinds.index(kind) for i, kind in enumerate(by_layer)]

    def kind(self, group: int) -> torch.dtype:
        return self.dtypes[self.param(self.groups.index(group))]

    def quantises(self, group: int) -> bool:
        """Return whether the buckets of a group travel in blocks of bytes."""
        return self.groups.index(group) in self.quantised

    def layout(self, buckets: Sequence[Bucket], ranks: int, owners: Sequence[int] | None = None) -> Layout:
        """Return the places of the gradients in buckets that name parameters."""
        blocks = {group: BLOCK for group in set(self.groups) if self.quantises(group)}
        rows = {i: row.elements for i, row in self.rows.items()}
        numels = [self.numels[self.param(i)] for i in self.layers]
        heads = {self.head_of[i]: i for i in self.heads if i in self.rows}
        return build_layout(numels, self.itemsizes, buckets, ranks, owners, rows, blocks, heads)

    @property
    def itemsizes(self) -> list[int]:
        return [self.dtypes[self.param(i)].itemsize for i in self.layers]

    def bytes(self, i: int) -> int:
        """Return the bytes of the gradient of a layer's parameter."""
        return self.numels[self.param(i)] * self.dtypes[self.param(i)].itemsize

    def sent(self, i: int) -> int:
        """Return the bytes of one RS or AG of a layer's gradient."""
        if i >= len(self.names):
            return self.bytes(i) if self.param(i) in self.rows else 0
        return self.rows[i].sent if i in self.rows else self.bytes(i)

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

    def profile(self, order: Sequence[int], times: Sample, source: str) -> Profile:
        """Return a profile with the layers in this order; times are given by layer."""
        groups, place = self.groups, {i: number + 1 for number, i in enumerate(order)}
        layers = [Layer(OUTSIDE, times.outside, 0.0, 0)]
        layers += [
            Layer(
                self.name(i),
                times.forward[i],
                times.backward[i],
                self.sent(i),
                group=groups[i],
                needed_by=place[self.param(i)] if i >= len(self.names) and self.sent(i) else -1,
            )
            for i in order
        ]
        return Profile("this model", tuple(layers), source=source)

    def guess(self, order: Sequence[int], link: Link) -> Profile:
        """Return a profile without measurements: compute by bytes, as long as all communication."""
        each = [2 * link.beta * self.sent(i) for i in self.layers]
        times = Sample([t / 3 for t in each], [2 * t / 3 for t in each], 0.0)
        return self.profile(order, times, "a guess from the sizes")

    def fitted(self, profile: Profile, order: Sequence[int]) -> tuple[Profile, list[int]]:
        """Return a user's profile of this model, checked, and the parameter of each layer (-1: none)."""
        index = {name: i for i, name in enumerate(self.names)}
        with_bytes = [layer.name for layer in profile.layers if layer.bytes]
        missing = sorted(set(self.names) - {layer.name for layer in profile.layers})
        strange = [name for name in with_bytes if name not in index]
        wrong = []
        for layer in profile.layers:
            i = index.get(layer.name, -1)
            fewer = i in self.rows and layer.bytes < self.bytes(i)
            if i >= 0 and layer.bytes != self.bytes(i) and not fewer:
                wrong.append(f"{layer.name} has {layer.bytes} bytes there and {self.bytes(i)} here")
        if missing or strange or wrong or len(with_bytes) != len(set(with_bytes)):
            raise ValueError(
                f"profile {profile.name!r} is of another model: {wrong[:3] or ''} parameters without a layer:"
                f" {missing[:3]}, layers without a parameter: {strange[:3]}; write one with"
                " optimizer.profile().save(FILE) in a run of this model"
            )
        if profile.layers[0].bytes:
            profile = replace(profile, layers=(Layer(OUTSIDE, 0.0, 0.0, 0), *profile.layers))
        groups = self.groups
        layers = [
            replace(la, group=groups[index[la.name]]) if la.name in index else la for la in profile.layers
        ]
        return replace(profile, layers=tuple(layers)), [index.get(layer.name, -1) for layer in layers[1:]]
