"""How the ranks of one job find each other under every launcher: one c10d store, and a check that they agree.

Rank 0 listens; where the launcher does not already hand out an address, rank 0's is published through
whatever the launcher has (horovodrun's key-value server, one MPI broadcast, Horovod itself). Every rank then
signs in, which shows missing ranks, ranks that count twice and ranks that believe in another world size.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from commsched.env import settings
from commsched.errors import CommError
from commsched.process import mpi_bootstrap
from commsched.process.launch import Launch
from commsched.process.network import (
    KeyValueServer,
    chosen_interface,
    first_reachable,
    interface_address,
    is_loopback,
    own_addresses,
)

Publish = Callable[[dict[str, object] | None], dict[str, object]]
_POLL_SECONDS = 0.02
_LINGER_SECONDS = 20.0


@dataclass(frozen=True)
class Record:
    """What one rank says of itself when it signs in."""

    rank: int
    size: int
    local_rank: int
    node: str
    own_address: str
    master_address: str


@dataclass(frozen=True)
class Meeting:
    """All ranks have met: their records by rank, a store they share, the address others reach this one by."""

    launch: Launch
    store: Store
    records: tuple[Record, ...]
    address: str

    @property
    def cross(self) -> tuple[int, int]:
        """(index, count) of this rank's node among the nodes that have its local rank."""
        nodes = list(dict.fromkeys(r.node for r in self.records if r.local_rank == self.launch.local_rank))
        return nodes.index(self.launch.node), len(nodes)


@dataclass(frozen=True)
class _Base:
    """The process's one connection to the job's store; it outlives shutdown(), so that init() works again."""

    store: Store
    own_address: str
    master_address: str


_base: _Base | None = None
_generation = 0


def meet(launch: Launch, publish: Publish | None = None) -> Meeting:
    """Bring all ranks of `launch` together; ``CommError`` says who is missing or disagrees."""
    global _base, _generation
    _generation += 1
    if launch.size == 1:
        record = Record(0, 1, 0, launch.node, "127.0.0.1", "127.0.0.1")
        return Meeting(launch, HashStore(), (record,), "127.0.0.1")
    if _base is None:
        _base = _connect(launch, publish)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"commsched/{restart}/{_generation}", _base.store)
    mine = Record(
        launch.rank, launch.size, launch.local_rank, launch.node, _base.own_address, _base.master_address
    )
    try:
        records = _sign_in(store, mine)
    except CommError:
        raise
    except RuntimeError as error:  # what a store raises whose server is gone
        raise CommError(f"rank 0 ended while rank {mine.rank} was waiting for all ranks: {error}") from error
    return Meeting(launch, store, records, _reachable_address(mine, records))


def _connect(launch: Launch, publish: Publish | None) -> _Base:
    options = settings()
    if options.master_addr or (launch.launcher == "torchrun" and publish is None):
        return _connect_to_given(launch)
    if publish is None:
        publish = _publisher(launch)
    if launch.rank != 0:
        found = publish(None)
        return _join(found["addresses"], int(found["port"]), str(found["token"]))  # type: ignore[arg-type,call-overload]
    addresses, token = own_addresses(launch.one_host), secrets.token_hex(16)
    server = _listen("0.0.0.0", 0)
    server.set("commsched/token", token)
    publish({"addresses": addresses, "port": server.port, "token": token})
    return _Base(server, addresses[0], addresses[0])


def _connect_to_given(launch: Launch) -> _Base:
    """The address is known before: torchrun's MASTER_ADDR and MASTER_PORT, or COMMSCHED_MASTER_ADDR and
    _PORT."""
    options = settings()
    if options.master_addr:
        names, address, port = (
            ("COMMSCHED_MASTER_ADDR", "COMMSCHED_MASTER_PORT"),
            options.master_addr,
            options.master_port,
        )
    else:
        names, address = ("MASTER_ADDR", "MASTER_PORT"), os.environ.get("MASTER_ADDR", "")
        port = int(os.environ.get("MASTER_PORT") or 0)
    if not address or not port:
        raise CommError(
            f"{launch.size} ranks need {names[0]} and {names[1]}, but they are {address!r} and {port}; set "
            "both on every rank to an address and a free port of rank 0's host"
        )
    launcher_listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not options.master_addr
    if launch.rank == 0 and not launcher_listens:
        server = _listen(address, port)
        return _Base(server, *reversed(first_reachable([address], port, options.timeout)))
    return _join([address], port, None)


def launcher_server() -> KeyValueServer | None:
    """horovodrun's key-value server, None where it did not start this process (or did with MPI)."""
    address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{what}", "") for what in ("ADDR", "PORT"))
    return KeyValueServer(address, int(port), settings().timeout) if address and port else None


def _publisher(launch: Launch) -> Publish:
    if launch.mpi:
        return lambda value: mpi_bootstrap.broadcast(value, launch.rank)
    server = launcher_server()
    if server is None:
        raise CommError(
            f"{launch.size} ranks need to know rank 0's address, and {launch.launcher} gives none "
            "(HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT are not set); set COMMSCHED_MASTER_ADDR and "
            "COMMSCHED_MASTER_PORT on every rank"
        )

    def publish(value: dict[str, object] | None) -> dict[str, object]:
        if value is None:
            return json.loads(server.wait("commsched", "rank0"))
        server.put("commsched", "rank0", json.dumps(value).encode())
        return value

    return publish


def _listen(address: str, port: int) -> TCPStore:
    try:
        # multi_tenant: the script's own init_process_group may share the port from within this process.
        return TCPStore(address, port, None, True, _timeout(), wait_for_workers=False, multi_tenant=port != 0)
    except RuntimeError as error:
        raise CommError(
            f"rank 0 can not listen on {address}, port {port}: {error}; is another job using the port? "
            "Choose a free one"
        ) from error


def _join(addresses: list[str], port: int, token: str | None) -> _Base:
    master, own = first_reachable(addresses, port, settings().timeout)
    try:
        store = TCPStore(master, port, None, False, _timeout(), wait_for_workers=False)
        found = store.get("commsched/token").decode() if token else None
    except RuntimeError as error:
        raise CommError(
            f"what answers on {master}, port {port}, is not the store of rank 0: {error}"
        ) from error
    if found != token:
        raise CommError(
            f"what answers on {master}, port {port}, belongs to another job; end that job, or choose this "
            "job's port with COMMSCHED_MASTER_ADDR and COMMSCHED_MASTER_PORT"
        )
    return _Base(store, own, master)


def _timeout() -> timedelta:
    return timedelta(seconds=settings().timeout)


def _sign_in(store: Store, mine: Record) -> tuple[Record, ...]:
    """Post this rank's record and wait for everybody's, comparing each as it comes."""
    store.set(f"record/{store.add('signed_in', 1)}", json.dumps(asdict(mine)))
    records: dict[int, Record] = {}
    read, deadline = 0, time.monotonic() + settings().timeout
    while len(records) < mine.size:
        if time.monotonic() > deadline:
            missing = sorted(set(range(mine.size)) - set(records))
            raise CommError(
                f"rank {mine.rank} waited {settings().timeout:g} s (COMMSCHED_TIMEOUT) for {mine.size} "
                f"ranks; missing: {missing}. Did they start, and do they all call init()?"
            )
        while read < store.add("signed_in", 0):
            read += 1
            other = Record(**json.loads(store.get(f"record/{read}")))
            complaint = _disagreement(mine, other, records)
            if complaint:
                _let_others_read(store, mine)
                raise CommError(complaint)
            records[other.rank] = other
        time.sleep(_POLL_SECONDS)
    return tuple(records[rank] for rank in range(mine.size))


def _disagreement(mine: Record, other: Record, records: dict[int, Record]) -> str | None:
    if other.size != mine.size:
        return (
            f"the ranks disagree about how many they are: rank {mine.rank} on {mine.node} was told "
            f"{mine.size}, rank {other.rank} on {other.node} was told {other.size}; start all of them with "
            "one launcher command"
        )
    if other.rank in records:
        return (
            f"two processes ({records[other.rank].node} and {other.node}) both say they are rank "
            f"{other.rank} of {other.size}; start all ranks with one launcher command"
        )
    return None


def _let_others_read(store: Store, mine: Record) -> None:
    """Rank 0 serves the store: give the others a moment to read why it goes before it goes."""
    told = store.add("complained", 1)
    deadline = time.monotonic() + _LINGER_SECONDS
    while mine.rank == 0 and told < store.add("signed_in", 0) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        told = store.add("complained", 0)


def _reachable_address(mine: Record, records: tuple[Record, ...]) -> str:
    """The address by which the other ranks reach this one's host."""
    interface = chosen_interface()
    named = interface_address(interface) if interface else None
    if named and not is_loopback(named):
        return named
    seen = [r.master_address for r in records if r.rank != 0 and not is_loopback(r.master_address)]
    # What the others dialled is rank 0's address for sure; its own view may be the loopback or another of its
    # cards.
    if seen and (mine.rank == 0 or is_loopback(mine.own_address)):
        return seen[0]
    return mine.own_address
