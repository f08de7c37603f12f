"""A rank that has called ``join()``: it takes part in the others' steps until all ranks have joined.

It contributes gradients of zero to every round of one optimizer, and installs the plans that the others
install. With ``gather="gradients"`` it leaves the update to the others and gets their parameters and state in
the end. With ``gather="parameters"`` the others need the update of its shards, so they tell it what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commsched.optimizer.step_state import Phase

if TYPE_CHECKING:
    from commsched.optimizer.driver import Driver


class Joining:
    """The rounds of one optimizer after ``join()``."""

    def __init__(self, driver: Driver, optimizer: Any) -> None:
        self._driver, self._optimizer = driver, optimizer
        self._state, self._ranks = driver.reducer.state, driver.backend.ranks
        driver.gathering.check_can_join()
        if self._state.phase is not Phase.IDLE:
            raise ValueError(
                f"rank {self._ranks.rank}: join() between a backward pass and its step(); call step() first"
            )
        self._early: list[int] = []  # ranks that joined in an earlier round than the last one
        self._last = 0
        driver.reducer.joined = True
        self._begin()

    def _begin(self) -> None:
        """Begin a round with gradients of zero."""
        self._driver.reducer.clear_grads(set_to_none=True)
        self._driver.reducer.seal()

    def poll(self) -> bool:
        """Take part in the others' step if its flags have arrived; return whether all ranks have joined."""
        driver, state = self._driver, self._state
        if not driver.backend.is_gathered(state.flags_bucket):
            return False
        self._early = state.joined
        driver.arrivals.wait_for_flags()
        if len(state.joined) < self._ranks.size:
            if driver.gathering.follow():
                driver.after_step()
            self._begin()
            return False
        self._last = max(set(state.joined) - set(self._early) or state.joined)
        state.joined, driver.reducer.joined = [], False
        driver.gathering.discard()
        driver.reducer.clear_grads(set_to_none=True)
        return True

    def end(self) -> None:
        """Give ranks that joined early what the last ones have learned since. Collective."""
        if self._early:
            self._driver.gathering.share(self._optimizer, self._ranks.global_rank(self._last))
