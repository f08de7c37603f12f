"""A rank ends, hangs or fails amid a pipeline's steps: the others stop within the time-out and name it."""

import os
import signal
import sys
import time

import commsched as hvd
from commsched.pipeline import Pipeline
from tests.support.pipeline_runs import batches, chain_model, loss_of, sgd

hvd.init()
pipeline = Pipeline(chain_model(3), sys.argv[1], 2, loss=loss_of, optimizer=sgd)
data = batches(8)
pipeline.step(data[0])
if hvd.rank() == 1:
    if sys.argv[2] == "dies":
        os._exit(17)
    if sys.argv[2] == "fails":
        pipeline._interpreter.stages[1].forward = None  # cannot be called
        try:
            pipeline.step(data[1])
        except ValueError as error:
            print(f"FAILED: {error}", flush=True)
        time.sleep(600)  # its process lives on, as a notebook's would
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    for batch in data[1:]:
        pipeline.step(batch)
except hvd.CommError as error:
    print(f"SAID: {error}", flush=True)
    os._exit(0)
print("no error", flush=True)
