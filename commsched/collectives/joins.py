"""``join()``: a rank without further data takes part in the others' operations, and optimizers' steps."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from commsched.collectives.carrier import carrier, epoch
from commsched.collectives.operations import allgather_object
from commsched.errors import CommError

_POLL_SECONDS = 0.001
_PROGRESS_SECONDS = 1.0  # between two reports that the others go on


class Joining(Protocol):
    """The work that a rank does for the others' steps of one optimizer after it has joined."""

    key: tuple[int, int]  # the optimizer's process set and number, the same on all of its ranks
    ranks_of_job: Sequence[int]  # those of the process set
    uses_carrier: bool  # its bytes travel as operations of the carrier
    ended: bool  # all of its ranks have joined
    failure: CommError | None  # why its connections have failed
    joined_last: set[int]  # the ranks that have joined since another rank took the last step

    def poll(self) -> None:
        """Take part in what the others have begun, without waiting for their next step."""

    def missed(self) -> bool:
        """Return whether this rank lacks steps that the others took after it had joined."""

    def give_up(self, reason: str) -> None:
        """End this rank's part, because not all ranks have this optimizer."""

    def stop(self) -> None:
        """Wait for no other rank any more, because the join is over or has failed."""

    def end(self) -> None:
        """Give all ranks the same state, once all have joined. Collective."""


# Weak: an optimizer that nobody uses any more must be freed. So this has the optimizers with which this rank
# could join; all ranks agree in the end which of them take part.
_joiners: WeakValueDictionary[tuple[int, int], Any] = WeakValueDictionary()  # by epoch and number
_numbers = itertools.count()


def register_joiner(joiner: Any) -> None:
    """Let ``join()`` call ``joiner.check_can_join()``, which raises where it cannot, and
    ``joiner.start_join()``, which returns a ``Joining`` or None. Keeps no reference.
    """
    _joiners[epoch(), next(_numbers)] = joiner


def join(device: int = -1) -> int:
    """Tell the other ranks that this one has no more data, and wait until every rank has joined.

    Until then this rank contributes zeros to the others' all-reduces, on GPU `device` (-1: the CPU), and to
    the steps of every ``DistributedOptimizer`` with a plan. Averages still divide by the number of all ranks.
    Afterwards all ranks have the same parameters and state of these optimizers, and no gradients. Returns the
    rank that joined last.

    Optimizers that a rank has closed or dropped before it joins do not take part; they end on the others.
    """
    joiners = _checked_joiners()
    works = [work for work in [joiner.start_join() for joiner in joiners] if work is not None]
    try:
        # A rank within the carrier's join cannot carry out operations of these optimizers' steps.
        _take_part(works, lambda: all(w.ended or w.failure is not None for w in works if w.uses_carrier))
        joined = carrier().start_join(device)
        _take_part(works, joined.done)
        try:
            last = joined.wait()
        except CommError as error:
            cause = next((work.failure for work in works if work.failure is not None), None)
            raise CommError(f"{error}; before that: {cause}" if cause else str(error)) from error
        agreed, missed = _agreed(works)
        _take_part(agreed, lambda: all(work.ended or work.failure is not None for work in agreed))
        for work in agreed:
            if work.failure is not None:
                raise work.failure
        for work in agreed:
            work.end()
            # The carrier may hear of several ranks at once, in any order.
            if last not in work.joined_last and len(work.ranks_of_job) in (0, carrier().launch.size):
                last = max(work.joined_last)
        if missed:
            raise missed[0]
        return last
    finally:
        for work in works:
            work.stop()


def _checked_joiners() -> list[Any]:
    """Return what can join; raise where the user must do something before.

    No user can act on an optimizer that only the garbage collector still knows: it must not stop the join.
    """
    gc.collect()
    # Not items(): other threads may register joiners, and the collector may free some.
    known = {ref.key: joiner for ref in _joiners.valuerefs() if (joiner := ref()) is not None}
    joiners = [known[key] for key in sorted(known) if key[0] == epoch()]
    for joiner in joiners:
        joiner.check_can_join()
    return joiners


def _take_part(works: Sequence[Joining], over: Callable[[], bool]) -> None:
    """Do what the others' steps need of this rank, until ``over()``."""
    reported = time.monotonic()
    while works:
        ended = over()  # before the polls: what has arrived by then may be an error that explains the end
        for work in works:
            work.poll()
        if ended:
            return
        if time.monotonic() - reported > _PROGRESS_SECONDS:
            carrier().report_progress()
            reported = time.monotonic()
        time.sleep(_POLL_SECONDS)


def _agreed(works: Sequence[Joining]) -> tuple[list[Joining], list[CommError]]:
    """Give up the optimizers that a rank of their process set does not have. Collective.

    Returns the others, in an order that all ranks have, and errors where this rank has missed steps.
    """
    held = [set(keys) for keys in allgather_object([work.key for work in works], "commsched.join")]
    agreed, errors, rank = [], [], carrier().launch.rank
    for work in sorted(works, key=lambda work: work.key):
        without = [rank for rank in work.ranks_of_job if work.key not in held[rank]]
        if not without:
            agreed.append(work)
            continue
        reason = (
            f"rank {without[0]} had closed, dropped or lost this optimizer before it called join(); close an"
            " optimizer on all ranks, after join()"
        )
        if work.missed():
            errors.append(
                CommError(f"rank {rank} missed steps that the others took after it had joined: {reason}")
            )
        work.give_up(f"rank {rank}: {reason}")
    return agreed, errors
