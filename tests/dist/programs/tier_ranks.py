"""Ranks that exchange in two tiers, without an optimizer.

`tier_ranks.py traffic MEGABYTES TIMES` counts bytes of RS, then of AG, of a bucket in an optimizer's layout;
`blocks MEGABYTES TIMES` those of both in blocks of int8.
With `RS` and `AG`, the last rank is killed before that operation of its second step; with `any`, ranks make
steps until one is killed from outside. Every other rank prints the error with which it ends.
"""

from __future__ import annotations

import os
import signal
import sys
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


def sent_bytes() -> int:
    """What this host's network device has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def measure(transport: comm_core.Transport, megabytes: int, times: int, in_blocks: bool) -> None:
    """Print the bytes by which the host's counter grows; ranks of one host read the same counter."""
    numel = (megabytes << 20) // 4
    whole = Bucket((Piece(0, 0, 4 * numel),))
    shares = shares_by_host(hosts_of())
    layout = build_layout([numel], [4], [whole], hvd.size(), alignment={0: BLOCK}, shares=shares)
    data, ends = torch.ones(layout.lengths[0]), layout.slices[0].ends
    if in_blocks:
        engine = comm_core.Engine(transport, hvd.rank(), hvd.size(), settings().timeout)
        engine.add_bucket(data, wire_dtype=torch.int8, ends=ends)
        engine.install([("RS", 0), ("AG", 0)])
    for operation in [engine.begin_step] if in_blocks else [transport.reduce_scatter, transport.all_gather]:
        hvd.barrier()
        before = sent_bytes()
        hvd.barrier()
        for step in range(times):
            if operation != transport.all_gather:
                data.fill_(1.0)
            if in_blocks:
                operation()
                engine.mark_ready(0)
                engine.wait_all()
            else:
                operation(data, step=step, ends=ends)
        hvd.barrier()
        print(f"sent {sent_bytes() - before}", flush=True)
    assert bool((data == hvd.size()).all())
    hvd.barrier()


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
    name, transport = make_transport("tiers", hvd.global_process_set, 1, settings().timeout)
    assert name == "tiers"
    what, *numbers = sys.argv[1:]
    if what in ("traffic", "blocks"):
        return measure(transport, *map(int, numbers), in_blocks=what == "blocks")
    try:
        fail(transport, what)
    except comm_core.EngineError as error:
        print(f"EngineError {error.kind} {error.peer}: {error}", flush=True)
        sys.exit(3)


main()
