"""Ranks that exchange in two tiers.

`tier_ranks.py bytes MEGABYTES TIMES` counts what a host sends in RS, in AG and in both in blocks of int8 of a
bucket in an optimizer's layout, and in training steps of a model of this size with each `gather=`.
With `RS` and `AG`, the last rank is killed before that operation of its second step; with `any`, ranks make
steps until one is killed from outside. Every other rank prints the error with which it ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import comm_core
import commsched as hvd
from comm_core.cuda.tables import BLOCK
from commsched.backends.cpu import make_transport
from commsched.collectives.private_groups import hosts_of
from commsched.env import settings
from commsched.optimizer.buckets import build_layout, shares_by_host
from scheduler.ir.buckets import Bucket, Piece
from tests.support.reference_run import some_profile


def sent_bytes() -> int:
    """What this host's network device has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


@contextmanager
def counted(what: str) -> Iterator[None]:
    """Print the bytes by which the host's counter grows; ranks of one host read the same counter."""
    hvd.barrier()
    before = sent_bytes()
    hvd.barrier()
    yield
    hvd.barrier()
    print(f"{what} sent {sent_bytes() - before}", flush=True)


def tiers(channel: int) -> comm_core.Transport:
    name, transport = make_transport("tiers", hvd.global_process_set, channel, settings().timeout)
    assert name == "tiers"
    return transport


def measure(megabytes: int, times: int) -> None:
    """Without an optimizer: RS, AG, and both in blocks of int8."""
    numel = (megabytes << 20) // 4
    whole = Bucket((Piece(0, 0, 4 * numel),))
    shares = shares_by_host(hosts_of())
    layout = build_layout([numel], [4], [whole], hvd.size(), alignment={0: BLOCK}, shares=shares)
    data, ends = torch.empty(layout.lengths[0]), layout.slices[0].ends
    transport = tiers(1001)
    for operation in (transport.reduce_scatter, transport.all_gather):
        with counted(operation.__name__):
            for step in range(times):
                if operation != transport.all_gather:
                    data.fill_(1.0)
                operation(data, step=step, ends=ends)
    assert bool((data == hvd.size()).all())
    engine = comm_core.Engine(tiers(1002), hvd.rank(), hvd.size(), settings().timeout)
    engine.add_bucket(data, wire_dtype=torch.int8, ends=ends)
    engine.install([("RS", 0), ("AG", 0)])
    with counted("blocks"):
        for _ in range(times):
            data.fill_(1.0)
            engine.begin_step()
            engine.mark_ready(0)
            engine.wait_all()
    assert bool((data == hvd.size()).all())
    engine.close()


def train(megabytes: int, times: int, gather: str) -> None:
    """Whole steps. In the first, which is not counted, the ranks compare all parameters."""
    size = 512
    layers = [torch.nn.Linear(size, size, bias=False) for _ in range(megabytes)]  # 1 MiB each
    model = torch.nn.Sequential(*layers)
    sgd = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    options = {"schedule": "dear", "profile": some_profile(model), "gather": gather}
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
    assert hvd.explain(optimizer, show=False).transport == "tiers"

    def step() -> None:
        model(torch.ones(1, size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            assert parameter.isfinite().all()  # reads it, and so waits for its all-gather

    step()
    with counted(gather):
        for _ in range(times):
            step()
    optimizer.close()


def fail(transport: comm_core.Transport, operation: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    grads = transport.zeros(size << 18, torch.float32).fill_(1)
    params = torch.ones(size << 18)
    engine = comm_core.Engine(transport, rank, size, settings().timeout)
    engine.add_bucket(grads, gather=params, name="weights", needs_update=True)
    engine.install([("RS", 0), ("AG", 0)])
    for step in range(1_000_000 if operation == "any" else 2):
        dies = operation != "any" and step == 1 and rank == size - 1
        if step == 3:
            print("going", flush=True)
        if dies and operation == "RS":
            os.kill(os.getpid(), signal.SIGKILL)
        engine.begin_step()
        engine.mark_ready(0)
        engine.wait_rs(0)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.mark_updated(0)
        engine.wait_ag(0)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    what, *numbers = sys.argv[1:]
    if what == "bytes":
        megabytes, times = map(int, numbers)
        measure(megabytes, times)
        for gather in ("gradients", "parameters"):
            train(megabytes, times, gather)
        hvd.barrier()
        return
    try:
        fail(tiers(1001), what)
    except comm_core.EngineError as error:
        print(f"EngineError {error.kind} {error.peer}: {error}", flush=True)
        sys.exit(3)


main()
