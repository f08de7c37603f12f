"""Random numbers that are the same on every rank: those of the mesh's first rank."""

from __future__ import annotations

from hashlib import blake2b

import torch

from commsched.pipeline.random_state import random_state, set_random_state
from commsched.spatial.mesh import Mesh
from commsched.spatial.replicated import everyone


class SharedGenerators:
    """The first rank's default generators, on every rank of a mesh while the model runs.

    Models also draw into plain tensors (``torch.empty(n).bernoulli_()``), which are no tiles: with equal
    generators those numbers are equal. A rank whose generators differed gets its own back afterwards; ranks
    whose generators were equal keep them equal.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._state = device, random_state(device)
        self._replaced = False

    def digest(self) -> bytes:
        """Eight bytes that differ where states do."""
        return blake2b(torch.cat(self._state).numpy().tobytes(), digest_size=8).digest()

    def share(self, mesh: Mesh, module: str) -> None:
        """Copy the first rank's generator state; collective."""
        axes, mine = tuple(range(len(mesh.grid))), torch.cat(self._state)
        first = everyone(mine, mesh, axes, "state of the random generators", module)[0]
        self._replaced = not torch.equal(first, mine)
        if self._replaced:
            set_random_state(list(first.split([len(part) for part in self._state])), self._device)

    def restore(self) -> None:
        if self._replaced:
            set_random_state(self._state, self._device)


def draws(mesh: Mesh) -> bool:
    """Whether this rank draws a number that the first rank draws for all.

    Every process does, so that equal generators stay equal. Threads of one process share one generator.
    """
    return mesh.rank == 0 or mesh.channel.own_generator


def shared_seed(mesh: Mesh, device: torch.device) -> int:
    """A number from the default generator of the mesh's first rank."""
    axes = tuple(range(len(mesh.grid)))
    if device.type == "meta":  # dry runs draw no numbers
        everyone(torch.empty(1, dtype=torch.int64, device="meta"), mesh, axes, "seed")
        return 0
    drawn = torch.zeros(1, dtype=torch.int64)
    if draws(mesh):
        drawn.random_(-(1 << 62), 1 << 62)
    return int(everyone(drawn, mesh, axes, "seed")[0])
