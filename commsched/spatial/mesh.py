"""The grid of ranks that share one image, the state of one rank in it, and values that the ranks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from commsched.channels import Channel
from commsched.pipeline.random_state import Generator, default_generators
from commsched.spatial.intervals import Split

# With fewer multiplications in the interior, splitting an operation costs more than waiting for the halo.
OVERLAP_WORK = 1 << 27


class NeedsOthersError(Exception):
    """A block that is computed alone needs pixels that it does not hold. ``fetches``: perhaps a halo."""

    def __init__(self, why: str, fetches: bool = False) -> None:
        super().__init__(why)
        self.why, self.fetches = why, fetches


class Mesh:
    """A ``grid`` of tiles over the tensor dimensions ``dims`` (counted from the end); rank order is
    row-major.

    One object per rank. ``traffic`` counts the bytes this rank sent, by module name.
    """

    def __init__(
        self,
        channel: Channel,
        grid: Sequence[int],
        dims: Sequence[int],
        unsupported: str = "error",
        overlap: str = "auto",
    ) -> None:
        self.channel, self.grid, self.dims = channel, tuple(grid), tuple(dims)
        self.unsupported, self.overlap = unsupported, overlap
        self._check()
        self.coords = tuple(product(*(range(parts) for parts in self.grid)))
        self.names: list[str] = []
        self.dry = False  # nothing is computed or sent
        self.work = self.hiding = 0  # in dry runs: multiplications of windows, and those done beside halos
        self.alone = False  # the tiles are blocks, each of which is computed alone
        self.device_mesh: Any = None  # of DTensors on the same ranks
        self.traffic: Counter[str] = Counter()
        self.gathered: Counter[str] = Counter()  # bytes of whole tensors that it received, by module
        self.refused: list[str] = []  # operations that were gathered for, by module

    def _check(self) -> None:
        if len(self.grid) != len(self.dims) or not self.grid:
            raise ValueError(f"grid {self.grid} and dims {self.dims} must have the same length, at least 1")
        if any(dim >= 0 for dim in self.dims) or len(set(self.dims)) != len(self.dims):
            raise ValueError(f"dims must be different and counted from the end (negative), got {self.dims}")
        if any(parts < 1 for parts in self.grid) or prod(self.grid) != self.channel.size:
            raise ValueError(
                f"a grid of {'x'.join(map(str, self.grid))} needs {prod(self.grid)} ranks, and there are "
                f"{self.channel.size}; choose a grid whose parts multiply to {self.channel.size}"
            )
        if self.overlap not in ("auto", "on", "off"):
            raise ValueError(f"overlap must be 'auto', 'on' or 'off', got {self.overlap!r}")
        if self.unsupported not in ("error", "gather"):
            raise ValueError(f"unsupported must be 'error' or 'gather', got {self.unsupported!r}")

    def like(self, other: Mesh) -> bool:
        """Whether the other one cuts images into the same parts, on as many ranks."""
        mine, its = ((mesh.grid, mesh.dims, mesh.rank, mesh.dry) for mesh in (self, other))
        return mine == its

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self  # connections cannot be copied, and need not be

    @property
    def rank(self) -> int:
        return self.channel.rank

    @property
    def size(self) -> int:
        return self.channel.size

    @property
    def coord(self) -> tuple[int, ...]:
        return self.coords[self.rank]

    def parts(self, axis: int) -> tuple[int, ...]:
        """The part along ``axis`` of every rank."""
        return tuple(coord[axis] for coord in self.coords)

    def groups(self, axes: Sequence[int]) -> tuple[int, ...]:
        """For every rank, the first rank whose coordinates differ from it along ``axes`` only."""
        fixed = [tuple(part for axis, part in enumerate(coord) if axis not in axes) for coord in self.coords]
        return tuple(fixed.index(key) for key in fixed)

    def peers(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The ranks, this one included, whose coordinates differ from this rank's along ``axes`` only."""
        groups = self.groups(axes)
        return tuple(r for r, group in enumerate(groups) if group == groups[self.rank])

    def even_splits(self, shape: Sequence[int]) -> tuple[Split, ...]:
        """How ``scatter`` cuts an image of global ``shape``."""
        if len(shape) < -min(self.dims):
            raise ValueError(f"dims {self.dims} do not exist in a tensor of shape {tuple(shape)}")
        try:
            return tuple(Split.even(shape[dim], parts) for dim, parts in zip(self.dims, self.grid))
        except ValueError as error:
            raise ValueError(
                f"{self.where('scatter')}: image {tuple(shape)} over grid {self.grid}: {error}"
            ) from None

    @property
    def module(self) -> str:
        """The module that runs now."""
        return self.names[-1] if self.names else "outside the model"

    def where(self, operation: str) -> str:
        """``operation`` with the name of the module that runs it, for messages."""
        return f"{self.module}: {operation}"

    def needs_other_end(self) -> None:
        """An operation joins the two ends of the image."""
        if self.alone:
            raise NeedsOthersError("it joins the two ends of the image")

    def overlaps(self, work: int) -> bool:
        """Whether an operation with ``work`` multiplications in its interior is split to overlap its halo."""
        return self.overlap == "on" or (self.overlap == "auto" and work >= OVERLAP_WORK)

    def count(self, module: str, sent: int) -> None:
        if sent:
            self.traffic[module] += sent


_current: ContextVar[Mesh | None] = ContextVar("commsched_spatial_mesh", default=None)


def current_mesh() -> Mesh:
    """The mesh of the last ``shard`` or ``use_mesh`` in this thread."""
    mesh = _current.get()
    if mesh is None:
        raise ValueError("no spatial mesh: call commsched.spatial.shard(model, ...) first, or pass mesh=")
    return mesh


def set_mesh(mesh: Mesh | None) -> None:
    _current.set(mesh)


@contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Make ``mesh`` the default of ``scatter`` and ``gather`` inside the block."""
    token = _current.set(mesh)
    try:
        yield mesh
    finally:
        _current.reset(token)


# -- linear functions of tensors on several ranks: the gradient of each is a linear function too -------------

_SHARED = 3
TRANSPOSED: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
"""By function the one that computes its gradient, from the gradient of its result and its first three further
arguments.
"""


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.function, ctx.args, ctx.count = function, args[:_SHARED], len(args)
        return function(x, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return apply(TRANSPOSED[ctx.function], grad, *ctx.args), *(None,) * (1 + ctx.count)


def apply(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """``function(x, *args)``, differentiable any number of times."""
    return _Linear.apply(x, function, *args)


# -- replicated values: sums over tiles, and their use together with tiles or parameters ---------------------


def everyone(
    x: Tensor, mesh: Mesh, axes: tuple[int, ...], what: str, module: str | None = None
) -> list[Tensor]:
    """``x`` of every rank along ``axes``, in rank order (not differentiable)."""
    peers = mesh.peers(axes)
    if len(peers) == 1:
        return [x]
    module = mesh.module if module is None else module
    mesh.count(module, x.nbytes * (len(peers) - 1))
    flat = x.detach().contiguous().view(-1)
    vectors = exchanged(flat, mesh.channel, peers, f"{module}: {what}")
    return [x if peer == mesh.rank else other.view(x.shape) for peer, other in zip(peers, vectors)]


def exchanged(mine: Tensor, channel: Channel, peers: Sequence[int], operation: str) -> list[Tensor]:
    """The vectors of all these ranks, of which this is one."""
    received = {peer: torch.empty_like(mine) for peer in peers if peer != channel.rank}
    channel.exchange([(peer, mine) for peer in received], list(received.items()), operation).wait()
    return [received.get(peer, mine) for peer in peers]


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def total(x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
    """The sum over ``axes``, added in rank order: parts become a replicated value, whose gradient all ranks
    share.
    """
    return sum_in_order(everyone(x, mesh, axes, "sum over tiles", module))


def same(x: Tensor) -> Tensor:
    """The same memory as another tensor. ``x.view_as(x)`` gives a single sample in channels_last a stride for
    which torch 2.13 computes wrong gradients of a convolution's weight.
    """
    return x[...]


def spread(x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
    """A replicated value that tiles use: its gradient is the sum of the contributions of all tiles."""
    return same(x)


def once(x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
    """A parameter that meets a replicated value: its gradient counts on the first rank along ``axes`` only,
    so that the sum over tiles is right.
    """
    return same(x)


def _counted(grad: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
    """A replicated gradient where it counts, zeros elsewhere."""
    return grad.clone() if all(mesh.coord[axis] == 0 for axis in axes) else torch.zeros_like(grad)


def _shared(x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
    """The value of the first rank along ``axes``, on all of them."""
    return everyone(x, mesh, axes, "share", module)[0].clone()


TRANSPOSED.update({total: spread, spread: total, once: _counted, _counted: _shared, _shared: _counted})


# -- random numbers that are the same on every rank: those of the mesh's first rank --------------------------


class SharedGenerators:
    """The first rank's default generators (torch's, Python's and NumPy's), on every rank of a mesh while the
    model runs.

    Models also draw into plain tensors (``torch.empty(n).bernoulli_()``), which are no tiles, or choose a
    branch (``random.random() < p``): with equal generators those numbers are equal. A rank whose generator
    differed gets its own back afterwards; ranks whose generators were equal keep them equal.
    """

    def __init__(self, device: torch.device) -> None:
        self._own = default_generators(device)
        self._replaced: list[Generator] = []

    def digest(self) -> bytes:
        """Eight bytes that differ where states do."""
        return blake2b(self._bytes().numpy().tobytes(), digest_size=8).digest()

    def _bytes(self) -> Tensor:
        return torch.cat([state for state, _ in self._own])

    def share(self, mesh: Mesh, module: str) -> None:
        """Copy the first rank's generator states; collective."""
        axes = tuple(range(len(mesh.grid)))
        first = everyone(self._bytes(), mesh, axes, "state of the random generators", module)[0]
        parts = first.split([len(state) for state, _ in self._own])
        for part, (state, set_state) in zip(parts, self._own):
            if not torch.equal(part, state):
                self._replaced.append((state, set_state))
                set_state(part.clone())

    def restore(self) -> None:
        for state, set_state in self._replaced:
            set_state(state)


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
