"""``commsched ARGUMENTS``, or ``python -m dnn_bench ARGUMENTS`` where these begin with spatial.

With KILLED=RANK:STEP or RANK:STEP:SIGNAL, that rank gets signal 9 or SIGNAL when it calls its pipeline's
step STEP.
"""

import os
import signal
import sys

import torch

from commsched import cli
from commsched.pipeline import Pipeline
from dnn_bench import __main__ as bench

if os.environ.get("KILLED"):
    rank, step, number = map(int, (*os.environ["KILLED"].split(":"), signal.SIGKILL)[:3])
    take, taken = Pipeline.step, 0

    def counted(pipeline, *batch, **options):  # type: ignore[no-untyped-def]
        global taken
        if pipeline.rank == rank and taken == step:
            os.kill(os.getpid(), number)
        taken += 1
        return take(pipeline, *batch, **options)

    Pipeline.step = counted  # type: ignore[method-assign]
torch.set_num_threads(1)
words = sys.argv[1:]
sys.exit(bench.main(words) if words[0] == "spatial" else cli.main(words))
