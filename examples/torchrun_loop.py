"""A training loop for torchrun: sharded optimizer state, clipping, a checkpoint, and what the plan gains.

torchrun --nproc-per-node 2 examples/torchrun_loop.py
"""

import sys

import torch
from torch import nn

import commsched

commsched.init()
torch.manual_seed(1)  # the same weights on every rank
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)), nn.Linear(256, 1))
optimizer = commsched.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    named_parameters=model.named_parameters(),
    gather="parameters",  # each rank keeps and updates a part of the optimizer's state
)

torch.manual_seed(100 + commsched.rank())  # other samples on every rank
samples = torch.randn(64, 256)
for step in range(60):
    inputs = samples[step % 4 * 16 :][:16]
    loss = (model(inputs) - inputs[:, :1].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = optimizer.clip_grad_norm_(1.0)  # of the whole gradient; torch's function would see one rank's part
    optimizer.step()
    if step % 20 == 0 and commsched.rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}, gradient norm {norm:.4f}")

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # on all ranks: each has a part
if commsched.rank() == 0:
    torch.save(state, sys.argv[1] if len(sys.argv) > 1 else "checkpoint.pt")
commsched.explain(optimizer, show=commsched.rank() == 0)  # what travels when, and how much of it is hidden
