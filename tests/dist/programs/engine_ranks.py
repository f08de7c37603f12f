"""One rank of the engine's tests: what it does is its first argument, over which transports its second."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from comm_core import (
    DirectTransport,
    Engine,
    EngineError,
    PythonTransport,
    RingTransport,
    Transport,
    tcp_channel,
)

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Of a rank that waits in vain, or else one that no test reaches.
TIMEOUT = {"fewer": 15.0, "plans": 60.0, "endless": 60.0}.get(sys.argv[1], 900.0)
LENGTHS = [1, 1001, 0, 40_000]
SPLIT = [("RS", 3), ("RS", 1), ("AG", 3), ("RS", 2), ("AG", 1), ("AG", 2), ("AR", 0)]


class GlooCollectives:
    """Blocking collectives as PythonTransport wants them."""

    def __init__(self, backend: dist.ProcessGroupGloo) -> None:
        self.backend, self.rank, self.size = backend, RANK, SIZE

    def scatter_sum(self, full: torch.Tensor, shard: torch.Tensor, name: str) -> None:
        self.backend._reduce_scatter_base(shard, full).wait()

    def gather(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        self.backend._allgather_base(full, shard).wait()

    def sum(self, full: torch.Tensor, name: str) -> None:
        self.backend.allreduce([full]).wait()


def make_transport(kind: str, store: dist.Store) -> Transport:
    if kind.startswith("tcp"):
        exchange = RingTransport if kind == "tcp-ring" else DirectTransport
        return exchange(tcp_channel(store, RANK, SIZE), RANK, SIZE, segment_bytes=4096)
    backend = dist.ProcessGroupGloo(store, RANK, SIZE, timedelta(seconds=TIMEOUT))
    return PythonTransport(GlooCollectives(backend))


def make_engine(transport: Transport) -> tuple[Engine, list[torch.Tensor]]:
    engine = Engine(transport, RANK, SIZE, TIMEOUT)
    gradients = [torch.zeros(length * SIZE) for length in LENGTHS]
    for i, buffer in enumerate(gradients):
        engine.add_bucket(buffer, postscale=1 / SIZE, name=f"bucket{i}")
    engine.install(SPLIT)
    return engine, gradients


def step(engine: Engine, gradients: list[torch.Tensor]) -> None:
    for buffer in gradients:
        buffer.copy_(torch.arange(buffer.numel()) % 97 + RANK)
    engine.begin_step()
    for bucket in range(len(gradients)):
        engine.mark_ready(bucket)
    for bucket in range(len(gradients)):
        engine.wait_ag(bucket)
    for buffer in gradients:
        torch.testing.assert_close(buffer, torch.arange(buffer.numel()) % 97 + (SIZE - 1) / 2)


def train(transport: Transport) -> None:
    engine, gradients = make_engine(transport)
    for _ in range(5):
        step(engine, gradients)
    engine.wait_all()
    assert len(engine.events()) == 5 * len(SPLIT)
    engine.close()
    print("right")


def report(call: object, begin: float) -> None:
    try:
        call()  # type: ignore[operator]
    except EngineError as error:
        print(f"{error.kind} peer={error.peer} name={error.name} after={time.monotonic() - begin:.1f}")
        print(error)
    else:
        print("fine")


def endless(transport: Transport) -> None:
    """Steps without end: some rank is killed meanwhile."""
    engine, gradients = make_engine(transport)
    step(engine, gradients)
    print("running", flush=True)

    def run() -> None:
        while True:
            step(engine, gradients)

    report(run, time.monotonic())
    engine.close()


def fewer(transport: Transport) -> None:
    """The last rank takes one step less, and stays until the others have ended."""
    engine, gradients = make_engine(transport)
    for _ in range(2):
        step(engine, gradients)
    if RANK < SIZE - 1:
        report(lambda: step(engine, gradients), time.monotonic())
        store.set("ended", "yes")
    else:
        store.wait(["ended"])
        print("fine")
    engine.close()


def plans(transport: Transport) -> None:
    """The last rank has another plan."""
    engine, gradients = make_engine(transport)
    if RANK == SIZE - 1:
        engine.install([("RS", 1), ("RS", 3), ("AG", 3), ("RS", 2), ("AG", 1), ("AG", 2), ("AR", 0)])
    report(lambda: step(engine, gradients), time.monotonic())
    engine.close()


def forks(transport: Transport) -> None:
    """A child ends as any process does, and cannot use the engine; another one outlives rank 1."""
    engine, gradients = make_engine(transport)
    step(engine, gradients)
    child = os.fork()
    if child == 0:
        report(engine.begin_step, time.monotonic())
        sys.exit(0)  # runs what is registered for the end of a process
    os.waitpid(child, 0)
    for _ in range(3):
        step(engine, gradients)
    if RANK == 1:
        child = os.fork()
        if child == 0:
            time.sleep(600)
        print(f"child={child}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        while True:
            step(engine, gradients)

    report(run, time.monotonic())
    engine.close()


def unclosed(transport: Transport) -> None:
    """Ends while a bucket travels, without closing anything."""
    engine, gradients = make_engine(transport)
    step(engine, gradients)
    if RANK == 0:
        engine.begin_step()
        for bucket in range(len(gradients)):
            engine.mark_ready(bucket)
    print("end")


torch.set_num_threads(1)
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(address, port, SIZE, RANK == 0, timeout=timedelta(seconds=300))
for kind in sys.argv[2].split(","):
    globals()[sys.argv[1]](make_transport(kind, dist.PrefixStore(kind, store)))
