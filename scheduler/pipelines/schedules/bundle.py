"""Bundles: a front and a rear sub-model, one batch in flight; every host runs a bundle of its own.

A host may have several fronts and rears (shape 4,2: outputs are gathered, concatenated and split again, which
is what unequal replica counts do). Gradients are summed on the host's first rank of each sub-model, reduced
among those, and broadcast back (``reduction="masters"``). One position is data parallelism alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.pipelines.schedules.gpipe import gpipe
from scheduler.pipelines.schedules.orders import Order


def bundle(positions: int = 2, microbatches: int = 1) -> list[Order]:
    if microbatches != 1 or positions not in (1, 2):
        raise ValueError(
            "a bundle has a front and a rear (or is one model) and one batch in flight; got"
            f" {positions} sub-models and {microbatches} micro-batches"
        )
    return gpipe(positions, 1)


def bundle_ranks(hosts: int, shape: Sequence[int] = (1, 1)) -> tuple[tuple[int, ...], ...]:
    """The ranks of each sub-model, for ``hosts`` hosts of ``sum(shape)`` ranks each: a host's fronts first,
    then its rears. Rows follow the hosts, so no tensor of a bundle leaves its host.
    """
    if hosts < 1 or not 1 <= len(shape) <= 2 or min(shape) < 1:
        raise ValueError(
            f"bundles need a host, and a front and a rear on it; got {hosts} hosts, shape {shape}"
        )
    each = sum(shape)
    first = [0, *shape][: len(shape)]
    return tuple(
        tuple(host * each + start + number for host in range(hosts) for number in range(count))
        for start, count in zip(first, shape, strict=True)
    )


def bundle_ranks_across(hosts: int, each: int) -> tuple[tuple[int, ...], ...]:
    """The same for fronts on the first half of the hosts and rears on the others, ``each`` ranks a host."""
    if hosts < 2 or hosts % 2 or each < 1:
        raise ValueError(
            f"fronts and rears on different hosts need an even number of hosts; got {hosts} hosts of {each}"
            " ranks"
        )
    half = hosts // 2 * each
    return tuple(range(half)), tuple(range(half, 2 * half))
