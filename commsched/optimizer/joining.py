"""A rank that has called ``join()``: it takes part in the others' steps until all ranks have joined.

It contributes gradients of zero to every round of one optimizer, and installs the plans that the others
install. With ``gather="gradients"`` it leaves the update to the others and gets their parameters and state in
the end. With ``gather="parameters"`` the others need the update of its shards, so they tell it what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commsched.optimizer.round import Round, State


class Joining:
    """The rounds of one optimizer after ``join()``; calls ``after_step`` behind each step of the others."""

    def __init__(self, now: Round, after_step: Callable[[], None], optimizer: Any) -> None:
        self._round, self._after_step, self._optimizer = now, after_step, optimizer
        self._ranks = now.ranks
        now.mode.check_can_join()
        if now.state is not State.IDLE:
            raise ValueError(
                f"rank {self._ranks.rank}: join() between a backward pass and its step(); call step() first"
            )
        self._early: list[int] = []  # ranks that joined in an earlier round than the last one
        self._last = 0
        now.joined = True
        self._begin()

    def _begin(self) -> None:
        """Begin a round with gradients of zero."""
        self._round.clear_grads(set_to_none=True)
        self._round.seal()

    def poll(self) -> bool:
        """Take part in the others' step if its flags have arrived; return whether all ranks have joined."""
        now = self._round
        if not now.backend.is_gathered(now.flags_bucket):
            return False
        self._early = now.joined_ranks
        now.wait_for_flags()
        if len(now.joined_ranks) < self._ranks.size:
            if now.mode.follow():
                self._after_step()
            self._begin()
            return False
        self._last = max(set(now.joined_ranks) - set(self._early) or now.joined_ranks)
        now.joined_ranks, now.joined = [], False
        now.mode.discard()
        now.clear_grads(set_to_none=True)
        return True

    def end(self) -> None:
        """Give ranks that joined early what the last ones have learned since. Collective."""
        if self._early:
            self._round.mode.share(self._optimizer, self._ranks.global_rank(self._last))
