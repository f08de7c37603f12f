"""`shard`: attach a mesh to a model, track the running module, and check that ranks run the same image."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from comm_core import EngineError, MessageChannel, message_channel, tcp_connections
from commsched.channels import Channel, ProcessChannel, SilentChannel
from commsched.collectives.carrier import carrier_or_none
from commsched.collectives.private_groups import messages_between
from commsched.env import settings
from commsched.errors import CommError
from commsched.pipeline.random_state import numpy_state, python_state, set_numpy_state, set_python_state
from commsched.process.network import chosen_interface, own_addresses
from commsched.spatial.layout import Folded, trimmed
from commsched.spatial.mesh import Mesh, SharedGenerators, exchanged, set_mesh
from commsched.spatial.tile import Cuts, Tile, cut_axes, refuse_compiling, tiles_in, tree_map

Model = TypeVar("Model", bound=nn.Module)
_NOTE = 512  # bytes of a note that ranks compare


def shard(
    model: Model,
    grid: Sequence[int] = (2, 2),
    dims: Sequence[int] = (-2, -1),
    *,
    replicas: int = 1,
    overlap: str = "auto",
    unsupported: str = "error",
    timeout: float = 60.0,
    channel: Channel | None = None,
) -> Model:
    """Prepare ``model`` for tiles: call it with what `scatter` or `from_local` returns.

    The model stays what it is: the same object, modules, parameter names and ``state_dict``. Ranks form
    ``replicas`` groups of ``prod(grid)`` consecutive ranks, each of which shares one image cut along
    ``dims``. ``overlap`` is ``"on"`` to compute the interior of every convolution and pooling while its halo
    travels, ``"off"``, or ``"auto"`` for those large enough to gain. ``unsupported`` says what happens to an
    operation that mixes pixels in a way not known here: ``"error"``, or ``"gather"`` to run it on the whole
    image on every rank. The mesh becomes the default of `scatter` and `gather`.
    """
    name = type(model).__name__
    channel = channel or default_channel(name, tuple(grid), replicas, timeout)
    parameters = sum(p.numel() for p in model.parameters())
    options = f"unsupported {unsupported}, {parameters} parameters"
    agree(channel, f"{name}: shard", f"grid {tuple(grid)}, dims {tuple(dims)}, {options}")
    mesh = Mesh(channel, grid, dims, unsupported, overlap)
    unshard(model)
    forward = _Forward(mesh, name)
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
    """A channel over this rank's block of consecutive ranks of the job."""
    job, tiles = _job(), prod(grid)
    world = 1 if job is None else job.size
    if world != tiles * replicas or replicas < 1:
        raise ValueError(
            f"{name}: a grid of {'x'.join(map(str, grid))} with {replicas} replicas needs {tiles * replicas} "
            f"ranks, and there are {world}; choose grid and replicas whose product is {world}"
            + ("" if job is not None else ", or call commsched.init() (or init_process_group) first")
        )
    if job is None:
        return SilentChannel()
    first = job.rank // tiles * tiles
    return channel(range(first, first + tiles), timeout)


def channel(ranks: Sequence[int] | None = None, timeout: float = 60.0) -> Channel:
    """Return a channel between these ranks of the job, in the order of the grid (default: all of them).

    Each of these ranks must make the same channels in the same order. ``timeout``: seconds that a wait lasts
    in which no byte comes. Channels between the same ranks share their connections.
    """
    job = _job()
    if job is None:
        raise ValueError("a channel needs a job: call commsched.init() (or init_process_group) first")
    order = tuple(range(job.size) if ranks is None else ranks)
    members = tuple(sorted(order))
    if len(set(order)) < len(order) or not {job.rank} <= set(order) <= set(range(job.size)):
        raise ValueError(
            f"rank {job.rank} of {job.size} needs different ranks with its own, got {list(order)}"
        )
    if len(members) == 1:
        return SilentChannel(ranks=order)
    known = _connections.setdefault(job.key, {})
    if (members, timeout) not in known:
        name = f"tiles/{'-'.join(map(str, members))}/{timeout:g}"
        known[members, timeout] = job.connect(name, members, timeout), itertools.count()
    messages, numbers = known[members, timeout]
    places = [members.index(rank) for rank in order]
    return ProcessChannel(messages, members.index(job.rank), places, f"mesh {next(numbers)}", order)


class _Job(NamedTuple):
    """The ranks of this job, and how to connect some of them. `key` lives as long as the job."""

    rank: int
    size: int
    key: Any
    connect: Callable[[str, Sequence[int], float], MessageChannel]


_connections: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def _job() -> _Job | None:
    """The ranks of torch.distributed's default group, else of ``commsched.init()``, else None."""
    known = carrier_or_none()
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if known is None or (known.launch.rank, known.launch.size) != (rank, size):
            return _Job(rank, size, dist.group.WORLD, _connect_through_torch)
    return None if known is None else _Job(known.launch.rank, known.launch.size, known, messages_between)


def _connect_through_torch(name: str, ranks: Sequence[int], timeout: float) -> MessageChannel:
    """The ranks of torch.distributed's default group meet in its store."""
    store: Any = dist.distributed_c10d._get_default_store()
    place, store = ranks.index(dist.get_rank()), PrefixStore(f"commsched/{name}", store)
    # Without an address a rank listens at the one from which it reaches the store's host, if that is known.
    known = isinstance(_innermost(store), TCPStore) and not chosen_interface()
    address = None if known else own_addresses(one_host=False)[0]
    try:
        connections = tcp_connections(
            store, place, len(ranks), address, timeout, host_timeout_seconds=settings().host_timeout
        )
    except EngineError as error:
        raise CommError(f"rank {place} of {len(ranks)} could not connect to the others: {error}") from error
    return message_channel(place, connections, timeout)


def _innermost(store: Any) -> Any:
    return _innermost(store.underlying_store) if hasattr(store, "underlying_store") else store


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


_DIGEST = 8  # bytes


def digest_of(module: nn.Module) -> bytes:
    """Bytes that differ where parameters or buffers do."""
    found = blake2b(digest_size=_DIGEST)
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_lazy(tensor) and tensor.layout == torch.strided and not tensor.is_meta:
            flat = tensor.detach().cpu().contiguous().view(-1)
            found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.digest()


class _Attached:
    """Hooks of a sharded model. Copies of the model are sharded alike; a pickle of it is a plain model."""

    def __reduce__(self) -> Any:
        return _Detached, ()


class _Detached:
    """Stands for the hooks of a sharded model that was pickled."""

    def begin(self, *arguments: Any) -> None:
        pass

    enter = leave = end = begin


class _Forward(_Attached):
    """Hooks before and after each forward of a sharded model."""

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._mesh, self._name = mesh, name
        self._generators: SharedGenerators | None = None
        self._compared = False  # the ranks' weights, in the first forward

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(self._mesh, self._name)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Check that all ranks run the same image and share the random state."""
        mesh = self._mesh
        refuse_compiling(mesh)
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
        mine = generators.digest() + (b"" if self._compared else digest_of(module))
        heard = agree(mesh.channel, f"{self._name}: forward", note, mine)
        if others := [rank for rank, theirs in enumerate(heard) if theirs[_DIGEST:] != heard[0][_DIGEST:]]:
            raise CommError(
                f"{self._name}: ranks {others} of the grid have other weights than rank 0, so each tile would"
                " be computed by another model; call torch.manual_seed() alike on all ranks before the model"
                " is made, or commsched.broadcast_parameters(model.state_dict(), root_rank=0)"
            )
        self._compared = True
        if mesh.channel.own_generator and len({theirs[:_DIGEST] for theirs in heard}) > 1:
            generators.share(mesh, self._name)
        self._generators = generators
        return args, kwargs

    def _adopted(self, value: Any) -> Any:
        if isinstance(value, Tile) and value.mesh is not self._mesh:
            return Tile.make(value.held, self._mesh, value.cuts)
        return value

    def _check(self, tiles: list[Tile]) -> None:
        if not tiles:
            raise ValueError(
                f"{self._name}: a sharded model takes tiles, and got none; pass"
                " commsched.spatial.scatter(image), or take the sharding back with"
                " commsched.spatial.unshard(model)"
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

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._mesh.names and self._mesh.names[-1] == self._name:  # else the pre-hook has raised
            self._mesh.names.pop()


# -- forwards without data, for what a model sends and holds, and the halos of blocks -----------------------


def call_without_data(model: nn.Module, state: dict[str, Tensor], args: Any) -> Any:
    """Return what the forward returns with such a state. The model is as before: forwards count their calls,
    keep grids that they have made for a device, collect losses in lists, and draw random numbers.
    """
    kept = [(module, _contents(module)) for module in model.modules()]
    numbers = python_state(), numpy_state()
    try:
        return functional_call(model, state, args)
    finally:
        set_python_state(numbers[0])
        set_numpy_state(numbers[1])
        for module, contents in kept:
            for name in vars(module).keys() - contents.keys() - _OF_TORCH:
                del vars(module)[name]
            for name, (value, copied) in contents.items():
                vars(module)[name] = value
                if isinstance(value, list):
                    value[:] = copied
                elif copied is not None:
                    value.clear()
                    value.update(copied)


def _contents(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of a module that are not torch's, and copies of those that are collections."""
    attributes = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
    return {
        name: (value, copy.copy(value) if isinstance(value, list | dict | set) else None)
        for name, value in attributes.items()
    }


_OF_TORCH = frozenset(vars(nn.Module()))


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
