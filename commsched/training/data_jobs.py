"""Ready jobs: classes of images, classes of sentences, and masks of images, from folders and tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate

from commsched.pipeline.job import Data, Job
from commsched.training import images, measures, text

Maker = Callable[..., nn.Module]
_TESTED = 10
"""Every so-manieth row is test data where a data set comes in one part."""


def image_classes(root: Path, model: Maker, size: int) -> Job:
    """``root/train/CLASS/*.png`` and ``root/val/CLASS/*.png``."""
    train = images.ClassFolders(root / "train", size)
    test = _other(root, lambda folder: images.ClassFolders(folder, size, train.names))
    made = built(model, num_classes=len(train.names))
    return _job(made, Data(train, test, measures.classes(class_loss)), class_loss)


def image_masks(root: Path, model: Maker, size: int, classes: int | None) -> Job:
    """``root/images/NAME.png`` and ``root/masks/NAME.png``; or such folders in ``root/train`` and ``val``."""
    parts = (root / "train").is_dir()
    train: Any = images.ImagesWithMasks(root / "train" if parts else root, size)
    kinds = classes or train.classes()
    test: Dataset[Any] | None
    if parts:
        test = _other(root, lambda folder: images.ImagesWithMasks(folder, size))
    else:
        train, test = _divided(train)
    made = built(model, num_classes=kinds)
    return _job(made, Data(train, test, measures.masks(mask_loss, kinds, images.IGNORED)), mask_loss)


def sentence_classes(path: Path, model: Maker, length: int, vocabulary: int, columns: Sequence[str]) -> Job:
    """A table, or a folder with train.tsv and dev.tsv (or .csv)."""
    if path.is_dir():
        rows = text.read_table(_table(path, ("train",)), columns)
        tested = text.read_table(_table(path, ("dev", "dev_matched", "val", "test")), columns)
    else:
        everything = text.read_table(path, columns)
        rows = [row for number, row in enumerate(everything) if number % _TESTED]
        tested = everything[::_TESTED]
    words, labels = text.Vocabulary(rows, vocabulary), sorted({row.label for row in rows})
    train, test = (text.Sentences(part, words, labels, length) for part in (rows, tested))
    made = built(model, vocab_size=len(words), num_classes=len(labels))
    return _job(made, Data(train, test, measures.classes(class_loss)), class_loss)


def built(model: Maker, **sizes: int) -> nn.Module:
    """The model; it gets those of the sizes that the function takes."""
    takes = inspect.signature(model).parameters
    anything = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    made = model(**{name: size for name, size in sizes.items() if anything or name in takes})
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model: the function must return an nn.Module, got {type(made).__name__}")
    return made


def class_loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(measures.logits_of(outputs), targets)


def mask_loss(outputs: Any, targets: Tensor) -> Tensor:
    """The mean over each image's known pixels, then over the images."""
    each = F.cross_entropy(
        measures.logits_of(outputs), targets, reduction="none", ignore_index=images.IGNORED
    )
    known = (targets != images.IGNORED).sum((1, 2)).clamp(min=1)
    return (each.sum((1, 2)) / known).mean()


def _job(model: nn.Module, data: Data, loss: Any) -> Job:
    return Job(model, loss, lambda rows: _batches(data.train, rows), data=data)


def _batches(dataset: Any, rows: int) -> Iterator[Any]:
    """Batches in the order of the data set, again and again, for profiles."""
    first = 0
    while True:
        yield tuple(default_collate([dataset[(first + row) % len(dataset)] for row in range(rows)]))
        first += rows


def _other(root: Path, make: Callable[[Path], Any]) -> Any:
    """The test data beside ``root/train``, if any."""
    found = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    return None if found is None else make(found)


def _divided(dataset: Any) -> tuple[Any, Any]:
    rest = [number for number in range(len(dataset)) if number % _TESTED]
    return Subset(dataset, rest), Subset(dataset, range(0, len(dataset), _TESTED))


def _table(folder: Path, names: Sequence[str]) -> Path:
    for file in (folder / f"{name}{suffix}" for name in names for suffix in (".tsv", ".csv")):
        if file.is_file():
            return file
    raise ValueError(f"{folder} has no {' or '.join(names)} with suffix .tsv or .csv")
