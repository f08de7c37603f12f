"""A training script as users write it, with DDP or, with --commsched, changed to commsched.

It trains a small model on made-up data. With --commsched rank 0 prints the median seconds of a step, and the
seconds of its compute. With --disturbed-at N:CORE another process takes a processor in step N, for 2 s.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from dnn_bench import models

SETTLE = 40  # steps in which commsched measures, plans, and tries DDP's way
BURN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
end = time.monotonic() + 2
while time.monotonic() < end:
    pass
"""


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--model", default="mlp_tiny")
    given.add_argument("--batch-size", type=int, default=8)
    given.add_argument("--steps", type=int, default=40)
    given.add_argument("--commsched", action="store_true", help="train with commsched instead of DDP")
    given.add_argument("--settle", type=int, default=SETTLE, help="steps that are not timed")
    given.add_argument("--disturbed-at", default="-1:0", metavar="STEP:CORE")
    options = given.parse_args()
    disturbed, core = map(int, options.disturbed_at.split(":"))
    torch.manual_seed(1)
    model = models.build(options.model)
    inputs, targets = models.sample_batch(options.model, options.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if options.commsched:
        import commsched as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), model=model)
    else:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    ends = []
    for step in range(options.steps):
        if step == disturbed:
            burner = subprocess.Popen([sys.executable, "-c", BURN, str(core)])
        optimizer.zero_grad()
        models.loss(options.model, model(inputs), targets).backward()
        optimizer.step()
        ends.append(time.monotonic())
    times = [after - before for before, after in itertools.pairwise(ends[options.settle :])]
    if disturbed >= 0:
        burner.wait(60)
    if options.commsched:
        compute = optimizer.profile().compute
        if hvd.rank() == 0:
            print(statistics.median(times), compute, flush=True)
        hvd.shutdown()
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
