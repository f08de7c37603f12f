"""States that are read without waiting for pending parameters, and what takes the rest when it arrives.

[Note: late values]
After ``step()`` many parameters wait for their buckets, which travel under the next forward. A commit or a
checkpoint that waited for them would put this traffic on the critical path::

    step()  commit()                  forward                          backward
            | copies what is there    | 1 | layer 1 | 2 | layer 2 ...  | begins when all are there
                                        |             |
                                        each is copied here, right after its update

A late value is taken where its parameter is completed (``Round.complete_buckets``). It is the value that a
wait would have shown: every access completes a pending parameter first, so nobody can have changed it before,
and whoever needed it goes on afterwards. Parameters that could be changed unnoticed are never left pending.
A round begins with all parameters complete, so everything has arrived before the next step changes anything.

Where the update fails, or the connections end, the rest never comes: the copy does not become whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from commsched.optimizer.pending import PendingParameter, complete_value, is_late, when_complete
from commsched.optimizer.wrapper import DistributedMethods


@dataclass(frozen=True)
class Late:
    """Entries of a dictionary that have one value, once a parameter is complete."""

    param: nn.Parameter
    place: dict[Any, Any]
    keys: list[Any]
    read: Callable[[], Any]  # the value, once it is there; None: there are no such entries
    before: Any  # the value that was there before the update

    def wait(self) -> Any:
        """Return the value, after waiting for it."""
        if isinstance(self.param, PendingParameter):
            complete_value(self.param)
        return self.read()


def state_so_far(value: Any) -> tuple[Any, list[Late]]:
    """Return ``value.state_dict()`` without waiting: with None in the place of late values, and these."""
    if isinstance(value, DistributedMethods):
        state, params, own = value.state_so_far()
        place = state["state"]
        return state, [Late(p, place, [i], partial(own.get, p), own.get(p)) for i, p in params.items()]
    if not isinstance(value, nn.Module) or not any(map(is_late, value.parameters())):
        return value.state_dict(), []
    if not all(map(_has_plain_state, value.modules())):
        return value.state_dict(), []
    state, late = value.state_dict(keep_vars=True), dict[nn.Parameter, Late]()
    for name, entry in state.items():
        if name.endswith("_extra_state"):
            continue  # whatever the module has made
        if isinstance(entry, nn.Parameter) and is_late(entry):
            late.setdefault(entry, Late(entry, state, [], entry.detach, entry)).keys.append(name)
            state[name] = None
        elif isinstance(entry, Tensor):
            state[name] = entry.detach()
    return state, list(late.values())


def _has_plain_state(module: nn.Module) -> bool:
    """Return whether a module's state dict has the tensors themselves, whatever their values are."""
    kind = type(module)
    is_plain = kind.state_dict is nn.Module.state_dict and "state_dict" not in vars(module)
    is_plain &= kind._save_to_state_dict is nn.Module._save_to_state_dict
    return is_plain and not (module._state_dict_hooks or module._state_dict_pre_hooks)


class Arrivals:
    """Late values that together complete a copy, or do not."""

    def __init__(self) -> None:
        self._left: dict[int, Late] = {}  # in the order in which they were asked for
        self._count = 0
        self._error: BaseException | None = None  # of taking a value
        self._is_dropped = False
        self._then: Callable[[], None] | None = None
        self._lock = threading.RLock()  # threads may complete parameters of two optimizers at the same time

    def take(self, late: Late, put: Callable[[Any], None]) -> None:
        """Call ``put`` with a late value once it is there."""
        number = self._count = self._count + 1
        self._left[number] = late
        act = partial(self._taken, number, put)
        if not when_complete(late.param, act):
            late.wait()  # another thread has completed it; or this raises
            act()

    def _taken(self, number: int, put: Callable[[Any], None]) -> None:
        """Take one value. This never raises: it runs where somebody needs the parameter."""
        with self._lock:
            if self._is_dropped:
                return
            try:
                put(self._left[number].read())
            except BaseException as error:
                self._error = error
            else:
                del self._left[number]
            if self.is_whole and self._then is not None:
                self._then()

    def when_whole(self, then: Callable[[], None]) -> None:
        """Call ``then`` once, when every value that was asked for is there: perhaps at once."""
        with self._lock:
            self._then = then
            if self.is_whole:
                then()

    @property
    def is_whole(self) -> bool:
        with self._lock:
            return not (self._left or self._error or self._is_dropped)

    def complete(self) -> None:
        """Wait for what has not arrived, and raise what has failed. What was lost never comes: ``is_whole``
        tells.
        """
        for late in list(self._left.values()):
            late.wait()
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """Take nothing more."""
        with self._lock:
            self._is_dropped = True
            self._left.clear()
