"""Trains nine steps on three ranks, on two after a host's only rank was killed, on three after a host came.

Arguments: the file with the hosts; "stages", "replicas" or "tiles"; whether the rank is killed in a "step" or
in a "commit", before it tells the others that it has all of that.
"""

import gc
import json
import os
import signal
import sys
import time
import weakref
from pathlib import Path

import torch
import torch.nn.functional as F

import commsched as hvd
from commsched import spatial
from commsched.elastic import pipelines
from commsched.pipeline import Pipeline
from tests.support.pipeline_runs import adam, batches, chain_model, loss_of

hosts, kind = Path(sys.argv[1]), sys.argv[2]
hvd.init()
made = []


def image(step):
    return torch.randn(2, 1, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def tiled_model():
    layers = torch.nn.Conv2d(1, 3, 3, padding=1), torch.nn.Tanh(), torch.nn.Conv2d(3, 1, 5, padding=2)
    return torch.nn.Sequential(*layers).double()


def make(ranks):
    """New ranks have other weights, until they get the state."""
    mesh = (ranks, 1) if kind == "stages" else (1, ranks)
    pipeline = Pipeline(chain_model(4, seed=len(made)), "1f1b", 2, mesh, loss=loss_of, optimizer=adam)
    gc.collect()
    made.append(weakref.ref(pipeline))
    return pipeline


def die(where, sizes):
    if sys.argv[3] == where and state.sizes == sizes and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
        os.kill(os.getpid(), signal.SIGKILL)


def told(value, name):
    if name == "commsched.elastic.commit":
        die("commit", [3, 3, 3, 3])
    return hvd.allgather_object(value, name)


def stepped(step):
    if kind != "tiles":
        return state.pipeline.step(data[step])
    optimizer.zero_grad()
    loss = F.mse_loss(model(spatial.scatter(image(step))), spatial.scatter(image(-step - 1)))
    loss.backward()
    optimizer.step()
    return loss.item()


@hvd.elastic.run
def train(state):
    if kind == "tiles":
        spatial.shard(model, grid=(1, hvd.size()))
    while state.step < 9:
        die("step", [3, 3, 3])
        state.losses.append(stepped(state.step))
        state.sizes.append(hvd.size())
        state.step += 1
        if state.step == 6 and hvd.rank() == 0:
            hosts.write_text("localhost:2\n127.0.0.1:1\n127.1:1\n")
            deadline = time.monotonic() + 300
            while state._host_messages.empty() and time.monotonic() < deadline:
                time.sleep(0.05)
        if state.step % 2 == 0:
            state.commit()


pipelines.allgather_object = told
data = batches(9)
if kind == "tiles":
    torch.manual_seed(1)
    model = tiled_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
    state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[], losses=[])
else:
    state = hvd.elastic.PipelineState(make, step=0, sizes=[], losses=[])
train(state)
weights = model.state_dict() if kind == "tiles" else state.pipeline.state_dict()
left = sum(one() is not None for one in made)
print(json.dumps([state.sizes, left, state.losses, {k: v.tolist() for k, v in weights.items()}]), flush=True)
