"""The input of every policy: a profile, a link, and how gradients and parameters are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scheduler.ir.actions import Action, Kind
from scheduler.ir.buckets import MIB, Bucket, check_cover, fuse_by_bytes, one_per_layer
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program, check_step, data_parallel_program
from scheduler.simulate.step_model import StepModel

FUSED = 25 * MIB
"""The bucket size that DDP, Horovod's users and DeAR's authors start from."""

LADDER = (None, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, FUSED, 50 * MIB, 100 * MIB)
"""Bucket sizes that policies whose authors tune the size choose from; None is one bucket per layer."""


@dataclass(frozen=True)
class Problem:
    """A profile and a link, and how the step is done: what all-gathers move, and on how many ranks.

    ``buckets``: the caller's own; ``bucket_bytes``: the caller's size of each. By default policies choose.
    """

    profile: Profile
    link: Link
    gather: str = "gradients"
    early_step: bool = False
    ranks: int = 2
    buckets: Sequence[Bucket] | None = None
    bucket_bytes: float | None = None

    def __post_init__(self) -> None:
        check_step(self.gather, self.early_step)

    @property
    def step(self) -> dict[str, Any]:
        """The keywords by which policies and bounds are told how the step is done."""
        return {"gather": self.gather, "early_step": self.early_step}

    @property
    def gathers_late(self) -> bool:
        """Whether every AG must stand after the last RS: the update of the shards needs all gradients."""
        return self.gather == "parameters" and not self.early_step

    @property
    def has_buckets(self) -> bool:
        """Whether the caller has chosen the buckets or their size."""
        return self.buckets is not None or self.bucket_bytes is not None

    @cached_property
    def groups(self) -> tuple[int, ...]:
        return tuple(layer.group for layer in self.profile.layers)

    def fuse(self, limit: float | None, first: float | None = None) -> tuple[Bucket, ...]:
        """Buckets of about ``limit`` bytes; None is one for each layer."""
        if limit is None:
            return one_per_layer(self.profile.sizes, self.groups)
        return fuse_by_bytes(self.profile.sizes, limit, first, groups=self.groups)

    def candidates(self, sizes: Sequence[float | None] = LADDER) -> list[tuple[Bucket, ...]]:
        """The caller's buckets, or those of the caller's size, or one set for each of ``sizes``."""
        if self.buckets is not None:
            check_cover(self.buckets, self.profile.sizes, self.groups)
            return [tuple(self.buckets)]
        if self.bucket_bytes is not None:
            return [self.fuse(self.bucket_bytes)]
        return list(dict.fromkeys(self.fuse(size) for size in sizes))

    def model(self, buckets: Sequence[Bucket]) -> StepModel:
        return StepModel(self.profile, self.link, buckets, ranks=self.ranks, **self.step)

    def period(self, program: Program) -> float:
        """Seconds per iteration of a program for this problem."""
        model = self.model(program.buckets)
        return model.period(model.encode(program.link))

    def program(
        self, policy: str, buckets: Sequence[Bucket], order: Sequence[Action], **meta: Any
    ) -> Program:
        return data_parallel_program(
            policy,
            buckets,
            corrections_last(self.profile, buckets, order),
            len(self.profile.layers),
            self.ranks,
            self.gather,
            self.early_step,
            meta=meta,
        )

    def fastest(self, programs: Iterable[Program]) -> Program:
        """The program with the shortest period; of equals, the first. A single one is not timed."""
        choices = list(programs)
        return choices[0] if len(choices) == 1 else min(choices, key=self.period)


def backward_order(buckets: Sequence[Bucket]) -> list[int]:
    """The buckets' numbers in the order in which the backward completes them."""
    return sorted(range(len(buckets)), key=lambda b: -buckets[b].ready_layer)


def corrections_last(
    profile: Profile, buckets: Sequence[Bucket], order: Iterable[Action]
) -> tuple[Action, ...]:
    """Return the order with each all-gather of corrections after those of what they correct."""
    order = tuple(order)
    for layer, part in enumerate(profile.layers):
        if part.needed_by < 0:
            continue
        gathers = [action for action in order if action.kind is not Kind.RS]
        whole = [action for action in gathers if layer in buckets[action.index].layers]
        early = {action for action in gathers if part.needed_by in buckets[action.index].layers}
        last = max((order.index(action) for action in whole), default=-1)
        moved = [action for action in order[:last] if action in early]
        kept = [action for action in order[:last] if action not in early]
        order = (*kept, *order[last : last + 1], *moved, *order[last + 1 :]) if moved else order
    return order


def collectives(kind: Kind, buckets: Iterable[int]) -> list[Action]:
    """Return one collective for each of these buckets, in their order."""
    return [Action(kind, bucket) for bucket in buckets]
