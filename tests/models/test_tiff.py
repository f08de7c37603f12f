"""`spatial.run` reads TIFF files: memory-mapped, or only the strips and tiles that a rank needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commsched.spatial.run import Pixels

pytestmark = pytest.mark.models

KINDS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((50, 70), {}),
    ((50, 70, 3), {"photometric": "rgb"}),
    ((3, 50, 70), {"photometric": "rgb", "planarconfig": "separate"}),
    ((50, 70), {"tile": (16, 32)}),
    ((50, 70, 3), {"photometric": "rgb", "tile": (16, 32), "compression": "zlib"}),
    ((3, 50, 70), {"photometric": "rgb", "planarconfig": "separate", "tile": (32, 16)}),
    ((50, 70), {"compression": "zlib", "predictor": True, "rowsperstrip": 7}),
]


@pytest.mark.parametrize(("shape", "options"), KINDS)
def test_a_rectangle_of_a_tiff(shape: tuple[int, ...], options: dict[str, Any], tmp_path: Path) -> None:
    import tifffile

    image = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    tifffile.imwrite(tmp_path / "image.tif", image, **options)
    pixels = Pixels(tmp_path / "image.tif")
    assert pixels.shape[-2:] == (50, 70)
    whole = Pixels(image, pixels.layout)
    for rows, columns in ((slice(3, 41), slice(20, 70)), (slice(0, 50), slice(31, 33))):
        box = (slice(0, 1), slice(0, pixels.shape[1]), rows, columns)
        assert pixels.read(box).equal(whole.read(box))
