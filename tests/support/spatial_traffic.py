"""Halos and gradients on one link: a training that records a trace, and what the trace says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comm_core import MessageChannel

PROGRAM = """
import torch
import torch.nn.functional as F
from torch import nn

import commsched as hvd
from commsched import spatial

hvd.init()
torch.manual_seed(0)
# Many weights on few pixels, so that gradients travel for most of the step, between many halos.
layers = [nn.Conv2d(3, 96, 3, padding=1), nn.ReLU()]
for _ in range(4):
    layers += [nn.Conv2d(96, 96, 5, padding=2), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))
spatial.shard(model, grid=(1, hvd.size()), overlap="on", timeout=100)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), op=hvd.Sum,
    schedule="{schedule}",
)
image = torch.randn(2, 3, 32, 48)
for _ in range({steps}):
    optimizer.zero_grad()
    F.cross_entropy(model(spatial.scatter(image)), torch.tensor([1, 2])).backward()
    optimizer.step()
hvd.shutdown()
"""


# What leaves a host is what explain says, what TCP and Ethernet add to it, and notes that ranks compare.
COUNTED = """
from pathlib import Path

import torch
from torch import nn

import commsched as hvd
from commsched import spatial

def left_this_host():
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(fields[9]) for fields in lines if fields[0] != "lo:")

hvd.init()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Conv2d(16, 16, 5, padding=2) for _ in range(3)))
shape, grid, steps = (2, 16, 2048, 24), (1, hvd.size()), 3
said = spatial.explain(model, shape, grid).ranks[hvd.rank()]
spatial.shard(model, grid=grid, timeout=100)
tile = spatial.from_local(torch.zeros([b.stop - b.start for b in spatial.tile_bounds(shape)]), shape)
hvd.barrier()
before = left_this_host()
for _ in range(steps):
    model(tile).sum().backward()
hvd.barrier()
left, expected = left_this_host() - before, steps * said.sent
assert expected > 5e6 and expected < left < 1.12 * expected + 65536, (expected, left)
print(f"{expected} bytes expected, {left} counted", flush=True)
hvd.shutdown()
"""


def program(steps: int = 12, schedule: str = "wfbp") -> str:
    return PROGRAM.format(steps=steps, schedule=schedule)


def events(trace: Path, rank: int) -> tuple[list[Any], list[Any]]:
    """One rank's halos and gradient chunks, from a trace file."""
    found = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
    return [e for e in found if e["name"] == "halo"], [e for e in found if e["name"] == "gradient chunk"]


def violations(halos: list[Any], chunks: list[Any]) -> list[tuple[float, float]]:
    """Chunks that started while a halo was on its way: their time, and how long the halo took, in ms.

    A halo that takes longer than the gate's patience waits for a slow process: from then on chunks may start.
    """
    found = []
    for halo in halos:
        start, end = halo["ts"], halo["ts"] + min(halo["dur"], 1e6 * MessageChannel.TURN_PATIENCE)
        # A microsecond of rounding on both sides.
        found += [(c["ts"], halo["dur"] / 1e3) for c in chunks if start + 1 < c["ts"] < end - 1]
    return found
