"""Ranks that have joined while others train: they still own shards, and update them as they are told."""

from __future__ import annotations

from typing import Any

from commsched.backends.ranks import Ranks, ranks_text
from commsched.collectives.objects import broadcast_object
from commsched.optimizer.step_state import StepState


class AbsentRanks:
    """The ranks of one optimizer that have joined, as the others see them."""

    def __init__(self, state: StepState, ranks: Ranks) -> None:
        self._state, self._ranks = state, ranks

    def tell(self, what: str, value: Any = None) -> None:
        """Let ranks that have joined do what this one is about to do. The round's flags must be known."""
        joined = self._state.round.joined
        if joined and self._ranks.rank not in joined:
            self._ranks.tell_joined((what, value))

    def follow(self, gathering: Any, optimizer: Any) -> bool | None:
        """Do what the others do, on a rank that has joined, until they step (True) or discard the round.

        None: they have not said yet what they do next; call again. They may be busy with another optimizer.
        """
        while (order := self._ranks.next_order()) is not None:
            what, value = order
            if what == "clip":
                gathering.clip_grad_norm_(*value)
            elif what == "step":
                set_options(optimizer, value)
                gathering.step(optimizer, synchronous=True)
                return True
            else:
                gathering.discard()
                return False
        return None

    def check_none(self, what: str) -> None:
        """Raise for calls that need every rank and that those that have joined do not hear of."""
        joined = self._state.joined
        if joined:
            raise ValueError(
                f"rank {self._ranks.rank}: {what} needs all ranks with gather='parameters',"
                " Compression.int8 or fp8, and"
                f" {ranks_text(joined)} joined; call it when all have, and to clip use clip_grad_norm_()"
            )


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the hyperparameters of each parameter group."""
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def set_options(optimizer: Any, options: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)


def share_options(optimizer: Any, root: int, ranks: Ranks) -> None:
    """Give all ranks the hyperparameters of global rank ``root``. Collective."""
    set_options(optimizer, broadcast_object(options_of(optimizer), root, "commsched.join", ranks.process_set))
