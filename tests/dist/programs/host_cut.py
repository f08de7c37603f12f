"""A rank that waits for the other one in every way there is, until the host is cut off.

Each wait has a thread of its own. Every rank does the same; where its peer would have to take part for a wait
to end, the peer does not.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch

import comm_core
import commsched as hvd
from commsched import spatial
from commsched.collectives.private_groups import data_channel
from commsched.env import settings
from commsched.pipeline.messages import ProcessFabric
from tests.support.reference_run import some_profile

hvd.init()
torch.set_num_threads(1)
ME, PEER = hvd.rank(), 1 - hvd.rank()
LITTLE, MUCH = torch.ones(1000), torch.ones(16 << 20)  # much: more than the sockets' buffers take


def direct() -> comm_core.Transport:
    transport = comm_core.DirectTransport(data_channel(), ME, 2)
    transport.set_timeout(settings().timeout)
    return transport


def mine(transports: list[comm_core.Transport], buffer: torch.Tensor) -> Callable[[], object]:
    """The other rank has the same pair and uses the other one."""
    return lambda: transports[ME].all_gather(buffer)


def trained() -> Callable[[], object]:
    """Steps without end: bytes are always on their way."""
    model = torch.nn.Linear(300, 300)
    sgd = torch.optim.SGD(model.parameters(), 0.01)
    options = {"schedule": "dear", "profile": some_profile(model)}
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)

    def run() -> None:
        while True:
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)

    return run


fabric = ProcessFabric()
stages, unread = fabric.lane("stages"), fabric.lane("unread")
halos = spatial.channel(timeout=settings().timeout)
waits: dict[str, Callable[[], object]] = {
    "direct": trained(),
    "idle": mine([direct(), direct()], LITTLE),
    "full": mine([direct(), direct()], MUCH),
    "halo": lambda: halos.exchange([], [(PEER, LITTLE.clone())], "halo").wait(),
    "short": lambda: stages.receive(PEER, [LITTLE.clone()]).wait(),
    "long": lambda: unread.send(PEER, [MUCH]).wait(),
    "allreduce": lambda: hvd.allreduce(LITTLE, name=f"lonely {ME}"),
}


def report(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except (comm_core.EngineError, hvd.CommError) as error:
        print(f"{name} ended at {time.monotonic()}: {error}\n", end="", flush=True)  # whole, from any thread


hvd.barrier()
threads = [threading.Thread(target=report, args=item, daemon=True) for item in waits.items()]
for thread in threads:
    thread.start()
print("ready", os.getpid(), flush=True)
for thread in threads:
    thread.join()
print("all ended", flush=True)
sys.exit(0)
