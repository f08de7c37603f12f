"""Wide halos: one fetch for several operations, which compute some pixels beyond their own instead of
fetching.

An operation that must fetch is a *site*. The first of a group of consecutive sites fetches a halo that is
wide enough for all of them. Dry runs of the same code on the meta device find the width.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from commsched.spatial.mesh import Mesh, Rates, Site, Visit
from commsched.spatial.replicated import everyone
from commsched.spatial.tile import Cuts, Tile, cut_axes, tree_map
from commsched.transport.channel import SilentChannel

Fusion = dict[Site, int]
DryRun = Callable[[Fusion], list[Visit]]
_GROUPS = (2, 3, 4, 6, 8)  # group sizes that "auto" tries, until the cost rises
_WORTH = 1.05  # skip the search where halo waits are below 5 % of the compute: fusion cannot save more


def find_fusion(dry_run: DryRun, group: int) -> Fusion:
    """The reach that the first of each ``group`` consecutive sites needs so that the others need no fetch."""
    visits = {visit.site: visit for visit in dry_run({}) if visit.fetches}
    sites = list(visits)
    blocks = [_Block([visits[site] for site in sites[i : i + group]]) for i in range(0, len(sites), group)]
    while True:
        blocks = [block for block in blocks if len(block.visits) > 1]
        if all(block.low + 1 >= block.high for block in blocks):
            return {block.first: block.high for block in blocks}
        reach = {block.first: block.guess for block in blocks}
        fetching = {visit.site for visit in dry_run(reach) if visit.fetches}
        for block in blocks:
            block.learn(not any(visit.site in fetching for visit in block.visits[1:]))


class _Block:
    """Sites that share one halo, and the bisection for its width."""

    def __init__(self, visits: list[Visit]) -> None:
        self.visits = visits
        self._begin()

    def _begin(self) -> None:
        self.low, self.high = 0, 1 << 30
        self.guess = 0
        for visit in reversed(self.visits[1:]):  # as if each read what the one before wrote
            self.guess = math.ceil(self.guess * visit.step) + visit.halo
        self.guess = max(1, min(self.guess, self.visits[0].room))

    @property
    def first(self) -> Site:
        return self.visits[0].site

    def learn(self, enough: bool) -> None:
        if self.low + 1 >= self.high:
            return
        if enough:
            self.high = self.guess
        else:
            self.low = self.guess
        if self.low >= self.visits[0].room:  # the last site reads another tensor, or the tiles are too small
            self.visits.pop()
            self._begin()
            return
        self.guess = (
            min(2 * self.low, self.visits[0].room) if self.high == 1 << 30 else (self.low + self.high) // 2
        )
        if self.low + 1 >= self.high:
            self.guess = self.high


def cost(visits: Sequence[Visit], rates: Rates) -> float:
    """Seconds that a forward waits for halos and computes."""
    waits = sum(rates.latency + visit.sent * rates.per_byte for visit in visits if visit.fetches)
    return waits + sum(visit.work for visit in visits) * rates.per_multiplication


def cheapest(dry_run: DryRun, rates: Rates) -> Fusion:
    """The best of a few group sizes by the cost model."""
    best: Fusion = {}
    visits = dry_run({})
    least, computing = cost(visits, rates), cost(visits, rates._replace(latency=0.0, per_byte=0.0))
    if least < _WORTH * computing:
        return best
    for group in _GROUPS:
        fusion = find_fusion(dry_run, group)
        price = cost(dry_run(fusion), rates)
        if price >= least:
            break
        best, least = fusion, price
    return best


def measure(mesh: Mesh) -> Rates:
    """Measure latency and bandwidth of the mesh and the speed of a convolution; rank 0's figures on every
    rank.
    """
    axes = tuple(range(len(mesh.grid)))

    def exchange(count: int) -> float:
        buffer = torch.zeros(count, dtype=torch.uint8)
        return statistics.median([_timed(lambda: everyone(buffer, mesh, axes, "measure")) for _ in range(5)])

    small, large = exchange(64), exchange(1 << 20)
    image, weight = torch.ones(1, 16, 64, 64), torch.ones(16, 16, 3, 3)  # no numbers of the user's generator
    conv = statistics.median([_timed(lambda: torch.conv2d(image, weight, padding=1)) for _ in range(5)])
    work = weight.numel() * 64 * 64
    mine = torch.tensor([small, max(large - small, 0.0) / (1 << 20), conv / work], dtype=torch.float64)
    return Rates(*everyone(mine, mesh, axes, "measure")[0].tolist())


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def dry_runner(model: nn.Module, args: Any, kwargs: Any, mesh: Mesh) -> DryRun:
    """Runs ``model`` without data, for the sites it visits.

    Every rank runs the first rank's part: costs differ from part to part, and all ranks must choose the same.
    """
    dry = Mesh(SilentChannel(0, mesh.size), mesh.grid, mesh.dims, mesh.unsupported, "off")
    dry.dry = True
    dry.names, dry.ordinals = mesh.names, mesh.ordinals  # the model's hooks keep those
    state = meta_state(model)

    def as_meta(value: Tensor) -> Tensor:
        if isinstance(value, Tile):
            return meta_tile(value.shape, value.dtype, dry, value.cuts)
        return value.detach().to("meta")

    plain_args, plain_kwargs = tree_map(as_meta, (args, kwargs))

    def run(fusion: Fusion) -> list[Visit]:
        dry.fusion, dry.visits = fusion, []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            functional_call(model, state, plain_args, plain_kwargs)
        return dry.visits

    return run


def meta_tile(
    shape: Sequence[int], dtype: torch.dtype, mesh: Mesh, cuts: Cuts, requires_grad: bool = False
) -> Tile:
    """This rank's tile, without data, of a tensor of global ``shape``."""
    local = list(shape)
    for axis, cut in cut_axes(cuts):
        local[cut.dim] = len(range(*cut.split.held(mesh.coord[axis])))
    part = torch.empty(local, dtype=dtype, device="meta", requires_grad=requires_grad)
    return Tile.make(part, mesh, cuts)


def meta_state(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Parameters and buffers without storage; counters stay real, as modules read them."""
    state: dict[str, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            meta = torch.empty_like(tensor, device="meta", dtype=dtype or tensor.dtype)
            state[name] = meta.requires_grad_(tensor.requires_grad)
        else:
            state[name] = tensor.detach().clone()
    return state


def choose(model: nn.Module, args: Any, kwargs: Any, mesh: Mesh, option: int | str) -> Fusion | None:
    """The fusion for these inputs: groups of ``option`` sites, or the cheapest by the cost model.

    None if the model raised: the forward itself must raise that, after what it changes before.
    """
    if option == "off" or option == 1 or mesh.size == 1:
        return {}
    dry_run = dry_runner(model, args, kwargs, mesh)
    if option == "auto" and mesh.rates is None:
        mesh.rates = measure(mesh)
    try:
        if isinstance(option, int):
            return find_fusion(dry_run, option)
        assert mesh.rates is not None
        return cheapest(dry_run, mesh.rates)
    except (RuntimeError, NotImplementedError) as error:
        # The model reads tensor values, which a dry run does not have.
        warnings.warn(
            f"fuse_halo={option!r} is off: {type(model).__name__} cannot run without data ({error})",
            stacklevel=2,
        )
        return {}
    except Exception:
        return None
