"""One rank, serving commands until its connection ends.

    python -m dnn_bench.runner.worker SOCKET BASELINE JOB (the last two as JSON)

The launcher that the baseline asks for starts it; SOCKET is a path, reachable from every emulated host since
hosts share the machine's files.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dnn_bench.baselines.job import Job


class Rank:
    """The commands, by method name."""

    def __init__(self, baseline: dict[str, Any], job: dict[str, Any]) -> None:
        from dnn_bench import baselines

        self.trainer = baselines.start(baselines.Baseline(**baseline), make_job(job))

    def check(self, path: str) -> tuple[float, str] | None:
        """First steps compared with the references in `path`; rank 0 judges: the error, and what is wrong."""
        import torch

        from dnn_bench.baselines import reference

        # Mapped: only rank 0 needs the parameters in memory.
        references = [reference.Reference(*parts) for parts in torch.load(path, mmap=True)]
        return reference.check(self.trainer, references)

    def block(self, warmup: int, iterations: int) -> dict[str, Any]:
        from dnn_bench.runner.measure import run_block

        return run_block(self.trainer, warmup, iterations).to_dict()

    def link(self) -> list[tuple[int, float]]:
        from dnn_bench.runner.measure import time_link

        return time_link()

    def profile(self, iterations: int) -> dict[str, Any]:
        from dnn_bench.runner.layers import profile_of

        return profile_of(self.trainer, iterations).to_dict()

    def collectives(self, sizes: list[int]) -> list[dict[str, Any]]:
        from dnn_bench.collectives.measure import measure

        return [sample.to_dict() for sample in measure(self.trainer, sizes)]

    def train(self, steps: int, path: str) -> dict[str, Any]:
        from dnn_bench.converge.train import train

        return train(self.trainer, steps, path)

    def trace(self) -> dict[str, Any]:
        from dnn_bench.runner.trace import trace_iteration

        return trace_iteration(self.trainer)


def make_job(description: dict[str, Any]) -> Job:
    from dnn_bench.baselines.job import Job
    from dnn_bench.converge.tasks import TaskJob

    return TaskJob(**description) if "task" in description else Job(**description)


def serve(connection: Connection, make: Callable[[], Rank]) -> None:
    """Answers (command, arguments) with ("ok", result) or ("error", text); an error ends the rank."""
    connection.send(("hello", os.getpid()))
    try:
        rank = make()
        connection.send(("ready", (rank.trainer.rank, rank.trainer.size)))
        while True:
            command, arguments = connection.recv()
            if command == "close":
                break
            answer = getattr(rank, command)(*arguments)
            give_memory_back()
            connection.send(("ok", answer))
        rank.trainer.close()
    except EOFError:
        os._exit(1)  # the one who asks is gone; a clean end could wait for ranks that are gone too
    except BaseException as error:
        connection.send(("error", f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"))
        os._exit(1)


def give_memory_back() -> None:
    """What the allocator keeps for later: this rank rests now, and others need the memory."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def save_reference(path: str, size: int, job: dict[str, Any]) -> None:
    import torch

    from dnn_bench.baselines.job import Job
    from dnn_bench.baselines.reference import train_alone

    made = train_alone(Job(**job), size)
    torch.save([(one.before, one.after, one.steps, one.tolerance) for one in made], path)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--reference":
        path, size, job = arguments[1:]
        save_reference(path, int(size), json.loads(job))
        return
    address, baseline, job = arguments
    serve(Client(address), lambda: Rank(json.loads(baseline), json.loads(job)))


if __name__ == "__main__":
    main(sys.argv[1:])
