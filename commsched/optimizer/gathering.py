"""What ``gather="gradients"`` and ``gather="parameters"`` do differently, as an interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from commsched.backends.interface import Backend
from commsched.optimizer.absent_ranks import AbsentRanks
from commsched.optimizer.bucket_layout import Buffers
from commsched.optimizer.residuals import State
from commsched.optimizer.step_state import Phase, StepState
from scheduler.ir.program import Program


class Gathering(ABC):
    """The part that differs between ``gather="gradients"`` and ``gather="parameters"``.

    It decides which values are gathered once the gradients are reduced, and how the optimizer steps on them.
    """

    arrivals: Any  # the Arrivals of this round, which set it
    # Whether a rank that has joined takes a step after each round without being told that the others do.
    steps_after_each_round = True

    def __init__(self, state: StepState, backend: Backend) -> None:
        self.state, self.backend = state, backend

    def prepare(self, program: Program, buffers: Buffers) -> Buffers | None:
        """Return the parameters' buffers for a new plan, if parameters are gathered. Between two steps."""
        return None

    def installed(self, program: Program) -> None:
        """React to a new plan, which the backend has installed."""

    def owners(self, i: int) -> int:
        """Return how many tensors hold this parameter's memory when no alias exists."""
        return 1

    def before_round(self) -> None:
        """End the former round, or refuse a new one, because a backward begins."""

    def round_begun(self) -> None:
        """React to a new round; buckets may be marked from now on."""

    @property
    def readable(self) -> bool:
        """Whether a gradient that is being reduced can be read once it has arrived."""
        return True

    def check_readable(self) -> None:
        """Raise where a gradient that is being reduced cannot be read."""

    @abstractmethod
    def show(self, i: int) -> None:
        """Set ``p.grad`` of a completed parameter that some rank used."""

    def weigh(self, factor: float) -> None:
        """Multiply this round's gradients by a factor before anybody reads them."""
        self.state.round.factor = factor

    @abstractmethod
    def reduce_outside(self, late: bool, sparse: Sequence[int]) -> None:
        """Reduce gradients that no bucket contained: late and sparse ones."""

    @abstractmethod
    def gather_gradients(self) -> None:
        """Give every rank every reduced gradient. Collective."""

    @abstractmethod
    def step(self, optimizer: Any, synchronous: bool) -> None:
        """Step the optimizer; with ``synchronous`` defer no update."""

    @abstractmethod
    def finish_round(self) -> None:
        """Wait until no other rank needs this rank for the round."""

    def finish_step(self, stepped: bool = True) -> None:
        """End the step, also one that was left out: later gradients belong to the next one."""
        with self.state.lock:
            self.state.finish_step(stepped)
            self.backend.step_ended()

    def check_can_join(self) -> None:
        """Raise where a rank that has joined cannot take part in the others' steps."""

    @abstractmethod
    def follow(self) -> bool | None:
        """Take part in the others' step, on a rank that has joined; return whether there was one.

        None: they have not begun it yet; call again.
        """

    @abstractmethod
    def share(self, optimizer: Any, root: int) -> None:
        """Give all ranks what the ranks that joined earlier lack, from rank ``root``. Collective."""

    @abstractmethod
    def discard(self) -> None:
        """End a round without using its result."""

    def cleared(self) -> None:
        """React to the user's ``zero_grad()``."""

    @abstractmethod
    def finish_all(self) -> None:
        """Complete all pending work, so that another reducer can take over; gradients stay."""

    @property
    def spreads_state(self) -> bool:
        """Whether ``whole_state()`` is collective, because each rank has a part of the state."""
        return bool(self.state.residuals.params)

    def whole_state(self, state: State) -> State:
        """Return the optimizer's state with everything that belongs into a state dict."""
        if self.state.residuals.params:
            AbsentRanks(self.state, self.backend.ranks).check_none("state_dict()")
        self._finish_residuals()
        return self.state.residuals.added_to(state)

    def take_state(self) -> None:
        """Use a state that was loaded into the optimizer."""
        self._finish_residuals()
        self.state.residuals.load()

    def _finish_residuals(self) -> None:
        """Wait for the round that changes the residuals, if there is one."""
        if self.state.residuals.params and self.state.phase is Phase.SENT:
            self.finish_round()

    def close(self) -> None:
        """End threads; pending results are lost."""
