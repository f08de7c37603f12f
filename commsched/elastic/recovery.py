"""``run``: calls the user's training function in each epoch of an elastic job.

[Note: what ends an epoch]

    the function raises    the state   then
    ---------------------  ----------  ---------------------------------------------------------------
    HorovodInternalError,  is          the next epoch begins with the ranks that are left: on_reset(),
    or CommError, which    restored    sync(), call again
    is one: a lost rank
    HostsUpdatedInterrupt  stays       the same; without sync() if all ranks can do without
    CheckpointError,       stays       it ends all processes: every rank raises it, and would do so again
    SettingsError
    OSError, and nobody    is          the same as after a lost rank: the launcher of this process is gone,
    reads the output       restored    and what it prints from now on goes to nowhere
    another exception      stays       it ends this process, and the other ranks lose a rank
    CommError once more,   is          the same processes meet again: no rank was lost, and the function would
    without a commit       restored    fail in the same way for ever. Every rank raises a CommError

Only horovodrun's elastic driver can begin an epoch without a lost rank (``process.rendezvous``). Under every
other launcher a ``CommError`` restores the last commit and is raised: the launcher ends the job, or starts it
again.

[Note: removed processes]
The driver answers all processes at once, and tells those of a removed host that they have no place. These
end, which takes a second or more. It knows an ended process by its place alone. If the host is in the list
again and the others ask before the driver has noticed that end, it takes it for the end of the new process in
that place, counts it as failed, and may end the job when the next rank is lost. So the others do not ask
again while removed processes may still be ending.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from commsched.collectives.carrier import carrier_or_none
from commsched.collectives.job import init, leave, rank, size
from commsched.collectives.operations import allgather_object
from commsched.elastic.guardian import killed_when_stopped
from commsched.elastic.state import State
from commsched.elastic.virtual import VirtualRanks
from commsched.env import settings
from commsched.errors import CheckpointError, CommError, HostsUpdatedInterrupt, SettingsError
from commsched.optimizer.distributed import connect, described, lasting
from commsched.process.launch import Launch, detect_launch
from commsched.process.rendezvous import launcher_server, tell_begin, tell_end

_log = logging.getLogger("commsched")
# Of Horovod where that is installed: scripts raise it, too.
_Failure = CommError.__bases__[0] if CommError.__bases__[0] is not RuntimeError else CommError

OUTPUTS = (1, 2)  # stdout and stderr
_MOST_FAILURES = 2  # rollbacks of the same processes without a commit: a fault of the network may pass
_ENDING_SECONDS = 5.0  # [Note: removed processes]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@overload
def run(
    func: Callable[Concatenate[Any, _Arguments], _Result],
) -> Callable[Concatenate[Any, _Arguments], _Result]: ...


@overload
def run(*, virtual_ranks: int, seed: int = 0) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def run(func: Any = None, *, virtual_ranks: int | None = None, seed: int = 0) -> Any:
    """Decorate a training function whose first argument is a ``State``: it is called again when ranks change.

    Before each call all ranks get the state of rank 0. A rank must not call collectives before the function:
    the others may be in it. ``DistributedOptimizer`` may be made before.

    With ``@run(virtual_ranks=8)`` each step is that of 8 ranks, over which the function loops with
    ``virtual_ranks(state)``: the parameters do not depend on the ranks that there are. ``seed`` is that of
    the virtual ranks' random numbers.
    """
    if func is None:
        return functools.partial(run, virtual_ranks=virtual_ranks, seed=seed)
    if virtual_ranks is not None and virtual_ranks < 1:
        raise ValueError(f"virtual_ranks must be at least 1, got {virtual_ranks}")

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        place = detect_launch(os.environ, settings().launcher)
        elastic = place.elastic
        failures, removals = _Failures(state), _Removals()
        is_reset, can_skip = False, False
        error: Exception | None
        virtual = VirtualRanks(state, virtual_ranks, seed) if virtual_ranks else None
        with (
            closing(virtual) if virtual else nullcontext(),
            _notified_of_hosts(state, elastic),
            killed_when_stopped() if elastic else nullcontext(),
            _end_told(place) if elastic else nullcontext(),
        ):
            while True:
                try:
                    failures.check()
                    if is_reset:
                        state.on_reset()
                    _begin(state, can_skip, virtual)
                    return _called(func, state, *args, **kwargs)
                except HostsUpdatedInterrupt as interrupt:
                    error = None
                    can_skip = _ended_in_order(state, failures, elastic) and interrupt.skip_sync
                except _LASTING:
                    raise
                except (_Failure, OSError) as failure:
                    if isinstance(failure, OSError) and not (elastic and silence_unread_output()):
                        raise
                    error = failure
                    _roll_back(state, failures, error, elastic)
                    can_skip = False
                _next_epoch(state, error, removals)
                is_reset = True

    return wrapper


class _RepeatedFailure(CommError):
    """The same processes have failed again; another epoch would end in the same way."""


_LASTING = CheckpointError, SettingsError, _RepeatedFailure  # every rank raises it, and would do so again


class _Failures:
    """Counts this rank's rollbacks since its last commit, and since the job had another number of ranks."""

    def __init__(self, state: Any) -> None:
        self._state, self._commits = state, _commits(state)
        self._count = self._size = 0
        self._last: Exception | None = None

    def add(self, error: Exception) -> None:
        """Count a rollback."""
        commits = _commits(self._state)
        if commits is None or commits != self._commits:
            self._count = 0
        self._count, self._commits, self._last = self._count + 1, commits, error

    def check(self) -> None:
        """Raise an error on all ranks where the same processes roll back again and again. Collective.

        A process that has rolled back was in the epoch before. If all have, none is new, and if they are as
        many as before, none has gone. All ranks decide from the same counts, which may differ: a rank that
        fails during ``commit()`` has not committed.
        """
        if size() != self._size:
            self._count, self._size = 0, size()
        fewest = min(allgather_object(self._count, "commsched.elastic.failures"))
        if fewest >= _MOST_FAILURES:
            raise _RepeatedFailure(
                f"the same {self._size} processes have gone back to the last commit {fewest} times without"
                " another commit in between, so no lost rank is the cause, and a further try would fail, too."
                f" The last error on rank {rank()}: {self._last}. Repair its cause; if the network fails now"
                " and then, call state.commit() more often"
            ) from self._last
        if fewest == 0:  # at least one process is new
            self._count = 0


class _Removals:
    """Delays the question for the next epoch after one that has removed hosts: [Note: removed processes]."""

    def __init__(self) -> None:
        self._asks_at = 0.0

    @contextmanager
    def change(self, in_order: bool) -> Iterator[None]:
        """Within this context the ranks change. The driver has noticed the ends of ranks that were lost."""
        before = _places()
        time.sleep(max(0.0, self._asks_at - time.monotonic()))
        yield
        if in_order and before - _places():
            self._asks_at = time.monotonic() + _ENDING_SECONDS


def _places() -> set[tuple[str, int]]:
    """Return host and number there of every rank."""
    carrier = carrier_or_none()
    return {(record.node, record.local_rank) for record in carrier.meeting.records} if carrier else set()


def _commits(state: Any) -> int | None:
    """Return how often the state was committed; None for a class that does not count."""
    return getattr(state, "_commits", None)


def _begin(state: Any, can_skip: bool, virtual: VirtualRanks | None) -> None:
    """Give all ranks one state, and connect the optimizers. Collective."""
    asked = [["virtual ranks", virtual.count, virtual.seed]] if virtual else []
    optimizers = lasting.alive()
    every = allgather_object((can_skip, asked + described(optimizers)), "commsched.elastic")
    differ = [rank for rank, (_, others) in enumerate(every) if others != every[0][1]]
    if differ:
        raise ValueError(
            "all ranks must have made the same optimizers before the function of elastic.run, but rank 0 has"
            f" {every[0][1]} and rank {differ[0]} has {every[differ[0]][1]} (class, number of parameters);"
            " make them where every rank does, or inside of the function, with the same virtual_ranks="
        )
    changed = lasting.set_virtual_ranks(optimizers, virtual.count if virtual else 0)
    if virtual:
        virtual.connect(changed)
    if not all(skips for skips, _ in every):  # a new rank has nothing yet
        state.sync()
    connect(optimizers)


def _called(func: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    lasting.running = True
    try:
        return func(*args, **kwargs)
    finally:
        lasting.running = False


def _ended_in_order(state: Any, failures: _Failures, elastic: bool) -> bool:
    """Complete the last step on all ranks; return False where a rank was lost meanwhile. Collective."""
    try:
        lasting.disconnect(wait=True)
        return True
    except _Failure as error:
        _roll_back(state, failures, error, elastic)
        return False


def _roll_back(state: Any, failures: _Failures, error: Exception, elastic: bool) -> None:
    """Restore the last commit; raise the error where nobody can begin an epoch without the lost rank."""
    if elastic:
        _forget_locals(error)
    if isinstance(state, State):
        with suppress(Exception):  # what has arrived stays readable; the rest is lost
            state._settle()
    lasting.disconnect(wait=False)
    state.restore()
    if not elastic:
        raise error
    failures.add(error)
    _log.warning("the job goes on from the last commit with the ranks that are left: %s", error)


def _forget_locals(error: BaseException | None) -> None:
    """Let go of what an error's frames hold: a pipeline of the epoch that ends, its activations, a batch."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def silence_unread_output() -> bool:
    """Send output that nobody reads to nowhere; return whether there was some.

    The launcher of a process whose host was cut off has ended, and the next ``print()`` would end the
    process, whose state may be the newest that is left.
    """
    asking = select.poll()
    for descriptor in OUTPUTS:
        asking.register(descriptor, 0)
    unread = [one for one, event in asking.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for descriptor in unread:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), descriptor)
    return bool(unread)


def _next_epoch(state: Any, error: Exception | None, removals: _Removals) -> None:
    """Leave this epoch of the job, after an error or in order, and join the next one."""
    silence_unread_output()
    with removals.change(in_order=error is None):
        leave(error)
        # Before init() asks the driver, which counts its hosts after all ranks have asked. What it announces
        # while it answers may be missing in the answer; if not, the ranks begin one epoch more than needed.
        if isinstance(state, State):
            state.forget_host_updates()
        init()


@contextmanager
def _end_told(place: Launch) -> Iterator[None]:
    """Tell a later process in this place how this context ends."""
    tell_begin(place)
    try:
        yield
    except Exception as error:
        if isinstance(error, _LASTING) or not isinstance(error, _Failure):  # else this one has met nobody
            tell_end(place, error)
        raise
    tell_end(place)


@contextmanager
def _notified_of_hosts(state: Any, elastic: bool) -> Iterator[None]:
    """Within this context horovodrun's driver can tell this process that hosts have changed.

    It tells rank 0, over a service of Horovod's that each rank offers, since each may become rank 0.
    """
    if not elastic:
        yield
        return
    try:
        from horovod.runner.common.util import codec
        from horovod.runner.elastic.worker import PUT_WORKER_ADDRESSES

        from commsched.elastic.host_updates import HostUpdates
    except ImportError as error:
        _log.warning(
            "this job cannot take new hosts: Horovod is not installed where the ranks run (%s)", error
        )
        yield
        return
    place, service = detect_launch(os.environ, settings().launcher), HostUpdates(state)
    try:
        server = launcher_server()
        if server is not None:
            value = codec.dumps_base64((service.addresses(), service.key), to_ascii=False)
            server.put(PUT_WORKER_ADDRESSES, f"{place.node}:{place.local_rank}", value)
        yield
    finally:
        service.shutdown()
