"""Stages on tiles: their modules, and a prediction of what a hybrid sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from commsched.channels import Channel, Parcel, Pending, SilentChannel
from commsched.pipeline.rows import Cut, Part, border, entering, part_of
from commsched.spatial.explain import backward_of_sums, naming
from commsched.spatial.intervals import Split
from commsched.spatial.layout import replicate
from commsched.spatial.mesh import Mesh, current_mesh
from commsched.spatial.shard import meta_state, meta_tile, owned_outputs, shard
from commsched.spatial.tile import Cut as TileCut
from commsched.spatial.tile import Cuts, Tile, local_of
from scheduler.ir.layout import Placement, Tiles, place
from scheduler.ir.profile import Border

# -- a stage on tiles: its module on one grid of ranks, and plain tensors at its borders ---------------------


class TiledModule:
    """``module`` on the ranks of ``channel``, which are the tiles of one replica."""

    def __init__(self, number: int, module: nn.Module, tiles: Tiles, channel: Channel, options: Any) -> None:
        self.number, self.module, self.tiles = number, module, tiles
        shard(module, tiles.grid, tiles.dims, channel=channel, timeout=channel.timeout, **options)
        self.mesh = current_mesh()

    def scatter(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Cut | None]]:
        """This rank's tile of whole tensors."""
        cuts = [entering(leaf, None, None, self.tiles) for leaf in leaves]
        return [self._own(leaf, cut) for leaf, cut in zip(leaves, cuts)], cuts

    def _own(self, leaf: Any, cut: Cut | None) -> Any:
        for axis, part in zip(cut or (), self.mesh.coord):
            if axis is not None:
                leaf = leaf.narrow(axis[0], axis[1][part], axis[1][part + 1] - axis[1][part])
        return leaf

    def enter(self, leaves: Sequence[Any], cuts: Sequence[Cut | None]) -> list[Any]:
        """Local tensors as tiles."""
        return [
            leaf if cut is None else Tile.make(leaf, self.mesh, tile_cuts(cut))
            for leaf, cut in zip(leaves, cuts, strict=True)
        ]

    def leave(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Cut | None]]:
        """The local tensors of tiles, and how they are cut."""
        return [self.local(leaf) for leaf in leaves], [cut_of(x, self.tiles, self.number) for x in leaves]

    def whole(self, value: Any) -> Any:
        """The plain whole tensor of which a value is a tile; all tiles must call."""
        return self.local(replicate(value)) if isinstance(value, Tile) else value

    def local(self, value: Any) -> Any:
        """The plain tensor behind a tile."""
        return local_of(value) if isinstance(value, Tile) else value


def tile_cuts(cut: Cut) -> Cuts:
    return tuple(axis and TileCut(axis[0], Split(axis[1])) for axis in cut)


def cut_of(leaf: Any, tiles: Tiles, stage: int) -> Cut | None:
    if not isinstance(leaf, Tensor):
        return None
    cuts = leaf.cuts if isinstance(leaf, Tile) else (None,) * len(tiles.grid)
    whole = [axis for axis, parts in enumerate(tiles.grid) if parts > 1 and cuts[axis] is None]
    if whole:
        raise ValueError(
            f"stage {stage} runs on tiles and returns a tensor of shape {tuple(leaf.shape)} that"
            f" every rank holds whole along mesh axes {whole}; only the last stage may, so let the next"
            " stage begin before the operation that makes it whole"
        )
    return tuple(None if c is None else (c.dim, c.split.bounds) for c in cuts)


# -- predictions: halos between tiles, and tensors between stages --------------------------------------------

# report = spatial.explain_stages(stages, [spatial.Tiles((2, 2)), spatial.Samples()], shape)
# print(report)                                             # a line for each pair of ranks
# program = replace(trainer.program, borders=report.borders)  # halos for the simulator


@dataclass(frozen=True)
class Flow:
    """Bytes that rank ``source`` sends rank ``target`` in the forward of a stage. ``backward``: of a halo,
    bytes sent in the backward; of an activation, bytes that come back.
    """

    kind: str
    stage: int
    source: int
    target: int
    forward: int
    backward: int

    def __str__(self) -> str:
        back = "sends {:,} in the backward" if self.kind == "halo" else "gets {:,} back"
        return (
            f"{self.kind} of stage {self.stage}: rank {self.source} sends rank {self.target}"
            f" {self.forward:,} bytes, {back.format(self.backward)}"
        )


@dataclass(frozen=True)
class StagesReport:
    """The result of `explain_stages`; ``print`` it. ``borders``: for each stage on tiles, the bytes of the
    tile that sends most, and the largest share of a tile's work that no halo travels beside.
    """

    shape: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    flows: tuple[Flow, ...]
    borders: tuple[Border | None, ...]

    def __str__(self) -> str:
        lines = [f"a micro-batch {self.shape} in {len(self.ranks)} stages, one replica:"]
        lines += [
            f"stage {number} on ranks {', '.join(map(str, ranks))}" for number, ranks in enumerate(self.ranks)
        ]
        return "\n".join([*lines, *map(str, self.flows)])


class _Counting(SilentChannel):
    """Counts the bytes for each peer instead of sending them."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.bytes: Counter[int] = Counter()

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], what: str) -> Pending:
        for peer, buffer in sends:
            self.bytes[peer] += buffer.nbytes
        return super().exchange(sends, recvs, what)


@dataclass(frozen=True)
class _Values:
    """A stage's inputs or outputs: tensors without data, with the size of all tiles and samples, how tiles
    cut each, and their structure.
    """

    leaves: list[Any]
    cuts: list[Cut | None]
    spec: Any


def explain_stages(
    stages: Sequence[nn.Module],
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    overlap: str = "auto",
) -> StagesReport:
    """The bytes of one micro-batch of images of this shape, in one replica: halos of every pair of tiles, and
    what every pair of ranks of neighbouring stages exchanges. Without the loss.

    ``stages`` are not changed and nothing is computed or sent.
    Operations that `Hybrid` refuses on tiles are refused here, too.
    """
    if len(stages) != len(placements):
        raise ValueError(
            f"every stage needs a placement, got {len(stages)} stages and {len(placements)} placements"
        )
    ranks = place(placements).ranks
    flows: list[Flow] = []
    borders: list[Border | None] = []
    leaves, spec = tree_flatten(torch.empty(tuple(shape), dtype=dtype, device="meta"))
    values, before = _Values(leaves, [None], spec), None
    for number, (stage, placement) in enumerate(zip(stages, placements)):
        tiles = placement if isinstance(placement, Tiles) else None
        cuts = [entering(leaf, cut, before, tiles) for leaf, cut in zip(values.leaves, values.cuts)]
        if number:
            flows += _activations(number - 1, placements, ranks, shape[0], values, cuts)
        entered = _Values(values.leaves, cuts, values.spec)
        if tiles is None:
            whole = tree_unflatten(entered.leaves, entered.spec)
            values = _outputs(functional_call(stage, meta_state(stage), (whole,)), None, number)
            borders.append(None)
        else:
            dry = _Dry(stage, tiles, entered, overlap)
            values = _outputs(dry.output, tiles if number + 1 < len(stages) else None, number)
            flows += dry.flows(number, ranks[number])
            borders.append(dry.border)
        before = tiles
    return StagesReport(tuple(shape), ranks, tuple(flows), tuple(borders))


def _outputs(output: Any, tiles: Tiles | None, number: int) -> _Values:
    """``output`` as the next stage finds it; the last stage's may be whole on every tile."""
    leaves, spec = tree_flatten(output)
    whole = [
        torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
    cuts = [None if tiles is None else cut_of(leaf, tiles, number) for leaf in leaves]
    return _Values(whole, cuts, spec)


class _Dry:
    """Forward and backward of every tile of a stage, on the meta device."""

    def __init__(self, stage: nn.Module, tiles: Tiles, entered: _Values, overlap: str) -> None:
        self.stage, self.tiles, self.entered = stage, tiles, entered
        self.sent: list[tuple[Counter[int], Counter[int]]] = []
        self.output: Any = None
        alone = 0.0
        for tile in range(tiles.size):
            mesh = Mesh(_Counting(tile, tiles.size), tiles.grid, tiles.dims, overlap=overlap)
            mesh.dry = True
            self._run(mesh)
            alone = max(alone, 1 - mesh.hiding / mesh.work if mesh.work else 1.0)
        most = [max(sum(sent[way].values()) for sent in self.sent) for way in (0, 1)]
        self.border = Border(float(most[0]), float(most[1]), alone) if any(most) else None

    def _inputs(self, mesh: Mesh) -> Any:
        leaves = []
        for leaf, cut in zip(self.entered.leaves, self.entered.cuts):
            if cut is not None:
                leaf = meta_tile(leaf.shape, leaf.dtype, mesh, tile_cuts(cut), leaf.requires_grad)
            leaves.append(leaf)
        return tree_unflatten(leaves, self.entered.spec)

    def _run(self, mesh: Mesh) -> None:
        channel = mesh.channel
        assert isinstance(channel, _Counting)
        with naming(self.stage, mesh), torch.random.fork_rng(devices=[]):
            self.output = owned_outputs(
                functional_call(self.stage, meta_state(self.stage), (self._inputs(mesh),))
            )
            forward = Counter(channel.bytes)
            leaves = tree_leaves(self.output)
            backward_of_sums(leaf.held if isinstance(leaf, Tile) else leaf for leaf in leaves)
        self.sent.append((forward, channel.bytes - forward))

    def flows(self, number: int, ranks: Sequence[int]) -> Iterator[Flow]:
        for tile, (forward, backward) in enumerate(self.sent):
            for peer in sorted({*forward, *backward}):
                yield Flow("halo", number, ranks[tile], ranks[peer], forward[peer], backward[peer])


def _activations(
    stage: int,
    placements: Sequence[Placement],
    ranks: Sequence[Sequence[int]],
    rows: int,
    values: _Values,
    cuts: Sequence[Cut | None],
) -> Iterator[Flow]:
    """Each message from a rank of ``stage`` to one of the next stage, which cuts the tensors by ``cuts``."""
    here, there = placements[stage], placements[stage + 1]
    for source, target in product(range(here.size), range(there.size)):
        forward = backward = 0
        for leaf, before, after in zip(values.leaves, values.cuts, cuts):
            if isinstance(leaf, Tensor):
                mine = part_of(*_holder(here, source, rows), (before, after))
                its = part_of(*_holder(there, target, rows), (after, before))
                size = _common_bytes(leaf, mine, its)
                forward += size
                backward += size * leaf.requires_grad
        if forward:
            yield Flow("activation", stage, ranks[stage][source], ranks[stage + 1][target], forward, backward)


def _common_bytes(leaf: Tensor, mine: Part, its: Part) -> int:
    """Bytes of a tensor that lie in both parts."""
    size = leaf.nbytes
    for dim, (low, high) in mine.items():
        both = max(0, min(high, its[dim][1]) - max(low, its[dim][0]))
        size = size // leaf.shape[dim] * both
    return size


def _holder(placement: Placement, number: int, rows: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The rows that a rank of a stage has, and its place in the grid."""
    if isinstance(placement, Tiles):
        return (0, rows), placement.coord(number)
    return (border(number, rows, placement.size), border(number + 1, rows, placement.size)), ()
