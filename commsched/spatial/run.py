"""Run a model on one image that stays on disk: each rank reads its part and writes its part of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from commsched.channels import Channel, Parcel, Pending, SilentChannel
from commsched.spatial.api import even_cuts, from_local, tile_bounds
from commsched.spatial.explain import naming
from commsched.spatial.intervals import Split
from commsched.spatial.layout import trimmed
from commsched.spatial.mesh import Mesh, NeedsOthersError, current_mesh, use_mesh
from commsched.spatial.shard import (
    agree,
    call_without_data,
    default_channel,
    is_sharded,
    meta_state,
    meta_tile,
    shard,
    unshard,
)
from commsched.spatial.tile import Cut, Tile, cut_axes, name_of, tiles_in
from scheduler.ir.inputs import InputError


def run(
    model: nn.Module,
    image: Any,
    grid: Sequence[int] = (2, 2),
    *,
    dims: Sequence[int] = (-2, -1),
    blocks: Sequence[int] | None = None,
    layout: str | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    out: Any = None,
    timeout: float = 600.0,
    channel: Channel | None = None,
) -> Any:
    """Compute ``model``, without gradients, on an image of which no rank reads more than its part.

    ``image`` is an array or memory map, any object with ``.shape`` and slices, or the path of a ``.npy`` or
    TIFF file; ``layout`` names its dimensions (see `Pixels`). ``prepare`` turns pixels into the model's
    input, each pixel by itself; the default converts to the type of the parameters.

    Without ``blocks``, each rank computes its tile at once, and halos travel between ranks. With
    ``blocks=(rows, columns)`` each rank computes its tile in so many blocks, one after the other, reads each
    with its halo, and sends nothing; operations that need the whole image are refused.

    Returns this rank's tile of the result. With ``out``, the path of an ``.npy`` file that all ranks reach
    or an array with the result's shape, each rank writes its tile there, and ``out`` is returned as an array
    (of float32 where the result is bfloat16).
    """
    if model.training or is_sharded(model):
        raise ValueError(
            f"{type(model).__name__}: run takes a plain model in eval mode, and got one "
            f"{'in training mode: call model.eval()' if model.training else 'that is sharded: call unshard'}"
            " first"
        )
    channel = channel or default_channel(type(model).__name__, tuple(grid), 1, timeout)
    mesh = Mesh(channel, grid, dims)
    load = _Loader(Pixels(image, layout), prepare, model, mesh)
    with torch.no_grad(), use_mesh(mesh):
        if blocks is not None:
            return _Blocks(model, load, mesh, blocks).compute(out)
        shard(model, grid, dims, timeout=timeout, channel=channel)
        try:
            part = load(tile_bounds(load.shape, mesh))
            result = model(from_local(part, load.whole(part), current_mesh()))
        finally:
            unshard(model)
    return result if out is None else _written(out, mesh, [_only_tile(result, model)])


class _Loader:
    """Loads boxes of the image as the model's input."""

    def __init__(
        self, pixels: Pixels, prepare: Callable[[Tensor], Tensor] | None, model: nn.Module, mesh: Mesh
    ) -> None:
        self.shape, self._pixels, self._prepare = pixels.shape, pixels, prepare
        self._like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        self._cut = {dim + len(self.shape) for dim in mesh.dims}

    def __call__(self, box: Sequence[slice]) -> Tensor:
        part = self._pixels.read(box).to(self._like.device)
        return part.to(self._like.dtype) if self._prepare is None else self._prepare(part)

    def whole(self, part: Tensor) -> list[int]:
        """The shape of the whole input; `prepare` may change the number of channels."""
        return [self.shape[dim] if dim in self._cut else size for dim, size in enumerate(part.shape)]

    def pixel(self) -> Tensor:
        """The first pixel, for the input's type and channels."""
        return self([slice(0, 1 if dim in self._cut else size) for dim, size in enumerate(self.shape)])


class _Isolated(SilentChannel):
    """The channel of a block that has its halo from the file."""

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], operation: str) -> Pending:
        raise NeedsOthersError("it needs the whole image", fetches=operation.endswith(": fetch"))


class _HaloWatch(TorchFunctionMode):
    """Names the running operation, and the first one after which blocks lack a halo, or pixels at all."""

    def __init__(self) -> None:
        super().__init__()
        self.operation = self.trimming = self.emptying = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tiles = list(tiles_in((args, kwargs)))
        if tiles:
            self.operation = tiles[0].mesh.where(name_of(func))
        result = func(*args, **kwargs)
        if any(map(_has_margin, tiles)):
            made = list(tiles_in(result))
            if not all(map(_has_margin, made)):
                self.trimming = self.trimming or self.operation
            splits = (cut.split for tile in made for _, cut in cut_axes(tile.cuts))
            if any(len(set(split.bounds)) <= split.parts for split in splits):
                self.emptying = self.emptying or self.operation
        return result

    def refusal(self, error: NeedsOthersError) -> str:
        """Which operation cannot be computed in blocks, why, and what to do."""
        why, way_out = error.why, "run without blocks="
        if error.fetches and self.emptying:
            why = f"{self.emptying} leaves blocks without pixels"
            way_out = f"take fewer blocks, or {way_out}"
        elif error.fetches and self.trimming:
            why = f"{self.trimming} keeps no halo for it"
        return f"{self.operation} cannot be computed in blocks: {why}; {way_out}"


def _has_margin(tile: Tile) -> bool:
    return any(cut.split.margin != (0, 0) for _, cut in cut_axes(tile.cuts))


class _Blocks:
    """The blocks of all ranks are the tiles of one grid, with a margin that makes messages needless."""

    def __init__(self, model: nn.Module, load: _Loader, mesh: Mesh, blocks: Sequence[int]) -> None:
        if len(blocks) != len(mesh.grid) or min(blocks) < 1:
            raise ValueError(f"blocks must be {len(mesh.grid)} positive numbers, got {tuple(blocks)}")
        self._model, self._load, self._mesh, self._blocks = model, load, mesh, tuple(blocks)
        self._grid = tuple(tiles * own for tiles, own in zip(mesh.grid, blocks))
        self._pixel = load.pixel()
        self._whole = load.whole(self._pixel)
        self._state = meta_state(model)
        self._margin, self._result = self._narrowest_margin()

    def compute(self, out: Any) -> Any:
        """All blocks of this rank, into ``out`` or one tile."""
        if out is not None:
            return _written(out, self._mesh, self._tiles())
        cuts = tuple(cut and Cut(cut.dim, Split(cut.split.bounds[:: self._blocks[axis]]))
                     for axis, cut in enumerate(self._result.cuts))  # fmt: skip
        tile, local = None, torch.empty(0)
        for block in self._tiles():
            if tile is None:
                size = list(block.shape)
                for axis, cut in cut_axes(cuts):
                    size[cut.dim] = len(range(*cut.split.owned(self._mesh.coord[axis])))
                local = block.held.new_empty(size)
                tile = Tile.make(local, self._mesh, cuts)
            place = (
                slice(lo - first[0], hi - first[0]) for (lo, hi), first in zip(block.bounds, tile.bounds)
            )
            local[tuple(place)] = block.held
        return tile

    def _tiles(self) -> Iterator[Tile]:
        own = [range(part * n, (part + 1) * n) for part, n in zip(self._mesh.coord, self._blocks)]
        for coord in product(*own):
            yield self._run(int(np.ravel_multi_index(coord, self._grid)), self._margin, data=True)

    def _narrowest_margin(self) -> tuple[int, Tile]:
        """By dry runs without data: doubled until no block needs another, then bisected."""
        few, many, widest = -1, 1, max(self._load.shape)
        while (result := self._attempt(many)) is None:
            few, many = many, 2 * many
            if few >= widest:
                raise ValueError(f"{type(self._model).__name__}: {self._refusal}")
        while many - few > 1:
            middle = (few + many) // 2
            attempt = self._attempt(middle)
            few, many, result = (middle, many, result) if attempt is None else (few, middle, attempt)
        return many, result

    def _attempt(self, margin: int) -> Tile | None:
        with _HaloWatch() as watch:
            try:
                return self._run(0, margin, data=False)
            except NeedsOthersError as error:
                self._refusal = watch.refusal(error)
                return None

    def _run(self, rank: int, margin: int, data: bool) -> Tile:
        mesh = Mesh(_Isolated(rank, prod(self._grid)), self._grid, self._mesh.dims)
        mesh.dry, mesh.alone = not data, True
        cuts = even_cuts(mesh, self._whole, margin)
        with naming(self._model, mesh):
            if data:
                box = [slice(0, size) for size in self._load.shape]
                for axis, cut in cut_axes(cuts):
                    box[cut.dim] = slice(*cut.split.held(mesh.coord[axis]))
                result = self._model(Tile.make(self._load(box), mesh, cuts))
            else:
                part = meta_tile(self._whole, self._pixel.dtype, mesh, cuts)
                result = call_without_data(self._model, self._state, (part,))
            return trimmed(_only_tile(result, self._model))


def _only_tile(result: Any, model: nn.Module) -> Tile:
    if not isinstance(result, Tile):
        raise ValueError(
            f"{type(model).__name__}: out= and blocks= are for models that return one tensor, and this one "
            f"returns {type(result).__name__}; wrap it in a module that picks one"
        )
    return result


def _written(out: Any, mesh: Mesh, tiles: Iterable[Tile]) -> Any:
    """Write the tiles of this rank to their places in ``out``; returns the array when all ranks have."""
    array: Any = None
    for tile in tiles:
        if array is None:
            array = _opened_output(out, mesh, tile)
        array[tuple(slice(*interval) for interval in tile.bounds)] = _for_numpy(tile.local).numpy()
    if hasattr(array, "flush"):
        array.flush()
    agree(mesh.channel, "run: writing the result", "done")
    return array


def _for_numpy(tensor: Tensor) -> Tensor:
    """Return it in main memory; bfloat16, which numpy does not know, becomes float32 with the same values."""
    return tensor.cpu().float() if tensor.dtype == torch.bfloat16 else tensor.cpu()


def _opened_output(out: Any, mesh: Mesh, tile: Tile) -> Any:
    if isinstance(out, (str, Path)):
        if mesh.rank == 0:
            dtype = _for_numpy(tile.local[:0]).numpy().dtype
            np.lib.format.open_memmap(out, mode="w+", dtype=dtype, shape=tuple(tile.shape)).flush()
        agree(mesh.channel, "run: opening the result", f"shape {tuple(tile.shape)}")
        return np.lib.format.open_memmap(out, mode="r+")
    if tuple(out.shape) != tuple(tile.shape):
        raise ValueError(
            f"rank {mesh.rank}: out must have the result's shape {tuple(tile.shape)}, got {tuple(out.shape)}"
        )
    return out


# -- read rectangles of an image that stays on disk: arrays, memory maps, `.npy` files and TIFF files --------

_USUAL = {1: "W", 2: "HW", 3: "CHW", 4: "NCHW", 5: "NCDHW"}
_TIFF = {"Y": "H", "X": "W", "S": "C", "Z": "D"}


class Pixels:
    """An image as the model takes it, ``(samples, channels, ...)``, of which `read` loads rectangles.

    ``layout`` names the dimensions of ``source`` by the letters N, C, D, H and W.
    """

    def __init__(self, source: Any, layout: str | None = None) -> None:
        self._source, found = _opened(source)
        shape = tuple(self._source.shape)
        self.layout = layout or found or _USUAL.get(len(shape), "")
        letters = sorted(self.layout)
        if len(letters) != len(shape) or len(set(letters)) != len(letters) or set(letters) - set("NCDHW"):
            raise ValueError(
                f"layout must name the {len(shape)} dimensions of an image of shape {shape} by different "
                f"letters of NCDHW, for example {_USUAL.get(len(shape), 'HW')!r}, got {self.layout!r}"
            )
        self._order = "NC" + "".join(letter for letter in "DHW" if letter in letters)
        sizes = dict(zip(self.layout, shape))
        self.shape = tuple(sizes.get(letter, 1) for letter in self._order)

    def read(self, box: Sequence[slice]) -> Tensor:
        """The pixels of ``box``, one slice for each dimension of ``shape``."""
        along = dict(zip(self._order, box))
        part = np.asarray(self._source[tuple(along[letter] for letter in self.layout)])
        present = [letter for letter in self._order if letter in self.layout]
        part = part.transpose([self.layout.index(letter) for letter in present])
        sizes = [part.shape[present.index(letter)] if letter in present else 1 for letter in self._order]
        # torch has no tensors of another byte order, which many TIFF and FITS files have.
        return torch.from_numpy(np.array(part, dtype=part.dtype.newbyteorder("=")).reshape(sizes))


def _opened(source: Any) -> tuple[Any, str | None]:
    """An object with shape and slices, and the names of its dimensions if the file has them."""
    if isinstance(source, (str, Path)):
        kind = Path(source).suffix.lower()
        if kind == ".npy":
            try:
                return np.lib.format.open_memmap(source, mode="r"), None
            except Exception as error:  # of many types: NumPy parses a header as Python
                raise InputError(f"{source}: is no array of NumPy ({error})") from error
        if kind in (".tif", ".tiff"):
            return _open_tiff(source)
    elif hasattr(source, "shape") and hasattr(source, "__getitem__"):
        return source, None
    raise ValueError(
        "an image is an array, an object with .shape and slices, or the path of a .npy, .tif or .tiff file, "
        f"got {source!r}"
    )


def _open_tiff(path: str | Path) -> tuple[Any, str]:
    try:
        import tifffile
    except ImportError as error:
        raise ValueError(f"{path}: reading a TIFF needs tifffile: pip install tifffile") from error
    page = tifffile.TiffFile(path).pages[0]
    layout = "".join(_TIFF[axis] for axis in page.axes)
    try:
        return tifffile.memmap(path, page=0, mode="r"), layout
    except ValueError:  # compressed, or in tiles
        return _Segments(page), layout


class _Segments:
    """The first page of a TIFF; slices decode only the strips or tiles that they meet."""

    def __init__(self, page: Any) -> None:
        self._page, self.shape = page, tuple(page.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        page = self._page
        # The page as (separate samples, depth, length, width, samples of a pixel).
        place_of = {"Z": 1, "Y": 2, "X": 3, "S": 0 if page.axes.startswith("S") else 4}
        spans = [(0, size) for size in page.shaped]
        for axis, wanted in zip(page.axes, index):
            spans[place_of[axis]] = wanted.indices(page.shaped[place_of[axis]])[:2]
        out = np.zeros([hi - lo for lo, hi in spans], page.dtype)
        for number, (offset, count) in enumerate(zip(page.dataoffsets, page.databytecounts)):
            _, start, shape = page.decode(None, number)
            first, size = (start[0], *start[1:]), (1, *shape)
            met = [(max(lo, a), min(hi, a + n)) for (lo, hi), a, n in zip(spans, first, size)]
            if count and all(lo < hi for lo, hi in met):
                page.parent.filehandle.seek(offset)
                data = page.decode(page.parent.filehandle.read(count), number, jpegtables=page.jpegtables)[0]
                inside = tuple(slice(lo - a, hi - a) for (lo, hi), a in zip(met, first))
                place = tuple(slice(lo - span[0], hi - span[0]) for (lo, hi), span in zip(met, spans))
                out[place] = data[None][inside]
        return out.reshape([len(range(*s.indices(n))) for s, n in zip(index, self.shape)])
