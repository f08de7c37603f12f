"""Random spatial operations with integer values, checked bit for bit against the unsharded operation.

Every rank draws the same case from its seed, computes the reference on the whole image, and compares its
own part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.channels import Channel
from commsched.spatial import Mesh, ThreadHub, Tile, scatter
from commsched.spatial.intervals import Split
from commsched.spatial.layout import recut
from commsched.spatial.mesh import everyone, sum_in_order
from tests.support.thread_ranks import run_threads

DIVISIBLE = 216000  # by every product of three counts up to 6: averages stay integers
KINDS = ("conv", "conv_transpose", "max_pool", "avg_pool", "pad")
RANDOM_OVER_PROCESSES = {2: 150, 3: 150, 4: 250}  # how many, by number of ranks
GRIDS = ((2,), (3,), (4,), (1, 4), (4, 1), (2, 2), (3, 1), (1, 2))


@dataclass
class Case:
    """One operation on one image over one grid."""

    seed: int
    kind: str
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    bounds: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = field(default_factory=dict)
    weight: tuple[int, ...] | None = None
    bias: int | None = None

    def function(self) -> Callable[..., Tensor]:
        n = len(self.shape) - 2
        by_kind: dict[str, Any] = {
            "conv": (F.conv1d, F.conv2d, F.conv3d),
            "conv_transpose": (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
            "max_pool": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
            "avg_pool": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
            "pad": (F.pad,) * 3,
        }
        return by_kind[self.kind][n - 1]


def bounds_of(rng: random.Random, size: int, parts: int) -> tuple[int, ...]:
    """Even, uneven, or with empty parts."""
    inner = [rng.randint(0, size) for _ in range(parts - 1)]
    if rng.random() < 0.3:
        return Split.even(size, parts).bounds
    return (0, *sorted(inner), size)


def draw(seed: int, ranks: int, kinds: Sequence[str] = KINDS) -> Case:
    """A valid case for ``ranks`` ranks."""
    rng = random.Random(seed)
    while True:
        case = _draw(rng, seed, ranks, rng.choice(kinds))
        try:  # some combinations are refused by torch itself
            out = run_plain(case, *inputs(case))
        except RuntimeError:
            continue
        # A max-pool window without a single pixel (dilation may skip the image) has no gradient to speak of.
        if out.numel() and out.isfinite().all():
            return case


def _draw(rng: random.Random, seed: int, ranks: int, kind: str) -> Case:
    grid = rng.choice([g for g in GRIDS if _product(g) == ranks])
    n = rng.choice([k for k in (1, 2, 2, 2, 3) if k >= len(grid)])
    dims = tuple(sorted(rng.sample(range(-n, 0), len(grid))))
    sizes = tuple(rng.randint(max(grid), 5 if n == 3 else 13) for _ in range(n))
    groups = rng.choice((1, 1, 1, 2))
    channels = groups * rng.randint(1, 2)
    case = Case(seed, kind, dims, (rng.randint(1, 2), channels, *sizes), ())
    case.bounds = tuple(bounds_of(rng, sizes[dim], parts) for dim, parts in zip(dims, grid))
    _OPTIONS[kind](rng, case, n, groups)
    return case


def _product(values: Sequence[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


def _per_dim(rng: random.Random, n: int, low: int, high: int) -> Any:
    return tuple(rng.randint(low, high) for _ in range(n))


def _conv(rng: random.Random, case: Case, n: int, groups: int) -> None:
    kernel = _per_dim(rng, n, 1, 6 if n < 3 else 3)
    case.weight = (groups * rng.randint(1, 2), case.shape[1] // groups, *kernel)
    case.bias = case.weight[0] if rng.random() < 0.5 else None
    case.options = {
        "stride": _per_dim(rng, n, 1, 4),
        "padding": _per_dim(rng, n, 0, 4),
        "groups": groups,
        "dilation": _per_dim(rng, n, 1, 3),
    }
    if rng.random() < 0.15:
        case.options |= {"padding": "same", "stride": (1,) * n}


def _conv_transpose(rng: random.Random, case: Case, n: int, groups: int) -> None:
    kernel = _per_dim(rng, n, 1, 5 if n < 3 else 3)
    case.weight = (case.shape[1], rng.randint(1, 2), *kernel)
    case.bias = case.weight[1] * groups if rng.random() < 0.5 else None
    stride, dilation = _per_dim(rng, n, 1, 4), _per_dim(rng, n, 1, 3)
    extra = tuple(rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation))
    case.options = {
        "stride": stride,
        "padding": _per_dim(rng, n, 0, 3),
        "output_padding": extra,
        "groups": groups,
        "dilation": dilation,
    }


def _max_pool(rng: random.Random, case: Case, n: int, groups: int) -> None:
    kernel = _per_dim(rng, n, 1, 6 if n < 3 else 3)
    case.options = {
        "kernel_size": kernel,
        "stride": _per_dim(rng, n, 1, 4),
        "dilation": _per_dim(rng, n, 1, 3),
        "padding": tuple(rng.randint(0, k // 2) for k in kernel),
        "ceil_mode": rng.random() < 0.5,
    }


def _avg_pool(rng: random.Random, case: Case, n: int, groups: int) -> None:
    _max_pool(rng, case, n, groups)
    del case.options["dilation"]
    case.options["count_include_pad"] = rng.random() < 0.5
    if n > 1 and rng.random() < 0.2:
        case.options["divisor_override"] = rng.randint(1, 6)


def _pad(rng: random.Random, case: Case, n: int, groups: int) -> None:
    mode = rng.choice(("constant", "reflect", "replicate", "circular"))
    low = -2 if mode == "constant" else 0
    case.options = {"pad": tuple(rng.randint(low, 4) for _ in range(2 * n)), "mode": mode}
    if mode == "constant":
        case.options["value"] = 3.0


_OPTIONS = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "pad": _pad,
}


def traits(case: Case) -> set[str]:
    """What is special about a case."""
    options, found = case.options, {case.kind, f"{len(case.bounds)}-D grid", f"{len(case.shape) - 2}-D image"}
    tiles = [hi - lo for bounds in case.bounds for lo, hi in zip(bounds, bounds[1:])]
    found |= {"empty tile"} if 0 in tiles else set()
    even = all(bounds == Split.even(bounds[-1], len(bounds) - 1).bounds for bounds in case.bounds)
    found |= set() if even else {"uneven tiles"}
    if case.kind == "pad":
        return found | {options["mode"]}
    kernel = case.weight[2:] if case.weight else options["kernel_size"]
    dilation = options.get("dilation", (1,) * len(kernel))
    found |= {f"kernel {max(kernel)}", f"stride {max(options['stride'])}", f"dilation {max(dilation)}"}
    found |= {"groups"} if options.get("groups", 1) > 1 else set()
    for dim, bounds in zip(case.dims, case.bounds):
        smallest = min((hi - lo for lo, hi in zip(bounds, bounds[1:]) if hi > lo), default=0)
        if dilation[dim] * (kernel[dim] - 1) // 2 > smallest:
            found.add("tile smaller than the halo")
    return found


def process_cases(ranks: int, count: int) -> list[tuple[Case, str]]:
    """What is checked over processes: every kind, without and with overlap, in turn."""
    drawn = (draw(100_000 + seed, ranks, (KINDS[seed % len(KINDS)],)) for seed in range(count))
    return [(case, ("off", "on")[number % 2]) for number, case in enumerate(drawn)]


def integers(generator: torch.Generator, shape: Sequence[int], scale: int = 1) -> Tensor:
    return torch.randint(-4, 5, tuple(shape), generator=generator).double() * scale


def inputs(case: Case) -> tuple[Tensor, Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(case.seed)
    image = integers(generator, case.shape, DIVISIBLE if case.kind == "avg_pool" else 1)
    weight = None if case.weight is None else integers(generator, case.weight)
    return image, weight, None if case.bias is None else integers(generator, (case.bias,))


def run_plain(case: Case, image: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    parameters = () if weight is None else (weight, bias)
    return case.function()(image, *parameters, **case.options)


def part(tile: Tile) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in tile.bounds)


def check(case: Case, channel: Channel, overlap: str = "off") -> None:
    """Output, input gradient and weight gradients equal the unsharded ones; AssertionError names the case."""
    grid = tuple(len(b) - 1 for b in case.bounds)
    mesh = Mesh(channel, grid, case.dims, overlap=overlap)
    plain = [None if t is None else t.requires_grad_() for t in inputs(case)]
    expected = run_plain(case, *plain)
    generator = torch.Generator().manual_seed(case.seed + 1)
    grad = integers(generator, expected.shape, DIVISIBLE if case.kind == "avg_pool" else 1)
    expected.backward(grad)

    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in plain]
    image = scatter(leaves[0], mesh)
    tile = recut(image, {axis: Split(bounds) for axis, bounds in enumerate(case.bounds)})
    result = run_plain(case, tile, *leaves[1:])
    assert result.shape == expected.shape, (case, result.shape, expected.shape)
    assert torch.equal(result.local, expected[part(result)]), f"output of {case}"
    result.local.backward(grad[part(result)])
    assert torch.equal(leaves[0].grad[part(image)], plain[0].grad[part(image)]), f"input gradient of {case}"
    for name, leaf, reference in zip(("weight", "bias"), leaves[1:], plain[1:]):
        if leaf is not None:
            total = sum_in_order(everyone(leaf.grad, mesh, tuple(range(len(grid))), f"check {name}"))
            assert torch.equal(total, reference.grad), f"{name} gradient of {case}"


def on_threads(ranks: int, work: Callable[[Channel], Any], timeout: float = 300.0) -> list[Any]:
    """``work`` on every rank, each a thread of this process; the first error of any rank is raised here."""
    hub = ThreadHub(ranks, timeout)
    return run_threads(ranks, lambda rank: work(hub.channel(rank)), timeout + 300.0, hub.broken.set)
