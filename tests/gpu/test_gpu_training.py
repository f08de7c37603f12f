"""Training on a GPU: one rank over NCCL, several that share the GPU, overlap seen in events, graphs
refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dnn_bench import emulate
from dnn_bench.baselines.trainer import Job
from dnn_bench.emulate import Emulation
from scheduler.ir.link import Link
from tests.support.launch import run_ranks, start_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

# Every rank trains on the GPU, and the mean of all batches alone in float64 beside it.
TRAIN = """
import torch, torch.nn as nn, commsched as hvd
hvd.init()
device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
torch.cuda.set_device(device)
def build():
    torch.manual_seed(1)
    layers = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
    return nn.Sequential(*layers).to(device)
def batch(rank, step):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
for gather in ("gradients", "parameters"):
    sgd, adamw = (torch.optim.SGD, dict(lr=0.1, momentum=0.9)), (torch.optim.AdamW, dict(lr=1e-2, eps=1e-3))
    for kind, more in (sgd, adamw):
        model, plain = build(), build().double()
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), **more), model.named_parameters(), gather=gather, bucket_mb=0.1)
        reference = kind(plain.parameters(), **more)
        for step in range(12):
            model(batch(hvd.rank(), step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.stack([plain(batch(r, step).double()).square().mean() for r in
            range(hvd.size())]).mean().backward()
            reference.step()
            reference.zero_grad()
        for p, q in zip(model.state_dict().values(), plain.state_dict().values()):
            torch.testing.assert_close(p.double(), q, rtol=1e-3, atol=1e-4)
        if hvd.size() > 1:
            print(optimizer._session.backend.name)
scaler = torch.amp.GradScaler()
model = build()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(8):
    with torch.autocast("cuda"):
        value = model(batch(hvd.rank(), step)).square().mean()
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
assert all(p.isfinite().all() for p in model.state_dict().values())
hvd.shutdown()
print("trained on", device)
"""


@pytest.mark.parametrize("size", [1, 2, 4])
def test_training_equals_the_mean_batch(size: int) -> None:
    launcher = "alone" if size == 1 else "torchrun-env"
    for result in run_ranks(TRAIN, size, launcher=launcher, timeout=280, check=True):
        assert "trained on cuda" in result.stdout
        if size > torch.cuda.device_count():
            assert "staged, flags over" in result.stdout


# Gradients and updates that a CPU and a GPU compute alike, so that all else must be alike, too.
QUANTISED = """
import sys, torch, torch.nn as nn, commsched as hvd
hvd.init()
gpu = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
torch.cuda.set_device(gpu)
SHAPES = (300, 700), (64, 80), (48, 100)
def gradient(shape, step):
    seed = 1000 * step + 10 * SHAPES.index(shape) + hvd.rank()
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
def trained(device, code, gather):
    params = [nn.Parameter(torch.zeros(shape, device=device)) for shape in SHAPES]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), bucket_mb=0.1, gather=gather,
        compression=getattr(hvd.Compression, code))
    for step in range(12):
        sum((p * gradient(shape, step).to(device)).sum() for p, shape in zip(params, SHAPES)).backward()
        optimizer.step()
        optimizer.zero_grad()
    lost = [entries["wire_residual"] for entries in optimizer.state_dict()["state"].values()]
    assert len(lost) == 3 and all(each.any() for each in lost)
    if device == gpu:
        print(optimizer._session.backend.name)
    optimizer.close()
    return [p.detach().cpu() for p in params], [each.cpu() for each in lost]
for code in ("int8", "fp8"):
    for gather in ("gradients", "parameters"):
        (wanted, lacking), (found, lost) = (trained(device, code, gather) for device in ("cpu", gpu))
        assert all(torch.equal(one, other) for one, other in zip(wanted, found)), (code, gather)
        # A checkpoint adds up the ranks' residuals in the order of the plan's shards.
        torch.testing.assert_close(lost, lacking, rtol=1e-5, atol=1e-6)
hvd.shutdown()
print("the bits of the CPU")
"""


@pytest.mark.parametrize("size", [2, 3])
def test_quantised_gradients_have_the_bits_of_the_cpu(size: int) -> None:
    """Over NCCL where each rank has a GPU; else through the host, with the kernels of the GPU they share."""
    for result in run_ranks(QUANTISED, size, timeout=280, check=True):
        assert "the bits of the CPU" in result.stdout


SKIPPED = """
import torch, torch.nn as nn, commsched as hvd
hvd.init()
torch.cuda.set_device(0)
torch.manual_seed(1)
model, plain = (nn.Linear(64, 64).cuda() for _ in range(2))
plain.load_state_dict(model.state_dict())
make = lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True)
optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), gather="parameters")
reference = make(plain.parameters())
scalers = [torch.amp.GradScaler(init_scale=4.0) for _ in range(2)]
for step in range(12):
    batch = torch.randn(5, 64).cuda() * (float("inf") if step % 5 == 0 else 1.0)
    for each, inner, scaler in zip((model, plain), (optimizer, reference), scalers):
        scaler.scale(each(batch).square().mean()).backward()
        if inner is optimizer:
            optimizer.synchronize()  # the scaler looks at whole gradients
        scaler.step(inner)
        scaler.update()
        inner.zero_grad()
for p, q in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
assert {int(s["step"]) for s in optimizer.state_dict()["state"].values()} == {9}
print("skipped steps do not count")
"""


def test_an_overflow_does_not_count_as_a_step() -> None:
    for result in run_ranks(SKIPPED, 2, timeout=120, check=True):
        assert "skipped steps do not count" in result.stdout


BLOCKED = """
import time, torch, commsched as hvd
from commsched.errors import CommError
hvd.init()
torch.cuda.set_device(hvd.local_rank())
model = torch.nn.Linear(64, 64).cuda()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(12):
    model(torch.ones(2, 64).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
backend = optimizer._session.backend
assert backend.name.startswith("nccl"), backend.name
torch.cuda.synchronize()
print("planned", flush=True)
if hvd.rank() == 1:
    time.sleep(100)
with backend.streams.on(backend.streams.comm):
    data = torch.ones(1 << 20, device="cuda")
    backend.exchange.reduce_scatter(data, 1.0)  # rank 1 never comes
    data.sum().item()
try:
    model(torch.ones(2, 64).cuda()).sum().backward()
except CommError as error:
    assert "rank 1 is gone" in str(error) or "rank 1 died" in str(error), error
    print("told", flush=True)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_host_that_waits_for_its_gpu_is_freed_when_a_rank_dies() -> None:
    with start_ranks(BLOCKED, 2) as ranks:
        for rank in range(2):
            ranks.wait_for_output(rank, "planned")
        ranks.kill(1)
        result = ranks.wait(100)[0]
    assert "told" in result.stdout, result.stderr[-3000:]


COMMUNICATORS = """
import torch, torch.nn as nn, commsched as hvd
hvd.init()
torch.cuda.set_device(hvd.local_rank())
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
free = []
for step in range(12):
    model(torch.ones(2, 64).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    free.append(torch.cuda.mem_get_info()[0])
    model[0].bias.requires_grad_(bool(step % 2))
optimizer.close()
assert free[3] - free[-1] < 8 << 20, free  # a communicator holds tens of MB
print("closed")
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_frozen_parameters_leave_no_communicator_behind() -> None:
    for result in run_ranks(COMMUNICATORS, 2, timeout=200, check=True):
        assert "closed" in result.stdout


JOIN = """
import torch, commsched as hvd
hvd.init()
if hvd.rank() == 0:
    torch.cuda.set_device(0)
    found = hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum, name="x")
    assert found.is_cuda and found.tolist() == [1.0] * 3
    hvd.join(0)
else:
    hvd.join()  # its zeros are on the CPU
    assert not torch.cuda.is_initialized()
print("joined")
"""


def test_a_joined_rank_without_a_gpu() -> None:
    for result in run_ranks(JOIN, 2, timeout=120, check=True):
        assert "joined" in result.stdout


NCCL_ALONE = """
import torch
from torch.distributed import HashStore, ProcessGroupNCCL
from commsched.backends.cuda import StreamBucket, StreamSchedule
from commsched.devices import CudaDevice
from commsched.backends.nccl import NcclExchange
device = CudaDevice(torch.device("cuda", 0))
torch.cuda.set_device(0)
group = ProcessGroupNCCL(HashStore(), 0, 1, ProcessGroupNCCL.Options())
plan = StreamSchedule(device, NcclExchange(group), 0, 1)
buckets = [StreamBucket(torch.zeros(1 << 20, device="cuda")) for _ in range(3)]
plan.install([("RS", 0), ("RS", 1), ("AG", 0), ("RS", 2), ("AG", 2), ("AG", 1)], buckets)
for step in range(1, 20):
    plan.begin_step()
    torch.cuda._sleep(1_000_000)
    for number, bucket in enumerate(buckets):
        bucket.data.fill_(10 * step + number)
        plan.mark(number, "ready")
    copies = []
    for number in (2, 0, 1):
        plan.wait(number, "gathered")
        copies.append((10 * step + number, buckets[number].data.clone()))
    for value, copy in copies:
        assert copy.unique().tolist() == [value]
print("over NCCL")
"""


MASTERS = """
import torch, torch.nn as nn, commsched as hvd
hvd.init()
torch.cuda.set_device(0)
torch.manual_seed(1)
model, plain = (nn.Linear(64, 64, bias=False).cuda().bfloat16() for _ in range(2))
plain.load_state_dict(model.state_dict())
copy = nn.Parameter(plain.weight.detach().float())
make = lambda params: torch.optim.AdamW(params, lr=1e-4, eps=1e-3, fused=True)
optimizer = hvd.DistributedOptimizer(
    make(model.parameters()), model.named_parameters(), gather="parameters", master_weights=True)
assert optimizer._session.backend.name.startswith("nccl"), optimizer._session.backend.name
reference = make([copy])
for step in range(16):
    batch = torch.randn(5, 64).cuda().bfloat16()
    for each in (model, plain):
        each(batch).float().square().mean().backward()
    torch.cuda.set_sync_debug_mode("error" if step > 9 else "default")  # planned by then
    norm = optimizer.clip_grad_norm_(0.01)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    optimizer.zero_grad()
    copy.grad = plain.weight.grad.float()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_([copy], 0.01), rtol=1e-3, atol=0)
    reference.step()
    plain.weight.data.copy_(copy.data)
    plain.zero_grad()
found = optimizer.state_dict()["state"][0]["master_weight"]
torch.testing.assert_close(found, copy.data, rtol=1e-4, atol=1e-6)
print("masters kept")
"""


def test_masters_and_clipping_over_nccl_wait_for_nothing() -> None:
    (result,) = run_ranks(MASTERS, 1, launcher="alone", timeout=120, check=True)
    assert "masters kept" in result.stdout


def test_the_plan_over_nccl_with_one_rank() -> None:
    (result,) = run_ranks(NCCL_ALONE, 1, launcher="alone", timeout=120, check=True)
    assert "over NCCL" in result.stdout


@pytest.mark.bench
def test_communication_runs_beside_computation() -> None:
    """On an emulated link that takes as long as the compute, the step is far shorter than both in turn."""
    job = Job("bert_base", 64, device="cuda")  # large enough that the GPU's time counts, not the host's
    size = sum(p.numel() * 4 for p in job.build_model().parameters())
    alone = Emulation(job, Link(1e-5, 1e-12), 2, 5, 12).plain()
    emulation = Emulation(job, Link(1e-5, alone / (2 * size)), 2, 5, 12)
    outcome = emulation.outcome(["auto", "sequential"])
    auto, sequential = (row["measured"] for row in outcome["rows"])
    link = 2 * emulation.link.beta * size
    assert sequential > 0.95 * (min(alone, outcome["compute"]) + link)
    assert auto < 0.75 * sequential


def test_events_show_the_overlap() -> None:
    job = Job("bert_tiny", 16, device="cuda")
    emulation = Emulation(job, Link(1e-4, 1e-10), 2, 1, 1)
    with emulation.wrapped("dear", emulation.profile()) as (model, optimizer):
        emulation.time(model, optimizer, 3)
        events = optimizer._session.backend.events()
    assert (events["end"] > events["start"]).all()
    first = events[events["step"] == events["step"].max() - 1]
    assert (first["start"][1:] >= first["end"][:-1] - 1e-5).all()  # one link: one after the other


def test_the_emulate_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e.json"
    words = "--model bert_tiny --network 10gbe --ranks 8 --iterations 6 --warmup 2 --json"
    assert emulate.main([*words.split(), str(file)]) == 0
    found = json.loads(file.read_text())
    assert all(row["measured"] >= 0.97 * found["bound"] for row in found["rows"])
    assert "EMULATED" in capsys.readouterr().out


def test_graph_capture_is_refused() -> None:
    emulation = Emulation(Job("mlp_tiny", 8, device="cuda"), Link(1e-5, 1e-10), 2, 1, 1)
    with emulation.wrapped("dear", emulation.profile()) as (model, optimizer):
        emulation.time(model, optimizer, 3)
        inputs, targets = emulation.batch
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(Exception, match="cannot be captured into a CUDA graph"):
            with torch.cuda.graph(graph):
                emulation.job.loss(model(inputs), targets).backward()
        torch.cuda.synchronize()
