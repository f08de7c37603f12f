"""A training script in Horovod's own style; only its import names another package.

The test runs it under every launcher with the batch divided among the ranks, and alone with the whole batch.
"""

import torch
import torch.nn.functional as F

import commsched as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(42 + hvd.rank())  # every rank starts differently; broadcast_parameters makes them equal

model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
if hvd.rank() == 0:
    torch.manual_seed(7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)

lr_scaler = hvd.size()
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.08 / lr_scaler * hvd.size(), momentum=0.9, weight_decay=1e-3
)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), op=hvd.Average, compression=hvd.Compression.none
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.Generator().manual_seed(1)
inputs = torch.randn(24, 10, generator=data).double()
targets = inputs.sum(dim=1, keepdim=True)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value, dtype=torch.float64), name=name).item()


for _ in range(3):
    share = len(inputs) // hvd.size()
    mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs[mine]), targets[mine])
    loss.backward()
    optimizer.step()
    average = metric_average(loss.item(), "avg_loss")

if hvd.rank() == 0:
    print(f"final loss {average:.10f}")
print(f"rank {hvd.rank()} of {hvd.size()} engine {hvd.engine_name()}")
