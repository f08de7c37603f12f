"""Trains with two ranks and prints, on rank 0, which functions of ours a gradient and an update pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import commsched as hvd
from commsched.collectives.carrier import carrier
from tests.support.oracle import batch, seeded
from tests.support.reference_run import comparing, some_profile

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("commsched", "comm_core"))
UPDATE = torch.optim.SGD.step.__wrapped__.__code__  # type: ignore[attr-defined]


def ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGES)


def name_of(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}: {frame.f_code.co_name}"


class Trace:
    """For each goal that was reached: the calls on the stack, and all calls since the outermost of them."""

    def __init__(self) -> None:
        self.chains: dict[str, list[str]] = {}
        self.calls: dict[str, list[str]] = {}
        self._since: list[str] = []
        self.on_call: Callable[[str], None] = lambda name: None

    def _reach(self, goal: str, frame: FrameType | None) -> None:
        chain = []
        while frame is not None:
            if ours(frame):
                chain.append(name_of(frame))
            frame = frame.f_back
        goal = f"{goal} from {chain[-1]}"
        if len(chain) >= len(self.chains.get(goal, ())):  # the longest way counts
            self.chains[goal], self.calls[goal] = chain[::-1], list(self._since)

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call" and ours(frame):
            self.on_call(frame.f_code.co_name)
            if not any(map(ours, outer_frames(frame))):
                self._since.clear()
            self._since.append(name_of(frame))
        elif event == "call" and frame.f_code is UPDATE:
            self._reach("update", frame)
        elif event == "c_call" and getattr(function, "__name__", "") == "mark_ready":
            self._reach("mark_ready", frame)


def outer_frames(frame: FrameType) -> Iterator[FrameType]:
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(None)


def set_on_call(store: Any, key: str, name: str) -> None:
    """These two functions are called when it is decided whether updates are left for later."""
    if name in ("defer", "complete_all"):
        store.set(key, "")


def train(gather: str) -> Trace:
    """Rank 1's backward starts when rank 0 has decided what to wait for in its step, so that rank 0 has to
    leave updates for later; except one of a parameter that the script has an alias of.
    """
    trace, store = Trace(), carrier().meeting.store
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3)))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with comparing(every=0):  # the first step would wait for rank 1
        optimizer: Any = hvd.DistributedOptimizer(
            inner,
            model.named_parameters(),
            schedule="dear",
            bucket_mb=0.002,
            profile=some_profile(model),
            gather=gather,
        )
    aliases = []
    for step in range(3):  # nothing is sent before the end of the first backward
        with traced(trace):
            loss = model(batch(hvd.rank(), step)).square().mean()
        if hvd.rank() == 1:
            store.wait([f"{gather} {step}"])
        with traced(trace):
            loss.backward()
        aliases.append(model[2].bias.detach() if gather == "gradients" else None)
        key = f"{gather} {step}"
        if gather == "gradients":
            trace.on_call = partial(set_on_call, store, key)
        else:
            store.set(key, "")
        with traced(trace):
            optimizer.step()
        trace.on_call = lambda name: None
        with traced(trace):
            optimizer.zero_grad()
    optimizer.close()
    return trace


def whole_step() -> tuple[int, list[str], list[str]]:
    """Return how many calls a step of a model of 12 parameters takes with default options, once it is
    planned, and the files and classes of ours that they are in.
    """
    model = seeded(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    # Measurements are made again where other work disturbed them, until after the step that is counted.
    optimizer._session._repeats = 0
    codes: list[Any] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and ours(frame):
            codes.append(frame.f_code)

    rank = hvd.rank()
    for step in range(20):
        sys.setprofile(note if step == 19 else None)
        loss = model(batch(rank, step, (4, 16))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.setprofile(None)
    optimizer.close()
    files = {str(Path(code.co_filename).relative_to(ROOT)) for code in codes}
    classes = {code.co_qualname.split(".")[-2] for code in codes if "." in code.co_qualname}
    return len(codes), sorted(files), sorted(name for name in classes if name != "<locals>")


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    found = {gather: train(gather) for gather in ("gradients", "parameters")}
    step = whole_step()
    if hvd.rank() == 0:
        traces = {gather: [trace.chains, trace.calls] for gather, trace in found.items()}
        print(json.dumps({"traces": traces, "step": step}))
    hvd.shutdown()
