"""Three ranks train on every sample once; one is killed when the parameters of a commit are on their way.

Arguments: the file with the hosts, the rank that is killed. All weights are equal, and all numbers are exact:
the weight and its momentum tell which samples were added, in which steps. Each rank prints the steps' numbers
of ranks, what it restored (steps, weight, momentum), and what it has in the end.
"""

import json
import os
import signal
import sys
import time

import torch

import commsched as hvd
from tests.support.reference_run import some_profile

BATCH, SAMPLES, LOSS = 2, 36, 3
hvd.init()


class Sums(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.Linear(512, 1024, bias=False, dtype=torch.float64) for _ in range(8))
        self.layers = torch.nn.ModuleList(layers)
        for layer in self.layers:
            torch.nn.init.zeros_(layer.weight)

    def forward(self, x):
        return sum(layer(x).sum() for layer in self.layers)


model, restored = Sums(), []
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
optimizer = hvd.DistributedOptimizer(
    optimizer, model=model, op=hvd.Sum, schedule="dear", bucket_mb=4, profile=some_profile(model)
)
sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=False, exact=True)


def values():
    weights = {float(value) for p in model.parameters() for value in p.unique()}
    momenta = {
        float(value)
        for one in optimizer.state_dict()["state"].values()
        for value in one["momentum_buffer"].unique()
    }
    return [len(state.sizes), sorted(weights), sorted(momenta)]


@hvd.elastic.run
def train(state):
    while hvd.size() < 3 and not state.sizes:
        time.sleep(0.05)
        state.check_host_updates()
    if optimizer._session is not None:
        optimizer._session.backend.puts_off = True
    indices, largest = list(sampler), -(-len(sampler.remaining_indices) // hvd.size())
    for start in range(0, largest, BATCH):
        total = sum(index + 1 for index in indices[start : start + BATCH])
        optimizer.zero_grad()
        model(torch.full((1, 512), float(total), dtype=torch.float64)).backward()
        optimizer.step()
        sampler.record_batch(start, BATCH)
        state.sizes.append(hvd.size())
        state.commit()
        if len(state.sizes) == LOSS and hvd.size() == 3:
            assert state._arriving is not None
            if hvd.rank() == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, sizes=[])
state.register_reset_callbacks([lambda: restored.append(values())])
train(state)
print(json.dumps([state.sizes, restored, values()]), flush=True)
