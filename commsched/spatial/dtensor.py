"""Tiles from and to `torch.distributed.tensor.DTensor`, without copying or sending pixels."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from commsched.spatial.intervals import Split
from commsched.spatial.layout import local_owned
from commsched.spatial.mesh import Mesh, current_mesh
from commsched.spatial.tile import Cut, Tile, cut_axes


def chunked(size: int, parts: int) -> Split:
    """How `DTensor` shards ``size`` pixels: parts of the rounded-up mean, the last ones smaller or empty."""
    length = -(-size // parts)
    return Split(tuple(min(i * length, size) for i in range(parts + 1)))


def from_dtensor(dtensor: DTensor, mesh: Mesh | None = None) -> Tile:
    """The tile that holds this rank's shard: one dimension of the device mesh for each of the grid.

    The pixels stay where they are, also where `DTensor` shards unevenly. Differentiable.
    """
    mesh = mesh or current_mesh()
    device_mesh, ranks = dtensor.device_mesh, list(mesh.channel.ranks)
    if tuple(device_mesh.shape) != mesh.grid or device_mesh.mesh.flatten().tolist() != ranks:
        raise ValueError(
            f"rank {mesh.rank}: the DTensor lies on a device mesh of shape {tuple(device_mesh.shape)} with "
            f"ranks {device_mesh.mesh.flatten().tolist()}, and the tiles' grid is {mesh.grid} with ranks "
            f"{ranks}; shard the model over the same grid"
        )
    mesh.device_mesh = device_mesh
    cuts = tuple(_cut(dtensor, axis, mesh) for axis in range(len(mesh.grid)))
    return Tile.make(dtensor.to_local(), mesh, cuts)


def _cut(dtensor: DTensor, axis: int, mesh: Mesh) -> Cut | None:
    placement: Any = dtensor.placements[axis]
    if type(placement) is Replicate or mesh.grid[axis] == 1:
        return None
    dim = placement.dim - dtensor.ndim if type(placement) is Shard else None
    if dim != mesh.dims[axis]:
        raise ValueError(
            f"rank {mesh.rank}: mesh dimension {axis} must be Shard({mesh.dims[axis] + dtensor.ndim}) or "
            f"Replicate(), got {placement} of a DTensor of shape {tuple(dtensor.shape)}; "
            "redistribute it first"
        )
    return Cut(dim, chunked(dtensor.shape[dim], mesh.grid[axis]))


def to_dtensor(tile: Tile) -> DTensor:
    """This rank's owned pixels as the shard of a `DTensor` on the same ranks (see `Tile.to_dtensor`)."""
    mesh, ndim = tile.mesh, tile.ndim
    placements: list[Any] = [Replicate()] * len(mesh.grid)
    for axis, cut in cut_axes(tile.cuts):
        expected = chunked(cut.split.size, cut.split.parts).bounds
        if cut.split.bounds != expected:
            raise ValueError(
                f"rank {mesh.rank}: a DTensor has dimension {cut.dim + ndim} of {tuple(tile.shape)} cut at "
                f"{expected}, and this tile has it cut at {cut.split.bounds}; choose an image size that the "
                f"grid {mesh.grid} divides, or start from a DTensor (from_dtensor)"
            )
        placements[axis] = Shard(cut.dim + ndim)
    local = local_owned(tile)
    stride = torch.empty(tile.shape, device="meta").stride()
    return DTensor.from_local(
        local, _device_mesh(mesh, local), placements, run_check=False, shape=tile.shape, stride=stride
    )


def _device_mesh(mesh: Mesh, local: torch.Tensor) -> DeviceMesh:
    """The device mesh that `from_dtensor` got, else a new one, which all ranks of the job make together."""
    if mesh.device_mesh is None:
        ranks, size = list(mesh.channel.ranks), dist.get_world_size()
        if len(ranks) < size:
            raise ValueError(
                f"rank {mesh.rank}: the tiles lie on ranks {ranks} of {size}, and all ranks of a job make a"
                " device mesh together; cut one from init_device_mesh()'s and begin with from_dtensor()"
            )
        mesh.device_mesh = DeviceMesh(local.device.type, torch.tensor(ranks).view(mesh.grid))
    return mesh.device_mesh
