"""A rank that has called ``join()``: it takes part in the others' steps until all ranks have joined.

It contributes gradients of zero to every round of one optimizer, and installs the plans that the others
install. With ``gather="gradients"`` it leaves the update to the others and gets their parameters and state in
the end. With ``gather="parameters"`` the others need the update of its shards, so they tell it what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commsched.optimizer.reducer import Reducer
from commsched.optimizer.step_state import Phase


class Joining:
    """The rounds of one optimizer after ``join()``; calls ``after_step`` behind each step of the others."""

    def __init__(self, reducer: Reducer, after_step: Callable[[], None], optimizer: Any) -> None:
        self._reducer, self._after_step, self._optimizer = reducer, after_step, optimizer
        self._state, self._ranks = reducer.state, reducer.backend.ranks
        reducer.gathering.check_can_join()
        if self._state.phase is not Phase.IDLE:
            raise ValueError(
                f"rank {self._ranks.rank}: join() between a backward pass and its step(); call step() first"
            )
        self._early: list[int] = []  # ranks that joined in an earlier round than the last one
        self._last = 0
        reducer.joined = True
        self._begin()

    def _begin(self) -> None:
        """Begin a round with gradients of zero."""
        self._reducer.clear_grads(set_to_none=True)
        self._reducer.seal()

    def poll(self) -> bool:
        """Take part in the others' step if its flags have arrived; return whether all ranks have joined."""
        reducer, state = self._reducer, self._state
        if not reducer.backend.is_gathered(state.flags_bucket):
            return False
        self._early = state.joined
        reducer.arrivals.wait_for_flags()
        if len(state.joined) < self._ranks.size:
            if reducer.gathering.follow():
                self._after_step()
            self._begin()
            return False
        self._last = max(set(state.joined) - set(self._early) or state.joined)
        state.joined, reducer.joined = [], False
        reducer.gathering.discard()
        reducer.clear_grads(set_to_none=True)
        return True

    def end(self) -> None:
        """Give ranks that joined early what the last ones have learned since. Collective."""
        if self._early:
            self._reducer.gathering.share(self._optimizer, self._ranks.global_rank(self._last))
