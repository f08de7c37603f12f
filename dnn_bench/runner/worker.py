"""One rank, serving commands until its connection ends.

    python -m dnn_bench.runner.worker SOCKET BASELINE JOB (the last two as JSON)

The launcher that the baseline asks for starts it; SOCKET is a path, reachable from every emulated host since
hosts share the machine's files.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from dnn_bench import baselines

if TYPE_CHECKING:
    from dnn_bench.baselines.trainer import Job


# By command: the function that a rank calls with its trainer and the arguments of the command.
COMMANDS = {
    "check": "dnn_bench.baselines.reference.check_file",
    "settle": "dnn_bench.runner.measure.settle",
    "block": "dnn_bench.runner.measure.run_block",
    "link": "dnn_bench.runner.measure.time_link",
    "profile": "dnn_bench.runner.measure.profile_of",
    "prediction": "dnn_bench.runner.measure.prediction",
    "trace": "dnn_bench.runner.measure.trace_iteration",
    "collectives": "dnn_bench.transports.measure",
    "train": "dnn_bench.converge.train",
}


def function(name: str) -> Callable[..., Any]:
    """The function of this full name; its module is imported now, and not before."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def make_job(description: dict[str, Any]) -> Job:
    from dnn_bench.baselines.trainer import Job
    from dnn_bench.converge import TaskJob

    return TaskJob(**description) if "task" in description else Job(**description)


def serve(connection: Connection, baseline: dict[str, Any], job: dict[str, Any]) -> None:
    """Answers (command, arguments) with ("ok", result) or ("error", text); an error ends the rank."""
    connection.send(("hello", os.getpid()))
    try:
        trainer = baselines.start(baselines.Baseline(**baseline), make_job(job))
        connection.send(("ready", (trainer.rank, trainer.size)))
        while True:
            command, arguments = connection.recv()
            if command == "close":
                break
            answer = function(COMMANDS[command])(trainer, *arguments)
            # The allocator keeps memory for later: this rank rests now, and others need it.
            ctypes.CDLL(None).malloc_trim(0)
            connection.send(("ok", answer))
        trainer.close()
    except EOFError:
        os._exit(1)  # the one who asks is gone; a clean end could wait for ranks that are gone too
    except BaseException as error:
        connection.send(("error", f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"))
        os._exit(1)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--reference":
        path, size, job = arguments[1:]
        function("dnn_bench.baselines.reference.save")(path, int(size), make_job(json.loads(job)))
        return
    address, baseline, job = arguments
    serve(Client(address), json.loads(baseline), json.loads(job))


if __name__ == "__main__":
    main(sys.argv[1:])
