"""A stage on tiles: its module on one grid of ranks, and plain tensors at its borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from commsched.pipeline.parts import Cut, entering
from commsched.spatial.intervals import Split
from commsched.spatial.layout import replicate
from commsched.spatial.mesh import current_mesh
from commsched.spatial.shard import shard
from commsched.spatial.tile import Cut as TileCut
from commsched.spatial.tile import Cuts, Tile, local_of
from commsched.transport.channel import Channel
from scheduler.ir.layout import Tiles


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
        for axis, place in zip(cut or (), self.mesh.coord):
            if axis is not None:
                leaf = leaf.narrow(axis[0], axis[1][place], axis[1][place + 1] - axis[1][place])
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
    """``cut`` as tiles have it."""
    return tuple(axis and TileCut(axis[0], Split(axis[1])) for axis in cut)


def cut_of(leaf: Any, tiles: Tiles, stage: int) -> Cut | None:
    """How an output of a stage on tiles is cut."""
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
