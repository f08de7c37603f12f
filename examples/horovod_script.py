"""A Horovod script with another import: trains a small network on digits.

python examples/horovod_script.py                       # one process
horovodrun -np 2 python examples/horovod_script.py      # or torchrun --nproc-per-node 2, or mpirun -np 2
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import commsched as hvd  # was: import horovod.torch as hvd


def digits(count: int = 512) -> TensorDataset:
    """Return noisy pictures of ten patterns, and which pattern each one is."""
    dice = torch.Generator().manual_seed(1)
    patterns = torch.randn(10, 64, generator=dice)
    labels = torch.randint(0, 10, (count,), generator=dice)
    return TensorDataset(patterns[labels] + 0.3 * torch.randn(count, 64, generator=dice), labels)


hvd.init()
data = digits()
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=32, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for pictures, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss")  # over the ranks' last batches
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean:.4f} over {hvd.size()} ranks")
