"""The methods of a wrapped optimizer that replace or extend those of its own class."""

from __future__ import annotations

import operator
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.backends.ranks import empty_rows
from commsched.collectives.carrier import carrier_or_none, epoch
from commsched.collectives.job import ProcessSet, global_process_set
from commsched.collectives.operations import (
    Adasum,
    Sum,
    allreduce,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from commsched.errors import CommError
from commsched.optimizer.gradient import OptimizerState, is_zero
from commsched.optimizer.pending import is_late, ordinary
from commsched.optimizer.planner import Options
from commsched.optimizer.session import Session, take_over
from commsched.optimizer.sharded_step import ShardedStep, load_state_dict_of, state_dict_with
from commsched.optimizer.whole_step import is_separable, plain_step
from scheduler.ir.profile import Profile

Closure = Callable[[], Any]


def refuse_part(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "with gather='parameters' each rank has a part of the optimizer's state, and optimizer.state does not"
        " hold it; read it with state_dict() and change it with load_state_dict(), on all ranks"
    )


class PartOfState(dict[Any, Any]):
    """``optimizer.state`` where it is spread over the ranks: what every rank has of it, to be read only."""

    __missing__ = __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = refuse_part


class _Forwarded:
    """An attribute that is looked up as if the class did not have it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance.__getattr__(self._name)


def forward_to_wrapped(cls: type, methods: type) -> None:
    """Forward the attributes that ``cls`` inherits from ``methods``, if it imitates an optimizer.

    Lightning and Fabric make objects that hold a wrapped optimizer and look like one.
    ``type("LightningSGD", (LightningOptimizer, type(optimizer)), {})`` inherits the wrapped optimizer's
    methods, for ``isinstance`` alone. Called on such an object, they would not find the optimizer's session.
    The object's ``__getattr__`` returns the attributes of the optimizer it holds, so these methods are looked
    up there.
    """
    before = cls.__mro__[: cls.__mro__.index(methods)]
    if not any("__getattr__" in vars(base) for base in before):
        return
    for name in vars(methods):
        if not name.startswith("__") and not any(name in vars(base) for base in before):
            setattr(cls, name, _Forwarded(name))


def _plain(cls: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    return optimizer


class DistributedMethods(Optimizer):
    """Mixed in before the wrapped optimizer's class.

    Several ranks have a session or, where gradients are reduced one by one, an ``Unplanned``. Without either
    the methods do what torch does.
    """

    _session: Session | None = None
    _unplanned: Unplanned | None = None
    _base: type[Optimizer] = Optimizer
    _model: nn.Module | None
    _options: Options
    _parameter_names: dict[nn.Parameter, str]  # Horovod's attribute
    _skip = False
    _synchronized = False
    _samples = 0  # counted on a rank alone
    _make_unplanned: Callable[[], Unplanned] | None = None  # where gradients are reduced one by one
    _job: int | None = None  # the epoch of the job that this optimizer is connected to
    _released = _closed = False
    _plain_step: Any = None  # the step() that a scheduler had put into the instance before it was wrapped
    backward_passes_per_step = 1
    _ordinary: Options | None = None  # the options that were asked for, in the place of virtual ranks'
    _reads_ahead = False  # while the state is read without waiting for pending updates
    _is_summed = False  # with virtual ranks: the gradients are their sums, and no step has used them

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward_to_wrapped(cls, DistributedMethods)

    # -- the step --------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the reduced gradients; returns the result of ``closure``, if given.

        A parameter whose gradient has not arrived is updated when it is first needed, with the
        hyperparameters of this call. Every access to such a parameter waits for the update.
        """
        self._check_connected()
        if self._options.virtual_divisor and not self._is_summed:
            raise ValueError(
                "with elastic.run(virtual_ranks=...) each step() needs new gradients of all virtual ranks:"
                " compute them in 'for v in hvd.elastic.virtual_ranks(state):', to the end of that loop;"
                " after that function, an ordinary elastic.run function restores the optimizer for real ranks"
            )
        self._is_summed = False
        if self._synchronized and not self._skip:
            again = "they are reduced again" if self._unplanned else "Horovod would reduce them again"
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize(), but synchronize() has reduced"
                f" the gradients: {again}",
                stacklevel=4,
            )
        self._synchronized = False
        if self._unplanned is not None and self._unplanned.op == Adasum:
            return self._unplanned.adasum_step(self._named(), partial(self._update, closure))
        if self._session is None and self._unplanned is None:
            self._divide_alone()
            return self._update(*(() if closure is None else (self._dividing(closure),)))
        if closure is not None and not is_separable(self._base):
            return self._step_whole(closure)
        loss = None
        if closure is not None:  # run once, before the update, which may then wait for its gradients
            with torch.enable_grad():
                loss = closure()
            self._synchronized = False
        if self._session is None:
            if not self._skip:
                self._synchronize()
            result = self._update()
            return result if closure is None else loss
        session = self._refreshed()
        session.round.mark("enter")
        if not self._skip:
            session.round.require_sent()
        if session.round.due:
            session.compare()
        session.mode.step(self, session.synchronous)
        session.after_step()
        session.round.raise_failed()
        return loss

    def _step_whole(self, closure: Closure) -> Any:
        """Step an optimizer that updates all parameters at once, and runs the closure itself, as often as it
        likes: gradients are reduced each time.
        """

        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._synchronize()
            if self._session is not None and self._session.round.due:
                self._session.compare()
            return loss

        result = self._update(reduced)
        self._synchronized = False
        if self._session is not None:
            self._session.round.finish_step()
            self._session.after_step()
        return result

    def _dividing(self, closure: Closure) -> Closure:
        """Return the closure on a rank alone, with gradients divided by the samples of weighted losses."""

        def run() -> Any:
            loss = closure()
            self._divide_alone()
            return loss

        return run

    def _refreshed(self) -> Session:
        """Return the session, whose round knows the parameters as they are now."""
        session = self._session
        assert session is not None
        if self._closed:
            raise CommError(
                f"rank {session.backend.ranks.rank}: this optimizer is closed, by close() or because another"
                " one was made over some of its parameters, so it reduces no gradients; wrap the optimizer"
                " again, or call release() in the place of close() to go on alone"
            )
        session.refresh()
        return session

    def _every_param(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def _update(self, *closure: Any) -> Any:
        # A closure runs the model, whose compiled graphs know their parameters by the class.
        with ordinary(() if closure else self._every_param()):
            return plain_step(self._base)(self, *closure)

    # -- Horovod's methods -----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every ``p.grad`` holds the reduced gradient, for example to clip it."""
        self._synchronize()
        self._synchronized = self._options.gather == "gradients"

    def reduce_before_step(self) -> None:
        """Let every ``p.grad`` be the reduced gradient, for a trainer that clips or unscales it next.

        Unlike after ``synchronize()``, ``step()`` does not reduce these gradients again, so the trainer's
        ``step()`` needs no ``skip_synchronize()``. Whole gradients with a plan need nothing: reading them
        waits. With Adasum gradients stay each rank's own.
        """
        if self._unplanned is not None:
            self._unplanned.reduce_once(self._named())
        elif self._shards is not None:
            self.synchronize()

    def _synchronize(self) -> None:
        self._divide_alone()
        if self._unplanned is not None:
            self._unplanned.reduce(self._named())
        elif self._session is not None:
            with self._sent() as session:
                session.mode.gather_gradients()

    @contextmanager
    def _sent(self) -> Iterator[Session]:
        """Reduce what has not been reduced; afterwards end a round in which no rank had a gradient."""
        session = self._refreshed()
        session.round.require_sent()
        yield session
        session.round.leave_empty()

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """Return all parameters: some may have been added, frozen or unfrozen since the wrapping."""
        names = self._names()
        return [(names[p], p) for p in self._every_param()]

    def _names(self) -> dict[nn.Parameter, str]:
        """Return the parameters' names, with numbers for those that were added later.

        Numbers are not places: those that user code has taken out of a group keep theirs.
        """
        names = self._parameter_names
        unnamed = (p for p in self._every_param() if p not in names)
        later = {p: f"parameter.{i}" for i, p in enumerate(unnamed, len(names))}
        self._parameter_names = names = names | later
        return names

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context ``step()`` uses the gradients as they are, reduced by ``synchronize()``."""
        if self._unplanned is not None and self._unplanned.op == Adasum:
            raise AssertionError("Adasum combines the update itself within step(), which can not be skipped")
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate this many backward passes locally before the gradients are reduced."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
        self.backward_passes_per_step = passes
        if self._session is not None:
            self._session.round.backward_passes = passes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context gradients accumulate locally, as in DDP; the next backward reduces the sum."""
        session = self._session
        if session is None:
            yield
            return
        before, session.round.local_only = session.round.local_only, True
        try:
            yield
        finally:
            session.round.local_only = before  # another round, where parameters were frozen or added within

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those of pending updates."""
        session = self._session
        if session is None or self._closed:
            self._samples = 0
            self._base.zero_grad(self, set_to_none)
            return
        session.round.clear_grads(set_to_none)

    def weighted(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        """Return a loss for ``backward()`` from the mean loss of this rank's samples.

        The step's gradients become those of the mean over all samples that were counted in it, on all ranks
        and in all accumulated backward passes. ``samples`` may count anything: sequences, tokens, pixels.
        """
        count = operator.index(samples)
        if count < 1:
            raise ValueError(
                f"weighted() needs a count of at least 1, got {count}; a rank without samples only calls"
                " step()"
            )
        if self._unplanned is not None or self._options.sums:
            raise ValueError(
                "weighted() divides by the samples of all ranks, but op=Sum, Adasum, virtual ranks and"
                " gradients that are reduced without a plan are not divided so; use op=Average with a plan"
            )
        if self._session is not None:
            self._session.mode.refuse_early("weighted()")
        total = loss * count  # so gradients add up to a sum over samples
        if total.requires_grad:
            # When the backward begins: zero_grad() may be called after the forward.
            total.register_hook(lambda _: self._count(count))
        return total

    def _count(self, count: int) -> None:
        """Count the samples of a weighted loss whose backward begins."""
        if self._session is not None:
            self._session.round.count(count)
            return
        there = any(p.grad is not None and not is_zero(p.grad) for p in self._every_param())
        if there and not self._samples:
            raise ValueError(
                "a weighted loss cannot add to gradients that no weighted loss has computed: they would be"
                " divided by the samples as well; clear gradients after each step, for example with"
                " optimizer.zero_grad(), and pass every loss of a step through optimizer.weighted()"
            )
        self._samples = count + self._samples * there

    def _divide_alone(self) -> None:
        """Divide the gradients of weighted losses where no reduction does it, because there is one rank."""
        samples, self._samples = self._samples, 0
        for param in self._every_param() if samples else ():
            if param.grad is not None:
                param.grad.div_(samples)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients to a total norm of at most ``max_norm``; return the norm they had."""
        if self._unplanned is not None and self._unplanned.op == Adasum:
            raise ValueError(
                "Adasum combines updates, so there are no reduced gradients to clip; clip those of each rank"
                " with torch.nn.utils.clip_grad_norm_()"
            )
        if self._shards is not None and not self._options.virtual_divisor:  # norms of shards round otherwise
            with self._sent():
                return self._shards.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        if self._unplanned is not None:
            self.reduce_before_step()
        else:
            self._synchronize()
        return nn.utils.clip_grad_norm_(self._every_param(), max_norm, norm_type, error_if_nonfinite)

    # -- state and profile -----------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The optimizer's state; on shards a copy without their part, which cannot be changed."""
        self._settle()
        own = self.__dict__["state"]
        return own if self._shards is None or self._closed else PartOfState(own)

    @state.setter
    def state(self, value: Any) -> None:
        if self._shards is not None and not self._closed:
            refuse_part()
        self.__dict__["state"] = value

    @property
    def spreads_state(self) -> bool:
        """Whether every rank must call ``state_dict()``, because each has a part of the state only."""
        return self._session is not None and self._session.mode.spreads_state

    @property
    def _shards(self) -> ShardedStep | None:
        mode = self._session.mode if self._session is not None else None
        return mode if isinstance(mode, ShardedStep) else None

    def _settle(self) -> None:
        """Apply pending updates, before something reads the optimizer's state."""
        if self._session is not None and not self._reads_ahead:
            self._session.round.settle()
            self._session.round.raise_failed()

    def _whole_state(self) -> dict[Any, Any]:
        """Return the state of whole parameters, on every rank. Collective where each has a part."""
        self._settle()
        own: dict[Any, Any] = self.__dict__["state"]
        session = self._session
        if session is None:
            return own
        if not (self._closed or session.round.closed):
            return session.mode.whole_state(own)
        if session.mode.spreads_state and not own:
            raise CommError(
                f"rank {session.backend.ranks.rank}: this optimizer is closed, and each rank has a part of"
                " its state; call state_dict() on all ranks before close(), or release() in its place"
            )
        return own

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict; either optimizer can load that of the other.

        With ``gather="parameters"``, ``Compression.int8`` or ``fp8`` every rank must call: each has a part.
        """
        whole = self._whole_state()
        # In the order of the parameters: they get their states in another one on each rank.
        ordered = {p: whole[p] for p in chain(self._every_param(), whole) if p in whole}
        return state_dict_with(self, self._base, defaultdict(dict, ordered))

    def state_so_far(self) -> tuple[dict[str, Any], dict[int, nn.Parameter], OptimizerState]:
        """Return the state dict without waiting, with None as the state of late parameters, these by their
        numbers there, and where their states will be.

        None is late where others than this class may look at the states, or each rank has a part.
        """
        session, late, own = self._session, dict[int, nn.Parameter](), self.__dict__["state"]
        hooks = self._optimizer_state_dict_pre_hooks.values()
        is_plain = self._base.state_dict is Optimizer.state_dict and "state_dict" not in self.__dict__
        is_plain &= not self._optimizer_state_dict_post_hooks and all(hasattr(h, "settles") for h in hooks)
        if is_plain and session is not None and not (self._closed or session.mode.spreads_state):
            late = {i: p for i, p in enumerate(self._every_param()) if is_late(p)}
        if not late:
            return self.state_dict(), late, own
        self._reads_ahead = True
        try:
            found = self.state_dict()
        finally:
            self._reads_ahead = False
        states = found["state"]
        numbers = chain(range(len(self._every_param())), states)
        found["state"] = {i: None if i in late else states[i] for i in numbers if i in late or i in states}
        return found, late, own

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let copies and pickles be plain optimizers of the wrapped class."""
        return _plain, (self._base, {**self._base.__getstate__(self), "state": self._whole_state()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._settle()
        load_state_dict_of(self, self._base, state_dict, self._options.master_weights)
        if self._session is not None and not self._closed:
            self._session.mode.take_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch. All ranks must add the same one."""
        self._settle()
        add = partial(self._base.add_param_group, self, param_group)
        if self._session is None or self._closed:
            add()
        else:
            self._session.begin_anew(add)

    def close(self, wait: bool = True) -> None:
        """Apply the last update (not with ``wait=False``, after an error); end connections and threads.

        The parameters can be read afterwards, whatever has failed before. Never raises. Where each rank has a
        part of the state (``spreads_state``), every rank must call: the wrapped optimizer gets all of it.
        """
        if self._session is not None and not self._closed:
            session = self._session
            ends = session.round.drain, session.mode.finish_all
            # Not where the round has ended already, by an error: the other ranks do not come.
            for act in ends if wait and not session.round.closed else ():
                with suppress(Exception):  # of ranks that are gone; what is here is kept
                    act()
            session.close(wait)
            self._closed = True
            # The wrapped optimizer steps by itself again.
            self.__dict__.pop("step", None)
            if self._plain_step is not None:
                self.__dict__["step"] = self._plain_step

    # [Note: optimizers outlive jobs]
    # An optimizer is connected to one epoch of the job: connections, buckets, plans and shards are made for
    # the ranks of that epoch. When it ends (a rank is lost, or hosts change), ``disconnect()`` leaves a plain
    # optimizer with the whole state. ``connect()`` then makes everything anew for the ranks there are, and
    # nothing where there is one. Both are collective, so no rank may notice by itself that it is time:
    # ``commsched.elastic.run`` calls them between two calls of the user's function, on all ranks, in the
    # order in which the optimizers were made. A script that calls ``shutdown()`` and ``init()`` itself calls
    # ``release()`` and ``resume()``. ``step()`` of an optimizer that was left out is an error: it would use
    # the gradients of this rank alone, or wait for ranks that are gone.

    def connect(self) -> None:
        """Reduce gradients over the ranks of the job as it is now. Collective."""
        process_set = self._options.process_set
        self._session = self._unplanned = None
        self._released = False
        # One rank alone needs a session for master weights only.
        if process_set.included() and ((process_set.size() or 1) > 1 or self._options.master_weights):
            if self._make_unplanned is not None:
                take_over(self)
                self._unplanned = self._make_unplanned()
            else:
                self._session = Session(self)
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        if self._session is not None and self._options.virtual_divisor:
            self._session.round.local_only = True  # ``elastic.virtual_ranks`` takes what backwards compute
        self._job = epoch()

    def disconnect(self, wait: bool) -> None:
        """Be a plain optimizer until ``connect()``. Collective, unless ``wait`` is False.

        After an error, ``wait=False`` drops the gradients, and the updates that are on their way: the
        parameters can be read and loaded.
        """
        if self._closed or self._released:
            return
        self.release(wait)
        self._unplanned, self._job, self._released = None, None, False
        if not wait:
            self._samples = 0
            self._base.zero_grad(self)

    def set_virtual_ranks(self, count: int) -> None:
        """Expect gradients that ``elastic.virtual_ranks`` has summed over so many virtual ranks; 0: none.

        Collective: an optimizer that is connected gets other connections in ``resume()``.
        """
        asked = self._ordinary or self._options
        other = asked.wire_dtype or asked.early_step or asked.predivide != 1 or self._make_unplanned
        some = asked.process_set is not global_process_set or any(p.is_complex() for p in self._every_param())
        if count and (other or some):
            raise ValueError(
                f"virtual ranks need exact sums over all ranks, but this {self._base.__name__} was wrapped"
                " with compression=, early_step=, gradient_predivide_factor=, process_set=, op=Adasum or"
                " transport='plain', or has complex parameters; leave these out"
            )
        options = asked.for_virtual_ranks(count, self._every_param()) if count else asked
        if options != self._options:
            self.disconnect(wait=True)
        self._options, self._ordinary = options, asked if count else None

    def _check_connected(self) -> None:
        current = carrier_or_none()
        if current is None or self._job == epoch() or self._released or self._closed:
            return
        launch = current.launch
        if self._session is not None and not launch.elastic:
            return  # the ranks are the same as before, and so are the connections
        if launch.size == 1 and self._session is None:
            self.connect()
            return
        raise CommError(
            f"rank {launch.rank} of {launch.size}: this optimizer is not connected to the ranks of the job as"
            " it is now; train in a function with @commsched.elastic.run, and make the optimizer before that"
            " function is called, or inside of it in each call; or call optimizer.release() before shutdown()"
            " and optimizer.resume() after init(), on all ranks"
        )

    def release(self, wait: bool = True) -> None:
        """Apply the last update and step locally from now on, with the whole state. Every rank must call.

        After an error, ``wait=False`` calls no other rank, and the state of other ranks' shards is lost.
        """
        if self._session is not None:
            if wait and not self._closed:
                self._session.mode.finish_all()
            self._session.close(wait)
            self._session, self._released, self._closed = None, True, False
        elif self._unplanned is not None:
            self._unplanned, self._released = None, True

    def resume(self) -> None:
        """Reduce gradients again after ``release()``, over the job as it is now. Every rank must call."""
        if self._released or (self._session is None and self._job != epoch()):
            self.connect()

    def profile(self) -> Profile:
        """Return the measured profile; ``.save(FILE)`` writes it, ``profile=FILE`` plans from it."""
        if self._session is None or self._session.profile is None:
            raise ValueError(
                "no profile has been measured yet; it is there after a few steps with schedule='auto' on"
                " several ranks"
            )
        return self._session.profile.whole()


# -- gradients reduced one by one ----------------------------------------------------------------------------

# Buckets cannot carry these: Adasum, compressors of single tensors, and parameters on several devices. They
# are reduced within ``step()``.

Named = list[tuple[str, torch.Tensor]]


@dataclass
class Unplanned:
    """Reduces the gradients of one optimizer; the fields are Horovod's arguments."""

    compression: Any
    op: Any
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet
    groups: list[list[torch.Tensor]] | None
    # The last result of each parameter, and its version: one that is frozen since is not reduced again.
    _results: dict[torch.Tensor, tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=dict)
    # Gradients that ``reduce_once`` has reduced and no backward has added to: the next reduction leaves them
    # out, whatever a trainer has done within their memory since.
    _reduced: dict[torch.Tensor, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    _watched: set[torch.Tensor] = field(default_factory=set)

    def reduce_once(self, named: Named) -> None:
        """Reduce gradients before ``step()``, which then reduces only what a backward adds to afterwards."""
        if self.op == Adasum:
            return
        self.reduce(named)
        self._reduced.update((p, weakref.ref(p.grad)) for _, p in named if p.grad is not None)
        for p in self._reduced.keys() - self._watched:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._is_added_to)
                self._watched.add(p)

    def _is_added_to(self, p: torch.Tensor) -> None:
        self._reduced.pop(p, None)

    def reduce(self, named: Named) -> None:
        """Combine these parameters' gradients over the ranks, except for Adasum, which combines updates."""
        if self.op == Adasum:
            return
        kinds = self._agree_on_gradients(named)
        finish: list[Callable[[], None]] = []
        for group in self._in_groups(named):
            used = [(name, p) for name, p in group if kinds[name] == "dense"]
            if used:
                finish.append(self._start_dense(used))
            finish += [self._start_sparse(name, p) for name, p in group if kinds[name] == "sparse"]
        for end in finish:
            end()
        self._reduced.clear()

    def _put(self, p: torch.Tensor, result: torch.Tensor) -> None:
        p.grad = result
        self._results[p] = weakref.ref(result), result._version

    def _is_result(self, p: torch.Tensor, grad: torch.Tensor) -> bool:
        result, version = self._results.get(p, (lambda: None, 0))
        return result() is grad and grad._version == version

    def _in_groups(self, named: Named) -> list[Named]:
        """Return the parameters of each operation: the user's groups and single ones, or all together."""
        if self.groups is None:
            return [named]
        place = {p: number for number, group in enumerate(self.groups) for p in group}
        groups: list[Named] = [[] for _ in self.groups]
        alone: list[Named] = []
        for name, p in named:
            if p in place:
                groups[place[p]].append((name, p))
            else:
                alone.append([(name, p)])
        return [*groups, *alone]

    def _agree_on_gradients(self, named: Named) -> dict[str, str | None]:
        """Return which gradients exist on any rank; others must stay None, or momentum would move them."""
        counts = torch.zeros(2, len(named), dtype=torch.int32)
        for i, (_, p) in enumerate(named):
            if p.grad is None or (p in self._reduced and self._reduced[p]() is p.grad):
                continue
            if p.requires_grad or not self._is_result(p, p.grad):
                counts[int(p.grad.is_sparse and not self.sparse_as_dense), i] = 1
        name, process_set = "optimizer.gradients", self.process_set
        counts = allreduce(counts, op=Sum, name=name, process_set=process_set)
        return {
            name: "sparse" if sparse else "dense" if there else None
            for (name, _), there, sparse in zip(named, *counts.tolist(), strict=True)
        }

    def _start_dense(self, group: Named) -> Callable[[], None]:
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
            for _, p in group
        ]
        pairs = [self.compression.compress(gradient.contiguous()) for gradient in gradients]
        handle = grouped_allreduce_async_(
            [small for small, _ in pairs],
            name=f"optimizer.{group[0][0]}",
            op=self.op,
            prescale_factor=1.0 / self.predivide,
            postscale_factor=self.predivide,
            process_set=self.process_set,
        )

        def finish() -> None:
            for (_, p), result, (_, context) in zip(group, synchronize(handle), pairs, strict=True):
                combined = self.compression.decompress(result, context)
                self._put(p, combined.to_sparse(1) if p.grad is not None and p.grad.is_sparse else combined)

        return finish

    def _start_sparse(self, name: str, p: torch.Tensor) -> Callable[[], None]:
        gradient = empty_rows(p) if p.grad is None else p.grad
        result = sparse_allreduce_async(
            gradient, name=f"optimizer.{name}", op=self.op, process_set=self.process_set
        )

        def finish() -> None:
            self._put(p, result())

        return finish

    def adasum_step(self, named: Named, step: Callable[[], Any]) -> Any:
        """Step locally, then combine the updates: Adasum does not combine gradients."""
        before = {p: p.detach().clone() for _, p in named if p.requires_grad or p.grad is not None}
        loss = step()
        kinds = self._agree_on_gradients(named)
        with torch.no_grad():
            for name, p in named:
                if kinds[name] is None:
                    continue
                old = before.get(p, p)
                small, context = self.compression.compress((p - old).contiguous())
                handle = allreduce_async_(small, op=Adasum)
                p.copy_(old + self.compression.decompress(synchronize(handle), context))
        return loss
