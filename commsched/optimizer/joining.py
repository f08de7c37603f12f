"""A rank that has called ``join()``: it takes part in the others' steps until all ranks have joined.

One ``Joining`` for each optimizer that the rank holds open. Rank J has joined, rank A has not; both hold the
optimizer. Every line but the second and the last two is what happens in any step.

| when | rank J sends | rank A sends | over |
|---|---|---|---|
| J calls ``join()`` | a round of zeros, its flag says JOINED | | the optimizer's connections |
| at once | "I join" | | the carrier (Horovod: its own join) |
| A's backward | | a round of gradients | the optimizer's connections |
| A knows J's flag, steps | | with ``gather="parameters"``: "clip", "step", "discard" | the job's store |
| J has read that | the update of its shards, then the next round of zeros | its shards | the connections |
| both plan again | times, votes, agreements | the same | ``PrivateObjects`` |
| A calls ``join()`` | | as J did | |
| the carrier's join ends | the keys of the optimizers it began with | the same | the carrier |
| all members listed it | | | (J and A see JOINED of all ranks in the flags of the last round) |
| in the end | | rank A, which joined last: parameters, state, options | the carrier |

With ``gather="gradients"`` J leaves the update to the others, which may clip or schedule the learning rate.
It gets their parameters and state in the end. With ``gather="parameters"`` they need its shards' update.

**Which optimizers take part is agreed, once all have joined** (``commsched.collectives.joins``): those
that all ranks of their process set held open when they joined. References decide nothing: one rank's
collector may have freed an optimizer that another rank still keeps.
- A rank that closed the optimizer before it joined, or whose step had failed, does not list it. Nobody can
  step it any more, so J ends its part without waiting for anybody (``give_up``); its next use is an error.
- Nobody waits for an optimizer that is open but idle: the carrier's join decides when all have joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from commsched.errors import CommError
from commsched.optimizer.round import Round, State
from commsched.optimizer.whole_step import WholeStep


def check_can_join(now: Round) -> None:
    """Raise ``ValueError`` where the user must do something before ``join()``."""
    if now.backend.failure() is not None:
        return  # it takes no more steps on any rank
    now.mode.check_can_join()
    with suppress(ValueError):  # of a backward that has raised: such an optimizer ends, see ``begin``
        now.leave_cleared()
    if now.state is State.SENT:
        raise ValueError(
            f"rank {now.ranks.rank}: join() between a backward pass and its step(); call step()"
            " first (or zero_grad() to drop the gradients, or close() if the optimizer is no longer used)"
        )


class Joining:
    """The rounds of one optimizer after ``join()``; calls ``after_step`` after each step of the others."""

    def __init__(
        self, now: Round, after_step: Callable[[], None], optimizer: Any, close: Callable[[bool], None]
    ) -> None:
        self._round, self._after_step = now, after_step
        self._optimizer, self._close = optimizer, close
        self._ranks = now.ranks
        self.key, self.ranks_of_job = self._ranks.key, list(self._ranks.process_set.ranks or ())
        self.uses_carrier = now.backend.name.endswith("horovod")
        self.failure: CommError | None = None
        self.ended = False
        self._early: Sequence[int] = ()  # ranks that joined in an earlier round than the last one
        self._last = 0
        self.joined_last: set[int] = set()  # ranks of the job
        self._stepped: bool | None = (
            None  # whether the step that this rank has followed was one; None: not yet
        )
        self._in_step = False  # the flags of the others' round are known, its end is not
        self._steps = 0  # of the others

    def begin(self) -> bool:
        """Begin the first round; return whether this optimizer can take part."""
        now = self._round
        if now.backend.failure() is not None:
            return False
        if now.state is State.RAISED:
            self.give_up(
                f"rank {self._ranks.rank} called join() after a backward pass of this optimizer had failed;"
                " call zero_grad() before join(), or close() if the optimizer is no longer used"
            )
            return False
        now.joined = True
        try:
            self._begin_round()
        except CommError:  # a rank has closed it
            now.joined = False
            return False
        return True

    def _begin_round(self) -> None:
        """Begin a round with gradients of zero."""
        self._round.clear_grads(set_to_none=True)
        self._round.seal()

    def poll(self) -> None:
        """Take part in what the others have begun, without waiting for their next step.

        Sets ``ended`` once the flags say that all ranks have joined, ``failure`` once the connections have
        failed.
        """
        if self.ended or self.failure is not None:
            return
        try:
            self._go_on()
        except CommError as error:
            if self._round.backend.failure() is None:
                raise
            self.failure = error  # perhaps because a rank has closed it: the agreement in the end tells

    def _go_on(self) -> None:
        now, ranks = self._round, self._ranks
        if not self._in_step:
            if not now.backend.is_gathered(now.flags_bucket):
                return
            self._early = ranks.joined
            # Reading the flags may wait until the others read them, who may be busy with another optimizer.
            if now.mode.reduces_outside() and ranks.next_order() is None:
                return
            now.wait_for_flags()
            self._in_step = len(ranks.joined) < ranks.size
        if not self._in_step:
            last = set(ranks.joined) - set(self._early) or set(ranks.joined)
            self._last, self.joined_last = max(last), {ranks.global_rank(rank) for rank in last}
            self.ended = True
            return
        if self._stepped is None:
            self._stepped = now.mode.follow()
        if self._stepped is None or not now.is_here():
            return
        stepped, self._stepped, self._in_step = self._stepped, None, False
        now.settle()
        if stepped:
            self._steps += 1
            self._after_step()
        self._begin_round()

    def give_up(self, reason: str) -> None:
        """End this rank's part and the optimizer, which can no longer be stepped; its next use says why."""
        self._round.backend.abort(reason)
        self._round.joined, self._ranks.joined = False, ()
        self._close(False)

    def missed(self) -> bool:
        """Return whether this rank lacks steps that the others took after it had joined."""
        return self._steps > 0 and isinstance(self._round.mode, WholeStep)

    def end(self) -> None:
        """End the last round; give ranks that joined early what the last ones have learned. Collective."""
        now = self._round
        self._ranks.joined, now.joined = (), False
        now.mode.discard()
        now.clear_grads(set_to_none=True)
        if self._early:
            now.mode.share(self._optimizer, self._ranks.global_rank(self._last))
