"""``commsched advise`` on a DDP script with real ranks, under its own launcher and under another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import clean_environment, run_ranks

pytestmark = pytest.mark.dist

# What a user's script has: accumulation, an unused layer, an ``except Exception``, a group that it destroys.
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


if __name__ == "__main__":
    print(f"arguments {sys.argv[1:]}")  # in one piece: the ranks write to one pipe
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        for step in range(100):
            with model.no_sync():
                model(torch.randn(8, 64)).square().mean().backward()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception:
        print("caught")
    finally:
        dist.destroy_process_group()
    print("not reached")
"""


def check(told: dict[str, Any]) -> None:
    assert told["ranks"] == 2 and told["bytes"] == 4 * (4 * (64 * 64 + 64) + 4 * 4 + 4)
    assert told["link"]["beta"] > 0 and told["now"]["step"] > told["now"]["exposed"] >= 0
    assert told["compute"] > 0 and len(told["rows"]) == 5
    assert all(row["commsched"]["step"] >= told["compute"] * 0.99 for row in told["rows"])


def test_the_command_starts_the_ranks_of_a_script(tmp_path: Path) -> None:
    script, page = tmp_path / "train.py", tmp_path / "advise.html"
    script.write_text(SCRIPT)
    options = ["--nproc-per-node", "2", "--steps", "4", "--json", "--output", str(page)]
    done = subprocess.run(
        [sys.executable, "-m", "commsched", "advise", *options, str(script), "--epochs", "2"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # nothing else stands there
    check(told)
    assert done.stderr.count("arguments ['--epochs', '2']") == 2
    assert "not reached" not in done.stderr and "caught" not in done.stderr
    assert told["script"] == str(script) and script.read_text() == SCRIPT
    assert "DDP, measured" in page.read_text() and "<svg" in page.read_text()


def test_ranks_of_another_launcher(tmp_path: Path) -> None:
    """Whose port the script's own group takes, so that commsched must meet at another one."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    program = f"""
import sys
from commsched.cli import main
sys.exit(main(["advise", "--steps", "3", {str(script)!r}]))
"""
    first, second = run_ranks(program, 2, check=True)
    assert "now: DDP, measured" in first.stdout and "10 times the bandwidth" in first.stdout
    assert "DDP, measured" not in second.stdout and "not reached" not in second.stdout
