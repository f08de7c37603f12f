"""Batches from real files: a folder of images with one subfolder per class, or text."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from dnn_bench.models import data

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
BYTES = 256
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


@lru_cache
def listing(root: str) -> tuple[list[tuple[Path, int]], int]:
    """Every image with its class's number, and how many classes there are."""
    folders = sorted(path for path in Path(root).iterdir() if path.is_dir()) if Path(root).is_dir() else []
    found = [
        (path, label)
        for label, folder in enumerate(folders)
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in IMAGES
    ]
    if not found:
        raise ValueError(f"{root} has no images: it needs a folder per class with {', '.join(IMAGES)} files")
    return found, len(folders)


@lru_cache
def tokens(root: str) -> Tensor:
    """The bytes of a text file, or of every .txt file in a folder."""
    path = Path(root)
    parts = sorted(path.glob("**/*.txt")) if path.is_dir() else [path] if path.is_file() else []
    joined = b"\n".join(part.read_bytes() for part in parts)
    if not joined:
        raise ValueError(f"{root} has no text: it must be a file, or a folder with .txt files")
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def images(
    root: str, batch: int, generator: data.Generator, *, image_size: int, num_classes: int
) -> tuple[Tensor, Tensor]:
    files, classes = listing(root)
    if classes > num_classes:
        raise ValueError(f"{root} has {classes} classes, the model {num_classes}: build it with more")
    chosen = [files[i] for i in torch.randint(len(files), (batch,), generator=generator).tolist()]
    pixels = torch.stack([load(path, image_size) for path, _ in chosen])
    return pixels, torch.tensor([label for _, label in chosen])


def load(path: Path, size: int) -> Tensor:
    """The image's middle square at the wanted size, normalised as is usual for ImageNet."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError("images need Pillow: pip install pillow") from None
    with Image.open(path) as image:
        fitted = ImageOps.fit(image.convert("RGB"), (size, size))
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8).view(size, size, 3)
    return ((pixels.float() / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(2, 0, 1)


def windows(root: str, batch: int, generator: data.Generator, length: int, vocab_size: int) -> Tensor:
    """Pieces of the text that begin anywhere."""
    text = tokens(root)
    if vocab_size < BYTES or len(text) < length:
        raise ValueError(
            f"{root} gives {len(text)} tokens of {BYTES} kinds; the model needs at least {length} and knows "
            f"{vocab_size} kinds"
        )
    starts = torch.randint(len(text) - length + 1, (batch, 1), generator=generator)
    return text[starts + torch.arange(length)]


def causal_tokens(
    root: str, batch: int, generator: data.Generator, *, seq_len: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    return data.shifted(windows(root, batch, generator, seq_len + 1, vocab_size))


def masked_tokens(
    root: str, batch: int, generator: data.Generator, *, seq_len: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    return data.masked(windows(root, batch, generator, seq_len, vocab_size), generator)


SAMPLERS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "image": images,
    "causal_lm": causal_tokens,
    "masked_lm": masked_tokens,
}
