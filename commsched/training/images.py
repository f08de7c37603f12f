"""Data sets of image files: a folder for each class, or images with masks of the same names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
IGNORED = 255
"""The mask value of pixels that belong to no class."""


def pillow() -> Any:
    """Import ``PIL.Image``, or say how to install it."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("images are read with Pillow, which is not installed: pip install pillow") from None
    return Image


def picture(path: Path, size: int) -> Tensor:
    """Return the image's middle square, of ``size`` pixels a side, normalised as is usual for ImageNet."""
    from PIL import ImageOps

    with pillow().open(path) as image:
        fitted = ImageOps.fit(image.convert("RGB"), (size, size))
    pixels = (_bytes(fitted).view(size, size, 3).float() / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    return pixels.permute(2, 0, 1).contiguous()


def mask(path: Path, size: int) -> Tensor:
    """Return the class of each pixel of the mask's middle square."""
    from PIL import ImageOps

    fitted = ImageOps.fit(numbers_in(path), (size, size), pillow().Resampling.NEAREST)
    return _bytes(fitted).view(size, size).long()


def numbers_in(path: Path) -> Any:
    """Return the mask's class numbers as a grey image: its grey values, or indices into its palette."""
    with pillow().open(path) as image:
        if image.mode not in ("L", "P", "1"):
            raise ValueError(
                f"{path}: a mask needs one number for each pixel (modes 1, L and P), and this image has mode"
                f" {image.mode}; write the class numbers as grey values"
            )
        if image.mode == "P":
            return pillow().frombytes("L", image.size, image.tobytes())
        grey = image.convert("L")
        return grey.point(lambda value: value // 255) if image.mode == "1" else grey


def _bytes(image: Any) -> Tensor:
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)


def files_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


class ClassFolders(Dataset[tuple[Tensor, int]]):
    """``root/CLASS/*.png``; ``names`` of the classes, by default the folders' in their order."""

    def __init__(self, root: Path, size: int, names: Sequence[str] | None = None) -> None:
        pillow()
        folders = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        self.names, self.size = list(names or folders), size
        if unknown := sorted(set(folders) - set(self.names)):
            raise ValueError(f"{root} has folders of classes without training images: {', '.join(unknown)}")
        labelled = [(root / name, label) for label, name in enumerate(self.names) if (root / name).is_dir()]
        self.files = [(path, label) for folder, label in labelled for path in files_in(folder)]
        if not self.files:
            raise ValueError(f"{root} has no images; it needs a folder for each class, with images in it")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        return picture(path, self.size), label


class ImagesWithMasks(Dataset[tuple[Tensor, Tensor]]):
    """``root/images/NAME.png`` with ``root/masks/NAME.png``; suffixes may differ."""

    def __init__(self, root: Path, size: int) -> None:
        pillow()
        masks = {path.stem: path for path in files_in(root / "masks")}
        images = files_in(root / "images")
        if missing := [path.name for path in images if path.stem not in masks]:
            raise ValueError(f"{root}/masks has no mask for {', '.join(missing[:3])} of {root}/images")
        self.files, self.size = [(path, masks[path.stem]) for path in images], size
        if not self.files:
            raise ValueError(f"{root}/images has no images")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, masked = self.files[index]
        return picture(image, self.size), mask(masked, self.size)

    def classes(self) -> int:
        """Return one more than the largest number in any mask."""
        highest = 0
        for _, path in self.files:
            values = _bytes(numbers_in(path))
            known = values[values != IGNORED]
            highest = max(highest, int(known.max()) if len(known) else 0)
        return highest + 1
