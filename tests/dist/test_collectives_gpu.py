"""Collectives of GPU tensors: over NCCL where every rank has its own GPU, else staged through the CPU."""

import pytest
import torch

from tests.support.launch import run_ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROGRAM = """
import torch, commsched as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
torch.cuda.set_device(device)

def on_gpu(*values, **more):
    return torch.tensor(values, device=device, **more)

def same(found, *expected):
    assert found.device == device and found.tolist() == list(expected), (found, expected)

busy = torch.randn(2000, 2000, device=device)
for _ in range(20):
    busy = busy @ busy / busy.norm()
late = busy.sum() * 0 + rank + 1.0  # its value is there only when the GPU has caught up
same(hvd.allreduce(late.view(1), op=hvd.Sum), float(sum(range(1, size + 1))))
tensor = on_gpu(rank, 10 * rank)
assert hvd.allreduce_(tensor, op=hvd.Max) is tensor
same(tensor, size - 1, 10 * (size - 1))
first, second = hvd.grouped_allreduce([on_gpu(1.0), on_gpu(2, dtype=torch.int16)], op=hvd.Sum)
same(first, float(size)), same(second, 2 * size)
gathered = hvd.allgather(torch.full((rank + 1,), rank, device=device))
same(gathered, *[r for r in range(size) for _ in range(r + 1)])
same(hvd.broadcast(on_gpu(rank), size - 1), size - 1)
found, received = hvd.alltoall(on_gpu(*range(size)), splits=torch.ones(size, dtype=torch.int32))
same(found, *[rank] * size)
assert received.device.type == "cpu" and received.tolist() == [1] * size
same(hvd.reducescatter(on_gpu(*range(size)), op=hvd.Sum), rank * size)
x = on_gpu(1.0, 2.0).requires_grad_()
hvd.allreduce(x, op=hvd.Sum).sum().backward()
same(x.grad, float(size), float(size))
torch.manual_seed(rank)
model = torch.nn.Linear(2, 2).to(device)
hvd.broadcast_parameters(model.state_dict(), 0)
sums = hvd.allgather_object([p.sum().item() for p in model.parameters()])
assert sums == [sums[0]] * size
norm = hvd.SyncBatchNorm(2).to(device)
result = norm(torch.full((3, 2), float(rank), device=device))
assert torch.allclose(norm.running_mean, torch.full((2,), 0.1 * (size - 1) / 2, device=device))
hvd.shutdown()
print("all held on", device)
"""


@pytest.mark.parametrize("size", [1, 2])
def test_gpu_tensors(size):
    launcher = "alone" if size == 1 else "torchrun-env"
    for result in run_ranks(PROGRAM, size, launcher=launcher, check=True):
        assert "all held on cuda" in result.stdout
