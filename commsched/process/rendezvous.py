"""Connects the ranks of one job, under every launcher, to one c10d store and checks that they agree.

Rank 0 listens. Where the launcher provides no address, rank 0 publishes its own through horovodrun's
key-value server, one MPI broadcast or Horovod itself. Every rank then writes a record into the store. The
records show missing ranks, duplicate ranks and different numbers of ranks.

[Note: restarts]
torchrun's agents start the ranks of a failed job again, and its store keeps what the ended ranks wrote. No
variable tells the attempts apart: TORCHELASTIC_RESTART_COUNT grows only on the node whose rank failed.
So rank 0 tells the others where the records of this attempt are, in the first meeting of their processes:

    every rank     adds 1 to commsched/arrivals: the sum is the number of its arrival
    rank 0         looks for new arrivals until all have met; sets commsched/job/ARRIVAL to its own arrival
                   and the number of its meeting: the second one where a first init() has failed
    another rank   waits for commsched/job/ARRIVAL
    all            write and read the records under commsched/RANK 0'S ARRIVAL/MEETING

No other process has the same arrival, so the answers to ended ranks mislead nobody, and a rank 0 that has met
or ended answers nobody. Ranks that were told count further meetings as rank 0 does: each init() is one, also
one that fails. A rank whose connection to the store has failed connects anew, and arrives again.

[Note: epochs]
Under most launchers a process keeps its rank, and a second ``init()`` needs every rank again. The store is
kept for it. Under horovodrun's elastic driver (``launch.elastic``) ranks come and go, also rank 0. Such a job
has epochs, and each epoch its own ranks and its own store:

    who                       what                                             key-value server of horovodrun
    ------------------------  -----------------------------------------------  ------------------------------
    driver                    starts processes with their place                emptied before
    rank 0, then the others   meet(): a new store                              commsched/rank0 = its address
    all, after a loss or a    shutdown(), then renew(): ask for the place in   the address is still there
    change of hosts           the next epoch; wait
    driver                    all processes have asked or ended: answers all,  emptied before
                              starts new processes
    rank 0, then the others   meet(): a new store                              commsched/rank0 = its address

Nobody can read the address of an earlier epoch. A rank learns its place only after the server was emptied,
and before that every process that could write there has asked for its next place, or has ended. A process
that horovodrun wrongly takes for ended might write; ranks that follow it miss the others, and ask again.

A rank may be lost after the driver's answer and before all have met. The driver tells nobody, but takes each
question for the wish to begin another epoch. So init() asks again after a meeting that has failed:

    try    seconds, of COMMSCHED_START_TIMEOUT    when it fails
    -----  -------------------------------------  ------------------------------------------------------------
    1      an eighth                              renew(): wait until the others have asked or ended, too
    2, 3   a quarter, half                        the same
    4      all                                    CommError; the others lose this rank

Ranks need not be in the same try. One that asks early waits in renew() for those that still meet, and for a
new process that has not come yet. That one finds nobody, and asks, too: the answer comes to all at once, so
that a process which needs longer than a try to start meets the others in their next one.

[Note: one process in a place]
A place is a host and a number there. When ssh loses a host, horovodrun takes its processes for ended, and
later starts others in their places. A process that was only cut off comes back and asks for its next rank.
The driver counts questions, and not who asks: it would tell two processes in one place the same rank, and
begin epochs before all have asked. So a process holds the place's name on its host from its first init()
until it ends, and a later process of that place waits for the name in its first init():

    the earlier process                      the later process
    ---------------------------------------  ---------------------------------------------------------------
    asks, meets, trains                      waits, while horovodrun answers. The driver sees it alive, and
                                             takes the other's questions for its own
    is killed, or learns that it is no       has the name, asks, and begins as any new process: the rank that
    longer part of the job                   it was started with is that of the epoch which has just ended
    ends after its training, or with an      ends with status 0, or 1: for the driver, so does the place. If
    error: `elastic.run` has told so to      all ranks end with that error, a new process that remained would
    horovodrun's server                      begin the training anew

The earlier one goes first because its state may be the newest that is left: the others may be lost while it
comes back. The later one would begin the training anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from comm_core import EngineError, Waiting, ask_store, close_in_children
from commsched.env import LAST_PORT, settings
from commsched.errors import CommError
from commsched.process import failure_monitor, mpi_bootstrap
from commsched.process.launch import Launch
from commsched.process.network import (
    KeyValueServer,
    chosen_interface,
    first_reachable,
    interface_address,
    is_loopback,
    own_addresses,
)
from scheduler.ir.inputs import InputError, whole

_log = logging.getLogger("commsched")
Publish = Callable[[dict[str, Any] | None], dict[str, Any]]
"""Broadcasts rank 0's contact data: rank 0 passes it, the others pass None; returns it on every rank."""
_POLL_SECONDS = 0.02
# What the driver answers, in its order.
_PLACE = tuple(f"HOROVOD_{name}" for name in "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE".split())
_LINGER_SECONDS = 20.0
_ANSWER_SECONDS = 10.0  # that the store has for each answer, also shortly before the deadline
_ARRIVALS = "commsched/arrivals"
_OVER = b"in order"


@dataclass(frozen=True)
class Record:
    """What a rank writes into the store for the others."""

    rank: int
    size: int
    local_rank: int
    node: str
    own_address: str
    master_address: str


@dataclass(frozen=True)
class Meeting:
    """What `meet()` returns: all ranks' records, the store they share, this rank's address for the others."""

    launch: Launch
    store: Store
    records: tuple[Record, ...]
    address: str
    patience: float  # seconds that these ranks have to connect

    @property
    def cross(self) -> tuple[int, int]:
        """The index of this rank's node among the nodes with the same local rank, and their number."""
        nodes = list(dict.fromkeys(r.node for r in self.records if r.local_rank == self.launch.local_rank))
        return nodes.index(self.launch.node), len(nodes)


@dataclass
class _StoreConnection:
    """This process's connection to the job's store. It outlives shutdown(), so that init() works again."""

    store: Store
    own_address: str
    master_address: str
    job: int | None = None  # the arrival of rank 0 [Note: restarts]
    meetings: int = 0


_connection: _StoreConnection | None = None
_has_met = False  # the place that the launcher's variables tell has served for a meeting
_name: socket.socket | None = None  # this process's [Note: one process in a place]


def meet(launch: Launch, publish: Publish | None = None, patience: float | None = None) -> Meeting:
    """Wait for all ranks of `launch`; ``CommError`` names a rank that is missing or disagrees.

    Each step of the meeting may take `patience` seconds, by default COMMSCHED_START_TIMEOUT.
    """
    global _connection, _has_met
    _has_met = True
    failure_monitor.begin_job()
    patience = patience or settings().start_timeout
    if launch.elastic:
        _connection = None
    if launch.size == 1:
        record = Record(0, 1, 0, launch.node, "127.0.0.1", "127.0.0.1")
        return Meeting(launch, HashStore(), (record,), "127.0.0.1", patience)
    if _connection is None:
        _connection = _connect(launch, publish, patience)
    own, master = _connection.own_address, _connection.master_address
    mine = Record(launch.rank, launch.size, launch.local_rank, launch.node, own, master)
    waiting = Waiting(mine.rank, patience)
    try:
        if _connection.job is None:
            _connection.job, _connection.meetings = _arrive(_connection.store, mine, waiting)
        else:
            _connection.meetings += 1
        store = PrefixStore(f"commsched/{_connection.job}/{_connection.meetings}", _connection.store)
        records = _exchange_records(store, mine, waiting, _connection)
    except CommError:
        raise
    except RuntimeError as error:
        # The next init() connects anew, also to a rank 0 that was started again. Not where MPI or Horovod has
        # broadcast the address: another broadcast would wait for all ranks.
        if publish is None and not launch.mpi:
            _connection = None
        if isinstance(error, EngineError):  # no answer: see _ask()
            raise CommError(
                f"rank {mine.rank} cannot meet the other ranks: {error}; is that process stopped, or its host"
                " cut off? Start the job again"
            ) from error
        raise CommError(f"rank 0 ended while rank {mine.rank} was waiting for all ranks: {error}") from error
    return Meeting(launch, store, records, _reachable_address(mine, records), patience)


def renew(launch: Launch) -> None:
    """Ask horovodrun's elastic driver for this process's place in the next epoch; wait until all have asked.

    Changes the variables that the driver has set. Does not ask if the place they tell has not been used yet:
    the driver takes each question for the wish to begin another epoch.
    """
    global _connection, _has_met, _name
    if settings().master_addr:
        raise CommError(
            "COMMSCHED_MASTER_ADDR is set, and in an elastic job rank 0 may move to another host; unset it on"
            " every rank: horovodrun tells where rank 0 is"
        )
    # The others may notice a loss only after COMMSCHED_TIMEOUT, or still wait for ranks, or start.
    server = launcher_server(settings().timeout + settings().start_timeout)
    if _name is None and server is not None:
        _name, has_waited = _hold_name(launch, server)
        _has_met |= has_waited
    if not _has_met:
        return
    _connection = None  # nobody may find the store of the ended epoch
    if server is None:
        raise CommError(
            "HOROVOD_ELASTIC is set, but not HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT, which tell where the"
            " driver is; start the script with horovodrun, or unset HOROVOD_ELASTIC"
        )
    answer = server.ask("rank_and_size", f"{launch.node}:{launch.local_rank}").decode()
    values = answer.split(",")
    if len(values) != len(_PLACE) or not all(value.lstrip("-").isdigit() for value in values):
        raise CommError(
            f"horovodrun must answer with {len(_PLACE)} numbers ({', '.join(_PLACE)}), but said {answer!r};"
            " commsched works with the driver of Horovod 0.28"
        )
    if int(values[0]) < 0:
        if _name is not None:  # a later process need not wait until the script has ended
            _name.close()
        raise CommError(
            f"process {launch.local_rank} of host {launch.node} is no longer part of the job: the host was"
            " removed, or a process on it failed; nothing is to be done, the other ranks go on"
        )
    os.environ.update(zip(_PLACE, values, strict=True))
    _has_met = False


def _hold_name(launch: Launch, server: KeyValueServer) -> tuple[socket.socket, bool]:
    """Wait until no earlier process of this place runs; end this one if that one has ended the training.

    Return the name's socket, and whether there was an earlier process.
    """
    who = f"process {launch.local_rank} of host {launch.node}"
    place = f"{server.root} {who} {settings().job_token}"
    name = "\0commsched-" + hashlib.sha256(place.encode()).hexdigest()
    held = close_in_children(socket.socket(socket.AF_UNIX))
    asked: float | None = None
    has_waited = False
    while True:
        has_name = True
        try:
            held.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            has_name, has_waited = False, True
        if asked is None and not has_name:
            told = "%s waits: an earlier one, which horovodrun takes for ended, goes on in its place"
            _log.warning(told, who)
        # Also now and then while it waits: where horovodrun has ended, this raises.
        if asked is None or has_name or time.monotonic() > asked + _ANSWER_SECONDS:
            how = server.request("GET", "commsched", _end_key(launch))
            if how and has_name:  # else the earlier one may train once more
                _log.warning(
                    "%s ends: an earlier one in its place has ended the training (%s)", who, how.decode()
                )
                sys.exit(how != _OVER)
            asked = time.monotonic()
        if has_name:
            return held, has_waited
        time.sleep(_POLL_SECONDS)


def tell_end(launch: Launch, error: Exception | None = None) -> None:
    """Tell a later process of this place how the training has ended: [Note: one process in a place]."""
    server = launcher_server(_ANSWER_SECONDS)
    if server is not None:
        with suppress(CommError):  # horovodrun has ended, too
            server.put("commsched", _end_key(launch), repr(error).encode() if error else _OVER)


def tell_begin(launch: Launch) -> None:
    """Take back what this process has told of the end of an earlier training."""
    server = launcher_server(_ANSWER_SECONDS)
    if server is not None and server.request("GET", "commsched", _end_key(launch)):
        server.put("commsched", _end_key(launch), b"")


def _end_key(launch: Launch) -> str:
    return f"end-{launch.node}:{launch.local_rank}"


def _connect(launch: Launch, publish: Publish | None, patience: float) -> _StoreConnection:
    if settings().master_addr or launch.address or (launch.launcher == "torchrun" and publish is None):
        return _connect_to_given(launch, patience)
    if publish is None:
        publish = _publisher(launch, patience)
    if launch.rank != 0:
        contact = publish(None)
        if (
            patience < settings().start_timeout
        ):  # a rank 0 that does not listen any more is lost, or asks again
            patience = min(patience, _ANSWER_SECONDS)
        return _join(contact["addresses"], int(contact["port"]), str(contact["token"]), patience)
    addresses, token = own_addresses(launch.one_host), secrets.token_hex(16)
    # Other networks cannot reach a store that listens only where it is dialled. It binds one address, or all.
    server = _listen(0, addresses[0] if len(addresses) == 1 else "0.0.0.0")
    server.set("commsched/token", token)
    publish({"addresses": addresses, "port": server.port, "token": token})
    return _StoreConnection(server, addresses[0], addresses[0])


def _connect_to_given(launch: Launch, patience: float) -> _StoreConnection:
    """Connect to COMMSCHED_MASTER_ADDR and _PORT, else to the launch's address and port, else to torchrun's
    MASTER_ADDR and MASTER_PORT.
    """
    options = settings()
    address, port, prefix = options.master_addr, options.master_port, "COMMSCHED_"
    if not options.master_addr and launch.address:
        address, port = launch.address, launch.port
    elif not options.master_addr:
        address, port = os.environ.get("MASTER_ADDR", ""), _port("MASTER_PORT")
        prefix = ""
    if not address or not port:
        raise CommError(
            f"{launch.size} ranks need {prefix}MASTER_ADDR and {prefix}MASTER_PORT, but they are {address!r} "
            f"and {port}; set both on every rank to an address and a free port of rank 0's host"
        )
    given = options.master_addr or launch.address
    launcher_listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not given
    if launch.rank == 0 and not launcher_listens:
        server = _listen(port)
        master, own = first_reachable([address], port, patience)
        return _StoreConnection(server, own, master)
    return _join([address], port, None, patience)


def launcher_server(timeout: float | None = None) -> KeyValueServer | None:
    """Return horovodrun's key-value server; None under other launchers and under horovodrun with MPI."""
    address, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), _port("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return KeyValueServer(address, port, timeout or settings().start_timeout) if address and port else None


def _port(variable: str) -> int:
    """Return the port that a launcher has set; 0 for none."""
    try:
        return whole(os.environ.get(variable) or "0", variable, LAST_PORT)
    except InputError as error:
        raise CommError(f"{error}; set it on every rank to the same free port of rank 0's host") from None


def _publisher(launch: Launch, patience: float) -> Publish:
    if launch.mpi:
        return lambda value: mpi_bootstrap.broadcast(value, launch.rank)
    server = launcher_server(patience)
    if server is None:
        raise CommError(
            f"{launch.size} ranks need rank 0's address, and {launch.launcher} provides none "
            "(HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT are not set); set COMMSCHED_MASTER_ADDR and "
            "COMMSCHED_MASTER_PORT on every rank"
        )

    def publish(value: dict[str, Any] | None) -> dict[str, Any]:
        if value is None:
            return json.loads(server.wait("commsched", "rank0"))
        server.put("commsched", "rank0", json.dumps(value).encode())
        return value

    return publish


def _listen(port: int, address: str = "") -> TCPStore:
    """Serve the job's store on a given port of all addresses of this host, or on a free one of `address`."""
    try:
        if port:
            # This end dials the loopback address: torch would wait COMMSCHED_TIMEOUT for a name to resolve.
            # multi_tenant: the script's own init_process_group() may use the same port in this process.
            options: dict[str, Any] = {"host_name": "127.0.0.1", "multi_tenant": True}
        else:
            listener = socket.create_server((address, 0))
            port = listener.getsockname()[1]
            options = {"host_name": address, "master_listen_fd": listener.detach()}
        return TCPStore(port=port, is_master=True, timeout=_timeout(), wait_for_workers=False, **options)
    except (OSError, RuntimeError) as error:
        raise CommError(
            f"rank 0 cannot listen on {address or 'this host'}, port {port}: {error}; is another job using"
            " the port? Choose a free one"
        ) from error


def _join(addresses: list[str], port: int, token: str | None, patience: float) -> _StoreConnection:
    waiting = Waiting(-1, patience)
    master, own = first_reachable(addresses, port, patience)
    try:
        connect = partial(TCPStore, master, port, None, False, _timeout(), wait_for_workers=False)
        store = _ask(waiting, connect)
        found = _ask(waiting, store.get, "commsched/token").decode() if token else None
    except RuntimeError as error:
        raise CommError(
            f"the server on {master}, port {port}, is stopped, or is not the store of rank 0: {error}; choose"
            " another port with COMMSCHED_MASTER_ADDR and COMMSCHED_MASTER_PORT"
        ) from error
    if found != token:
        raise CommError(
            f"the store on {master}, port {port}, belongs to another job; end that job, or choose this "
            "job's port with COMMSCHED_MASTER_ADDR and COMMSCHED_MASTER_PORT"
        )
    return _StoreConnection(store, own, master)


def _timeout() -> timedelta:
    return timedelta(seconds=settings().timeout)


def _ask(waiting: Waiting, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of the ranks' store; ``EngineError`` if there is none while this rank waits."""
    left = max(waiting.left, min(_ANSWER_SECONDS, settings().start_timeout))
    return ask_store(Waiting(-1, left), call, *arguments)


def _arrive(store: Store, mine: Record, waiting: Waiting) -> tuple[int, int]:
    """Return rank 0's arrival and the meeting in which it waits. The other ranks wait until it tells both."""
    ask = partial(_ask, waiting)
    arrival = ask(store.add, _ARRIVALS, 1)
    while mine.rank != 0 and not ask(store.check, [f"commsched/job/{arrival}"]):
        if waiting.left < 0:
            raise CommError(
                f"rank {mine.rank} waited {waiting.seconds:g} s (COMMSCHED_START_TIMEOUT) for"
                f" {mine.size} ranks; missing: [0]. Did it start, does it call init(), and is this the only"
                f" process that was started as rank {mine.rank}?"
            )
        time.sleep(_POLL_SECONDS)
    if mine.rank == 0:
        return arrival, 1
    job, meeting = ask(store.get, f"commsched/job/{arrival}").split()
    return int(job), int(meeting)


def _exchange_records(
    store: Store, mine: Record, waiting: Waiting, connection: _StoreConnection
) -> tuple[Record, ...]:
    """Write this rank's record, wait for those of all ranks and compare each. Rank 0 answers arrivals."""
    ask = partial(_ask, waiting)
    ask(store.set, f"record/{ask(store.add, 'records', 1)}", json.dumps(asdict(mine)))
    records: dict[int, Record] = {}
    read, answered = 0, 0
    while len(records) < mine.size:
        while mine.rank == 0 and answered < ask(connection.store.add, _ARRIVALS, 0):
            answered += 1
            place = f"{connection.job} {connection.meetings}"
            ask(connection.store.set, f"commsched/job/{answered}", place)
        if waiting.left < 0:
            missing = sorted(set(range(mine.size)) - set(records))
            raise CommError(
                f"rank {mine.rank} waited {waiting.seconds:g} s (COMMSCHED_START_TIMEOUT) for"
                f" {mine.size} ranks; missing: {missing}. Did they start, and do they all call init()?"
            )
        while read < ask(store.add, "records", 0):
            read += 1
            other = Record(**json.loads(ask(store.get, f"record/{read}")))
            disagreement = _disagreement(mine, other, records)
            if disagreement:
                _wait_for_readers(store, mine)
                raise CommError(disagreement)
            records[other.rank] = other
        time.sleep(_POLL_SECONDS)
    return tuple(records[rank] for rank in range(mine.size))


def _disagreement(mine: Record, other: Record, records: dict[int, Record]) -> str | None:
    if other.size != mine.size:
        return (
            f"the ranks disagree about the number of ranks: it is {mine.size} on rank {mine.rank} "
            f"({mine.node}) and {other.size} on rank {other.rank} ({other.node}); start all of them with "
            "one launcher command"
        )
    if other.rank in records:
        return (
            f"two processes (on {records[other.rank].node} and {other.node}) were both started as rank "
            f"{other.rank} of {other.size}; start all ranks with one launcher command"
        )
    return None


def _wait_for_readers(store: Store, mine: Record) -> None:
    """Keep rank 0, which serves the store, until every rank has found the disagreement in it."""
    waiting = Waiting(mine.rank, _LINGER_SECONDS)
    ask = partial(_ask, waiting)
    found = ask(store.add, "disagreements", 1)
    while mine.rank == 0 and found < ask(store.add, "records", 0) and waiting.left > 0:
        time.sleep(_POLL_SECONDS)
        found = ask(store.add, "disagreements", 0)


def _reachable_address(mine: Record, records: tuple[Record, ...]) -> str:
    """Return the address by which the other ranks reach this rank's host."""
    interface = chosen_interface()
    named = interface_address(interface) if interface else None
    if named and not is_loopback(named):
        return named
    # The others did connect to rank 0 at this address; rank 0 itself may see the loopback or another card.
    dialled = [r.master_address for r in records if r.rank != 0 and not is_loopback(r.master_address)]
    if dialled and (mine.rank == 0 or is_loopback(mine.own_address)):
        return dialled[0]
    return mine.own_address
