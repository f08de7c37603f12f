"""One reduction of all gradients, from autograd's hook to sums that can be read: a machine with one table.

[Note: the states of a round]

    state    meaning
    IDLE     no gradient has come since the last step; that step's update may still wait for sums
    FILLING  a backward runs; gradients are put into their slots, and full buckets are sent
    SENT     the backward is over; its gradients are being reduced, or are reduced and can be read
    RAISED   the backward has raised; its gradients are incomplete, and some may be on their way

    event                     IDLE               FILLING            SENT                     RAISED
    ------------------------  -----------------  -----------------  -----------------------  -----------------
    gradient                  wait for updates,  put it             wait for the sum, which  error, unless all
                              FILLING, put it                       the gradient adds to;    are cleared: end
                                                                    FILLING, put it          the round, IDLE,
                                                                                             go on there
    gradient under no_sync,   stays in p.grad    put it: the outer  stays; is added to the   as above
    or of an early pass                          backward counts    sum when that arrives
    end of the backward       -                  put what is        -                        -
                                                 missing, SENT
    the backward raised       -                  RAISED             -                        -
    p.grad is read            wait               error: inside of   wait                     error
                                                 a backward
    p.grad is set or cleared  as in torch, when  error: inside of   that value counts, not   that gradient is
                              the sum is there   a backward         the sum; the last one    cleared; the last
                                                                    that is cleared ends     one ends the
                                                                    the round, IDLE          round, IDLE
    zero_grad()               clear now, or on   error: inside of   end the round without    end the round,
                              arrival            a backward         an update, IDLE          IDLE
    step(), synchronize()     put what is in     -                  update now, or when the  error
                              p.grad, SENT, on                      sum arrives; IDLE
    a plan is installed       wait for updates;  -                  -                        -
                              or with the first
                              gradient
    close()                   wait for updates   end the round      end the round            end the round
    dropped, or at exit       wait for updates   -                  wait for the sums        -

A round belongs to one backward, which may run others inside (reentrant checkpointing). Autograd calls a
queued callback at the end of the backward it was queued in, and drops it uncalled where that backward raises:
``_EndOfBackward`` tells both.

[Note: gradients apart]
Sparse gradients, those that come late, and those of parameters outside of the plan (they were frozen when it
was made) are reduced outside of the buckets, by all ranks together, once the flags tell of them
(``reduce_apart``). Ranks come to that in different places. Before a step it is where one of these gradients
is read, in ``step()``, or where the round ends. After it, it is where the flags are read, which is earlier on
one rank than on another, depending on what has arrived: with two optimizers the ranks would wait for each
other in different ones. So ``step()`` reads the flags where gradients may come apart: where a parameter
outside of the plan is trained or has a gradient, where a module makes sparse ones, and from the first that
comes apart, on any rank (``apart``).

[Note: failing updates]
An update that raises may do so in ``step()`` on one rank and at the next use of a parameter on another, or
within what all ranks do together. There it must not break off what the others wait for. So it is kept, and
the step, or the access, raises it when it has ended here as on all other ranks. What comes after it in that
update is left out, as in a plain ``step()`` that raises.

Threads: hooks and the end of a backward run on the thread that runs the backward, completions on any thread
that accesses a parameter; ``Round.lock`` guards all state. The engine's thread enters Python
with ``transport="horovod"`` only.
``docs/engine.md`` describes which part owns a buffer at what time.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from comm_core import foreign_users, overlapping, storages_held
from commsched.backends.interface import Backend, Scaling, step_work
from commsched.backends.ranks import ranks_text
from commsched.errors import CommError
from commsched.optimizer.buckets import Buffers, Slice
from commsched.optimizer.gradient import (
    Gradient,
    Payload,
    Residuals,
    Sum,
    Tied,
    is_zero,
    payload_of,
)
from commsched.optimizer.measuring import Watch, profiled
from commsched.optimizer.pending import (
    Access,
    clear_pending,
    clear_raw_grad,
    is_pending,
    mark_pending,
    raw_grad,
    release_class,
    set_raw_grad,
    without_completing,
)
from scheduler.ir.program import Program

Update = Callable[[list[int]], None]
"""Applies the optimizer to the parameters with these indices."""

# A parameter's entry in the flags that every round sums over the ranks: three counts of 20 bits.
DENSE, SPARSE, LATE = 1, 1 << 20, 1 << 40

# A rank's own entry, four counts of 15 bits: an emulated network multiplies them by the number of ranks.
# CROWDED: a gradient of the rank has come late, and it has other optimizers. JOINED: the rank takes part with
# zeros until all have joined.
STEPPED, RAISED, CROWDED, JOINED = 1, 1 << 15, 1 << 30, 1 << 45

CLEARED = "gradients cannot be set or cleared, which would not undo it"

LARGEST = 1 << 31  # samples of all ranks in a round are fewer

_KEPT_WAITS = 4096  # more than one step has
_KEPT_ROUNDS = 60

_counted_in: dict[int, weakref.ref[Round]] = {}
"""By autograd's number of each backward of a weighted loss the round whose optimizer has weighted it."""

# Of Python functions in a backward; older versions of torch have one of the two.
_APPLY = {
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")
    if hasattr(BackwardCFunction, name)
}
_engine: Any = torch.autograd.Variable._execution_engine
_task: Callable[[], int] = torch._C._current_graph_task_id


class State(Enum):
    IDLE = "no gradient has come since the last step"
    FILLING = "a backward is running"
    SENT = "the backward is over, its gradients are being reduced"
    RAISED = "the backward has raised"


class FlagPlaces(NamedTuple):
    """Where the flags of a round, after one for each parameter, hold the votes for a new plan; by rank
    STEPPED and so on; the samples that weighted losses have counted, and how many ranks with gradients
    counted none; by rank how long it waited in its latest step; by rank a digest of what must be the same on
    all ranks, 0 in most rounds. ``size``: of all flags.
    """

    votes: int
    steps: int
    samples: int
    unweighted: int
    waits: int
    digests: int
    size: int

    @classmethod
    def of(cls, params: int, ranks: int) -> FlagPlaces:
        after = params + 1 + ranks
        digests = after + 2 + ranks
        return cls(params, params + 1, after, after + 1, after + 2, digests, digests + ranks)


class _EndOfBackward:
    """Queued in a backward: autograd calls it at the end, or drops it uncalled where the backward raises."""

    __slots__ = ("_called", "_round")

    def __init__(self, of: Round) -> None:
        self._round, self._called = of, True
        _engine.queue_callback(self)
        self._called = False
        of.running += 1

    def __call__(self) -> None:
        self._called = True
        self._round.running -= 1
        self._round.end_of_backward()

    def __del__(self) -> None:
        if not self._called:
            self._round.running -= 1
            self._round.backward_raised()


class _Once:
    """Hooked before a node for one backward: the node of a leaf outlives it."""

    def __init__(self, node: Any, of: weakref.ref[Round]) -> None:
        self._round, self._handle = of, node.register_prehook(self)

    def __call__(self, _: Any) -> None:
        self._handle.remove()
        now = self._round()
        if now is not None:
            now.goes_on()


class _EndOfWeighted:
    """Queued in the backward of a weighted loss; autograd drops it at the end, however that comes."""

    def __init__(self, of: Round) -> None:
        self._task = _task()
        _counted_in[self._task] = weakref.ref(of)
        _engine.queue_callback(self)

    def __call__(self) -> None:
        pass

    def __del__(self) -> None:
        _counted_in.pop(self._task, None)


def inside_a_backward() -> bool:
    """Return whether the backward that ends now runs inside another one."""
    return any(True for _ in _enclosing())


def _enclosing() -> Iterator[Any]:
    """Yield the nodes in whose backward this one runs, the innermost first.

    Autograd does not tell, but the backward of a Python function is on the stack.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _APPLY:
            yield frame.f_locals["self"]
        frame = frame.f_back


class Round:
    """The gradients of one optimizer, from one step to the next."""

    flags: torch.Tensor
    early_flags: Sequence[torch.Tensor]  # with early_step: for each bucket, those of its parameters

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        backend: Backend,
        mode: Any,
        scaling: Scaling,
        residuals: Residuals,
        *,
        outside: Sequence[nn.Parameter] = (),
        sums: bool = False,
        sparse_as_dense: bool = False,
    ) -> None:
        """``outside``: the optimizer's parameters that no plan contains; ``names`` has theirs, too."""
        self.backend, self.mode, self.ranks = backend, mode, backend.ranks
        self.params = list(params)
        every = zip([*params, *outside], names, strict=True)
        self.gradients = [Gradient(i, p, name) for i, (p, name) in enumerate(every)]
        self.planned, self.outside = self.gradients[: len(params)], self.gradients[len(params) :]
        self.scaling, self.residuals = scaling, residuals
        self.sums = sums  # op=Sum, not Average
        self.sparse_as_dense = sparse_as_dense  # sparse gradients travel in the dense buckets
        self.sparse_dims: dict[int, int] = {}  # with how many sparse dimensions they came
        self.lock = threading.RLock()
        self.state = State.IDLE
        self.places = FlagPlaces.of(len(self.gradients), self.ranks.size)

        # The backward that fills this round, or whose gradients stay local.
        self.running = 0  # ends of backwards that have not come: that backward, and those inside of it
        self._backward = -1  # autograd's number of the backward that the last gradient came from
        self._goes_on = -1  # that of the last one that went on after an inner one
        self._is_local = self._is_early = False  # of no_sync(), or of an early pass; of an early pass
        self._passes = 0  # early passes since the last step
        self._creates_graph = False  # the backward adds to p.grad out of place
        self.backward_passes = 1  # so many are accumulated before the gradients are reduced
        self.local_only = False  # within no_sync()
        self._dirty = False  # local gradients have come since the round was sent

        # The present round.
        self.number = 0
        self._is_first = True  # in the first round gradients stay in p.grad, to see which come twice
        self.send_at_end = True
        self._missing: list[int] = []  # by bucket: gradients that have not come
        self._sent: list[bool] = []
        self.done: list[bool] = []  # by bucket: somebody has waited for it
        self.used: list[int] = []  # the summed flags, once they have arrived
        self.pending = 0  # gradients that are not exposed yet
        self.deferred: Update | None = None
        self.failed: BaseException | None = None  # what an update has raised, until user code sees it
        self.factor = 1.0  # of all gradients, by the samples that the ranks have counted
        self.abandoned = False  # nobody uses its sums
        self.raised: list[int] = []  # ranks whose backward has raised, once the flags have arrived
        self.rest = False  # gradients that no bucket contained are still to be reduced, as the flags tell
        self.late: list[int] = []  # parameters of which gradients came late, on any rank
        self.summed_outside: set[int] = set()  # parameters outside of the plan that have had a sum
        self._uncleared: set[int] | None = None  # once user code has cleared some gradients one by one
        # By parameter: what takes the value of the last step, once that is there (``snapshots``).
        self._followers: dict[int, list[Callable[[], None]]] = {}

        # From round to round.
        self.apart = False  # rounds may have gradients that no bucket carries: see [Note: gradients apart]
        self.stepped = False  # since the last round
        self.joined = False  # this rank takes part with zeros until every rank has joined
        self.samples = 0  # that weighted losses have counted since the last round
        self._counted = False  # the backward that runs is that of a weighted loss
        self.vote = 0  # this rank's votes for a new plan
        self.votes = 0  # those of all ranks in the last round but one: the same number on every rank
        self.compare_every = 0  # ranks are compared in the first round, and then every so many; 0: never
        self.digest_of: Callable[[int, Sequence[Gradient]], int]
        self.due = False  # the step of this round compares the ranks, by the digests of all of them
        self.digests: list[int] = []

        # Times.
        self.watch: Watch | None = None
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=_KEPT_WAITS)  # the backend's marks around each
        self.waited = 0  # what this rank's entry of ``waits_of_ranks`` will be
        # Microseconds that each rank waited in its latest step, plus one (0: none yet), of the last rounds.
        self.waits_of_ranks: deque[list[int]] = deque(maxlen=_KEPT_ROUNDS)

        self._accesses = [
            Access(
                partial(self.accessed, (i,)),
                partial(self.replaced, i),
                partial(self.cleared, i),
                partial(self._follow, i),
            )
            for i in range(len(self.gradients))
        ]
        self.has_company: Callable[[], bool] = lambda: False  # whether this rank has other optimizers
        # Parameters that user code has put into the optimizer's groups by hand, until step() plans for them.
        self.strangers: Callable[[], list[nn.Parameter]] = list
        self._refused: list[tuple[nn.Parameter, Access]] = []  # those of them whose gradients cannot be read
        # A weak reference to what installs the plan that the next round begins with.
        self.take_up: Callable[[], Callable[[], None] | None] | None = None
        self._installed = self.closed = self._draining = False
        mode.round = self

    # -- plans -----------------------------------------------------------------------------------------------

    def install(self, program: Program, buffers: Buffers) -> None:
        """Take a new plan and new buckets into use, between two steps. Gradients that are there stay."""
        with self.lock:
            if self._installed:
                self.complete_all()
            self._installed = True
            self.residuals.install(buffers)
            layout = buffers.layout
            self.buffers, self._empty = buffers, layout.empty()
            for gradient in self.planned:
                gradient.place(buffers)
                if gradient.view is not None:
                    i = gradient.number
                    gradient.payload = payload_of(i, gradient.view, buffers, gradient.param, self.residuals)
                else:
                    gradient.payload = Payload()
            self.travelling = [g for g in self.planned if g.view is not None]
            self.reduced = [*self.travelling, *self.outside]
            changed: dict[int, torch.Tensor] = {}
            for gradient in self.travelling:
                if isinstance(gradient.payload, Tied):
                    changed |= gradient.payload.changed
            work = step_work(
                program,
                buffers,
                self.places.size,
                self.ranks.size,
                self.mode.prepare(program, buffers),
                self.scaling,
                self.residuals.by_bucket(),
                changed,
            )
            self.flags, self.early_flags = work.flags[0], work.flags[1:]
            self.flag = self.flags.numpy()  # the same memory; an element of a tensor costs microseconds
            self.flags_bucket = len(layout.slices)
            self.bucket_names = [self._name_of(piece) for piece in layout.slices]
            self._finish()
            self.backend.install(work)
            self.mode.installed(program)

    def _name_of(self, piece: Slice) -> str:
        """Return a bucket's name for profilers, with the first of its parameters that the forward needs."""
        if not piece.params:
            return f"bucket {piece.number}: empty"
        others = f" and {len(piece.params) - 1} more" if len(piece.params) > 1 else ""
        return f"bucket {piece.number}: {self.gradients[piece.params[-1]].name}{others}"

    def _finish(self) -> None:
        """Be a round that is over, with nothing pending."""
        self._missing, self.pending = [], 0
        self._sent = self.done = [True] * self.flags_bucket
        self.used = [0] * (len(self.gradients) + 1)
        for gradient in self.gradients:
            gradient.exposed = True

    # -- gradients in ----------------------------------------------------------------------------------------

    def on_grad(self, i: int, param: nn.Parameter) -> None:
        """React to a gradient that autograd has accumulated into parameter ``i``."""
        if self.watch is not None and i < len(self.params):
            self.watch.grad(i)
        with self.lock:
            backward = _task()
            if backward != self._backward:
                self._enter(backward, i)
            gradient = self.gradients[i]
            grad = param.grad if type(param) is nn.Parameter else raw_grad(param)
            if grad is None:  # though autograd has just put it there
                raise ValueError(
                    f"rank {self.ranks.rank}: the gradient of {gradient.name} was cleared before it could be"
                    " reduced, by a hook or by another DistributedOptimizer over the same parameters; clear"
                    " gradients outside of the backward, and call close() on the other optimizer first"
                )
            if gradient.sum is not None and not gradient.added_to(grad) and self._creates_graph:
                raise ValueError(
                    f"rank {self.ranks.rank}: with create_graph=True autograd makes a new tensor, and nobody"
                    f" can tell whether that of {gradient.name} contains the sum that p.grad held before;"
                    " with op=Sum, call optimizer.zero_grad() before such a backward, or use op=Average"
                )
            if self._is_local:
                self._keep_local(gradient, grad)
                return
            if self.state is not State.FILLING:
                grad = self._open(gradient, grad)
            if gradient.filled == self.number:
                self._put_second(gradient, grad)
                return
            hooks: Any = param._post_accumulate_grad_hooks
            if self._is_first or gradient.twice or len(hooks) > 1 or gradient.view is None:
                # Autograd adds to p.grad, and hooks of user code see and change it, until the backward ends.
                gradient.twice = gradient.twice or gradient.seen == self.number
                gradient.seen = self.number
                return
            early = self._put(gradient, grad)
            if early and not self.send_at_end:
                self._send(gradient.payload.buckets)
            # Else the end of the backward sends it.

    def on_part(self, i: int, part: torch.Tensor) -> None:
        """React to the head's part of a tied weight's gradient; autograd adds the embedding's part later."""
        with self.lock:
            gradient = self.gradients[i]
            if not isinstance(gradient.payload, Tied):
                return
            backward = _task()
            if backward != self._backward:
                self._enter(backward, i)
            if self._is_local:
                return
            if self.state is not State.FILLING:
                self._begin()
                if not isinstance(gradient.payload, Tied):
                    return  # with the plan that this round has taken up
            # A second part, or an earlier gradient to which autograd adds both: the whole one is sent.
            if gradient.filled == self.number or raw_grad(gradient.param) is not None:
                return
            buckets = gradient.payload.put_part(part)
            if buckets is not None and not self.send_at_end:
                self._send(buckets)

    def _enter(self, backward: int, i: int) -> None:
        """React to the first gradient of a backward, which may run inside of the one that fills the round."""
        if self.state is State.FILLING or self._is_local:
            inner = self.running > 0 or backward < self._backward or inside_a_backward()
            if inner:
                self._backward = backward
                _EndOfBackward(self)
                self._watch_enclosing()
                return
            self.end_of_backward(outermost=True)  # it ended without a gradient after those of an inner one
        if self.state is State.RAISED:
            self._leave_raised()
        if self.samples and not self._counted:
            self._check_counted(i)
        if _counted_in and not self._counted:
            self._check_weighted_here(backward, i)
        self._backward = backward
        self._is_early = not self.local_only and self._passes + 1 < self.backward_passes
        self._is_local = self.local_only or self._is_early
        self._creates_graph = torch.is_grad_enabled()
        _EndOfBackward(self)
        self._watch_enclosing()

    def _watch_enclosing(self) -> None:
        """Notice the end of the backwards that this one runs inside of: all gradients may come in inner ones.

        A node whose backward runs others goes on with the nodes before it, in its own backward.
        """
        now = weakref.ref(self)
        for node in _enclosing():
            for before, _ in node.next_functions:
                if before is not None:
                    _Once(before, now)

    def goes_on(self) -> None:
        """React to a backward that goes on after an inner one: let its end be noticed."""
        with self.lock:
            if self._goes_on != _task():
                self._goes_on = _task()
                _EndOfBackward(self)

    def _keep_local(self, gradient: Gradient, grad: torch.Tensor) -> None:
        """Let a gradient stay on this rank until the next round."""
        if not (gradient.exposed or self.mode.gathered):
            gradient.keep_local(grad, self.backend)
            if gradient.touched and self.state is State.SENT:  # user code has cleared it: no sum will come
                self.leave_cleared()
                gradient.add_local()
        elif self.state is State.IDLE and not self.pending and not self.sums and not grad.is_sparse:
            self._keep_in_slot(gradient, grad)
        self._dirty = True

    def _keep_in_slot(self, gradient: Gradient, grad: torch.Tensor) -> None:
        """Let the next pass of a local accumulation add into the slot itself: one memory less."""
        hooks: Any = gradient.param._post_accumulate_grad_hooks
        if gradient.view is None or len(hooks) > 1 or grad.requires_grad or gradient.misfits():
            return
        if gradient.is_in_place(grad):
            return
        gradient.free()
        gradient.payload.zeros = False
        with torch.no_grad():
            gradient.view.copy_(grad)
        self.backend.reads(grad)
        gradient.hand_out()

    def _open(self, gradient: Gradient, grad: torch.Tensor) -> torch.Tensor:
        """Start a round, after all that is on its way. Returns the gradient that has come then.

        A backward without a step since the last one adds to what that one has reduced: plain PyTorch
        accumulates.
        """
        if not (gradient.exposed or self.mode.gathered):
            gradient.keep_local(grad, self.backend)
        self.leave_cleared()
        self._begin()
        grad_now = raw_grad(gradient.param)
        assert grad_now is not None
        return grad_now

    def _begin(self) -> None:
        """Begin a round: FILLING."""
        passes = self._passes
        self.mode.before_round()
        self._passes = passes  # a round without a step is added to, and later passes are reduced as well
        self.complete_all()
        if self.take_up is not None:
            take_up, self.take_up = self.take_up(), None
            if take_up is not None:
                with torch.no_grad():
                    take_up()
        layout = self.buffers.layout
        self.deferred, self._dirty = None, False
        self.votes = self.used[self.places.votes] if self.number and self.used else 0
        self.number += 1
        self._missing = [max(1, len(piece.params)) for piece in layout.slices]  # 1: see Layout.empty
        self._sent, self.done = [False] * self.flags_bucket, [False] * self.flags_bucket
        self.used, self.factor, self.abandoned, self.raised = [], 1.0, False, []
        self._uncleared, self.rest, self.late = None, False, []
        for gradient in self.gradients:
            gradient.clear = gradient.apart = None
            gradient.touched = False
            gradient.payload.begin()
        slots = [(gradient, gradient.alias) for gradient in self.gradients if gradient.alias is not None]
        for place in storages_held([alias for _, alias in slots], [1] * len(slots)):
            slots[place][0].free()
        self.flags.zero_()
        every = 0 if self.joined else self.compare_every
        self.due = every > 0 and self.number % every == 1 % every
        if self.due:  # before an update inside of this backward; those of earlier steps are complete
            digest = self.digest_of(self.number, self.planned)
            self.flag[self.places.digests : self.places.size][self.ranks.own] = digest
        self.backend.begin_step()
        self.state = State.FILLING
        self.mode.round_begun()
        self._send(self._empty)  # later buckets would wait for them

    def _put(self, gradient: Gradient, grad: torch.Tensor) -> bool:
        """Copy a gradient into its slot, unless autograd has written it there itself; return whether its
        buckets may be sent now.
        """
        gradient.filled = self.number
        taken, view = grad, gradient.view
        if grad.requires_grad:
            grad = grad.detach()  # of a backward with create_graph
        i, early = gradient.number, not isinstance(gradient.payload, Tied)
        if view is None or grad.is_sparse or grad.dtype != view.dtype or grad.shape != view.shape:
            self._put_apart(gradient, grad)
        else:
            self.flag[i] = DENSE
            if gradient.sum is not None and taken is gradient.sum.shown and self.ranks.rank != 0:
                self._put_difference(gradient, gradient.sum, grad)
            else:
                early = gradient.payload.put(grad, self.backend)
        gradient.sum = None
        gradient.take(taken)
        if gradient.pends:
            mark_pending(gradient.param, self._accesses[i], only_grad=True)
        return early

    def _put_apart(self, gradient: Gradient, grad: torch.Tensor) -> None:
        """Let a gradient be reduced when the flags are read: a sparse one, or one that fits into no slot."""
        before, i = gradient.sum, gradient.number
        if before is not None and grad is before.shown and self.ranks.rank != 0:
            self._check_sum(gradient, before, grad)
            base = gradient.view if before.base is None else before.base
            assert base is not None
            grad = grad - base.to(grad.dtype)  # only the difference: see _put_difference
        self.flag[i] = SPARSE if gradient.view is not None or grad.is_sparse else DENSE
        if gradient.view is None:
            gradient.apart = grad
        elif self.sparse_as_dense and grad.is_sparse and not gradient.misfits():
            self.sparse_dims[i] = grad.sparse_dim()
            gradient.payload.put(grad.to_dense(), self.backend)
        else:
            gradient.apart, self.apart = grad, True
            gradient.payload.put_zeros()

    def _put_difference(self, gradient: Gradient, before: Sum, grad: torch.Tensor) -> None:
        """Put the difference: with op=Sum, rank 0 alone contributes an earlier round's uncleared sum."""
        assert gradient.view is not None
        gradient.payload.zeros = False
        self._check_sum(gradient, before, grad)
        self.backend.take_back(gradient.number, gradient.view)  # the current stream writes into the slot
        if before.base is not None:
            torch.sub(grad, before.base, out=gradient.view)
            self.backend.reads(before.base)
        else:
            gradient.view.neg_().add_(grad)
        self.backend.reads(grad)

    def _check_sum(self, gradient: Gradient, before: Sum, grad: torch.Tensor) -> None:
        """Refuse an addition to a sum that user code has changed: the difference would not be what came."""
        if grad._version > before.version:
            raise ValueError(
                f"rank {self.ranks.rank}: the gradient of {gradient.name} was changed after it had been"
                " summed, and is now added to again; with op=Sum, call optimizer.zero_grad() before the next"
                " backward, or use op=Average"
            )

    def _put_second(self, gradient: Gradient, grad: torch.Tensor) -> None:
        """Add a second gradient of one backward (reentrant checkpointing of a module that is used twice)."""
        gradient.twice = True
        set_raw_grad(gradient.param, None)
        if gradient.view is None:
            return
        i, payload = gradient.number, gradient.payload
        apart = gradient.apart
        both = grad if apart is None else grad + apart if apart.is_sparse else apart + grad
        if apart is not None and (grad.is_sparse or gradient.misfits()):
            gradient.apart = both  # reduced at step time
            return
        early = isinstance(payload, Tied) and payload.early
        sent = early or any(self._sent[bucket] for bucket in gradient.buckets)
        if not sent:
            self.backend.take_back(i, gradient.view)
        if sent or apart is not None or (grad.is_sparse and not self.sparse_as_dense):
            gradient.apart = both
            self.apart = True
            if self.flag[i] < LATE:
                self.flag[i] += LATE + DENSE * (apart is not None)
        else:
            with torch.no_grad():
                gradient.view.add_(grad)

    def _send(self, buckets: Iterable[int]) -> None:
        """Send those of these buckets, each with one gradient more, that are complete now."""
        missing = self._missing
        for bucket in buckets:
            missing[bucket] -= 1
            if missing[bucket]:
                continue
            self._sent[bucket] = True
            self.backend.mark_ready(bucket)
            if self.early_flags:
                used = self.flags[list(self.buffers.layout.slices[bucket].params)]
                self.early_flags[bucket].zero_()[: len(used)].copy_(used)
                self.backend.mark_ready(self.flags_bucket + 1 + bucket)

    # -- the end of a backward -------------------------------------------------------------------------------

    def end_of_backward(self, outermost: bool = False) -> None:
        """Send what has not been sent; SENT. The outer backward of an inner one continues."""
        with self.lock:
            if not outermost and (self.running or inside_a_backward()):
                return
            self._backward, self._counted = -1, False
            if self._is_local:
                self._is_local, self._passes = False, self._passes + self._is_early
            elif self.state is State.FILLING:
                if self.watch is not None:
                    self.watch.mark("backward_end")
                self.seal()
            self._creates_graph = False

    def backward_raised(self) -> None:
        """Let nobody take the incomplete gradients for whole ones; RAISED.

        This runs while the exception is on its way to the script, so that it has happened before the script
        clears the gradients.
        """
        with self.lock:
            self._backward, local = -1, self._is_local
            self._is_local = self._counted = False
            if local or self.state is not State.FILLING or self.closed:
                return
            self.state, self._uncleared = State.RAISED, None
            for gradient in self.reduced:
                there = gradient.param.requires_grad and raw_grad(gradient.param) is not None
                gradient.unclear = there or self.number in (gradient.filled, gradient.seen)
                if gradient.unclear and gradient.pends:
                    mark_pending(gradient.param, self._accesses[gradient.number], only_grad=True)

    def _leave_raised(self) -> None:
        """End the round of a backward that has raised, if its gradients have been cleared; IDLE.

        The other ranks need this rank's part of the round, whatever is in it.
        """
        unclear = [gradient for gradient in self.reduced if gradient.unclear and gradient.pends]
        if unclear:
            raise ValueError(
                f"rank {self.ranks.rank}: the last backward raised an exception, so {len(unclear)} gradients"
                f" (the first is that of {unclear[0].name}) are incomplete, and parts of them may have been"
                " sent to the other ranks; clear them on all ranks, for example with optimizer.zero_grad()"
            )
        self._abandon()
        self.mode.check_abandoned()

    def _abandon(self) -> None:
        """End a round whose sums nobody may use; IDLE."""
        self.abandoned = True
        kept = [(gradient, raw_grad(gradient.param)) for gradient in self.reduced]
        for gradient, grad in kept:
            if grad is not None and gradient.filled != self.number and gradient.is_in_place(grad):
                gradient.move_out()  # of a frozen parameter, from an earlier round
            if gradient.view is None:
                clear_pending(gradient.param)
        for gradient, _ in kept:
            gradient.unclear, gradient.sum, gradient.apart = False, None, None
            if gradient.filled != self.number:
                gradient.filled = self.number
                if gradient.view is not None:
                    gradient.payload.put_zeros()
            gradient.take(raw_grad(gradient.param))
        self.seal()
        self.mode.discard()
        for gradient, grad in kept:  # set since by user code, or by the backward that has just begun
            if grad is not None and not gradient.is_in_place(grad):
                set_raw_grad(gradient.param, grad)

    def seal(self) -> None:
        """Send all that has not been sent; SENT. Gradients that were set outside of a backward count like any
        other.
        """
        with self.lock:
            if self.state not in (State.FILLING, State.RAISED):
                self._check_sums()  # before anything is sent
                self._begin()
            for gradient in self.travelling:
                if gradient.filled != self.number:
                    grad = raw_grad(gradient.param)
                    if grad is not None:
                        if self.backend.has_streams:  # it may have been computed on another one
                            self.backend.reads(grad)
                        self._put(gradient, grad)
                    else:
                        gradient.payload.put_zeros()
                gradient.payload.seal()
                gradient.exposed = False
            for gradient in self.outside:
                grad = raw_grad(gradient.param)
                if gradient.filled != self.number and (grad is not None or gradient.param.requires_grad):
                    if grad is not None:
                        self._put(gradient, grad)
                    gradient.exposed = False
            unsent = [bucket for bucket, sent in enumerate(self._sent) if not sent]
            self._missing = [1] * self.flags_bucket
            self._send(unsent)
            self._send_flags()
            for param in self.strangers():
                # Other classes: another optimizer's sum may be on its way.
                if type(param) is nn.Parameter and (param.requires_grad or param.grad is not None):
                    self._refuse_reading(param)
            self.state, self.send_at_end, self._is_first = State.SENT, False, False
            pending = [gradient for gradient in self.reduced if not gradient.exposed]
            self.pending = len(pending)
            unguarded = []
            for gradient in pending:
                if not gradient.pends:
                    unguarded.append(gradient.number)
                elif gradient.filled != self.number:
                    mark_pending(gradient.param, self._accesses[gradient.number], only_grad=True)
            if unguarded:
                self.complete(unguarded)
            if self.mode.updates_early:
                self.guard()  # nobody reads what each rank has updated in part

    def _refuse_reading(self, param: nn.Parameter) -> None:
        """Refuse to show a gradient that only ``step()`` reduces: scripts would clip it beside sums."""

        def refuse() -> None:
            raise ValueError(
                f"rank {self.ranks.rank}: a parameter of shape {tuple(param.shape)} was put into"
                " optimizer.param_groups by hand, so its gradient is this rank's alone until step(); call"
                " optimizer.add_param_group() instead, on all ranks, before the backward"
            )

        def replace(grad: torch.Tensor | None) -> bool:
            set_raw_grad(param, grad)
            clear_pending(param)
            return True

        def clear(set_to_none: bool) -> bool:
            return replace(None if set_to_none else torch.zeros_like(param, requires_grad=False))

        access = Access(refuse, replace, clear)
        self._refused.append((param, access))
        mark_pending(param, access, only_grad=True)

    def _show_refused(self) -> None:
        for param, access in self._refused:
            clear_pending(param, access)
        self._refused.clear()

    def _check_sums(self) -> None:
        for gradient in self.reduced:
            if gradient.sum is not None and raw_grad(gradient.param) is gradient.sum.shown:
                self._check_sum(gradient, gradient.sum, gradient.sum.shown)

    def _send_flags(self) -> None:
        flag, places, own = self.flag, self.places, self.ranks.own
        flag[places.samples] = self.samples
        flag[places.unweighted] = int(not self.samples and flag[: places.votes].any())
        flag[places.votes] = self.vote
        state = STEPPED * self.stepped + RAISED * self.abandoned + JOINED * self.joined
        if self.apart and (flag[: places.votes] >= LATE).any() and self.has_company():
            state += CROWDED
        flag[places.steps : places.samples][own] = state
        flag[places.waits : places.digests][own] = self.waited
        self.stepped, self.samples = False, 0
        self.backend.mark_ready(self.flags_bucket)

    # -- sums out --------------------------------------------------------------------------------------------

    def complete(self, params: Iterable[int]) -> None:
        """Wait for the sums of these parameters' gradients, then apply the deferred update, if any."""
        with self.lock:
            if self.state is State.FILLING:
                self._leave_filling()
            if self.state is State.RAISED:
                self._leave_raised()
            wanted = list(params)
            if self.state is State.SENT and any([i >= len(self.params) for i in wanted]):
                self.reduce_apart()
            if self.state is State.SENT and not self.mode.readable:
                self.wait_for_flags()
                wanted = [i for i in wanted if not self.gradients[i].exposed]
                if not any(self.used[i] for i in wanted):  # no rank has a gradient of these in this round
                    for i in wanted:
                        self.gradients[i].add_local()
                    return
                self.mode.refuse_reading()
            if self.pending:
                self.complete_buckets(bucket for i in wanted for bucket in self.gradients[i].buckets)

    def accessed(self, params: Iterable[int]) -> None:
        """Complete these parameters, because user code accesses them."""
        self.complete(params)
        self.raise_failed()

    def _leave_filling(self, whole: bool = False) -> None:
        """Seal a round whose backward has ended unnoticed, after that of an inner one.

        ``whole``: for a call that concerns all gradients, such as ``step()``.
        """
        if self.running or _task() != -1:
            if whole:
                raise ValueError(
                    f"rank {self.ranks.rank}: step(), synchronize() or zero_grad() is called inside of the"
                    " backward that computes this optimizer's gradients; call it after the backward, or let"
                    " one optimizer of all parameters update inside of it, with gather='parameters' and"
                    " early_step=True"
                )
            raise ValueError(
                f"rank {self.ranks.rank}: a gradient is read or set inside of the backward that computes it,"
                " after it was handed over to be reduced; do so in a hook of that parameter"
                " (register_post_accumulate_grad_hook), or after the backward"
            )
        self.end_of_backward(outermost=True)

    def complete_all(self) -> None:
        """Wait for all pending gradients and parameters, and for empty buckets, which the others need."""
        if self.pending or self.rest or not all([self.done[bucket] for bucket in self._empty]):
            with self.lock:
                self.reduce_apart()
                self.complete_buckets(range(self.flags_bucket))

    def needed(self, params: Sequence[int]) -> None:
        """Complete these parameters, because a module's forward is about to use them."""
        if self.state is State.IDLE:
            gradients = self.gradients
            for i in params:
                if not gradients[i].exposed:
                    self.accessed(params)
                    return

    def complete_buckets(self, buckets: Iterable[int]) -> None:
        """Wait for these buckets and expose every parameter that is in no other pending bucket.

        Its gradient becomes what plain PyTorch shows, and the deferred update is applied to it.
        """
        with self.lock, torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
            self.wait_for_flags()
            if self.outside and not self.rest:
                self._expose_outside([g for g in self.outside if not g.exposed])  # after an error
            if self.late:
                self.reduce_apart()
            done, slices, touched = self.done, self.buffers.layout.slices, dict[int, None]()
            missing = [bucket for bucket in buckets if not done[bucket]]
            for bucket in missing:  # all waits come first: Ctrl-C may end one, and a script may go on
                if not self.backend.is_gathered(bucket):
                    self.timed(self.bucket_names[bucket], self.backend.wait_gathered, bucket)
            for bucket in missing:
                done[bucket] = True
                touched.update(dict.fromkeys(slices[bucket].params))
            if self.rest and any([self.used[i] >= SPARSE for i in touched]):
                self.reduce_apart()
            gradients = self.gradients
            complete, used = [], []
            for i in touched:
                gradient = gradients[i]
                if gradient.exposed or not all([done[bucket] for bucket in gradient.buckets]):
                    continue
                gradient.exposed = True
                clear_pending(gradient.param)
                complete.append(gradient)
                only_sparse = self.used[i] % SPARSE == 0 and not self.sparse_as_dense
                if not self.used[i] or only_sparse:
                    gradient.payload.unused(self.buffers)  # what came over the buckets
                if self.used[i] and not self.abandoned:
                    self.mode.show(gradient)
                if gradient.touched or (self.used[i] and not self.abandoned):
                    used.append(i)
            self.pending -= len(complete)
            if self.deferred is not None and used:
                self.attempt(self.deferred, used)
            if self.failed is not None:
                self._followers.clear()
            for gradient in complete:
                if gradient.clear is not None:
                    gradient.apply_clear()
                if gradient.local is not None:
                    gradient.add_local()
                for take in self._followers.pop(gradient.number, ()):
                    take()
            self.backend.updates_issued()

    def _follow(self, i: int, take: Callable[[], None]) -> bool:
        """Call ``take`` when parameter ``i`` has been completed; False where it must be accessed now.

        A value is taken right after its update, under the lock: whoever needs it goes on afterwards, and user
        code that could change it has to access it first. ``take`` is never called if the update fails.
        """
        with self.lock:
            waits = self.state is State.IDLE and self.failed is None and not self.gradients[i].exposed
            if waits:
                self._followers.setdefault(i, []).append(take)
            return waits

    def attempt(self, update: Callable[..., None], *arguments: Any) -> None:
        """Run a part of an update; one that raises leaves out the later ones: see [Note: failing updates]."""
        if self.failed is None:
            try:
                update(*arguments)
            except BaseException as error:
                self.failed = error

    def raise_failed(self) -> None:
        """Raise what an update has raised, if nobody has seen it; the rest of the update is left out."""
        if self.failed is not None:
            error, self.failed, self.deferred = self.failed, None, None
            raise error

    def timed(self, what: str, wait: Callable[..., None], *arguments: int) -> None:
        """Wait and measure the time, which is exposed communication."""
        mark, start = self.backend.now(), time.monotonic()
        with profiled(f"commsched wait {what}"):
            wait(*arguments)
        self._waits.append((mark, self.backend.now()))
        if self.watch is not None:
            self.watch.wait(start, time.monotonic())

    def take_waits(self) -> list[tuple[Any, Any]]:
        """Return the backend's marks before and after each wait since the last call."""
        waits = list(self._waits)
        self._waits.clear()
        return waits

    def mark(self, name: str) -> None:
        if self.watch is not None:
            self.watch.mark(name)

    # -- flags -----------------------------------------------------------------------------------------------

    def wait_for_flags(self) -> None:
        """Wait until ``used`` contains which parameters any rank used in this round."""
        if self.used:
            return
        self.timed("flags", self.backend.wait_gathered, self.flags_bucket)
        places, flags = self.places, self.flags[: self.places.size].tolist()
        self.used = used = flags[: places.votes + 1]
        by_rank = flags[places.steps : places.samples]
        some_joined, self.ranks.joined = bool(self.ranks.joined), _ranks_with(JOINED, by_rank)
        self.waits_of_ranks.append(flags[places.waits : places.digests])
        self.digests = flags[places.digests :]
        self.raised = _ranks_with(RAISED, by_rank)
        self._check_raised()
        self._check_steps(by_rank, some_joined)
        self._weigh(flags[places.samples], flags[places.unweighted])
        if any(flag >= SPARSE for flag in used[: len(self.params)]):
            self.apart = True
            self.late = [i for i, flag in enumerate(used[:-1]) if flag >= LATE]
            self._crowded = bool(_ranks_with(CROWDED, by_rank))
            self.used = [flag % LATE for flag in used]
        elif not self.outside:
            return
        self.rest = self.reduces_apart()
        if not self.rest:
            self._expose_outside([g for g in self.outside if not g.exposed])
        elif self.state is not State.SENT:
            self.reduce_apart()

    def reduces_apart(self) -> bool:
        """Return whether this round, whose flags have arrived, has gradients that no bucket carries."""
        count, places, flags = len(self.params), self.places, self.flag
        if _ranks_with(RAISED, flags[places.steps : places.samples].tolist()):
            return False
        least = LATE if self.sparse_as_dense else SPARSE
        return bool((flags[:count] >= least).any() or flags[count : places.votes].any())

    def reduce_apart(self) -> None:
        """Reduce what no bucket contained, as the flags tell. Collective: see [Note: gradients apart]."""
        self.wait_for_flags()
        if not self.rest:
            return
        apart = [i for i, flag in enumerate(self.used[: len(self.params)]) if flag >= SPARSE]
        sparse = [i for i in apart if not self.sparse_as_dense or self.gradients[i].misfits()]
        self.mode.tell_joined("reduce apart")
        refusal = self.mode.refusal_of(sparse) if sparse else None
        if self.late:
            refusal = self._refusal_of_second() or refusal
        if refusal is not None and not self.abandoned:
            raise refusal
        outside = []
        if refusal is None:  # else no rank comes
            outside = [gradient for gradient in self.outside if self.used[gradient.number]]
            self._reduce_outside(outside)
            if self.late or sparse:
                self.mode.reduce_planned(sparse)
        self.rest = False
        self._expose_outside(outside, summed=True)
        self._expose_outside([g for g in self.outside if not g.exposed])

    def reduce_dense(self, gradients: Sequence[Gradient]) -> None:
        """Replace what these gradients have apart from the buckets by its mean (or sum). Collective.

        As in buckets: dense ones of a type travel together, rounded to the type of the wire.
        """
        kinds: dict[Any, list[Gradient]] = {}
        for gradient in gradients:
            kinds.setdefault((gradient.param.dtype, gradient.param.device), []).append(gradient)
        for (dtype, _), same in kinds.items():
            wire = self.scaling.wire_type(dtype) or dtype
            with without_completing():  # the parameters' values may be pending
                mine = [
                    torch.zeros_like(g.param, requires_grad=False) if g.apart is None else g.apart.to_dense()
                    for g in same
                ]
            total = torch.cat([grad.reshape(-1) for grad in mine]).mul_(self.scaling.before)
            total = total.to(wire).to(dtype)
            self.ranks.add_up(torch.view_as_real(total) if total.is_complex() else total, f"apart.{dtype}")
            total.mul_(self.scaling.after)
            if self.mode.gathers_sums:
                total = total.to(wire).to(dtype)
            for gradient, grad, part in zip(same, mine, total.split([g.numel() for g in mine]), strict=True):
                gradient.apart = torch.empty_like(grad).copy_(part.view(grad.shape))

    def _reduce_outside(self, outside: Sequence[Gradient]) -> None:
        """Reduce the gradients of parameters outside of the plan that some rank has. Collective."""
        self.summed_outside.update(gradient.number for gradient in outside)
        with torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
            self.reduce_dense([g for g in outside if self.used[g.number] % SPARSE])
            for gradient in outside:
                if self.used[gradient.number] % SPARSE == 0:  # no rank's gradient is dense
                    gradient.apart = self.ranks.reduce_sparse(
                        gradient.apart, gradient.param, gradient.name, mean=not self.sums
                    )

    def _expose_outside(self, complete: Sequence[Gradient], summed: bool = False) -> None:
        """Let gradients of parameters outside of the plan be read; ``summed``: they have been reduced."""
        with torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
            for gradient in complete:
                late = gradient.exposed and self.state is State.IDLE
                self.pending -= not gradient.exposed
                gradient.exposed = True
                clear_pending(gradient.param)
                if summed and not self.abandoned:
                    if late and self.failed is None:
                        self.failed = CommError(
                            f"rank {self.ranks.rank}: other ranks have a gradient of {gradient.name}, which"
                            " was frozen here, without a gradient, when step() was called; freeze parameters"
                            " after step(), and set gradients on all ranks"
                        )
                    gradient.show_sum(self.factor, self.sums)
                gradient.add_local()

    def _refusal_of_second(self) -> CommError | None:
        """Return why gradients cannot get what came late, if so: an error, until they are cleared."""
        why, way_out = self.mode.no_second, "gather='gradients'"
        if not why and self._crowded and not self._draining:
            why, way_out = "another DistributedOptimizer is open", "close the other one"
        return why and CommError(
            f"rank {self.ranks.rank}: a parameter received a second gradient in one backward after its bucket"
            f" had been sent (reentrant checkpointing of a module that is used twice?), and {why}; use"
            f" use_reentrant=False, or {way_out}"
        )

    def _check_raised(self) -> None:
        if self.raised and not self.abandoned and not self._all_cleared():
            self.mode.finish_round()
            raise CommError(
                f"rank {self.ranks.rank}: the backward of {ranks_text(self.raised)} raised an exception, so"
                " this step has incomplete gradients; catch the exception and call optimizer.zero_grad() on"
                " all ranks, and step() on none"
            )

    def _check_steps(self, by_rank: Sequence[int], some_joined: bool) -> None:
        """Raise unless all ranks have called ``step()`` since the last round, or none: else they differ.

        Where ranks had joined by the last round, and took a step after it, none is an error, too.
        """
        stepped = {rank: bool(flag % RAISED) for rank, flag in enumerate(by_rank) if flag < JOINED}
        if some_joined and self.mode.steps_after_each_round and stepped and not any(stepped.values()):
            self.mode.finish_round()
            raise CommError(
                f"rank {self.ranks.rank}: some ranks have joined, and between the last two backward passes"
                f" {ranks_text(sorted(stepped))} did not call step(); after join() on any rank, call step()"
                " after each backward pass (accumulate with set_backward_passes_per_step() or no_sync())"
            )
        if 0 < sum(stepped.values()) < len(stepped):
            did = ranks_text([rank for rank, flag in stepped.items() if flag])
            did_not = ranks_text([rank for rank, flag in stepped.items() if not flag])
            self.mode.finish_round()  # so that the other ranks raise this error too
            raise CommError(
                f"rank {self.ranks.rank}: between the last two backward passes {did} called step() and"
                f" {did_not} did not (the flags of round {self.number} say so); call step() on all ranks or"
                " on none, also on a rank that has no data"
            )

    def _weigh(self, samples: int, unweighted: int) -> None:
        """Let gradients be sums over samples, which are to be divided by the samples of all ranks."""
        if samples and unweighted:
            self.mode.finish_round()  # as above
            raise CommError(
                f"rank {self.ranks.rank}: in round {self.number} {unweighted} of {self.ranks.size} ranks had"
                " gradients of a loss that was not passed through optimizer.weighted(), and the others"
                f" counted {samples} samples; call weighted() on all ranks or on none"
            )
        if samples:
            self.factor = self.ranks.size / samples
            self.mode.weigh(self.factor)

    # -- what may stay on its way ----------------------------------------------------------------------------

    def guard(self) -> None:
        """From now on complete a parameter before anything accesses it: its update is pending."""
        for gradient in self.travelling:
            if not gradient.exposed and gradient.pends:
                mark_pending(gradient.param, self._accesses[gradient.number])

    def readable_unnoticed(self) -> list[int]:
        """Return the pending parameters that may be read without their noticing: others share their memory,
        or C++ code (a traced module) holds them.
        """
        waiting = [gradient for gradient in self.travelling if not gradient.exposed]
        params: list[torch.Tensor] = [gradient.param for gradient in waiting]
        own = [self.mode.holders(gradient.number) for gradient in waiting]
        unnoticed = {*foreign_users(params), *storages_held(params, own)}
        return [g.number for place, g in enumerate(waiting) if place in unnoticed or not g.pends]

    def early_parts(self) -> list[int]:
        """Return the tied weights of which this rank has sent the head's part first, in this round."""
        return [g.number for g in self.gradients if isinstance(g.payload, Tied) and g.payload.early]

    @property
    def may_come_apart(self) -> bool:
        """Whether ``step()`` must read the flags: see [Note: gradients apart]."""
        return self.apart or self.rest or any([not gradient.exposed for gradient in self.outside])

    def shared_memory(self) -> set[int]:
        """Return the parameters that share memory with each other, or with one that is frozen and has a
        gradient: their updates depend on their order.
        """
        return {i for i in overlapping([*self.params, *self.frozen()]) if i < len(self.params)}

    def frozen(self) -> list[nn.Parameter]:
        """Return the parameters outside of the plan that have a gradient: plain PyTorch updates them."""
        return [g.param for g in self.outside if raw_grad(g.param) is not None]

    def frozen_sharing(self) -> list[nn.Parameter]:
        """Return those of them that share memory."""
        frozen, count = self.frozen(), len(self.params)
        return [frozen[i - count] for i in overlapping([*self.params, *frozen]) if i >= count]

    def arrived(self) -> list[int]:
        """Return the buckets that can be completed without waiting."""
        if not self.backend.is_gathered(self.flags_bucket):
            return []
        return [b for b, done in enumerate(self.done) if not done and self.backend.is_gathered(b)]

    def all_arrived(self) -> bool:
        """Return whether every bucket that has not been completed can be without waiting."""
        return len(self.arrived()) == self.done.count(False)

    def settle(self) -> None:
        """Apply every pending update. Does not affect a running backward."""
        with self.lock:
            if self.state is State.IDLE:
                self.complete_all()

    # -- p.grad set and cleared ------------------------------------------------------------------------------

    def replaced(self, i: int, grad: torch.Tensor | None) -> bool:
        """React to ``p.grad = grad`` or ``del p.grad`` of a pending parameter; return whether that needs no
        waiting.
        """
        with self.lock:
            gradient = self.gradients[i]
            if self.state is State.FILLING:
                self._leave_filling()
            if self.state is State.IDLE:
                if grad is not None or gradient.exposed:
                    return False
                gradient.clear = True  # once the update has used it
                return True
            if self.state is State.SENT and gradient.view is not None:
                self.mode.check_not_updated(CLEARED)
            set_raw_grad(gradient.param, grad)  # raises where the gradient does not fit, as torch does
            clear_pending(gradient.param)
            in_place_of_sum = self.sums and self.state is State.SENT and grad is not None
            gradient.sum = Sum.of(grad) if in_place_of_sum else None  # type: ignore[arg-type]
            gradient.unclear, gradient.touched = False, True
            gradient.local = None
            self._end_if_cleared(i, self.state is State.RAISED or grad is None)
            return True

    def _end_if_cleared(self, i: int, cleared: bool) -> None:
        """End the round with the last gradient that user code clears, as ``zero_grad()`` does.

        The other ranks may wait for its end before they come to the next use of this optimizer.
        """
        if self._uncleared is None:
            left = [g for g in self.reduced if g.pends]
            if self.state is State.RAISED:
                left = [g for g in left if g.unclear]
            else:
                left = [g for g in left if not g.touched and g.param.requires_grad]
            self._uncleared = {g.number for g in left}
        (self._uncleared.discard if cleared else self._uncleared.add)(i)
        if not self._uncleared:
            self.leave_cleared()

    def cleared(self, i: int, set_to_none: bool) -> bool:
        """React to ``Module.zero_grad`` on a pending parameter; return whether that needs no waiting."""
        with self.lock:
            gradient = self.gradients[i]
            if self.state is State.IDLE and not gradient.exposed:
                gradient.clear = set_to_none or gradient.clear is True
                return True
            there = not set_to_none
            if there and self.state is State.SENT:
                self.wait_for_flags()
                # What no rank has used stays None, unless a local gradient has come since.
                there = bool(self.used[i]) or gradient.local is not None
            elif there and self.state is State.RAISED:
                there = gradient.unclear
            return self.replaced(i, torch.zeros_like(gradient.param, requires_grad=False) if there else None)

    # -- the optimizer's side --------------------------------------------------------------------------------

    def count(self, samples: int) -> None:
        """Count the samples of a weighted loss whose backward begins.

        The sums of this round will be divided by the samples of all ranks, with all that they contain.
        """
        with self.lock:
            if self.state is State.SENT:
                self.leave_cleared()
            if self.state is State.SENT:
                raise ValueError(
                    f"rank {self.ranks.rank}: a weighted loss cannot add to gradients that are reduced"
                    " already; accumulate several backward passes with set_backward_passes_per_step() or"
                    " no_sync(), or call step() or zero_grad() first"
                )
            if self.state is State.IDLE:
                there = self._uncleared_gradient()
                if there is not None and not self.samples:
                    raise ValueError(
                        f"rank {self.ranks.rank}: a weighted loss cannot add to the gradient of {there},"
                        " which no weighted loss has computed: it would be divided by the samples as well;"
                        " clear gradients after each step, for example with optimizer.zero_grad(), and pass"
                        " every loss of a step through optimizer.weighted()"
                    )
                if there is None:
                    self.samples = 0  # user code has cleared the gradients of those that were counted
            self.samples += samples
            self._counted = True
            _EndOfWeighted(self)
            if self.samples * self.ranks.size >= LARGEST:
                raise ValueError(
                    f"rank {self.ranks.rank} counts {self.samples} samples in one step, but those of"
                    f" {self.ranks.size} ranks must sum to less than {LARGEST}; count in larger units"
                )

    def _check_counted(self, i: int) -> None:
        """Refuse a loss that is not weighted, and whose first gradient is `i`, among weighted ones."""
        there = self._uncleared_gradient(apart_from=i)
        if there is not None:
            raise ValueError(
                f"rank {self.ranks.rank}: a loss that was not passed through optimizer.weighted() adds to the"
                f" gradient of {there}, which has {self.samples} samples; pass every loss of a step through"
                " weighted(), or none"
            )
        self.samples = 0  # user code has cleared the gradients of those that were counted

    def _check_weighted_here(self, backward: int, i: int) -> None:
        """Refuse a loss that another optimizer has weighted: this one would not divide by its samples."""
        inner, own = inside_a_backward(), self.ranks.global_own
        by = [(task, of()) for task, of in list(_counted_in.items())]
        if any(
            of is not None and of is not self and (task == backward or (inner and of.ranks.global_own == own))
            for task, of in by
        ):
            raise ValueError(
                f"rank {self.ranks.rank}: a loss that another optimizer has weighted computes the gradient of"
                f" {self.gradients[i].name}, which would not be divided by the samples; let each optimizer"
                " weight a loss of its own parameters alone, or train all in one optimizer's groups"
            )

    def _uncleared_gradient(self, apart_from: int = -1) -> str | None:
        """Return the name of a parameter with a gradient other than zero, to which a backward would add."""
        if any(not gradient.exposed and gradient.clear is None for gradient in self.gradients):
            self.complete_all()  # a pending update leaves its gradients
        for gradient in self.gradients:
            grad = raw_grad(gradient.param) if gradient.exposed else None
            there = gradient.local is not None or (grad is not None and not is_zero(grad))
            if there and gradient.number != apart_from:
                return gradient.name
        return None

    def check_can_end(self) -> None:
        """Raise ``ValueError`` where user code must act before this rank can reduce its gradients."""
        with self.lock:
            self.leave_cleared()
            if self.state is State.IDLE:
                self._check_sums()
                self.mode.check_can_begin()
            self.mode.check_not_updated("there are no other parameters")
            self.mode.check_fits()

    def require_sent(self) -> None:
        """Reduce what has not been reduced: without a backward, the gradients in ``p.grad``."""
        with self.lock:
            self.leave_cleared()
            if self.state is State.IDLE or self._dirty:
                self.seal()

    def clear_grads(self, set_to_none: bool) -> None:
        """``zero_grad``: pending gradients are cleared on arrival, a round without a step is discarded."""
        with self.lock:
            if self.state is State.FILLING:
                self._leave_filling(whole=True)
            there: list[Gradient] = []  # gradients that plain PyTorch would show now
            raised = self.state is State.RAISED
            if raised:
                there = [gradient for gradient in self.reduced if gradient.unclear]
                self._abandon()
            elif self.state is State.SENT:
                self.mode.check_not_updated(CLEARED)
                self.abandoned = True
                waited_for = [] if self.mode.gathered else [g for g in self.reduced if not g.exposed]
                self.mode.discard()
                there = [g for g in waited_for if self.used[g.number] and not g.touched]
            self._passes, self.samples, self._dirty = 0, 0, False
            for gradient in self.gradients:
                gradient.clear, gradient.local = set_to_none or gradient.clear is True, None
                if gradient.exposed:
                    gradient.apply_clear()
            self.mode.cleared(set_to_none)
            self._show_refused()
            for param in self.strangers():
                if not is_pending(param):
                    clear_raw_grad(param, set_to_none)
            for gradient in there if not set_to_none else ():
                gradient.show_zeros()
            if raised:
                self.mode.check_abandoned()

    def finish_step(self, stepped: bool = True) -> None:
        """End the step, also one that was left out: later gradients belong to the next one. IDLE."""
        with self.lock:
            self.stepped, self.state, self._passes, self.due = stepped, State.IDLE, 0, False
            self.backend.step_ended()

    def keep_values(self) -> None:
        """Copy the gradients that user code sees, because the buckets will change."""
        for gradient in self.gradients:
            gradient.keep_values(self.sums)

    def inherit(self, before: Round) -> None:
        """Continue from the finished round of other parameters."""
        self.backward_passes, self.local_only = before.backward_passes, before.local_only
        self.samples, self.stepped, self.number = before.samples, before.stepped, before.number
        self.apart = self.apart or before.apart
        self.failed, self._passes, self._dirty = before.failed, before._passes, before._dirty
        sums = {g.param: g.sum for g in before.gradients if g.sum is not None}
        for gradient in self.gradients:
            found = sums.get(gradient.param)
            if found is not None and raw_grad(gradient.param) is found.shown:
                gradient.sum = found
        self.mode.inherit(before.mode)

    def weigh_new(self, known: Container[int], factor: float) -> None:
        """Divide what a weighted backward has left in parameters whose ids its round did not know."""
        for gradient in self.gradients:
            grad = raw_grad(gradient.param)
            if grad is not None and factor != 1.0 and id(gradient.param) not in known:
                set_raw_grad(gradient.param, grad * factor)

    def leave_cleared(self) -> None:
        """End a round whose gradients user code has cleared one by one, or whose backward has raised."""
        with self.lock:
            if self.state is State.FILLING:
                self._leave_filling(whole=True)
            if self.state is State.RAISED:
                self._leave_raised()
            elif self.state is State.SENT and self._all_cleared():
                self.mode.check_not_updated(CLEARED)
                self.abandoned = True
                self.mode.discard()

    def leave_empty(self) -> None:
        """End a round in which no rank had a gradient: the first gradient on any rank begins one on all."""
        with self.lock:
            if self.state is State.SENT:
                self.wait_for_flags()
                if not any(self.used[: self.places.votes]):
                    self.mode.discard()

    def _all_cleared(self) -> bool:
        """Return whether user code has cleared every gradient that it trains, since the round was sent.

        One that is frozen now, and was used by some rank, stays.
        """
        with torch._C.DisableTorchFunctionSubclass():
            left = []
            for gradient in self.reduced:
                waits = not (self.mode.gathered or gradient.exposed or gradient.touched)
                if gradient.param.grad is not None or (waits and gradient.param.requires_grad):
                    return False
                if waits:
                    left.append(gradient.number)
        if left:
            self.wait_for_flags()
        return not any(self.used[i] for i in left)

    def drain(self) -> None:
        """Apply pending updates and show the last sums, before the end. Collective."""
        with self.lock:
            self._draining = True  # all ranks come to the end of this optimizer, whatever others there are
            if self.state is State.FILLING:
                self._leave_filling(whole=True)
            if self.state is State.RAISED:
                self._abandon()
            elif self.state is State.SENT:
                try:
                    self.wait_for_flags()
                except CommError:
                    if not self.raised:
                        raise
                if self.raised:  # the ranks whose backward has raised do the same
                    self.abandoned = True
                    self.mode.discard()
                else:
                    self.mode.end_round()
            self.complete_all()

    def leave(self) -> None:
        """Apply pending updates, and wait until no other rank needs this one, before the end.

        Not collective: the garbage collector may end this optimizer, on each rank at another time.
        """
        with self.lock:
            if self.state is State.IDLE:
                self.complete_all()
            elif self.state is State.SENT:
                self.mode.leave_round()

    def close(self) -> None:
        """Make the parameters ordinary again, and give the buckets back; pending results are lost."""
        with self.lock:
            self.closed, self.deferred, self.state = True, None, State.IDLE
            self._followers.clear()
            for gradient in self.gradients:
                gradient.unclear = False
                clear_pending(gradient.param)
                release_class(gradient.param)
                gradient.place(None)
                gradient.local = gradient.apart = None
            self._show_refused()
            if self._installed:
                self._finish()  # the optimizer's state can be read without waiting for anybody
            self.mode.close()


def _ranks_with(flag: int, by_rank: Sequence[int]) -> list[int]:
    return [rank for rank, flags in enumerate(by_rank) if flags // flag % RAISED]
