"""Batches and losses of every task; batches are synthetic, or from a folder of images or text."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.training.images import ClassFolders
from commsched.training.losses import class_loss, logits_of

Generator = torch.Generator | None
Batch = tuple[Tensor, Tensor]
IGNORED = -100  # a target that `cross_entropy` leaves out
MASKED_SHARE = 0.15
MASK_TOKEN = 0
BYTES = 256


def images(root: str, batch: int, generator: Generator, *, image_size: int, num_classes: int) -> Batch:
    """Noise in the place of ImageNet, or images of `root`."""
    if not root:
        inputs = torch.randn(batch, 3, image_size, image_size, generator=generator)
        return inputs, torch.randint(num_classes, (batch,), generator=generator)
    files = class_folders(root, image_size)
    if (classes := len(files.names)) > num_classes:
        raise ValueError(f"{root} has {classes} classes, the model {num_classes}: build it with more")
    chosen = [files[i] for i in torch.randint(len(files), (batch,), generator=generator).tolist()]
    return torch.stack([image for image, _ in chosen]), torch.tensor([label for _, label in chosen])


@lru_cache
def class_folders(root: str, size: int) -> ClassFolders:
    return ClassFolders(Path(root), size)


def pixels(root: str, batch: int, generator: Generator, *, image_size: int, num_classes: int) -> Batch:
    """Noise, and a random class for each pixel."""
    inputs = torch.randn(batch, 3, image_size, image_size, generator=generator)
    return inputs, torch.randint(num_classes, (batch, image_size, image_size), generator=generator)


def vectors(root: str, batch: int, generator: Generator, *, features: int, num_classes: int) -> Batch:
    inputs = torch.randn(batch, features, generator=generator)
    return inputs, torch.randint(num_classes, (batch,), generator=generator)


def tokens(
    root: str, batch: int, generator: Generator, length: int, vocab_size: int, least: int = 0
) -> Tensor:
    """Random tokens from `least` on, or pieces of the text in `root`, a byte a token, that begin anywhere."""
    if not root:
        return torch.randint(least, vocab_size, (batch, length), generator=generator)
    text = text_of(root)
    if vocab_size < BYTES or len(text) < length:
        raise ValueError(
            f"{root} gives {len(text)} tokens of {BYTES} kinds; the model needs at least {length} and knows "
            f"{vocab_size} kinds"
        )
    starts = torch.randint(len(text) - length + 1, (batch, 1), generator=generator)
    return text[starts + torch.arange(length)]


@lru_cache
def text_of(root: str) -> Tensor:
    """The bytes of a text file, or of every .txt file in a folder."""
    path = Path(root)
    parts = sorted(path.glob("**/*.txt")) if path.is_dir() else [path] if path.is_file() else []
    joined = b"\n".join(part.read_bytes() for part in parts)
    if not joined:
        raise ValueError(f"{root} has no text: it must be a file, or a folder with .txt files")
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def causal(root: str, batch: int, generator: Generator, *, seq_len: int, vocab_size: int) -> Batch:
    """The target of a position is the token that follows it."""
    stream = tokens(root, batch, generator, seq_len + 1, vocab_size)
    return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


def masked(root: str, batch: int, generator: Generator, *, seq_len: int, vocab_size: int) -> Batch:
    """Some tokens are masked; those are the targets."""
    whole = tokens(root, batch, generator, seq_len, vocab_size, least=1)
    hidden = torch.rand(whole.shape, generator=generator) < MASKED_SHARE
    hidden[:, 0] = True  # at least one token per sentence, so that the mean over masked tokens exists
    return whole.masked_fill(hidden, MASK_TOKEN), whole.masked_fill(~hidden, IGNORED)


def masked_pairs(root: str, batch: int, generator: Generator, **sizes: int) -> Batch:
    """Masked tokens (see `masked`); the last column of the targets says whether sentence B follows A."""
    inputs, targets = masked(root, batch, generator, **sizes)
    return inputs, torch.cat([targets, torch.randint(2, (batch, 1), generator=generator)], dim=1)


def labelled(
    root: str, batch: int, generator: Generator, *, seq_len: int, vocab_size: int, num_classes: int
) -> Batch:
    """Random tokens, and a random class for each sequence."""
    inputs = tokens("", batch, generator, seq_len, vocab_size, least=1)
    return inputs, torch.randint(num_classes, (batch,), generator=generator)


def clicks(root: str, batch: int, generator: Generator, *, fields: int, vocab_size: int) -> Batch:
    """Ids of which small ones are frequent, as in logs of clicks, and whether somebody clicked."""
    popular = torch.rand(batch, fields, generator=generator, dtype=torch.float64) ** 4
    return (popular * vocab_size).long(), torch.randint(2, (batch,), generator=generator)


def token_loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(outputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def pair_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Masked-token loss, averaged per sentence first, plus next-sentence loss.

    Averaging per sentence makes the loss of a batch the mean of the losses of its equal shards, which a
    comparison of data-parallel training with one process needs.
    """
    words, follows = outputs
    labels = targets[:, :-1]
    per_token = F.cross_entropy(words.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    counts = (labels != IGNORED).sum(dim=1)
    per_sentence = per_token.view_as(labels).sum(dim=1) / counts
    return per_sentence.mean() + F.cross_entropy(follows, targets[:, -1])


TASKS: dict[str, tuple[Callable[..., Batch], Callable[..., Tensor]]] = {
    "image": (images, class_loss),
    "pixels": (pixels, class_loss),
    "vector": (vectors, class_loss),
    "clicks": (clicks, class_loss),
    "causal_lm": (causal, token_loss),
    "masked_lm": (masked_pairs, pair_loss),
    "masked_tokens": (masked, token_loss),
    "sentence": (labelled, class_loss),
}
FROM_FILES = ("image", "causal_lm", "masked_lm", "masked_tokens")
