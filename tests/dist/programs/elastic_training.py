"""Trains nine steps: on one rank, on two after a host was added, on one after a rank was killed or stopped.

Arguments: the file with the hosts, "gradients" or "parameters", the rank that is lost, the signal it gets.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch

import commsched as hvd

hosts, gather = Path(sys.argv[1]), sys.argv[2]
is_first = "127.0.0.1" not in hosts.read_text()
is_victim = int(sys.argv[3]) == (not is_first)
hvd.init()
torch.manual_seed(int(is_first))  # new ranks begin with other weights
model = torch.nn.Linear(3, 2, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model=model, gather=gather)
sizes_at_reset = []


def batch(step, rank):
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


@hvd.elastic.run
def train(state):
    while state.step < 9:
        if state.step == 6 and is_victim:
            os.kill(os.getpid(), signal.Signals[sys.argv[4]])
        optimizer.zero_grad()
        model(batch(state.step, hvd.rank())).square().mean().backward()
        optimizer.step()
        state.sizes.append(hvd.size())
        state.step += 1
        if state.step == 3:
            hosts.write_text("localhost:1\n127.0.0.1:1\n")
            deadline = time.monotonic() + 300
            while state._host_messages.empty() and time.monotonic() < deadline:
                time.sleep(0.05)
        state.commit()
    return state.step


state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])
state.register_reset_callbacks([lambda: sizes_at_reset.append(hvd.size())])
train(state)
listening = [one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
values = [value for p in model.parameters() for value in p.flatten().tolist()]
print(json.dumps([state.sizes, sizes_at_reset, len(listening), values]), flush=True)
