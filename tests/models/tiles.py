"""Compare a network on tiles with one process: outputs and the gradients of all parameters, in float64.

``python -m tests.models.tiles docs/results/spatial-models.csv`` makes the table of all networks.
"""

from __future__ import annotations

import copy
import csv
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from commsched import spatial
from commsched.transport.channel import Channel
from tests.models.tiled_models import MODELS
from tests.models.zoo import made
from tests.support.spatial_cases import on_threads

GRIDS = ((2, 2), (1, 4))


@dataclass
class Row:
    """A line of the table: the largest differences, as shares of the largest value of their tensor."""

    model: str
    grid: str
    result: str = ""
    output: float = 0.0
    gradient: float = 0.0
    rounding: float = 0.0
    gathered: str = ""
    reason: str = ""
    seconds: float = 0.0


def leaves(output: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def loss_of(outputs: list[Any]) -> Any:
    """The mean square distance from fixed random targets, so that no gradient vanishes by symmetry."""
    generator = torch.Generator().manual_seed(2)
    total: Any = 0.0
    for out in outputs:
        target = torch.randn(tuple(out.shape), generator=generator, dtype=torch.float64)
        total = total + (out - target).square().mean()
    return total


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def sharing(model: nn.Module) -> nn.Module:
    """A copy with gradients and buffers of its own and the same memory for parameters."""
    return copy.deepcopy(model, {id(p): nn.Parameter(p.detach()) for p in model.parameters()})


def one_process(model: nn.Module, images: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
    model = sharing(model)
    outputs = leaves(model(images))
    loss_of(outputs).backward()
    return [out.detach() for out in outputs], gradients(model)


def on_tiles(
    model: nn.Module, images: Tensor, grid: tuple[int, int], **options: Any
) -> tuple[list[list[spatial.Tile]], list[Tensor | None]]:
    """Each rank's outputs, and the sum of the ranks' gradients."""
    copies = [sharing(model) for _ in range(grid[0] * grid[1])]

    def run(channel: Channel) -> list[spatial.Tile]:
        mine = spatial.shard(copies[channel.rank], grid=grid, channel=channel, **options)
        outputs = leaves(mine(spatial.scatter(images)))
        loss_of(outputs).backward()
        return outputs

    outputs = on_threads(len(copies), run)
    by_rank = zip(*map(gradients, copies))
    return outputs, [
        sum(found) if (found := [g for g in ranks if g is not None]) else None for ranks in by_rank
    ]


def worst(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The largest difference as a share of its tensor's largest value, or of a millionth of all tensors'.

    The gradient of a bias before a normalization is zero: its rounding is that of larger numbers.
    """
    floor = (
        1e-6 * max((float(e.abs().max()) for e in expected if e is not None and e.numel()), default=0.0)
        or 1.0
    )
    shares = [0.0]
    for f, e in zip(found, expected, strict=True):
        assert (f is None) == (e is None)
        if f is not None and e is not None and e.numel():
            shares.append(float((f - e).abs().max()) / max(float(e.abs().max()), floor))
    return max(shares)


def rows(name: str, limit: float = 1e-8) -> Iterator[Row]:
    """The network's line for each grid."""
    torch.manual_seed(0)
    model, images = made(MODELS[name], 2)
    model, images = model.double(), images.double()
    with torch.no_grad():  # many weights begin at zero and would hide what lies behind them
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    expected, wanted = one_process(model, images)
    for grid in GRIDS:
        yield compare(name, model, images, expected, wanted, grid)


def compare(name, model, images, expected, wanted, grid, limit=1e-8) -> Row:
    start, row = time.perf_counter(), Row(name, "x".join(map(str, grid)))
    try:
        outputs, found = on_tiles(model, images, grid, fuse_halo="off")
    except (ValueError, RuntimeError) as error:
        row.result, row.reason = "refused", str(error).split(chr(10))[0]
    else:
        for rank in outputs:
            parts = [e[tuple(slice(*b) for b in out.bounds)] for out, e in zip(rank, expected, strict=True)]
            row.output = max(row.output, worst([out.local.detach() for out in rank], parts))
        row.gradient = worst(found, wanted)
        row.result = "equal" if max(row.output, row.gradient) <= limit else "different"
    row.seconds = round(time.perf_counter() - start, 1)
    return row


def main() -> None:
    names = [name for name in MODELS if len(sys.argv) < 3 or any(word in name for word in sys.argv[2:])]
    with open(sys.argv[1], "w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        table.writeheader()
        for name in names:
            for row in rows(name):
                table.writerow(asdict(row))
                file.flush()
                print(row, flush=True)


if __name__ == "__main__":
    main()
