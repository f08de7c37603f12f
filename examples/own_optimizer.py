"""An optimizer of one's own: declared elementwise, it updates bucket by bucket and on shards.

torchrun --nproc-per-node 2 examples/own_optimizer.py
"""

import torch
from torch import nn

import commsched


@commsched.register_elementwise  # each element's update depends on that element alone
class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                p.sub_(torch.lerp(p.grad, state["mean"], first).sign(), alpha=group["lr"])
                state["mean"].lerp_(p.grad, 1 - second)


commsched.init()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = commsched.DistributedOptimizer(
    Lion(model.parameters()), named_parameters=model.named_parameters(), gather="parameters"
)

torch.manual_seed(100 + commsched.rank())
for step in range(200):
    inputs = torch.randn(16, 32)
    loss = (model(inputs) - inputs[:, :1].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 and commsched.rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
