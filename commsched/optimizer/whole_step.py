"""The step on whole gradients (``gather="gradients"``): every rank gets every sum and updates all parameters.

Sums become ``p.grad``. An optimizer is **separable** if updating its parameters one after the other, each
with the hyperparameters at the time of ``step()``, gives the same as updating them together. Then the update
of a bucket can wait until its gradients have arrived, under the next forward. Every other optimizer runs
whole, inside ``step()``, and runs its closure itself, as often as it likes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.backends.interface import Backend
from commsched.backends.ranks import ranks_text
from commsched.collectives.model_state import broadcast_parameters
from commsched.collectives.operations import broadcast_object
from commsched.optimizer.buckets import Buffers
from commsched.optimizer.gradient import Gradient, OptimizerState, Sum
from commsched.optimizer.pending import ordinary, set_raw_grad
from commsched.optimizer.round import SPARSE, Round, State, Update
from scheduler.ir.program import Program

# -- optimizers that can be updated bucket by bucket ---------------------------------------------------------

# Compared by exact type, because a subclass may compute something else.
ELEMENTWISE: set[type[Optimizer]] = {
    getattr(torch.optim, name)
    for name in "SGD Adam AdamW NAdam RAdam Adamax RMSprop Rprop Adagrad Adadelta ASGD".split()
}
_SEPARABLE: set[type[Optimizer]] = {torch.optim.Adafactor, torch.optim.SparseAdam}
if hasattr(torch.optim, "Muon"):
    _SEPARABLE.add(torch.optim.Muon)


def register_separable(cls: type[Optimizer]) -> type[Optimizer]:
    """Declare an optimizer class of your own separable (see this module); usable as a decorator.

    Its ``step(closure)`` must run the closure once, before the update.
    """
    _SEPARABLE.add(cls)
    return cls


def is_separable(cls: type[Optimizer]) -> bool:
    return cls in _SEPARABLE or cls in ELEMENTWISE


def plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """Return ``cls.step`` without torch's step hooks, which must run once per step, not once per bucket."""
    step = cls.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


class OptimizerView:
    """A second object with the wrapped optimizer's state and settings, to step on other parameter groups.

    The wrapped optimizer itself never shows those groups.
    """

    def __init__(self, optimizer: Optimizer, base: type[Optimizer], state: Any = None) -> None:
        self._step = plain_step(base)
        self._view = base.__new__(base)
        self._view.__dict__.update(optimizer.__dict__)
        # A deferred update must not keep the session alive: the session's end applies it.
        self._view.__dict__.pop("_session", None)
        if state is not None:
            self._view.__dict__["state"] = state

    def step(self, groups: list[dict[str, Any]]) -> None:
        self._view.param_groups = groups
        with plain_math(), ordinary(p for group in groups for p in group["params"]):
            self._step(self._view)


def groups_of_leaves(
    optimizer: Optimizer, members: Iterable[tuple[nn.Parameter, nn.Parameter]], state: Mapping[Any, Any]
) -> list[dict[str, Any]]:
    """Return the optimizer's groups with a leaf in place of each parameter. ``members``: pairs of both.

    Leaves without state stand apart: torch's fused SGD fails where only some have a momentum. The order of
    the members stays: updates of parameters that share memory depend on it.
    """
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    known = [
        (group_of[id(param)], not state.get(leaf), leaf) for param, leaf in members if id(param) in group_of
    ]
    known.sort(key=lambda member: member[0])
    return [
        {**optimizer.param_groups[number], "params": [leaf for _, _, leaf in chosen]}
        for (number, _), chosen in groupby(known, key=lambda member: member[:2])
    ]


def deferred_update(optimizer: Optimizer, base: type[Optimizer], params: Sequence[nn.Parameter]) -> Update:
    """Return the update of ``optimizer.step()`` now, to be applied to parameters when gradients arrive."""
    view, options = OptimizerView(optimizer, base), options_of(optimizer)
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def update(indices: Sequence[int]) -> None:
        chosen: list[list[nn.Parameter]] = [[] for _ in options]
        for i in sorted(indices):  # in the optimizer's order
            number = group_of.get(id(params[i]))
            if number is not None:
                chosen[number].append(params[i])
        groups = [
            {**group, "params": members} for group, members in zip(options, chosen, strict=True) if members
        ]
        if groups:
            view.step(groups)

    return update


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Copy the hyperparameters of each group: schedulers change them after ``step()``, some in place."""
    options = [dict(group) for group in optimizer.param_groups]
    for values in options:
        del values["params"]
        values.update({k: v.clone() for k, v in values.items() if isinstance(v, torch.Tensor)})
    return options


@contextmanager
def plain_math() -> Iterator[None]:
    """Run an update without the autocast or inference mode of the forward that triggered it."""
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


# -- the step ------------------------------------------------------------------------------------------------


class StepMode(ABC):
    """The part that differs between ``gather="gradients"`` and ``gather="parameters"``.

    It decides which values are gathered once the gradients are reduced, and how the optimizer steps on them.
    """

    round: Round  # which sets it
    # Whether a rank that has joined takes a step after each round without being told that the others do.
    steps_after_each_round = True
    prepares_together = False  # whether ``prepare()`` is collective
    gathers_sums = True  # in the type of the wire, as gradients are sent
    no_second = ""  # why no gradient can be added that came late
    gathered = False  # whether p.grad holds the sums although parameters are still to come
    updates_early = False  # whether parameters change within the backward

    def __init__(self, backend: Backend) -> None:
        self.backend, self.ranks = backend, backend.ranks

    def prepare(self, program: Program, buffers: Buffers) -> Buffers | None:
        """Return the buffers that all-gathers fill after an update, if parameters are gathered."""
        return None

    def installed(self, program: Program) -> None:
        """React to a new plan, which the backend has installed."""

    def check_can_begin(self) -> None:
        """Raise ``ValueError`` where user code must do something before another round."""

    def check_fits(self) -> None:
        """Raise ``ValueError`` where the gradient of a converted parameter cannot be reduced."""

    def check_not_updated(self, therefore: str) -> None:
        """Raise ``ValueError`` where this round's gradients have been used already, before ``step()``."""

    def check_abandoned(self) -> None:
        """Raise ``ValueError`` where a backward that raised has changed parameters."""

    @abstractmethod
    def before_round(self) -> None:
        """End the former round, or refuse a new one, because a backward begins."""

    @abstractmethod
    def round_begun(self) -> None:
        """React to a new round; buckets may be marked from now on."""

    @property
    def readable(self) -> bool:
        """Whether a gradient that is being reduced can be read once it has arrived."""
        return self.gathers_sums or self.gathered

    def refuse_reading(self) -> None:
        """Raise an error that says why gradients are not ``readable``."""

    @abstractmethod
    def holders(self, i: int) -> int:
        """Return how many tensors hold a parameter's memory when user code has no alias of it."""

    @abstractmethod
    def show(self, gradient: Gradient) -> None:
        """Show the result of a completed parameter that some rank used."""

    def weigh(self, factor: float) -> None:
        """Multiply this round's gradients by a factor (``Round.factor``) before anybody reads them."""

    def refusal_of(self, sparse: Sequence[int]) -> ValueError | None:
        """Return why these sparse gradients cannot be reduced, if so."""
        return None

    def reduce_planned(self, sparse: Sequence[int]) -> None:
        """Reduce what no bucket contained of gradients of the plan: sparse ones, and what came late."""

    @abstractmethod
    def gather_gradients(self) -> None:
        """Give every rank every reduced gradient. Collective."""

    @abstractmethod
    def step(self, optimizer: Any, synchronous: bool) -> None:
        """Step the optimizer; with ``synchronous`` defer no update."""

    @abstractmethod
    def finish_round(self) -> None:
        """Wait until no other rank needs this rank for the round."""

    @abstractmethod
    def end_round(self) -> None:
        """End a round before the optimizer's end; its sums are shown. Collective."""

    def leave_round(self) -> None:
        """End a round before the optimizer's end, and show the sums that are here. Not collective."""
        self.finish_round()

    @abstractmethod
    def discard(self) -> None:
        """End a round without using its result."""

    @abstractmethod
    def finish_all(self) -> None:
        """Complete all pending work, so that another round can take over; gradients stay."""

    @abstractmethod
    def cleared(self, set_to_none: bool) -> None:
        """React to the user's ``zero_grad()``."""

    def inherit(self, before: StepMode) -> None:
        """Continue from another round's mode."""

    def refuse_early(self, what: str) -> None:
        """Raise for calls that need all gradients before the update, where updates do not wait."""

    # -- ranks that have joined ------------------------------------------------------------------------------

    def tell_joined(self, what: str, value: Any = None) -> None:
        """Let ranks that have joined do what this one is about to do. The round's flags must be known."""
        joined = self.ranks.joined
        if joined and self.ranks.rank not in joined:
            self.ranks.tell_joined((what, value))

    @abstractmethod
    def follow(self) -> bool | None:
        """Take part in the others' step, on a rank that has joined; return whether there was one.

        None: they have not begun it yet; call again.
        """

    @abstractmethod
    def share(self, optimizer: Any, root: int) -> None:
        """Give all ranks what the ranks that joined earlier lack, from rank ``root``. Collective."""

    def check_none_joined(self, what: str) -> None:
        """Raise for calls that need every rank and that those that have joined do not hear of."""
        joined = self.ranks.joined
        if joined:
            raise ValueError(
                f"rank {self.ranks.rank}: {what} needs all ranks with gather='parameters',"
                " Compression.int8 or fp8, and"
                f" {ranks_text(joined)} joined; call it when all have, and to clip use clip_grad_norm_()"
            )

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def spreads_state(self) -> bool:
        """Whether ``whole_state()`` is collective, because each rank has a part of the state."""
        return bool(self.round.residuals.params)

    def whole_state(self, state: OptimizerState) -> OptimizerState:
        """Return the optimizer's state with everything that belongs into a state dict."""
        if self.round.residuals.params:
            self.check_none_joined("state_dict()")
            self.round.leave_cleared()
        self._finish_residuals()
        return self.round.residuals.added_to(state)

    def take_state(self) -> None:
        """Use a state that was loaded into the optimizer."""
        self._finish_residuals()
        self.round.residuals.load()

    def _finish_residuals(self) -> None:
        """Wait for the round that changes the residuals, if there is one."""
        if self.round.residuals.params and self.round.state is State.SENT:
            self.finish_round()

    def close(self) -> None:
        """End threads; pending results are lost."""


class WholeStep(StepMode):
    """Sums become ``p.grad``; updates wait for them, if need be until the next forward."""

    def before_round(self) -> None:
        pass

    def round_begun(self) -> None:
        pass

    def holders(self, i: int) -> int:
        return 1

    def cleared(self, set_to_none: bool) -> None:
        pass

    def show(self, gradient: Gradient) -> None:
        view, now = gradient.view, self.round
        assert view is not None
        gradient.keep_unseen()
        only_sparse = now.used[gradient.number] % SPARSE == 0  # no rank's gradient was dense
        sparse = gradient.apart
        if now.factor != 1.0:
            view.mul_(now.factor)
            sparse = None if sparse is None else sparse * now.factor
        if sparse is not None and (not only_sparse or gradient.number in now.late):
            view.add_(sparse)  # to what the bucket had
            sparse = None
        if sparse is None and now.sparse_as_dense and only_sparse:
            sparse = view.to_sparse(now.sparse_dims.get(gradient.number, 1))
        if sparse is not None:
            if not now.sparse_as_dense and not gradient.misfits():
                gradient.payload.zeros = gradient.payload.sums_nothing_but_rows
            self._set(gradient, sparse, Sum.of(sparse) if now.sums else None)
            return
        if now.sums:
            # Later gradients add to a copy, and the sum stays in the slot: only the difference is reduced.
            copy = view.clone()
            self._set(gradient, copy, Sum.of(copy, in_slot=True))
        elif not gradient.touched:
            gradient.hand_out()

    def _set(self, gradient: Gradient, grad: torch.Tensor, added_to: Sum | None) -> None:
        if not gradient.touched:
            gradient.sum = added_to
            set_raw_grad(gradient.param, grad)

    def reduce_planned(self, sparse: Sequence[int]) -> None:
        now = self.round
        gradients = [now.gradients[i] for i in sorted({*sparse, *now.late})]
        dense = [g for g in gradients if g.number in now.late or g.misfits()]
        now.reduce_dense(dense)
        for gradient in gradients:
            if gradient not in dense:
                assert gradient.view is not None
                gradient.apart = self.ranks.reduce_sparse(
                    gradient.apart, gradient.view, gradient.name, mean=not now.sums
                )

    def gather_gradients(self) -> None:
        self.round.complete_all()

    def step(self, optimizer: Any, synchronous: bool) -> None:
        base, now = optimizer._base, self.round
        if now.may_come_apart:
            now.reduce_apart()
        at_once = now.state is State.SENT and not self.backend.puts_off and False in now.done
        whole = (
            synchronous
            or not is_separable(base)
            or (at_once and now.all_arrived())
            or bool(now.frozen())
            or now.shared_memory()
        )
        if whole:
            now.complete_all()
        now.mark("step")
        if whole:
            now.attempt(optimizer._update)
            now.finish_step()
        else:
            self.defer(deferred_update(optimizer, base, now.params))

    def defer(self, update: Update) -> None:
        """Take over the update of every parameter: apply it now if its gradient has arrived, else then."""
        now = self.round
        with now.lock:
            now.deferred = update
            for gradient in now.gradients:
                gradient.clear = None
            now.finish_step()
            here = [gradient.number for gradient in now.planned if gradient.exposed]
            if here:
                now.attempt(update, here)
            now.guard()
            hurry = {b for i in now.readable_unnoticed() for b in now.gradients[i].buckets}
            due = sorted(hurry.union(() if self.backend.puts_off else now.arrived()))
            if due:  # else not even the flags are waited for
                now.complete_buckets(due)

    def follow(self) -> bool:
        """Do without the update: the others may clip, or schedule the learning rate (see ``share``)."""
        self.round.complete_all()
        self.round.finish_step()
        return True

    def share(self, optimizer: Any, root: int) -> None:
        process_set, mine = self.ranks.process_set, self.ranks.global_own == root
        later = [self.round.gradients[i].param for i in sorted(self.round.summed_outside)]
        named = [(f"commsched.join.{i}", p) for i, p in enumerate([*self.round.params, *later])]
        broadcast_parameters(named, root, process_set=process_set)
        # The wrapped class's own methods: each rank keeps its residuals.
        whole = optimizer._base.state_dict(optimizer) if mine else None
        whole = broadcast_object(whole, root, "commsched.join", process_set)
        if not mine:
            optimizer._base.load_state_dict(optimizer, whole)

    def finish_round(self) -> None:
        for bucket in range(self.round.flags_bucket):
            self.backend.wait_gathered(bucket)

    def end_round(self) -> None:
        self.round.complete_all()

    def leave_round(self) -> None:
        self.finish_round()
        self.backend.wait_gathered(self.round.flags_bucket)
        if not self.round.reduces_apart() or (self.round.used and not self.round.rest):
            self.round.complete_all()

    def discard(self) -> None:
        self.round.complete_all()
        self.round.finish_step(stepped=False)

    def finish_all(self) -> None:
        self.round.complete_all()
        self.round.residuals.keep()
