"""The gradients of one optimizer: where they are stored, and the state of the current round.

A **round** is one reduction of every bucket. The first gradient of a backward opens it; the end of the
backward seals it: slots without a gradient count as zero, which their flag records. Code that needs a
gradient or a parameter completes its buckets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from commsched.backends.interface import Scaling
from commsched.optimizer.bucket_layout import Buffers, Layout, Slice
from commsched.optimizer.corrections import Corrections
from commsched.optimizer.pending import clear_raw_grad, raw_grad, set_raw_grad
from commsched.optimizer.residuals import Residuals

# A parameter's entry in the flags that every round sums over the ranks: in an int64, three counts of ranks of
# 20 bits each, so that up to 1,048,575 ranks are told apart.
DENSE = 1
SPARSE = 1 << 20
LATE = 1 << 40

JOINED = 1 << 10  # in the place of a rank's count of steps: it has joined and takes part with zeros

Update = Callable[[list[int]], None]
"""Applies the optimizer to the parameters with these indices."""


class FlagPlaces(NamedTuple):
    """Where the flags of a round, behind one for each parameter, hold the votes for a new plan; by rank the
    steps since the last round; the samples that weighted losses have counted, and how many ranks with
    gradients counted none; by rank how long it waited in its latest step. ``size``: of all flags.
    """

    votes: int
    steps: int
    samples: int
    unweighted: int
    waits: int
    size: int

    @classmethod
    def of(cls, params: int, ranks: int) -> FlagPlaces:
        behind = params + 1 + ranks
        return cls(params, params + 1, behind, behind + 1, behind + 2, behind + 2 + ranks)


class Phase(Enum):
    IDLE = "no gradient has arrived since the last step"
    FILLING = "a backward is running"
    SENT = "the backward is over, its gradients are being reduced"


@dataclass(slots=True)
class Kept:
    """A sum over the ranks in ``p.grad``: later gradients add to it, and only the difference is summed."""

    shown: torch.Tensor
    version: int
    sparse: torch.Tensor | None  # the sum itself, where no slot holds it

    @classmethod
    def of(cls, shown: torch.Tensor) -> Kept:
        return cls(shown, shown._version, shown.clone() if shown.is_sparse else None)


class Round:
    """The counters of one reduction of all buckets."""

    def __init__(self, layout: Layout, params: int) -> None:
        buckets = len(layout.slices)
        self.filled = [False] * params
        self.exposed = [i not in layout.slots for i in range(params)]
        self.missing = [max(1, len(piece.params)) for piece in layout.slices]  # 1: see Layout.empty
        self.sent = [False] * buckets
        self.done = [False] * buckets
        self.used: list[int] = []  # the summed flags, once they have arrived
        self.sparse: dict[int, torch.Tensor] = {}
        self.late: dict[int, torch.Tensor] = {}
        self.joined: list[int] = []  # ranks that have joined, once the flags have arrived
        self.unused: list[int] = []  # quantised parameters whose sums nobody reads, once flags have come
        self.repeated = False  # with gradients that came late
        self.factor = 1.0  # of all gradients, by the samples that the ranks have counted

    @classmethod
    def finished(cls, layout: Layout, params: int) -> Round:
        """Return a round that is over, with nothing pending."""
        over = cls(layout, params)
        over.exposed = [True] * params
        over.sent = over.done = [True] * len(layout.slices)
        over.used = [0] * (params + 1)
        return over


class StepState:
    """The state that the reducer, the arrivals and the gathering share. ``lock`` guards all of it."""

    buffers: Buffers
    places: FlagPlaces
    flags: torch.Tensor
    early_flags: Sequence[torch.Tensor]  # with early_step: for each bucket, those of its parameters
    round: Round

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        scaling: Scaling,
        sums: bool,
        residuals: Residuals,
        sparse_as_dense: bool = False,
    ) -> None:
        self.params, self.names = list(params), list(names)
        self.scaling = scaling
        self.residuals = residuals  # of the parameters that are quantised
        self.corrections = Corrections()
        self.sums = sums  # op=Sum, not Average
        self.sparse_as_dense = sparse_as_dense  # sparse gradients travel in the dense buckets
        self.sparse_dims: dict[int, int] = {}  # with how many sparse dimensions they came
        self.lock = threading.RLock()
        self.phase = Phase.IDLE
        self.pending = 0  # parameters that are not exposed yet
        self.rounds = 0
        self.backward_passes = 1  # accumulated locally before the gradients are reduced
        self.passes = [0] * len(self.params)
        self.kept: dict[int, Kept] = {}
        self.views: dict[int, torch.Tensor] = {}
        self.zeros: set[int] = set()  # parameters whose slots hold nothing but zeros
        self.shown: set[int] = set()  # parameters whose slots anybody may write into: they have been p.grad
        self.deferred: Update | None = None
        # The parameters that zero_grad() has cleared since the step, and its set_to_none.
        self.clear: dict[int, bool] = {}
        self.stepped = False  # since the last round
        self.joined: list[int] = []  # ranks that had joined by the last round whose flags have arrived

    def install(self, buffers: Buffers, flags: Sequence[torch.Tensor]) -> None:
        """Take new buckets into use. Gradients that are there keep their values."""
        before = self.views
        self.zeros.clear()
        self.shown.clear()
        self.buffers, self.slots, self.empty = buffers, buffers.layout.slots, buffers.layout.empty()
        self.flags, self.early_flags = flags[0], flags[1:]
        self.flag = self.flags.numpy()  # the same memory; an element of a tensor costs microseconds
        self.flags_bucket = len(buffers.layout.slices)
        self.bucket_names = [self._name_of(piece) for piece in buffers.layout.slices]
        self.views = {i: buffers.view(self.params[i], slot) for i, slot in self.slots.items()}
        for i, view in self.views.items():
            grad = raw_grad(self.params[i])
            if i in self.kept:
                view.copy_(before[i])
            elif grad is not None and not grad.is_sparse:
                view.copy_(grad)
                self.show(i)
        self.round = Round.finished(buffers.layout, len(self.params))

    def _name_of(self, piece: Slice) -> str:
        """Return a bucket's name for profilers, with the first of its parameters that the forward needs."""
        if not piece.params:
            return f"bucket {piece.number}: empty"
        others = f" and {len(piece.params) - 1} more" if len(piece.params) > 1 else ""
        return f"bucket {piece.number}: {self.names[piece.params[-1]]}{others}"

    def show(self, i: int) -> None:
        """Let a parameter's gradient be the memory of its slot."""
        self.shown.add(i)
        set_raw_grad(self.params[i], self.views[i])

    def finish_step(self, stepped: bool) -> None:
        """End the step, also one that was left out: later gradients belong to the next one."""
        self.stepped, self.phase = stepped, Phase.IDLE
        self.passes = [0] * len(self.params)

    def apply_clear(self, params: Iterable[int]) -> None:
        """Clear gradients for which ``zero_grad()`` was called while they were pending."""
        for i in params if self.clear else ():
            if i in self.clear and clear_raw_grad(self.params[i], self.clear[i]):
                self.kept.pop(i, None)

    def keep_in_place(self, i: int, grad: torch.Tensor) -> None:
        """Let the next pass of a local accumulation add into the bucket itself, unless that is in use."""
        view = self.views.get(i)
        if view is None or self.pending or self.phase is not Phase.IDLE or grad.is_sparse or self.sums:
            return
        if grad.data_ptr() != view.data_ptr():
            with torch.no_grad():
                view.copy_(grad)
            self.show(i)

    def detach_gradients(self) -> None:
        """Copy the gradients that the user sees, because the buckets will change.

        With op=Sum, later passes add to the copies, and only the difference is summed.
        """
        for i, param in enumerate(self.params):
            grad = raw_grad(param)
            if grad is not None:
                copy = grad.clone()
                set_raw_grad(param, copy)
                if self.sums and i in self.views:
                    self.kept[i] = Kept.of(copy)
