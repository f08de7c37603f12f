"""Read rectangles of an image that stays on disk: arrays, memory maps, `.npy` files and TIFF files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
            return np.load(source, mmap_mode="r"), None
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
