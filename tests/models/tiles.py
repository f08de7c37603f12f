"""Compare a network on tiles with one process: outputs and the gradients of all parameters, in float64.

``python -m tests.models.tiles docs/spatial-models.csv [words of names]`` makes the table.
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
from commsched.channels import Channel
from tests.models.tiled_models import MODELS
from tests.models.zoo import made
from tests.support.spatial_cases import on_threads

GRIDS = ((2, 2), (1, 4))
LIMIT = 1e-8


@dataclass
class Row:
    """A line of the table. Differences are shares of the largest value of their tensor.

    ``rounding`` is what changing the last bits of images and parameters changes in one process. Tiles change
    the last bits of every sum, so differences of 10 times that are rounding, but never more than ``LIMIT``.
    """

    model: str
    grid: str
    result: str = ""
    output: float = 0.0
    gradient: float = 0.0
    rounding: float = 0.0
    gathered_bytes: int = 0
    reason: str = ""
    seconds: float = 0.0

    @property
    def allowed(self) -> float:
        return min(LIMIT, 10 * self.rounding)


Step = tuple[list[Any], list[Tensor | None]]
"""The outputs and the parameters' gradients."""


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


def sharing(model: nn.Module) -> nn.Module:
    """A copy with gradients and buffers of its own and the same memory for parameters."""
    return copy.deepcopy(model, {id(p): nn.Parameter(p.detach()) for p in model.parameters()})


def one_process(model: nn.Module, images: Tensor) -> Step:
    model = sharing(model)
    outputs = leaves(model(images))
    loss_of(outputs).backward()
    return [out.detach() for out in outputs], [p.grad for p in model.parameters()]


def on_tiles(model: nn.Module, images: Tensor, grid: tuple[int, int]) -> tuple[list[Step], int]:
    """Each rank's outputs and its part of the gradients, and the bytes of gathers."""
    copies = [sharing(model) for _ in range(grid[0] * grid[1])]

    def run(channel: Channel) -> tuple[Step, int]:
        mine = spatial.shard(copies[channel.rank], grid=grid, channel=channel)
        outputs = leaves(mine(spatial.scatter(images)))
        loss_of(outputs).backward()
        gathered = spatial.current_mesh().gathered.total()
        return (outputs, [p.grad for p in mine.parameters()]), gathered

    steps, gathered = zip(*on_threads(len(copies), run, timeout=60.0))
    return list(steps), sum(gathered)


def worst(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The largest difference as a share of its tensor's largest value, or of a millionth of all tensors'.

    The gradient of a bias before a normalization is zero: its rounding is that of larger numbers.
    """
    largest = [float(e.abs().max()) for e in expected if e is not None and e.numel()]
    floor = 1e-6 * max(largest, default=0.0) or 1.0
    shares = [0.0]
    for f, e in zip(found, expected, strict=True):
        assert (f is None) == (e is None)
        if f is not None and e is not None and e.numel():
            shares.append(float((f - e).abs().max()) / max(float(e.abs().max()), floor))
    return max(shares)


def noisy(tensor: Tensor) -> Tensor:
    """``tensor`` with its last bits changed."""
    return tensor * (1 + torch.finfo(tensor.dtype).eps * torch.randn_like(tensor))


def rows(name: str) -> Iterator[Row]:
    """The network's line for each grid."""
    torch.manual_seed(0)
    model, images = made(MODELS[name], 2)
    model, images = model.double(), images.double()
    with torch.no_grad():  # many weights begin at zero and would hide what lies behind them
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    outputs, gradients = one_process(model, images)
    other = sharing(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.data = noisy(parameter)
    noise = one_process(other, noisy(images))
    rounding = max(worst(noise[0], outputs), worst(noise[1], gradients))
    for grid in GRIDS:
        row = Row(name, "x".join(map(str, grid)), rounding=rounding)
        compare(row, grid, model, images, (outputs, gradients))
        yield row


def compare(row: Row, grid: tuple[int, int], model: nn.Module, images: Tensor, expected: Step) -> None:
    start = time.perf_counter()
    try:
        steps, row.gathered_bytes = on_tiles(model, images, grid)
    except ValueError as error:
        row.result, row.reason = "refused", str(error).splitlines()[0]
        return
    for outputs, _ in steps:
        parts = [e[tuple(slice(*b) for b in out.bounds)] for out, e in zip(outputs, expected[0], strict=True)]
        row.output = max(row.output, worst([out.local.detach() for out in outputs], parts))
    row.gradient = worst([summed(ranks) for ranks in zip(*(step[1] for step in steps))], expected[1])
    row.result = "equal" if max(row.output, row.gradient) <= row.allowed else "different"
    row.seconds = round(time.perf_counter() - start, 1)


def summed(ranks: tuple[Tensor | None, ...]) -> Tensor | None:
    present = [grad for grad in ranks if grad is not None]
    return torch.stack(present).sum(0) if present else None


def main() -> None:
    path, *words = sys.argv[1:]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        table.writeheader()
        for name in MODELS:
            for row in rows(name) if not words or any(word in name for word in words) else ():
                line = {
                    k: f"{v:.1e}" if isinstance(v, float) and v < 0.1 else v for k, v in asdict(row).items()
                }
                table.writerow(line)
                file.flush()
                print(row, flush=True)


if __name__ == "__main__":
    main()
