"""Pipelines and tiles between processes with GPUs: messages are staged through pinned memory. Those of
synchronous schedules go over NCCL where each rank has a GPU of its own.

The same programs run on the CPU as well, so that they are right before a GPU is there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.launch import run_ranks

PROGRAM = """
import copy, sys
import torch, torch.nn as nn, torch.nn.functional as F
import commsched as hvd
from commsched import spatial
from commsched.backends.nccl import NcclDirection
from commsched.channels import Staging
from commsched.pipeline import Pipeline
from scheduler import pipelines

hvd.init()
on = sys.argv[1]
device = torch.device("cpu")
if on == "cuda":
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
staged, moved = [], []
plain_move = NcclDirection.move
NcclDirection.move = lambda *given: moved.append(schedule) or plain_move(*given)
plain_send, plain_exchange = Staging.send, Staging.exchange
Staging.send = lambda *given: staged.append("stage") or plain_send(*given)
Staging.exchange = lambda *given: staged.append("tile") or plain_exchange(*given)

def chain():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(4)]).double()

def loss(outputs, targets):
    return (outputs - targets).square().sum(1).mean()

def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

def trained(batches, where, **options):
    model = chain().to(where)
    pipeline = Pipeline(model, loss=loss, optimizer=momentum, **options)
    losses = [pipeline.step(batch) for batch in batches]
    losses = [value for value in losses if value is not None] + pipeline.drain()
    weights = {name: value.cpu() for name, value in pipeline.state_dict().items()}
    pipeline.close()
    return losses, weights

dice = torch.Generator().manual_seed(2)
shape = dict(size=(256, 96), generator=dice, dtype=torch.float64)
batches = [tuple(torch.randn(**shape) for _ in range(2)) for _ in range(6)]
for schedule in pipelines.names():
    for mesh in [(2, 1), (1, 2)] if schedule != "bundle" else [(2, 1)]:
        micro = {"pipedream": 1, "ashpipe": 1, "bundle": 1}.get(schedule, 4)
        options = dict(schedule=schedule, mesh=mesh, num_microbatches=micro)
        (mine, weights), (wanted, others) = (trained(batches, where, **options) for where in (device, "cpu"))
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(value, others[name], rtol=1e-9, atol=1e-9, msg=f"{schedule} {name}")

torch.manual_seed(3)
layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 5, stride=2)]
layers += [nn.MaxPool2d(3, 2), nn.Conv2d(8, 4, 3, padding=1)]
model = nn.Sequential(*layers).double().to(device)
images = torch.randn(4, 3, 120, 90, dtype=torch.float64).to(device)
for overlap in ("on", "off"):
    whole, tiled = model, copy.deepcopy(model)
    spatial.shard(tiled, (1, 2), overlap=overlap, timeout=100)
    steppers = [momentum(one.parameters()) for one in (whole, tiled)]
    for step in range(4):
        for one, stepper in zip((whole, tiled), steppers):
            stepper.zero_grad()
            out = one(images if one is whole else spatial.scatter(images))
            value = out.square().mean()

            value.backward()
            if one is tiled:
                spatial.sum_gradients(tiled.parameters())
            stepper.step()
    for (name, p), q in zip(whole.named_parameters(), tiled.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9, msg=f"{overlap} {name}")
assert set(staged) == ({"stage", "tile"} if on == "cuda" else set()), staged
over_nccl = on == "cuda" and torch.cuda.device_count() > 1
wanted = {"gpipe", "1f1b", "interleaved", "zero_bubble", "bundle"} if over_nccl else set()
assert {name for name in moved if moved.count(name) > 3} == wanted, moved  # two of them connect
hvd.shutdown()
print("trained on", device)
"""


@pytest.mark.dist
def test_the_program_on_cpus() -> None:
    for result in run_ranks(PROGRAM, 2, ["cpu"], timeout=280, check=True):
        assert "trained on cpu" in result.stdout


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_stages_and_tiles_on_gpus() -> None:
    """Two ranks, each on a GPU of its own where there are two; else they share one, and NCCL is not used."""
    for result in run_ranks(PROGRAM, 2, ["cuda"], timeout=280, check=True):
        assert "trained on cuda" in result.stdout


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_train_command(tmp_path: Path) -> None:
    """``commsched train --device cuda`` with two stages."""
    words = "--job dnn_bench.pipeline.jobs:mlp_tiny --rows 16 --steps 6 --stages 2 --microbatches 2"
    program = (
        f"import sys; from commsched.cli import main;sys.exit(main('train --device cuda {words}'.split()))"
    )
    for result in run_ranks(program, 2, timeout=200, check=True):
        assert result.returncode == 0
