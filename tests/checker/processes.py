"""Programs on real ranks: one launch runs many programs, and a new one goes on after a failure."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tests.checker.programs import Failure, Program, Stop, _raised, plain_records, run_distributed

PREFIX = "PROGRAM "
PATIENCE = float(os.environ.get("CHECKER_PATIENCE", 12.0))
"""Seconds after which a rank's wait for another counts as a hang; more are wanted on a busy machine."""
_PORT = "CHECKER_PORT"


# -- in the ranks --------------------------------------------------------------------------------------------


Outcome = tuple[Failure | None, bool, float]
Meet = Callable[[str], None]
Here = Callable[[Any, int, Meet], Outcome]


def main(run: Here | None = None) -> None:
    """Run the programs of a file on this rank; print one line for each.

    ``run`` takes a program, the rank, and a function that waits until all ranks call it with the same word.
    """
    import numba  # noqa: F401
    import torch

    import commsched

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    commsched.init()
    rank, size = commsched.rank(), commsched.size()
    store = torch.distributed.TCPStore(
        "127.0.0.1", int(os.environ[_PORT]), is_master=rank == 0, wait_for_workers=False
    )
    if run is None and rank == 0:
        compile_searches()
    for number, each in enumerate(json.loads(Path(sys.argv[1]).read_text())):

        def meet(where: str, number: int = number) -> None:
            keys = [f"{number}/{where}/{each}" for each in range(size)]
            store.set(keys[rank], "")
            store.wait(keys, timedelta(seconds=6 * PATIENCE))

        failure, listed, moment = (run or run_here)(each, rank, meet)
        line = {
            "number": number,
            "failure": failure and asdict(failure),
            "listed": listed,
            "time": moment,
        }
        print(PREFIX + json.dumps(line), flush=True)
        if failure is not None:
            os._exit(1)  # nobody knows in which state the library is
        meet("end")
    commsched.shutdown()
    # Rank 0 has the store.
    store.set(f"end/{rank}", "")
    store.wait([f"end/{each}" for each in range(size)], timedelta(seconds=6 * PATIENCE))


def compile_searches() -> None:
    """Compile what makes plans, where numba's cache lacks it: 10 s of a processor.

    Rank 0 would do it within the first program that plans, while the others wait for its plan in vain.
    """
    import torch

    from scheduler import policies
    from scheduler.ir.link import Link
    from tests.checker.distributed import made_up_profile

    profile = made_up_profile([f"p{number}" for number in range(8)], [torch.zeros(100)] * 8)
    for policy, size in product(policies.names(), (None, 400)):  # bytes of a bucket
        policies.plan(profile, Link(alpha=1e-4, beta=1e-8), policy, bucket_bytes=size)


def run_here(described: Any, rank: int, meet: Meet) -> Outcome:
    """Run a program on this rank; return how it failed, whether a listed error ended it, and when."""
    from tests.checker.distributed import ProcessWorld

    program = Program.from_json(described)
    records = plain_records(program)
    # Wrapping is the ranks' first agreement: it would wait for one that is still computing its records, and
    # report a hang where another program takes that rank's processor.
    meet("begin")
    world = None
    try:
        world = ProcessWorld(program, rank)
        run_distributed(world, program, records[rank], [])
        meet("end")  # the others may need this rank until they are here
    except Stop as stop:
        return stop.failure, stop.failure is None, time.monotonic()
    except Exception as error:
        return _raised(error, rank, -1, "wrap"), False, time.monotonic()
    finally:
        if world is not None:
            world.end()  # the other ranks notice that
    return None, False, time.monotonic()


# -- in the checker ------------------------------------------------------------------------------------------


def run_in_processes(
    programs: Sequence[Program], ranks: int, hosts: int = 1
) -> Iterator[tuple[Program, Failure | None]]:
    """Run programs on real ranks; yield each with how it failed."""
    failures = run_described([program.to_json() for program in programs], ranks, Path(__file__), hosts)
    yield from zip(programs, failures)


def run_described(
    programs: Sequence[Any], ranks: int, source: Path, hosts: int = 1
) -> Iterator[Failure | None]:
    """Run programs, described for JSON, by a script that calls `main` on each rank; yield how each failed.

    All ranks are on this machine. With several `hosts`, the launcher's variables tell of so many.
    """
    left = list(programs)
    while left:
        done = 0
        for failure in _launch(left, ranks, source, hosts):
            yield failure
            done += 1
        left = left[done:]


def _launch(programs: Sequence[Any], ranks: int, source: Path, hosts: int) -> Iterator[Failure | None]:
    """Run programs until one fails; yield how each failed."""
    from commsched.process.network import HeldPort
    from tests.support.launch import start_ranks

    port = HeldPort()
    settings = {"COMMSCHED_TIMEOUT": f"{PATIENCE:g}", _PORT: str(port.number)}
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(programs, file)
        file.flush()
        launcher = "torchrun-env" if hosts == 1 else f"srun-env:{hosts}"
        started = start_ranks(source, ranks, [file.name], settings, launcher)
        with closing(port), started:
            yield from _follow(started, len(programs), ranks)


def _follow(started: Any, count: int, ranks: int) -> Iterator[Failure | None]:
    readers = [_Lines(started, rank) for rank in range(ranks)]
    number, latest = 0, time.monotonic() + 120.0  # to start
    while number < count:
        ended = all(process.poll() is not None for process in started.processes)
        for reader in readers:
            reader.read()
        here = [reader.lines[number] for reader in readers if number < len(reader.lines)]
        failures = [each for each in here if each["failure"]]
        if failures and (len(here) == ranks or ended or time.monotonic() > latest):
            first = Failure(**min(failures, key=lambda each: each["time"])["failure"])
            # A listed error has ended one rank: the others must not wait for it for ever. They get an error,
            # or None where close() had to do without that rank.
            lost = "CommError" in first.sort or " is None, plain has" in first.detail
            follows = any(each["listed"] for each in here) and lost
            yield None if follows else first
            return  # a new launch goes on
        if len(here) == ranks:
            yield None
            number, latest = number + 1, time.monotonic() + 8 * PATIENCE
        elif ended or time.monotonic() > latest:
            text = started.report()[-4000:]
            yield Failure("hangs", "a rank did not come to the end", -1, -1, "?", text)
            return
        else:
            time.sleep(0.02)


class _Lines:
    """What a rank has said about its programs, in their order."""

    def __init__(self, started: Any, rank: int) -> None:
        self._path, self._place = started.folder / f"rank.{rank}.stdout", 0
        self.lines: list[dict[str, Any]] = []

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._place)
            while (line := file.readline()).endswith("\n"):
                self._place += len(line.encode())
                if line.startswith(PREFIX):
                    self.lines.append(json.loads(line[len(PREFIX) :]))


if __name__ == "__main__":
    main()
