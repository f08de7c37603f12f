"""States: what a rank commits, what it goes back to, and what it gives to new ranks."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from commsched.collectives.job import rank
from commsched.collectives.model_state import broadcast_parameters, share_optimizer_state
from commsched.collectives.operations import allgather_object, broadcast_object
from commsched.elastic.sampler import ElasticSampler
from commsched.errors import HostsUpdatedInterrupt
from commsched.optimizer.snapshots import Arrivals, state_so_far

_REMOVED = 1  # hosts were only removed; the number is that of Horovod's HostUpdateResult


class State:
    """A state that the ranks share; subclasses say how it is saved, restored and given to the other ranks.

    ``bcast_object`` returns rank 0's object on every rank. ``get_rank`` is in Horovod's signature.
    """

    _commits = 0  # how many commits were made, for ``run``

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these after each change of ranks, for example to set the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the new ranks: ``reset()``, then the callbacks. ``run`` calls this before ``sync()``."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that horovodrun has found or lost hosts. Called by a thread of its own, on rank 0."""
        self._host_messages.put((timestamp, update_res))

    def forget_host_updates(self) -> None:
        """Forget what was noted: the epoch that begins takes it into account."""
        self._host_messages = queue.Queue()

    def commit(self) -> None:
        """Call ``check_host_updates()``, and save the state. Every rank must call, after the same step."""
        interrupt = None
        try:
            # First: it ends once all ranks have come. A rank that has left out a step waits in vain, and must
            # not keep its state: rank 0's would be given to all, without the update of that step.
            self.check_host_updates()
        except HostsUpdatedInterrupt as changed:
            interrupt = changed
        self.save()
        self._commits += 1
        if interrupt is not None:
            raise interrupt

    def check_host_updates(self) -> None:
        """Raise ``HostsUpdatedInterrupt`` on all ranks if hosts have changed. Collective."""
        before = newest = self._last_updated_timestamp
        update = 0
        messages = self._host_messages
        while not messages.empty():
            timestamp, result = messages.get()
            if timestamp > before:  # else it is one that the driver has sent twice
                newest, update = max(newest, timestamp), update | int(result)
        # Only rank 0 is told, so all ranks do what it says.
        before, self._last_updated_timestamp, update = self._bcast_object((before, newest, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == _REMOVED)

    def save(self) -> None:
        """Keep the state as it is now, in this process."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Wait until what was saved last is whole; here it is so at once."""

    def sync(self) -> None:
        """Give every rank the state of rank 0. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to other ranks, before ``sync()``; there may be nothing to do."""


class ObjectState(State):
    """A state of plain Python objects, which are its attributes. Commits hold copies of them."""

    _saved_state: dict[str, Any]

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._set_attrs(kwargs)
        self._saved_state = deepcopy(kwargs)

    def save(self) -> None:
        self._saved_state = deepcopy(self._current())

    def restore(self) -> None:
        self._set_attrs(deepcopy(self._saved_state))

    def sync(self) -> None:
        # The present values, not the saved ones: an interrupt without a commit must not lose any.
        if self._saved_state:
            self._set_attrs(self._bcast_object(self._current()))
        self.save()

    def _current(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set_attrs(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """A state of models, optimizers, samplers and plain objects, which are its attributes.

    Commits hold copies in this process's memory. ``sync()`` gives every rank what rank 0 has now, and commits
    it. Other kinds of objects can have handlers of their own: ``set_handler_registry``.

    [Note: commits that become whole later]

        step 8   commit()   forward of step 9               backward of step 9
                 |          |                               |
                 |          copies late parameters, and     all have come: the commit of step 8 is whole,
                 |          their states in the optimizer   that of step 7 is let go
                 copies what is there: values, samplers, buffers, complete parameters

    Parameters that ``step()`` has left pending are copied when they are complete (``optimizer.snapshots``).
    Until all are, the commit before stands: if a rank is lost, or an update fails, everything goes back to
    that one. So ranks may go back to commits of different steps. As ever, ``sync()`` then gives all of them
    what rank 0 has, which is one whole commit, taken after a step that all ranks have made.
    """

    # The last save, while parameters are missing in it, and by object the attributes to go back to.
    _arriving: tuple[Arrivals, list[tuple[Any, dict[str, Any]]]] | None = None

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs |= {"model": model, "optimizer": optimizer}
        self._handlers = {
            name: made for name, value in kwargs.items() if (made := _handler(value)) is not None
        }
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in kwargs.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **plain)

    def save(self) -> None:
        """Save everything, or nothing where a rank is lost: see [Note: commits that become whole later]."""
        self._settle()
        before: list[tuple[Any, dict[str, Any]]] = [(one, dict(vars(one))) for one in self._handlers.values()]
        before.append((self, {"_saved_state": self._saved_state, "_commits": self._commits}))
        arrivals = Arrivals()
        self._arriving = arrivals, before
        try:
            for handler in self._handlers.values():
                if type(handler).save is StateHandler.save:
                    handler._saved = _copy_of(handler.value, arrivals)
                else:
                    handler.save()
            super().save()
        except BaseException:
            self._go_back()
            raise
        arrivals.when_whole(partial(self._has_arrived, arrivals))

    def _has_arrived(self, arrivals: Arrivals) -> None:
        if self._arriving is not None and self._arriving[0] is arrivals:
            self._arriving = None

    def _settle(self) -> None:
        """Wait until the last save is whole; where it cannot be, go back to the one before."""
        if (arriving := self._arriving) is not None:
            try:
                arriving[0].complete()
            finally:
                if arriving[0].is_whole:  # the thread that took the last value may not have said so yet
                    self._has_arrived(arriving[0])
                self._go_back()

    def _go_back(self) -> None:
        """Let the save before be the last one, if something is missing in this one."""
        if (arriving := self._arriving) is not None:
            arriving[0].drop()
            self._arriving = None
            for thing, attributes in arriving[1]:
                vars(thing).update(attributes)

    def restore(self) -> None:
        with suppress(Exception):  # of ranks that are lost, and of updates that failed
            self._settle()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0, or raise the same ``ValueError`` on all. Collective."""
        # Each handler communicates in its own way: ranks with different handlers would wait for each other.
        every = allgather_object(self._kinds(), "commsched.elastic.kinds")
        differ = [other for other, kinds in enumerate(every) if kinds != every[0]]
        if differ:
            raise ValueError(
                "TorchState must have the same objects with a state, in the same order, on all ranks, but"
                f" rank 0 has {every[0]} and rank {differ[0]} has {every[differ[0]]}; a new rank lacks what"
                " the function of elastic.run makes: make it before the function, and pass it to TorchState()"
            )
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def _kinds(self) -> list[tuple[str, str]]:
        """Return the attributes with handlers and their kinds, as they are synchronised."""
        return [(name, type(handler).__name__) for name, handler in self._handlers.items()]

    def reset(self) -> None:
        """Adapt samplers to the present ranks: where hosts were only removed, no ``sync()`` follows."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_handlers" and name in self._handlers:
            self._settle()
            self._handlers[name].set_value(value)
        elif name in self.__dict__.get("_saved_state", ()) and (made := _handler(value)) is not None:
            self._settle()
            self._handlers[name] = made  # it began as None; a restored copy would not be the script's object
            del self._saved_state[name]
        super().__setattr__(name, value)


# -- handlers ------------------------------------------------------------------------------------------------


class StateHandler:
    """Saves, restores and synchronises one attribute of a ``TorchState``."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of the value's state dict."""
        self._saved = deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load what was saved last. A copy of it: an optimizer updates the tensors that it loads in place."""
        self.value.load_state_dict(deepcopy(self._saved))

    def sync(self) -> None:
        """Give every rank the value of rank 0. Collective."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="commsched.elastic.state"))

    def set_value(self, value: Any) -> None:
        """Take another object in the place of this one."""
        self.value = value
        self.save()


def _copy_of(value: Any, arrivals: Arrivals) -> Any:
    """Return a copy of the value's state dict; late values come into it with the arrivals."""
    state, every = state_so_far(value)
    copies: dict[int, Any] = {}
    state = deepcopy(state, copies)
    for late in every:
        arrivals.take(late, partial(_put, copies[id(late.place)], late.keys))
    return state


def _put(place: dict[Any, Any], keys: Iterable[Any], value: Any) -> None:
    """Put a copy of a value under the keys; without a value there are none."""
    copy = deepcopy(value)
    for key in keys:
        if copy is None:
            del place[key]
        else:
            place[key] = copy


class ModelStateHandler(StateHandler):
    """A model."""

    def sync(self) -> None:
        state = self.value.state_dict()
        if any(name.endswith("_extra_state") for name in state):  # of any type, and perhaps made for the call
            super().sync()
        else:
            broadcast_parameters(state, root_rank=0)


class OptimizerStateHandler(StateHandler):
    """An optimizer; with shards, commits hold the whole state, because the next epoch has other shards."""

    def sync(self) -> None:
        share_optimizer_state(self.value, root_rank=0)


Registry = list[tuple[type, Callable[[Any], Any]]]
_handler_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateHandler),
    (ElasticSampler, StateHandler),  # divides its samples anew when it loads a state
]


def get_handler_registry() -> Registry:
    """Return the kinds of objects that ``TorchState`` has handlers for; the first that fits counts."""
    return _handler_registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the kinds of objects that ``TorchState`` has handlers for."""
    global _handler_registry
    _handler_registry = registry


def _handler(value: Any) -> Any:
    """Return the handler of a value, None for a plain one. GradScaler, as others, only has a state."""
    made = next((make(value) for kind, make in _handler_registry if isinstance(value, kind)), None)
    if made is None and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return StateHandler(value)
    return made
