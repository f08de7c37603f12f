"""One training run in which rank 1 does what the first argument says; every rank prints how it ended."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import commsched as hvd
from commsched.optimizer.session import Session
from tests.support.oracle import batch, seeded
from tests.support.reference_run import some_profile

STEPS, WHEN = 15, 10  # behind the iterations that are timed


def mlp(width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )


def trainer(what: str, odd: bool) -> tuple[nn.Module, Any]:
    model = seeded(lambda: mlp(65 if odd and what == "another model" else 64))
    if odd and what == "one parameter less":
        model[4] = nn.Linear(64, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options: dict[str, Any] = {"schedule": "dear", "bucket_mb": 0.004}
    if what.endswith("while deferred"):
        options["profile"] = some_profile(model)
    if odd and what == "killed before the first step":
        die()
    if what == "parameters gathered":
        options["gather"] = "parameters"
    if odd and what == "another schedule":
        options["schedule"] = "wfbp"
    if odd and what == "another plan":
        use_another_plan()
    if odd and what.endswith("agrees on a plan"):
        instead = die if what.startswith("killed") else lambda *_: time.sleep(600)
        Session._meet = instead  # type: ignore[method-assign, assignment]
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def use_another_plan() -> None:
    """Past all checks: the engine itself is told another order."""
    from commsched.backends import interface

    honest = interface.link_order

    def swapped(program: Any) -> list[tuple[str, int]]:
        plan = honest(program)
        reductions = [i for i, (kind, _) in enumerate(plan) if kind == "RS"]
        if len(reductions) > 1:
            a, b = reductions[:2]
            plan[a], plan[b] = plan[b], plan[a]
        return plan

    interface.link_order = swapped


def die(*_: Any) -> None:
    print("dies now", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class SlowData(Dataset[int]):
    """Keeps the workers of a DataLoader busy for longer than any test."""

    def __init__(self) -> None:
        self.busy = multiprocessing.Semaphore(0)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index >= 2:
            self.busy.release()
            time.sleep(900)
        return index


def start_workers() -> Any:
    data = SlowData()
    batches = iter(DataLoader(data, batch_size=None, num_workers=2))
    print(f"workers={[worker.pid for worker in batches._workers]}", flush=True)  # type: ignore[attr-defined]
    next(batches)
    for _ in range(2):  # a worker that finds its parent dead before it is busy ends
        data.busy.acquire()
    return batches


def misbehave(what: str, step: int, model: nn.Module) -> bool:
    """Rank 1's turn; True: no step() this time."""
    if step != WHEN:
        return False
    if what.startswith("killed in the backward") or what == "parameters gathered":
        model[2].weight.register_hook(die)
    elif what.startswith("killed in the forward"):
        model[2].register_forward_pre_hook(die)
    elif what == "an exception":
        raise KeyError("the data of rank 1")
    elif what == "hangs":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "does not come":
        time.sleep(600)
    elif what == "comes late":
        time.sleep(6)
    return what == "skips a step"


def train(what: str) -> None:
    odd = hvd.rank() == 1
    model, optimizer = trainer(what, odd)
    workers = start_workers() if odd and what.endswith("with workers") else None  # noqa: F841  it keeps them
    try:
        for step in range(STEPS):
            skips = odd and misbehave(what, step, model)
            model(batch(hvd.rank(), step)).square().mean().backward()
            if not skips:
                optimizer.step()
            optimizer.zero_grad()
        optimizer.state_dict()
    except hvd.CommError:
        save(model, optimizer)
        raise


def save(model: nn.Module, optimizer: Any) -> None:
    """Write an emergency checkpoint of the model, and of the optimizer if this rank has all of its state."""
    for wait in (hvd.rank() == 0, False):  # nobody is waited for who is lost; a second close() is harmless
        optimizer.close(wait=wait)
    parts = {"model": model.state_dict()}
    if not optimizer.spreads_state:
        parts["optimizer"] = optimizer.state_dict()
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    saved = torch.load(file)
    plain = seeded(mlp)
    plain.load_state_dict(saved["model"])
    assert torch.equal(plain(batch(0, 0)), model(batch(0, 0)))
    if "optimizer" in parts:
        torch.optim.SGD(plain.parameters(), lr=1.0).load_state_dict(saved["optimizer"])
    print(f"saved {' and '.join(saved)}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs in a shell's background
    hvd.init()
    try:
        train(sys.argv[1])
    except hvd.CommError as error:
        print(f"CommError: {error}", flush=True)
        sys.exit(3)
    print("ended", flush=True)


if __name__ == "__main__":
    main()
