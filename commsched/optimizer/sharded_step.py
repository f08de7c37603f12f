"""The step on shards (``gather="parameters"``): each rank updates its part of every bucket, and parameters
are gathered.

[Note: where parameters are]
A parameter stays in its own memory, which this package never moves. A rank's shard of a bucket overlaps some
parameters; the optimizer sees each overlap as a small parameter of its own, a leaf over that part of the
parameter's memory, with the hyperparameters of the parameter's group. Its state exists only for those::

    slot of the gradient     RS ->  | . . sum . . |   update: leaf.grad = sum
    parameter's memory                 leaf           leaf -= ...
    slot of the gradient  <- copy   | . . leaf . . |   AG ->  | whole parameter |   copy -> parameter's memory

So the sums make room for the updated parameters, and p.grad has no value after a step: reading it is an error
until it is cleared. After ``synchronize()``, which gathers the sums, gradients are copied and stay.

That is exact for optimizers that treat every element by itself. For others each parameter lies in one rank's
shard, as a whole (``owners_of``). Some parameters are updated on every rank, from gathered sums: complex
ones, and those that share memory with another one (``a.data = b.data``), whose updates build on each other.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from comm_core import set_late, shares_storage, storage_holders
from commsched.backends.interface import Backend
from commsched.backends.ranks import Members
from commsched.collectives.operations import broadcast_object
from commsched.errors import CommError
from commsched.optimizer.agreement import Settings, settings_of
from commsched.optimizer.buckets import Buffers
from commsched.optimizer.gradient import Gradient, OptimizerState
from commsched.optimizer.pending import (
    Access,
    clear_pending,
    mark_pending,
    raw_grad,
    set_raw_grad,
    without_completing,
)
from commsched.optimizer.planner import WHOLE
from commsched.optimizer.round import State
from commsched.optimizer.whole_step import (
    ELEMENTWISE,
    OptimizerView,
    StepMode,
    groups_of_leaves,
    options_of,
    plain_math,
)
from scheduler.ir.actions import Kind
from scheduler.ir.program import Program


def register_elementwise(cls: type[Optimizer]) -> type[Optimizer]:
    """Declare that an optimizer class of your own updates every element by itself; usable as a decorator."""
    ELEMENTWISE.add(cls)
    return cls


def check_elementwise(cls: type[Optimizer]) -> None:
    if cls not in ELEMENTWISE:
        raise ValueError(
            f"gather='parameters' updates shards of flat buffers, and {cls.__name__} is not known to update"
            f" every element by itself (known: {', '.join(sorted(c.__name__ for c in ELEMENTWISE))}); use"
            " gather='gradients', or declare it with commsched.register_elementwise (for DistributedOptimizer"
            " also commsched.register_whole_matrix)"
        )


class ShardedStep(StepMode):
    """The step on shards. Between steps no rank holds a whole gradient, unless ``synchronize()`` made it."""

    shards: Shards
    spreads_state = prepares_together = True
    steps_after_each_round = True
    gathers_sums = False
    no_second = "with gather='parameters' no rank can add it to the sum"

    def __init__(self, backend: Backend, optimizer: Any, masters: bool) -> None:
        super().__init__(backend)
        if optimizer._base not in WHOLE:
            check_elementwise(optimizer._base)
        self.ranks.agree("master_weights", str(masters), "pass the same arguments on every rank")
        self._optimizer, self._masters = optimizer, masters  # a weak proxy: the optimizer owns this object
        self.gathered = False  # synchronize() has gathered this round's sums
        self._updated = False  # the last round ended with an update
        self._kept = False  # its gradients had been gathered, and stay
        self._gather_again = False  # they had been gathered before a new plan was made
        self._used_up: dict[nn.Parameter, str] = {}  # whose gradients the last update has used up, with names
        self._buckets: list[int] = []  # in the order of their RS
        self._early: EarlyUpdates | None = None
        self._settings: Settings = {}  # of the optimizer, when the round began

    # -- plans -----------------------------------------------------------------------------------------------

    def prepare(self, program: Program, buffers: Buffers) -> Buffers:
        if program.early_step and not self.backend.can_step_early:
            raise ValueError(
                "early_step=True updates from a thread of its own, which has no place in a GPU's streams; use"
                " early_step=False"
            )
        for gradient in self.round.planned:
            if not gradient.pends:
                raise ValueError(
                    f"gather='parameters' leaves parameters pending, and {gradient.name} is of a class of its"
                    f" own ({type(gradient.param).__name__}), which cannot wait; use gather='gradients'"
                )
        self._buffers = buffers
        self._make_shards(overlapping=self.round.shared_memory())
        return buffers

    def _make_shards(self, overlapping: set[int]) -> None:
        """Divide the parameters anew; the state of the former shards is gathered first. Collective."""
        factor = None
        if self._buckets:
            self.keep_shards()
            factor = self.shards.factor  # of a round whose gradients are here
        self.shards = Shards(
            self._optimizer,
            self._optimizer._base,
            self.round.planned,
            self._buffers,
            self.ranks,
            self._masters,
            overlapping,
            self.round.attempt,
        )
        self.shards.factor = factor
        self.shards.take_state(self._optimizer.__dict__["state"])

    def installed(self, program: Program) -> None:
        self._end_early()
        self._buckets = [action.index for action in program.link if action.kind is Kind.RS]
        if program.early_step:
            if self.shards.whole:
                raise self._refusal("parameters that share memory, or are complex")
            self._early, self.updates_early = EarlyUpdates(self._update_early, self._buckets), True

    def close(self) -> None:
        self._end_early()
        for param in self._used_up:
            clear_pending(param)

    def _end_early(self) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None

    # -- a round ---------------------------------------------------------------------------------------------

    def check_can_begin(self) -> None:
        self.check_not_updated("there is no further backward")
        self.round.settle()  # the last update tells what is gone
        if self._used_up:
            raise ValueError(
                "with gather='parameters' step() leaves no gradients that a further backward could add to;"
                " call optimizer.zero_grad() between step() and the next backward"
            )

    def check_not_updated(self, therefore: str) -> None:
        if self.round.state is State.SENT and self._early is not None:
            raise ValueError(
                f"with early_step=True every backward is a step, so before optimizer.step() {therefore}; call"
                " step() after each backward"
            )

    def check_abandoned(self) -> None:
        if self._early is not None:
            raise ValueError(
                "the backward that raised has updated parameters, with a part of its gradients, because of"
                " early_step=True; load parameters and state on all ranks, or use early_step=False"
            )

    def before_round(self) -> None:
        now = self.round
        self.check_can_begin()
        if now.state is State.SENT:
            # A second backward without a step adds to the first one's result.
            self.gather_gradients()
            for gradient in now.travelling:
                if storage_holders(_alias(gradient)) > 1:
                    gradient.move_out()
            self.discard()
            now.settle()

    def round_begun(self) -> None:
        self.shards.factor = None  # a discarded round may have left it
        if self._early is not None:
            self._settings = settings_of(self._optimizer, self.round.planned)
            self._early.begin()

    def weigh(self, factor: float) -> None:
        self.shards.factor = torch.tensor(factor, dtype=torch.float64, device=self.shards.device)

    def refusal_of(self, sparse: Sequence[int]) -> ValueError:
        try:
            self.check_fits()
        except ValueError as error:
            return error
        return ValueError(
            f"the gradient of {self.round.gradients[sparse[0]].name} is sparse, and gather='parameters'"
            " reduces dense buckets; use sparse_as_dense=True or gather='gradients'"
        )

    def check_fits(self) -> None:
        for gradient in self.round.travelling:
            if not gradient.misfits():
                continue
            raise ValueError(
                f"rank {self.ranks.rank}: {gradient.name} has another type or shape than when its shards"
                f" were made (now {gradient.param.dtype}, {tuple(gradient.param.shape)}); with"
                " gather='parameters', call optimizer.close() before the model is converted, and wrap"
                " the optimizer again"
            )

    def finish_round(self) -> None:
        for bucket in self._buckets:
            self.backend.wait_reduced(bucket)

    # -- reading ---------------------------------------------------------------------------------------------

    def holders(self, i: int) -> int:
        return self.shards.holders(i)

    def refuse_reading(self) -> None:
        self.check_not_updated("nothing can be read")
        raise CommError(
            f"rank {self.ranks.rank}: with gather='parameters' no rank holds a whole gradient after"
            " backward(); call optimizer.synchronize() on all ranks before p.grad is read, or"
            " optimizer.clip_grad_norm_() to clip"
        )

    def show(self, gradient: Gradient) -> None:
        """Copy the gathered values into the parameter. Its gradient is gone, unless it was cleared."""
        if not self._updated:
            return
        i = gradient.number
        if i not in self.shards.whole:
            assert gradient.view is not None
            with torch._C.DisableTorchFunctionSubclass():
                gradient.param.copy_(gradient.view)
        if self._kept or gradient.touched:
            return
        if gradient.clear is False:
            gradient.show_zeros()
        elif gradient.clear is None:
            self._lose(gradient.param, gradient.name)

    def _lose(self, param: nn.Parameter, name: str) -> None:
        """Refuse to read a gradient that the last step has used up, until it is cleared."""
        self._used_up[param] = name
        access = Access(
            partial(self._refuse, name), partial(self._replace, param), partial(self._clear, param)
        )
        mark_pending(param, access, only_grad=True)

    def inherit(self, before: StepMode) -> None:
        if isinstance(before, ShardedStep):
            self._gather_again = before._gather_again
            for param, name in before._used_up.items():
                self._lose(param, name)  # also of one that is frozen, which this plan does not contain

    def _refuse(self, name: str) -> None:
        raise CommError(
            f"rank {self.ranks.rank}: the gradient of {name} is gone: with gather='parameters'"
            " step() leaves none; read it after optimizer.synchronize() and before step(), and call"
            " optimizer.zero_grad() before the next backward"
        )

    def _replace(self, param: nn.Parameter, grad: torch.Tensor | None) -> bool:
        set_raw_grad(param, grad)
        self._used_up.pop(param, None)
        clear_pending(param)
        return True

    def _clear(self, param: nn.Parameter, set_to_none: bool) -> bool:
        return self._replace(param, None if set_to_none else torch.zeros_like(param, requires_grad=False))

    def cleared(self, set_to_none: bool) -> None:
        for param in list(self._used_up):
            self._clear(param, set_to_none)

    def refuse_early(self, what: str) -> None:
        if self._early is not None:
            raise self._refusal(what)

    def _refusal(self, what: str) -> ValueError:
        return ValueError(
            f"early_step=True updates inside the backward, before {what} could do anything; use"
            " early_step=False"
        )

    def _gather_as_before(self) -> None:
        """Gather gradients that had been gathered, if a new plan has been made since."""
        if self._gather_again:
            self._gather_again = False
            self.gather_gradients()

    def gather_gradients(self) -> None:
        self.refuse_early("synchronize()")
        now = self.round
        with now.lock:
            if self.gathered or now.state is not State.SENT:
                return
            self._wait_all_reduced()
            self.check_none_joined("synchronize()")
            self.shards.scale_gradients()
            for bucket in range(now.flags_bucket):
                self._gather(bucket)
            self.gathered = True
            for gradient in now.travelling:
                clear_pending(gradient.param)
                if gradient.touched:
                    continue
                if now.used[gradient.number]:
                    gradient.hand_out()
            if now.sums:
                now.keep_values()

    def _gather(self, bucket: int) -> None:
        self.backend.gather_now(self._buffers.bucket(bucket), self._buffers.layout.slices[bucket].ends)

    def _take_changes(self) -> None:
        """Use what user code has set or changed: ``p.grad`` of its own, or gathered gradients.

        An earlier clipping's factor concerns the sums only: user code sees its own gradients with it already.
        """
        now = self.round
        self.shards.scale_gradients()
        for gradient in now.travelling:
            if not (self.gathered or gradient.touched):
                continue
            grad = raw_grad(gradient.param)
            now.used[gradient.number] = int(grad is not None)
            if grad is not None and not gradient.is_in_place(grad):
                assert gradient.view is not None
                gradient.free()  # it may be another parameter's gradient now
                with torch.no_grad():
                    gradient.view.copy_(grad.to_dense() if grad.is_sparse else grad)

    # -- the step --------------------------------------------------------------------------------------------

    def step(self, optimizer: Any, synchronous: bool, read: bool = True) -> None:
        """Update each bucket's shard once it is reduced, and start the all-gather of its parameters."""
        now = self.round
        now.mark("step")
        if self._early is not None:
            now.timed("early updates", self._early.finish)
            if settings_of(self._optimizer, now.planned) != self._settings:
                raise self._refusal("settings that were changed after the backward began")
        else:
            self._gather_as_before()
        with now.lock:
            if now.state is State.IDLE:  # after a synchronize() without a gradient
                now.seal()
            now.reduce_apart()
            self.tell_joined("step", options_of(self._optimizer))
            if self._early is None:
                shared = now.shared_memory()
                if shared != self.shards.overlapping:
                    self._wait_all_reduced()
                    self._make_shards(shared)
                self._update_all()
            self._kept = self.gathered
            for gradient in now.gradients:
                gradient.clear = None
            now.attempt(self._update_others, optimizer)
            self._end_round(stepped=True, read=read)
        if synchronous:
            now.settle()

    def _update_all(self) -> None:
        now, shards = self.round, self.shards
        changed = self.gathered or any(gradient.touched for gradient in now.travelling)
        if changed or shards.whole:
            self._wait_all_reduced()
            self._take_changes()
        if self.gathered:  # the slots are about to be overwritten
            for gradient in now.travelling:
                if storage_holders(_alias(gradient)) > 1:
                    gradient.move_out()
        elif shards.whole:
            shards.scale_gradients()
            for bucket in {
                b for i in shards.whole for b in now.gradients[i].buckets if not now.gradients[i].touched
            }:
                self._gather(bucket)
        # Before the engine may write into the slots again.
        shards.update_whole(now.used, now.frozen_sharing() if shards.whole else ())
        for bucket in self._buckets:
            if not (changed or shards.whole):
                self._wait_reduced(bucket)
            shards.update(bucket, now.used)
            self.backend.mark_updated(bucket)

    def _update_others(self, optimizer: Any) -> None:
        """Update parameters outside of the plan that have a gradient: frozen ones, as plain PyTorch does, and
        those that were unfrozen since. Those of half precision get a master, which the next plan divides.
        """
        if not self.round.frozen():
            return
        together = self.round.frozen_sharing() if self.shards.whole and self._early is None else ()
        known = {id(param) for param in (*self.round.params, *together)}
        others = [p for p in optimizer._every_param() if id(p) not in known and raw_grad(p) is not None]
        state = optimizer.__dict__["state"]
        halves = [p for p in others if self._masters and p.dtype in HALVES]
        leaves = {param: _take_whole_master(param, state) for param in halves}
        groups = groups_of_leaves(optimizer, [(p, leaves.get(p, p)) for p in others], state)
        try:
            OptimizerView(optimizer, optimizer._base).step(groups)
        finally:
            for param, leaf in leaves.items():
                state[param] = {**state.pop(leaf, {}), KEY: leaf.detach()}
                param.detach().copy_(leaf.detach())

    def _wait_reduced(self, bucket: int) -> None:
        self.round.timed(f"the sums of bucket {bucket}", self.backend.wait_reduced, bucket)

    def _wait_all_reduced(self) -> None:
        self.round.reduce_apart()
        for bucket in self._buckets:
            self._wait_reduced(bucket)

    def _update_early(self, bucket: int) -> None:
        """Update in the thread of the early updates, which must not take the round's lock."""
        now, backend = self.round, self.backend
        backend.wait_reduced(bucket)
        backend.wait_gathered(now.flags_bucket + 1 + bucket)
        params = self._buffers.layout.slices[bucket].params
        self.shards.update(bucket, dict(zip(params, now.early_flags[bucket].tolist(), strict=False)))
        backend.mark_updated(bucket)

    def _end_round(self, stepped: bool, read: bool = True) -> None:
        """``read``: user code may read parameters from here on."""
        now = self.round
        now.deferred = self.shards.factor = None
        self._updated = stepped or self._early is not None  # else each rank would have its own part only
        now.finish_step(stepped)
        self.gathered = False
        now.guard()
        if read:
            now.complete(now.readable_unnoticed())

    def end_round(self) -> None:
        self._gather_again = self.gathered
        if self._early is None:
            self.gather_gradients()
            self.round.keep_values()
        self.discard()

    def discard(self) -> None:
        """End the round without an update."""
        self._begin_discard()
        self.round.complete_all()

    def _begin_discard(self, read: bool = True) -> None:
        if self._early is not None:
            self._early.finish()  # this round's updates are made and cannot be undone
        else:
            self.round.reduce_apart()
            self.tell_joined("discard")
        for bucket in self._buckets:
            self.backend.wait_reduced(bucket)
            if self._early is None:
                self.backend.mark_updated(bucket)
        self._end_round(stepped=False, read=read)

    def finish_all(self) -> None:
        self.round.leave_cleared()
        if self.round.state is not State.IDLE:
            self.end_round()
        self.round.settle()
        self.keep_shards()
        self.round.residuals.keep()

    # -- ranks that have joined ------------------------------------------------------------------------------

    def follow(self) -> bool | None:
        """Do what the others do, on a rank that has joined, until they step (True) or discard the round.

        None: they have not said yet what they do next; call again. They may be busy with another optimizer.
        Nothing here waits for the other ranks' updates: one that has joined may be in another optimizer's
        round, and two that waited for each other there would wait for ever.
        """
        while (order := self.ranks.next_order()) is not None:
            what, value = order
            if what == "clip":
                self.clip_grad_norm_(*value)
            elif what == "step":
                set_options(self._optimizer, value)
                self.step(self._optimizer, synchronous=False, read=False)
                return True
            else:
                self._begin_discard(read=False)
                return False
        return None

    def share(self, optimizer: Any, root: int) -> None:
        """Give all ranks the hyperparameters of global rank ``root``; every rank's shards are up to date."""
        options = broadcast_object(options_of(optimizer), root, "commsched.join", self.ranks.process_set)
        set_options(optimizer, options)

    # -- norms and state -------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip like ``torch.nn.utils.clip_grad_norm_``, from the shards; updates multiply by the factor.

        The norm stays on the gradients' device, so that the host does not wait for it.
        """
        self.refuse_early("clip_grad_norm_()")
        self._gather_as_before()
        now, shards = self.round, self.shards
        with now.lock:
            self._wait_all_reduced()
            self.tell_joined("clip", (max_norm, norm_type, error_if_nonfinite))
            self._take_changes()
            grads = shards.owned_gradients(now.used)
            # Of frozen parameters, which no shard contains: whole on every rank, so rank 0 counts them.
            others = [grad for param in now.frozen() if (grad := raw_grad(param)) is not None]
            grads += others if self.ranks.rank == 0 else []
            total = total_norm(grads, norm_type, self.backend.gather_scalars, shards.device)
            if error_if_nonfinite and not torch.isfinite(total):
                raise RuntimeError(
                    f"the total norm of the gradients is {total.item()}, so they cannot be clipped"
                )
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            if not self.gathered:
                shards.factor = factor
            for gradient in now.travelling:
                grad = raw_grad(gradient.param)
                if grad is not None and (self.gathered or gradient.touched):
                    grad.mul_(factor)
            for grad in others:
                grad.mul_(factor)
            if self.gathered:
                self._take_changes()
            return total.to(reduce(torch.promote_types, (p.dtype for p in now.params), torch.float32))

    def take_state(self) -> None:
        super().take_state()
        self.shards.take_state(self._optimizer.__dict__["state"])

    def whole_state(self, state: OptimizerState) -> OptimizerState:
        self.round.leave_cleared()
        self.check_not_updated("there is no state_dict()")
        self.check_none_joined("state_dict()")
        return super().whole_state({**state, **self._gathered_shards()})

    def _gathered_shards(self) -> OptimizerState:
        self.round.settle()
        if self.round.state is State.SENT:
            self._wait_all_reduced()  # the engine must not need the connections: it waits for the update then
        return self.shards.gathered_state(self.backend.gather_now)

    def keep_shards(self) -> None:
        """Put the state of whole parameters into the optimizer, on every rank. Collective."""
        self._optimizer.__dict__["state"].update(self._gathered_shards())


def _alias(gradient: Gradient) -> torch.Tensor:
    assert gradient.alias is not None
    return gradient.alias


def set_options(optimizer: Any, options: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)


def total_norm(
    mine: Iterable[torch.Tensor],
    norm_type: float,
    gather: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Return the norm of all ranks' gradients in double precision; ``gather`` gathers one number per rank.

    Norms of half-precision gradients are summed in float32.
    """
    by_type: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for grad in mine:
        by_type[grad.dtype].append(grad)
    norms = [
        torch.stack(torch._foreach_norm(same, norm_type, torch.promote_types(dtype, torch.float32))).double()
        for dtype, same in by_type.items()
    ]
    here = torch.linalg.vector_norm(torch.cat(norms), norm_type) if norms else torch.zeros((), device=device)
    return torch.linalg.vector_norm(gather(here.double()), norm_type)


# -- early updates -------------------------------------------------------------------------------------------

_CLOSING_SECONDS = 5.0


class EarlyUpdates:
    """Runs ``update(bucket)`` for every bucket of a round inside the backward (``early_step``), on a thread.

    The backward's thread cannot wait for buckets. This one waits for them in the order of the plan, updates
    this rank's shards and starts the parameters' all-gathers. It holds the GIL only while it updates.
    """

    def __init__(self, update: Callable[[int], None], buckets: Sequence[int]) -> None:
        self._update = update
        self._buckets = list(buckets)
        self._begun = threading.Semaphore(0)
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="commsched-early-step", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Start the updates of a round."""
        self._idle.clear()
        self._begun.release()

    def finish(self) -> None:
        """Wait for the round's updates, each of which has a time-out; raise the first error in them."""
        self._idle.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread. Its waits must be over or about to fail."""
        self._ended = True
        self._begun.release()
        # A thread that returns from C++ while the interpreter shuts down aborts the process.
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_SECONDS)

    def _run(self) -> None:
        while True:
            self._begun.acquire()
            if self._ended:
                return
            try:
                for bucket in self._buckets:
                    self._update(bucket)
            except BaseException as error:
                self._error = error
            self._idle.set()


# -- shards --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ShardView:
    """This rank's elements ``[start, stop)`` (in the slot's memory order) of a parameter in one bucket."""

    gradient: Gradient
    like: torch.Tensor  # the slot, in whose memory order this rank's elements are
    start: int
    stop: int
    grad: torch.Tensor  # these elements' sums, in the slot
    is_whole: bool  # an optimizer of whole matrices needs the parameter's shape
    leaf: nn.Parameter  # updated by the optimizer: ``weight``, or a float32 master of it
    weight: torch.Tensor  # these elements of the parameter: its own memory, or a copy where the order differs
    place: tuple[Any, ...] = ()  # of the parameter's memory when ``weight`` was made

    @property
    def master(self) -> torch.Tensor | None:
        return None if self.leaf.dtype == self.weight.dtype else self.leaf.detach()

    def begin_update(self) -> None:
        """Give the leaf its gradient, and the master any value that was written to the weight."""
        self.bind()
        self.leaf.grad = self.grad if self.master is None else self.grad.float()
        if self.master is not None:
            take_written(self.master, self.weight)

    def end_update(self) -> None:
        """Put the updated weight where the all-gather takes it from."""
        if self.leaf.grad is not None:
            if self.master is not None:
                self.weight.copy_(self.master)
            self.leaf.grad = None
            self.grad.copy_(self.weight)

    def bind(self) -> None:
        """Follow a parameter to other memory: user code may have assigned ``p.data``."""
        with without_completing():
            param = self.gradient.param
            place = (param.data_ptr(), param.stride())
            if place == self.place and param.stride() == self.like.stride():
                return
            self.place = place
            weight = param.detach()
            set_late(weight, False)
            self.weight = self._elements(weight)
            if self.master is None:
                self.leaf.data = self.weight

    def _elements(self, param: torch.Tensor) -> torch.Tensor:
        if self.is_whole:
            return param
        if param.stride() == self.like.stride():
            vector = param.as_strided((param.numel(),), (1,), param.storage_offset())
            return vector[self.start : self.stop].detach()  # a view's base would be one holder more
        return memory_order(param, self.like)[self.start : self.stop]


def _view(gradient: Gradient) -> torch.Tensor:
    assert gradient.view is not None
    return gradient.view


def memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements of ``tensor`` as a vector, in the order of ``like`` in memory."""
    placed = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device)
    placed.copy_(tensor)
    return placed.as_strided((placed.numel(),), (1,))


class Shards:
    """The parts of the parameters that this rank owns, and their optimizer state."""

    def __init__(
        self,
        optimizer: Any,
        base: type[Optimizer],
        gradients: Sequence[Gradient],
        buffers: Buffers,
        ranks: Members,
        masters: bool,
        overlapping: set[int],
        attempt: Callable[..., None],
    ) -> None:
        """``base``: the class whose step updates the parts, with the optimizer's settings. ``attempt``: runs
        a part of an update, and keeps what it raises.
        """
        self._base = base
        self._optimizer, self._ranks, self._masters = optimizer, ranks, masters
        self._attempt = attempt
        self.gradients = gradients
        self.layout, self._buffers = buffers.layout, buffers
        self.overlapping = overlapping
        travelling = [gradient for gradient in gradients if gradient.view is not None]
        # The slots of this plan: the next plan has other ones, perhaps in another memory format.
        self.slots = {gradient.number: _view(gradient) for gradient in travelling}
        # Updated on every rank, from gathered sums.
        self.whole = {g.number for g in travelling if g.number in overlapping or g.param.is_complex()}
        self.owned = [list(self._owned_in(piece.number)) for piece in self.layout.slices]
        self.parts = [
            [part for part in parts if part.gradient.number not in self.whole] for parts in self.owned
        ]
        self.whole_parts = [
            self._part(g, 0, g.param.numel(), self.slots[g.number], whole=True)
            for g in travelling
            if g.number in self.whole
        ]
        self.state: dict[Any, Any] = defaultdict(dict)
        # The update multiplies gradients by this factor, which clipping sets; on the device.
        self.factor: torch.Tensor | None = None

    def _owned_in(self, bucket: int) -> Iterator[ShardView]:
        piece = self.layout.slices[bucket]
        first, last = piece.shard(self._ranks.rank, self._ranks.size)
        for i in piece.params:
            slot = self.layout.slots[i]
            start, stop = max(first, slot.offset), min(last, slot.offset + slot.numel)
            if start < stop:
                whole = bool(piece.ends)
                flat = self._buffers.flat[slot.group]
                grad = self.slots[i] if whole else flat[start:stop]
                yield self._part(self.gradients[i], start - slot.offset, stop - slot.offset, grad, whole)

    def _part(self, gradient: Gradient, start: int, stop: int, grad: torch.Tensor, whole: bool) -> ShardView:
        nothing = torch.empty(0, dtype=gradient.param.dtype, device=gradient.param.device)
        like = self.slots[gradient.number]
        part = ShardView(gradient, like, start, stop, grad, whole, nn.Parameter(nothing), nothing)
        if gradient.number in self.whole and not whole:
            return part  # for norms only
        half = self._masters and gradient.param.dtype in HALVES
        part.bind()
        if half:
            part.leaf = nn.Parameter(part.weight.float())
        return part

    # -- the update ------------------------------------------------------------------------------------------

    def update(self, bucket: int, used: Sequence[int] | Mapping[int, int]) -> None:
        """Step the optimizer on this rank's parts of a bucket, for parameters that any rank used."""
        self._update(self.parts[bucket], used, self.factor)

    def update_whole(self, used: Sequence[int], frozen: Sequence[nn.Parameter] = ()) -> None:
        """Step the optimizer on the parameters that every rank updates, in the optimizer's order. ``frozen``:
        others, whose state is not here, that share their memory.
        """
        if self.whole_parts:
            full = self._optimizer.__dict__["state"]
            self.state |= {param: full.pop(param) for param in frozen if param in full}
            self._update(self.whole_parts, used, None, frozen)
            full |= {param: self.state.pop(param) for param in frozen if param in self.state}

    @plain_math()
    def _update(
        self,
        parts: Sequence[ShardView],
        used: Sequence[int] | Mapping[int, int],
        factor: torch.Tensor | None,
        frozen: Sequence[nn.Parameter] = (),
    ) -> None:
        optimizer = self._optimizer
        members = [(part.gradient.param, part.leaf) for part in parts if used[part.gradient.number]]
        if frozen:
            every = (p for group in optimizer.param_groups for p in group["params"])
            order = {id(p): place for place, p in enumerate(every)}
            members = sorted([*members, *zip(frozen, frozen)], key=lambda member: order[id(member[0])])
        for part in parts:
            if used[part.gradient.number]:
                part.begin_update()
        fresh = [leaf for _, leaf in members if not self.state.get(leaf)]
        groups = groups_of_leaves(optimizer, members, self.state)
        if groups:
            self._scale((leaf.grad for _, leaf in members), factor)
            # A new view each time: GradScaler leaves its scale on a fused optimizer for one step only.
            # Where it raises, the weights travel as they are: the other ranks wait for them.
            self._attempt(OptimizerView(optimizer, self._base, self.state).step, groups)
            self._zero_skipped_momentum(fresh)
        for part in parts:
            if part.leaf.grad is not None and part.master is not None:
                self.state[part.leaf][KEY] = part.master  # an update made it differ from the parameter
            part.end_update()

    def _zero_skipped_momentum(self, new: Iterable[nn.Parameter]) -> None:
        """Zero the momentum of a first step that the device skipped.

        torch's fused SGD allocates it uninitialised, and its kernel writes nothing if ``found_inf`` is set.
        """
        found_inf = self._optimizer.__dict__.get("found_inf")
        if found_inf is None:
            return
        for leaf in new:
            momentum = self.state[leaf].get("momentum_buffer")
            if momentum is not None:
                momentum.masked_fill_(found_inf.to(momentum.device) != 0, 0.0)

    def scale_gradients(self) -> None:
        """Multiply all gradients by the factor now; called before somebody reads them."""
        self._scale((part.grad for parts in self.owned for part in parts), self.factor)
        self.factor = None

    def _scale(self, grads: Iterable[torch.Tensor | None], factor: torch.Tensor | None) -> None:
        if factor is not None:
            for grad in grads:
                assert grad is not None
                grad.mul_(factor)

    # -- norms -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next((flat.device for flat in self._buffers.flat.values()), torch.device("cpu"))

    def owned_gradients(self, used: Sequence[int]) -> list[torch.Tensor]:
        return [part.grad for parts in self.owned for part in parts if used[part.gradient.number]]

    # -- whole state -----------------------------------------------------------------------------------------

    def holders(self, i: int) -> int:
        """Return how many tensors hold a parameter's memory: itself, and the leaves over it."""
        param = self.gradients[i].param
        mine = (part for part in self._all_parts() if part.gradient.number == i)
        return 1 + sum(shares_storage(param, part.weight) + shares_storage(param, part.leaf) for part in mine)

    def _all_parts(self) -> Iterator[ShardView]:
        return chain(self.whole_parts, *self.parts)

    def take_state(self, full: dict[Any, Any]) -> None:
        """Take this rank's parts out of the state of whole parameters; that of frozen ones stays there."""
        self.state.clear()
        for part in self._all_parts():
            for key, value in full.get(part.gradient.param, {}).items():
                self.state[part.leaf][key] = self._cut(key, value, part)
            self._take_master(part)
        for gradient in self.gradients:
            full.pop(gradient.param, None)

    def _take_master(self, part: ShardView) -> None:
        saved = self.state[part.leaf].pop(KEY, None) if part.leaf in self.state else None
        if part.master is not None:
            part.master.copy_(part.weight if saved is None else saved)
            if saved is not None:
                self.state[part.leaf][KEY] = part.master

    def _cut(self, key: str, value: Any, part: ShardView) -> Any:
        param = part.gradient.param
        if by_element(key, value, param):
            if part.leaf.shape == param.shape:
                cut = value
            else:
                cut = memory_order(value, part.like)[part.start : part.stop]
            widened = part.master is not None and cut.is_floating_point()
            return cut.to(torch.float32 if widened else cut.dtype, copy=True)
        if not isinstance(value, torch.Tensor):
            return deepcopy(value)
        # A GPU's count may have come from another rank, where it lay on that rank's GPU.
        return value.clone() if value.device.type == "cpu" else value.to(part.leaf.device, copy=True)

    def described_state(self) -> dict[int, dict[str, Any]]:
        """Return the state of this rank's parts by parameter; for tensors of a part's shape the dtype."""
        described: dict[int, dict[str, Any]] = {}
        for part in chain(*self.parts):
            for key, value in self.state.get(part.leaf, {}).items():
                whole = by_element(key, value, part.leaf)
                described.setdefault(part.gradient.number, {})[key] = (
                    _ByElement(value.dtype) if whole else value
                )
        if self._ranks.rank == 0:
            for part in self.whole_parts:
                described[part.gradient.number] = dict(self.state.get(part.leaf, {}))
        return described

    def gathered_state(self, all_gather: Callable[..., None]) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the state of whole parameters, on every rank. Collective."""
        rows = self._ranks.all_values(self.described_state())
        params = [gradient.param for gradient in self.gradients]
        full: dict[nn.Parameter, dict[str, Any]] = {}
        wanted: defaultdict[tuple[str, torch.dtype], set[int]] = defaultdict(set)
        for row in rows:
            for i, entries in row.items():
                for key, value in entries.items():
                    if isinstance(value, _ByElement):
                        wanted[key, value.dtype].add(i)
                        value = torch.empty_like(self.slots[i], dtype=value.dtype)
                    full.setdefault(params[i], {}).setdefault(key, value)
        for (key, dtype), members in sorted(wanted.items(), key=str):
            targets = {i: full[params[i]][key] for i in members}
            for piece in self.layout.slices:
                self._gather_bucket(piece.number, key, dtype, targets, all_gather)
        return full

    def _gather_bucket(
        self,
        bucket: int,
        key: str,
        dtype: torch.dtype,
        targets: Mapping[int, torch.Tensor],
        all_gather: Callable[..., None],
    ) -> None:
        """Gather one entry of the state of the parameters in a bucket into ``targets``."""
        piece = self.layout.slices[bucket]
        data = torch.zeros(piece.numel, dtype=dtype, device="cpu")
        for part in self.parts[bucket]:
            value = self.state.get(part.leaf, {}).get(key)
            i = part.gradient.number
            if i in targets and value is not None:
                start = self.layout.slots[i].offset + part.start - piece.start
                like = part.like if part.is_whole else part.leaf
                data[start : start + part.stop - part.start].copy_(memory_order(value, like))
        all_gather(data, piece.ends)
        for i in piece.params:
            if i not in targets:
                continue
            slot = self.layout.slots[i]
            start, stop = max(piece.start, slot.offset), min(piece.stop, slot.offset + slot.numel)
            vector = targets[i].as_strided((slot.numel,), (1,))
            vector[start - slot.offset : stop - slot.offset].copy_(
                data[start - piece.start : stop - piece.start]
            )


# State of torch's optimizers that is one number for the whole parameter, even if that is one number itself.
_COUNTERS = frozenset(("step", "eta", "mu", "mu_product"))


def by_element(key: str, value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape and key not in _COUNTERS


@dataclass(frozen=True)
class _ByElement:
    """Stands for a tensor with one value for each element of the parameter."""

    dtype: torch.dtype


# -- float32 weights of half-precision shards ----------------------------------------------------------------

# With ``master_weights=True`` each rank keeps float32 weights for its own shards. They are part of the
# optimizer's state, under ``KEY``, once the first update has made them differ from the parameters. A master
# is valid as long as it rounds to the parameter: where the parameter got another value (a broadcast, a loaded
# model, ``p.mul_()``), that value replaces it.

KEY = "master_weight"
HALVES = (torch.float16, torch.bfloat16)


def take_written(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Replace the master's elements that do not round to the weight's."""
    master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.float()))


def _take_whole_master(param: nn.Parameter, state: dict[Any, Any]) -> nn.Parameter:
    """Return a float32 master of a whole parameter, with its gradient; it takes over the state."""
    own = state.pop(param, {})
    leaf = nn.Parameter(own.pop(KEY, param.detach()).float())
    take_written(leaf.detach(), param.detach())
    grad = raw_grad(param)
    leaf.grad = None if grad is None else grad.float()
    if own:  # else a first update finds no state
        halves = {
            key for key, value in own.items() if by_element(key, value, param) and value.dtype in HALVES
        }
        state[leaf] = {key: value.float() if key in halves else value for key, value in own.items()}
    return leaf


def state_dict_with(optimizer: Any, base: type[Optimizer], whole: OptimizerState) -> dict[str, Any]:
    """Return the state dict that ``base`` makes of the optimizer, with the state of whole parameters."""
    own = optimizer.__dict__["state"]
    optimizer.__dict__["state"] = whole
    try:
        return base.state_dict(optimizer)
    finally:
        optimizer.__dict__["state"] = own


def load_state_dict_of(
    optimizer: Any, base: type[Optimizer], state_dict: dict[str, Any], masters: bool
) -> None:
    """Load a state dict as ``base`` does. With ``masters`` its tensors keep their type, where torch alone
    rounds them to the parameters' type.
    """
    if not masters:
        base.load_state_dict(optimizer, state_dict)
        return
    given: dict[str, Any] = {}
    hook = optimizer.register_load_state_dict_pre_hook(lambda _, final: given.update(final))
    try:
        base.load_state_dict(optimizer, state_dict)
    finally:
        hook.remove()
    names = chain.from_iterable(group["params"] for group in given["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state = optimizer.__dict__["state"]
    for name, param in zip(names, params, strict=True):
        for key, value in given["state"].get(name, {}).items():
            rounded = state[param][key]
            if isinstance(value, torch.Tensor) and rounded.dtype in HALVES:
                state[param][key] = value.to(rounded.device)
