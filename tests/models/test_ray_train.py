"""Ray Train's own trainer starts the ranks, as docs/runtime.md says: the same training as in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documented_commands import ROOT, of_page
from tests.support.launch import clean_environment

pytest.importorskip("ray")
pytestmark = [pytest.mark.models, pytest.mark.trainers, pytest.mark.timeout(1800)]

# Ray counts this machine's cores, and its own helpers take some of them.
START = """
import ray
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
"""
TRAINING = """
import torch

def train_steps(rank, size):
    import commsched as hvd
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
    data = torch.randn(8, 16, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if size > 1:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(data[rank * 8 // size : (rank + 1) * 8 // size]).square().mean().backward()
        optimizer.step()
    return f"{sum(p.double().sum().item() for p in model.parameters()):.10f}"
"""
SCRIPT = """
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

def train():
    import commsched as hvd
    hvd.init()
    assert hvd.local_size() == 2 and hvd.local_rank() == hvd.rank()
    print("trained", hvd.rank(), hvd.size(), train_steps(hvd.rank(), hvd.size()), flush=True)
    hvd.shutdown()

print("alone", train_steps(0, 1), flush=True)
TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
"""


def run(folder: Path, source: str) -> str:
    (folder / "driver.py").write_text(source)
    env = clean_environment({"PYTHONPATH": str(ROOT), "HOME": str(folder), "RAY_TRAIN_V2_ENABLED": "1"})
    env |= {"RAY_TMPDIR": "/tmp/ray-commsched", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "driver.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_a_trainer_trains_as_one_process_does(tmp_path: Path) -> None:
    said = run(tmp_path, START + TRAINING + SCRIPT)
    (alone,) = [line.split()[1] for line in said.splitlines() if line.startswith("alone ")]
    for rank in range(2):
        assert f"trained {rank} 2 {alone}" in said


def test_the_snippet_of_the_page(tmp_path: Path) -> None:
    page = "docs/runtime.md"
    (snippet,) = [b.text for b in of_page(page, (ROOT / page).read_text()) if "ray.train" in b.text]
    said = run(tmp_path, START + snippet)
    assert all(f"rank {rank} of 2" in said for rank in range(2))
