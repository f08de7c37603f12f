"""Random programs of optimizers, pipelines and tiles under torch's race detector, on devices on paper.

    python -m tests.checker.races --programs 1000               # of each kind
    python -m tests.checker.races --kinds tiles --seed 7 --programs 1
    python -m tests.checker.races --kinds optimizers --programs 5 --left-out "wait in StreamSchedule._start"

Programs are those of the other checkers: what they compute is compared as there, and no access to a device's
memory may lack an event that orders it. Each rank has a device of its own, whose detector watches all
operations of the rank's thread (``commsched.backends.races``). Scripts of optimizers compute on several
streams: see ``WatchedWorld``. With ``--left-out``, a function of the code does not wait, and races are what
is wanted. A program that takes longer than ``--limit`` counts as a hang: the command ends with the stacks of
all threads.

Left out: compiled blocks, for the detector sees operations and not what a compiler makes of them.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from commsched.backends.races import MAIN, OTHER, SIDE
from tests.checker import programs, stages, tiles
from tests.checker.__main__ import warm_up
from tests.checker.distributed import ThreadWorld
from tests.checker.programs import Failure, ThreadJob
from tests.support.races import Forgetful
from tests.support.watched_ranks import new_devices, no_collector, races_of, run_pipelines, run_tiles


class WatchedWorld(ThreadWorld):
    """Runs forwards on several streams, and backwards on those of their forwards, as autograd does.

    Scripts order the streams that they use: each waits for the usual one, and then that for it.
    """

    def __init__(self, job: WatchedJob, rank: int) -> None:
        self.device, self.dice = job.watched(rank), random.Random(f"streams {job.program.seed} {rank}")
        self.forwarded_on = MAIN
        super().__init__(job, rank)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        device, before = self.device, self.device.current()
        if stream == before:
            yield
            return
        device.wait(stream, device.record(before))
        try:
            with device.on(stream):
                yield
        finally:
            device.wait(before, device.record(stream))

    def forward(self, x: torch.Tensor, spec: dict[str, Any], bomb: int | None = None) -> torch.Tensor:
        self.forwarded_on = self.dice.choice([MAIN, MAIN, SIDE, OTHER])
        with self.on(self.forwarded_on):
            return super().forward(x, spec, bomb)

    def backward(self, loss: torch.Tensor | list[torch.Tensor], **how: Any) -> None:
        with self.on(self.forwarded_on):
            super().backward(loss, **how)


class WatchedJob(ThreadJob):
    def __init__(self, left_out: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.devices = new_devices(self.meeting.size, left_out, at_once=False)

    def watched(self, rank: int) -> Forgetful:
        return self.devices[rank]

    def new_world(self, rank: int) -> WatchedWorld:
        return WatchedWorld(self, rank)

    def run(self, rank: int, records: Any) -> None:
        with self.devices[rank].races:
            super().run(rank, records)

    def verdict(self) -> Failure | None:
        found = super().verdict()
        races = races_of(self.devices)
        return found or (Failure("races", races[0], 0, 0, "", "\n".join(races)) if races else None)


def of_optimizers(seed: int, left_out: str = "") -> str:
    program = programs.draw(seed, 2 + (seed % 5 == 0), fixed={"stream": True})
    with no_collector():
        failure = programs.run_on_threads(program, 120.0, new_job=partial(WatchedJob, left_out))
    return "" if failure is None else f"{program}\n{failure}"


def of_pipelines(seed: int, left_out: str = "", direct: bool = False) -> str:
    case = stages.draw(seed)
    kinds = tuple("plain" if kind in stages.COMPILED else kind for kind in case.kinds)
    steps = tuple((rows, "" if what == "compile" else what) for rows, what in case.steps)
    case = replace(case, kinds=kinds, steps=steps)
    devices = new_devices(case.size, left_out)
    reason = stages.failure(case, lambda size, *arguments: run_pipelines(devices, *arguments, direct=direct))
    return _told(case, reason, devices)


def of_tiles(seed: int, left_out: str = "") -> str:
    case = tiles.draw(seed)
    devices = new_devices(case.size, left_out)
    reason = tiles.failure(case, lambda size, *arguments: run_tiles(devices, *arguments))
    return _told(case, reason, devices)


def _told(case: Any, reason: str, devices: list[Forgetful]) -> str:
    found = "\n".join(filter(None, [reason, *races_of(devices)]))
    return found and f"{case}\n{found}"


KINDS: dict[str, Callable[..., str]] = {
    "optimizers": of_optimizers,
    "pipelines": of_pipelines,
    "direct": partial(of_pipelines, direct=True),  # messages from device to device, where they can
    "tiles": of_tiles,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--programs", type=int, default=100, metavar="N", help="of each kind (default 100)")
    add("--seed", type=int, default=1, metavar="N", help="of the first program of each kind (default 1)")
    add("--kinds", default=",".join(KINDS), help="with commas (default: all)")
    add(
        "--left-out",
        default="",
        metavar="PLACE",
        help="leave out what a function does: see WAITS in the tests",
    )
    add("--limit", type=float, default=300.0, metavar="S", help="seconds of one program (default 300)")
    add("--show", type=int, default=5, metavar="N", help="failures to print whole (default 5)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warm_up()
    faulthandler.enable()
    kinds = given.kinds.split(",")
    start, longest = time.monotonic(), (0.0, 0, "")
    failed = dict.fromkeys(kinds, 0)
    for done, seed in enumerate(range(given.seed, given.seed + given.programs), 1):
        for kind in kinds:
            began = time.monotonic()
            faulthandler.dump_traceback_later(given.limit, exit=True)
            reason = KINDS[kind](seed, given.left_out)
            faulthandler.cancel_dump_traceback_later()
            longest = max(longest, (time.monotonic() - began, seed, kind))
            if reason:
                failed[kind] += 1
                text = reason if failed[kind] <= given.show else reason.splitlines()[-1]
                print(f"{kind}, seed {seed}: {text}\n", flush=True)
        if done % 20 == 0 or done == given.programs:
            found = ", ".join(f"{count} of {kind}" for kind, count in failed.items())
            print(
                f"{done} programs of each kind from seed {given.seed}, failed: {found};"
                f" {time.monotonic() - start:.0f} s, cpu {time.process_time():.0f} s,"
                f" the longest {longest[0]:.1f} s ({longest[2]}, seed {longest[1]})",
                flush=True,
            )
    return int(any(failed.values()))


if __name__ == "__main__":
    sys.exit(main())
