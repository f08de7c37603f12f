"""Ranks in every phase of the exchange in two tiers at once, until a fault ends their waits.

`tier_faults.py standing VICTIM SIGN`: in each phase all wait for the rank VICTIM, which goes no further.
`tier_faults.py moving VICTIM SIGN`: all exchange and train, so the fault comes anywhere.

Each phase has connections and a thread of its own. A rank prints when and with which error each has ended.
Whoever makes the fault writes the file SIGN afterwards. SIGUSR1 has the victim close all that it has and end,
SIGUSR2 has it end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

import comm_core
import commsched as hvd
from comm_core import Traffic
from commsched.backends.cpu import make_transport
from commsched.collectives.private_groups import data_board, data_channel
from commsched.env import settings
from tests.support.reference_run import some_profile

ENDS = {signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # also in all threads: the main thread takes them
torch.set_num_threads(1)
hvd.init()
HOW, VICTIM, SIGN = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
LATE = hvd.rank() == VICTIM
MUCH = 2 << 20  # elements: a rank's part has four times as many segments as may be under way
numbers = count(1000)  # of connections; optimizers count theirs from 1
closable: list[Callable[[], object]] = []
kept: list[object] = []
Phase = Callable[[], object]


def engine_of(length: int, gathers: bool = True) -> comm_core.Engine:
    """A new engine with one bucket."""
    name, transport = make_transport("tiers", hvd.global_process_set, next(numbers), settings().timeout)
    assert name == "tiers"
    engine = comm_core.Engine(transport, hvd.rank(), hvd.size(), settings().timeout)
    sums = transport.zeros(length, torch.float32).fill_(1)
    engine.add_bucket(sums, gather=torch.ones(length), name="weights", needs_update=gathers)
    engine.install([("RS", 0), ("AG", 0)][: 1 + gathers])
    closable.append(engine.close)
    return engine


def reduce(engine: comm_core.Engine) -> None:
    engine.begin_step()
    engine.mark_ready(0)
    engine.wait_rs(0)


def gather(engine: comm_core.Engine) -> None:
    engine.mark_updated(0)
    engine.wait_ag(0)


def step(engine: comm_core.Engine) -> None:
    reduce(engine)
    gather(engine)


def after_the_fault(engine: comm_core.Engine) -> None:
    while not SIGN.exists():
        time.sleep(0.02)
    step(engine)


def optimizer() -> tuple[torch.nn.Module, hvd.DistributedOptimizer]:
    model = torch.nn.Linear(300, 300)
    sgd = torch.optim.SGD(model.parameters(), 0.01)
    options = {"schedule": "dear", "profile": some_profile(model)}
    made = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
    assert hvd.explain(made, show=False).transport == "tiers"
    return model, made


def training() -> Phase:
    model, made = optimizer()
    closable.append(lambda: made.close(wait=False))

    def run() -> None:
        while True:
            model(torch.ones(1, 300)).sum().backward()
            made.step()
            made.zero_grad()

    return run


def endless(engine: comm_core.Engine, gathers: bool) -> Phase:
    def run() -> None:
        while True:
            reduce(engine)
            if gathers:
                gather(engine)

    return run


def moving() -> dict[str, Phase]:
    return {
        "scatters": endless(engine_of(MUCH, gathers=False), False),
        "steps": endless(engine_of(MUCH), True),
        "training": training(),
    }


def standing() -> dict[str, Phase]:
    """What this rank does in each phase after it has come there; the victim does nothing more."""
    link = data_channel(channel=next(numbers))
    kept.append(link)
    inside, between, gathers, idle = (engine_of(MUCH) for _ in range(4))
    reduce(gathers)
    step(idle)
    if LATE:
        # The slices lie on its board. Their sum waits at the gate for a halo that does not end.
        comm_core.link_gate().begin(Traffic.halo, 0, 1e6)
        between.begin_step()
        between.mark_ready(0)
        return {}
    return {
        "optimizer": optimizer,
        "connections": lambda: data_channel(channel=100),
        "boards": lambda: data_board(link, range(hvd.size())),
        "inside": lambda: reduce(inside),
        "between": lambda: step(between),
        "gather": lambda: gather(gathers),
        "idle": lambda: after_the_fault(idle),
    }


def report(name: str, phase: Phase) -> None:
    try:
        phase()
        error = "no error"
    except comm_core.EngineError as raised:
        error = f"{raised.kind} {raised.peer}: {raised}"
    except hvd.CommError as raised:
        error = f"CommError: {raised}"
    print(f"{name} ended at {time.monotonic()}: {error}\n", end="", flush=True)  # whole, from any thread


def main() -> None:
    phases = moving() if HOW == "moving" else standing()
    hvd.barrier()
    threads = [threading.Thread(target=report, args=phase, daemon=True) for phase in phases.items()]
    for thread in threads:
        thread.start()
    while LATE and HOW == "standing" and not comm_core.link_gate().held_back():
        time.sleep(0.01)
    time.sleep(1)  # in which each comes to its wait
    print(f"ready {os.getpid()}", flush=True)
    if LATE:
        if signal.sigwait(ENDS) == signal.SIGUSR1:
            for close in closable:
                close()
        sys.exit(0)
    for thread in threads:
        thread.join()
    sys.exit(3)


main()
