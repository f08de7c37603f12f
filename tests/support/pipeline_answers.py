"""A rank of `dnn_bench pipeline` that measures nothing: its answer, while every rank's output mixes with the
others'.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dnn_bench.pipeline import worker
from dnn_bench.pipeline.options import Options, Result


def measure(options: Options) -> Result | None:
    """Write half a line, and answer when all ranks have done so."""
    folder = Path(sys.argv[1])
    print(f"RESULT of rank {os.environ['RANK']}", end="", flush=True)
    (folder / f"written.{os.environ['RANK']}").touch()
    while len(list(folder.glob("written.*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if options.schedule == "gpipe":
        raise ValueError(f"rank {os.environ['RANK']} refuses")
    if os.environ["RANK"] != "0":
        return None
    return Result(options.model, options.schedule, (0, 0), 1.0, 1.0, 0.0, 0.0, 1.0, 8, [1.0, 0.5])


worker.measure = measure
worker.main()
