"""`shard`: attach a mesh to a model, track the running module, and check that ranks run the same image."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from commsched.errors import CommError
from commsched.spatial.folded import Folded
from commsched.spatial.fuse import Fusion, choose
from commsched.spatial.layout import trimmed
from commsched.spatial.mesh import Mesh, set_mesh
from commsched.spatial.replicated import exchanged
from commsched.spatial.shared_random import SharedGenerators
from commsched.spatial.tile import Tile, tiles_in, tree_map
from commsched.transport.channel import Channel, DistChannel, SilentChannel

Model = TypeVar("Model", bound=nn.Module)
_DATA_CHANNEL = 5  # separate connections: halos do not wait behind the optimizer's messages
_NOTE = 512  # bytes of a note that ranks compare


def shard(
    model: Model,
    grid: Sequence[int] = (2, 2),
    dims: Sequence[int] = (-2, -1),
    *,
    replicas: int = 1,
    overlap: str = "auto",
    fuse_halo: int | str = "auto",
    unsupported: str = "error",
    timeout: float = 60.0,
    channel: Channel | None = None,
) -> Model:
    """Prepare ``model`` for tiles: call it with what `scatter` or `from_local` returns.

    The model stays what it is: the same object, modules, parameter names and ``state_dict``. Ranks form
    ``replicas`` groups of ``prod(grid)`` consecutive ranks, each of which shares one image cut along
    ``dims``. ``overlap`` is ``"on"`` to compute the interior of every convolution and pooling while its halo
    travels, ``"off"``, or ``"auto"`` for those large enough to gain. ``fuse_halo`` is how many operations
    share one wide halo, ``"off"`` (1), or ``"auto"`` to let a cost model with measured rates choose; rank 0's
    measurement holds for all. ``unsupported`` says what happens to an operation that mixes pixels in a way
    not known here: ``"error"``, or ``"gather"`` to run it on the whole image on every rank. The mesh becomes
    the default of `scatter` and `gather`.
    """
    if not (fuse_halo in ("auto", "off") or (isinstance(fuse_halo, int) and fuse_halo >= 1)):
        raise ValueError(f"fuse_halo must be 'auto', 'off' or a number of operations, got {fuse_halo!r}")
    name = type(model).__name__
    channel = channel or default_channel(name, tuple(grid), replicas, timeout)
    parameters = sum(p.numel() for p in model.parameters())
    options = f"fuse_halo {fuse_halo}, unsupported {unsupported}, {parameters} parameters"
    agree(channel, f"{name}: shard", f"grid {tuple(grid)}, dims {tuple(dims)}, {options}")
    mesh = Mesh(channel, grid, dims, unsupported, overlap)
    unshard(model)
    forward = _Forward(mesh, name, fuse_halo)
    model.register_forward_pre_hook(forward.begin, with_kwargs=True)
    for path, module in model.named_modules():
        name_hooks(module, mesh, path, type(module).__name__)
    model.register_forward_hook(_owned_outputs)
    model.register_forward_hook(forward.end, always_call=True)
    set_mesh(mesh)
    return model


def owned_outputs(output: Any) -> Any:
    """Trim margins from the model's outputs, and gather reshaped ones, of which nobody owns a rectangle."""

    def owned(value: Tensor) -> Tensor:
        if isinstance(value, Folded):
            return value.whole
        return trimmed(value) if isinstance(value, Tile) else value

    return tree_map(owned, output)


def _owned_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    return owned_outputs(output)


def unshard(model: nn.Module) -> None:
    """Undo `shard`, also of a copy: the model takes plain images again."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def is_sharded(model: nn.Module) -> bool:
    return any(map(_is_ours, model._forward_pre_hooks.values()))


def _is_ours(hook: Any) -> bool:
    return hook is _owned_outputs or isinstance(getattr(hook, "__self__", None), _Attached)


def default_channel(name: str, grid: tuple[int, ...], replicas: int, timeout: float) -> Channel:
    """A channel over this rank's block of consecutive ranks, in the job's process group."""
    group, tiles = _group(), prod(grid)
    world = 1 if group is None else group.size()
    if world != tiles * replicas or replicas < 1:
        raise ValueError(
            f"{name}: a grid of {'x'.join(map(str, grid))} with {replicas} replicas needs {tiles * replicas} "
            f"ranks, and there are {world}; choose grid and replicas whose product is {world}"
            + ("" if group is not None else ", or call commsched.init() (or init_process_group) first")
        )
    if group is None:
        return SilentChannel()
    first = group.rank() // tiles * tiles
    return DistChannel(group, range(first, first + tiles), timeout)


def _group() -> Any:
    """The ranks of torch.distributed's default group, else of ``commsched.init()``, else None."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    import commsched

    return commsched.data_group(channel=_DATA_CHANNEL) if commsched.is_initialized() else None


def agree(channel: Channel, what: str, note: str, attached: bytes = b"") -> list[bytes]:
    """Compare a note of every rank; a difference is a `CommError` on all of them, with every value.

    ``attached`` (of the same length everywhere) may differ; returns that of every rank.
    """
    if channel.size == 1 or isinstance(channel, SilentChannel):
        return [attached]
    sent = note.encode()[:_NOTE].ljust(_NOTE) + attached
    mine = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
    notes = exchanged(mine, channel, range(channel.size), f"{what}: comparing ranks")
    heard = [note.numpy().tobytes() for note in notes]
    said = [text[:_NOTE].decode(errors="replace").rstrip() for text in heard]
    if len(set(said)) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
        raise CommError(f"{what}: the ranks do not agree on the image and its grid: {listed}")
    return [text[_NOTE:] for text in heard]


class _Attached:
    """Hooks of a sharded model. Its copies are sharded alike, and a pickle of it is a plain model."""

    def __reduce__(self) -> Any:
        return _Detached, ()


class _Detached:
    """What hooks are in a model that comes from a file."""

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pass

    def enter(self, module: nn.Module, args: Any) -> None:
        pass

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        pass

    end = leave


class _Forward(_Attached):
    """Hooks before and after each forward of a sharded model."""

    def __init__(self, mesh: Mesh, name: str, fuse_halo: int | str) -> None:
        self._mesh, self._name, self._fuse_halo = mesh, name, fuse_halo
        self._fusions: dict[tuple[str, str], Fusion] = {}
        self._generators: SharedGenerators | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(self._mesh, self._name, self._fuse_halo)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Check that all ranks run the same image and share the random state."""
        mesh = self._mesh
        if len(mesh.names) > 0:  # a forward inside the model's own forward
            return None
        tiles = list(tiles_in((args, kwargs)))
        if any(tile.mesh.dry for tile in tiles):
            return None
        self._check(tiles)
        # Another model's tiles, such as a discriminator gets of a generator: the same parts on these ranks.
        args, kwargs = tree_map(self._adopted, (args, kwargs))
        shapes = ", ".join(f"{tuple(tile.shape)} {tile.dtype}" for tile in tiles)
        modes = f"{'train' if module.training else 'eval'}, grad {torch.is_grad_enabled()}"
        generators = SharedGenerators(tiles[0].device)
        note = f"image {shapes} over grid {mesh.grid}, {modes}"
        digests = agree(mesh.channel, f"{self._name}: forward", note, generators.digest())
        if mesh.channel.own_generator and len(set(digests)) > 1:
            generators.share(mesh, self._name)
        try:
            known = (shapes, modes)
            fusion = self._fusions.get(known)
            if fusion is None:
                fusion = choose(module, args, kwargs, mesh, self._fuse_halo)
            if fusion is not None:
                self._fusions[known] = fusion
        except BaseException:
            generators.restore()
            raise
        mesh.fusion, self._generators = fusion or {}, generators
        return args, kwargs

    def _adopted(self, value: Any) -> Any:
        if isinstance(value, Tile) and value.mesh is not self._mesh:
            return Tile.make(value.local, self._mesh, value.cuts)
        return value

    def _check(self, tiles: list[Tile]) -> None:
        if not tiles:
            raise ValueError(
                f"{self._name}: a sharded model takes tiles, and got none; pass "
                f"commsched.spatial.scatter(image), or take "
                "the sharding back with commsched.spatial.unshard(model)"
            )
        others = [tile.mesh for tile in tiles if not tile.mesh.like(self._mesh)]
        if others:
            raise ValueError(
                f"{self._name}: got a tile of a grid {others[0].grid} along {others[0].dims} on"
                f" {others[0].size} ranks, and this model is sharded over {self._mesh.grid} along"
                f" {self._mesh.dims}; scatter the image over this model's mesh"
            )

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._mesh.names and self._generators is not None:
            self._generators.restore()
            self._generators = None


def name_hooks(module: nn.Module, mesh: Mesh, path: str, kind: str) -> list[RemovableHandle]:
    """Keep the name of the running module in ``mesh``."""
    named = _Named(mesh, f"{path} ({kind})" if path else kind)
    return [
        module.register_forward_pre_hook(named.enter),
        module.register_forward_hook(named.leave, always_call=True),
    ]


class _Named(_Attached):
    def __init__(self, mesh: Mesh, name: str) -> None:
        self._mesh, self._name = mesh, name

    def __deepcopy__(self, memo: dict[int, Any]) -> _Named:
        return self

    def enter(self, module: nn.Module, args: Any) -> None:
        self._mesh.names.append(self._name)
        self._mesh.ordinals.append(0)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._mesh.names and self._mesh.names[-1] == self._name:  # else the pre-hook has raised
            self._mesh.names.pop()
            self._mesh.ordinals.pop()
