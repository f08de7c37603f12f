"""Orders of a backward whose weight gradients have places of their own: where the search starts and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scheduler.bounds.split import Parts, split_exposed
from scheduler.ir.actions import Action, Kind
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile

if TYPE_CHECKING:
    from scheduler.policies.search.weight_kernel import Backward

TRIES = 20_000
THRESHOLDS = (0.0, 1e-9, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3)
"""Starts compute a weight gradient when the link has less work than these parts of the compute."""

HEATS = (0.03, 0.01, 0.003)
"""The best starts are improved, with so much of the compute as the heat of the first moves."""


def backward_orders(
    profile: Profile, link: Link, extra_memory: float | None = None, seed: int = 0, tries: int = TRIES
) -> list[tuple[Action, ...]]:
    """Good orders of the backward's actions for this link, the best first. ``extra_memory``: bytes that
    waiting weight gradients may hold beyond the peak of the backward without them.
    """
    from scheduler.policies.search.weight_kernel import anneal, exposed_seconds, fed

    work = _work(profile, link, extra_memory)
    if not work.movable.any():
        return []
    enough = split_exposed(profile, link) * (1 + 1e-9)
    known = [fed(work, share * profile.compute, low) for share in THRESHOLDS for low in (True, False)]
    starts = sorted([_plain(work), *known], key=lambda order: exposed_seconds(work, order))
    each = tries // len(HEATS)
    found = [
        anneal(work, start, enough, each, seed, heat * profile.compute) for start, heat in zip(starts, HEATS)
    ]
    found.sort(key=lambda pair: pair[1])
    return [_actions(work, order) for order, _ in found]


def _work(profile: Profile, link: Link, extra_memory: float | None) -> Backward:
    from scheduler.policies.search.weight_kernel import Backward

    parts = Parts.of(profile, link)
    kept = np.array([layer.activation_bytes for layer in profile.layers], float)
    room = np.inf if extra_memory is None else kept.sum() + extra_memory
    movable = parts.weights > 0
    return Backward(*parts, np.array(profile.needed), movable, np.stack([kept, kept], 1), room)


def _plain(work: Backward) -> np.ndarray:
    """Each weight gradient right before its layer's input gradient."""
    count = len(work.inputs)
    pairs = [([layer] if work.movable[layer] else []) + [count + layer] for layer in reversed(range(count))]
    return np.array(sum(pairs, []), np.int64)


def _actions(work: Backward, order: np.ndarray) -> tuple[Action, ...]:
    count = len(work.inputs)
    return tuple(Action(Kind.W if code < count else Kind.B, int(code) % count) for code in order)
