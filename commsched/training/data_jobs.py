"""Ready jobs: classes of images, classes of sentences, and masks of images, from folders and tables."""

from __future__ import annotations

import csv
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate

from commsched.pipeline.job import Data, Job, Measure
from commsched.pipeline.stage import Loss
from commsched.training import images
from commsched.training.losses import class_loss, logits_of, mask_loss
from scheduler.ir.inputs import InputError, reading

Maker = Callable[..., nn.Module]
_TESTED = 10
"""One row in so many is test data where a data set comes in one part."""


def image_classes(root: Path, model: Maker, size: int) -> Job:
    """``root/train/CLASS/*.png`` and ``root/val/CLASS/*.png``."""
    train = images.ClassFolders(root / "train", size)
    test = _other(root, lambda folder: images.ClassFolders(folder, size, train.names))
    made = built(model, num_classes=len(train.names))
    return _job(made, Data(train, test, classes(class_loss)), class_loss)


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
    return _job(made, Data(train, test, masks(mask_loss, kinds, images.IGNORED)), mask_loss)


def sentence_classes(path: Path, model: Maker, length: int, vocabulary: int, columns: Sequence[str]) -> Job:
    """A table, or a folder with train.tsv and dev.tsv (or .csv)."""
    if path.is_dir():
        rows = read_table(_table(path, ("train",)), columns)
        tested = read_table(_table(path, ("dev", "dev_matched", "val", "test")), columns)
    else:
        everything = read_table(path, columns)
        rows = [row for number, row in enumerate(everything) if number % _TESTED]
        tested = everything[::_TESTED]
    words, labels = Vocabulary(rows, vocabulary), sorted({row.label for row in rows})
    train, test = (Sentences(part, words, labels, length) for part in (rows, tested))
    made = built(model, vocab_size=len(words), num_classes=len(labels))
    return _job(made, Data(train, test, classes(class_loss)), class_loss)


def built(model: Maker, **sizes: int) -> nn.Module:
    """The model; it gets those of the sizes that the function takes."""
    takes = inspect.signature(model).parameters
    anything = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    made = model(**{name: size for name, size in sizes.items() if anything or name in takes})
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model: the function must return an nn.Module, got {type(made).__name__}")
    return made


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
    folder = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    return None if folder is None else make(folder)


def _divided(dataset: Any) -> tuple[Any, Any]:
    rest = [number for number in range(len(dataset)) if number % _TESTED]
    return Subset(dataset, rest), Subset(dataset, range(0, len(dataset), _TESTED))


def _table(folder: Path, names: Sequence[str]) -> Path:
    for file in (folder / f"{name}{suffix}" for name in names for suffix in (".tsv", ".csv")):
        if file.is_file():
            return file
    raise ValueError(f"{folder} has no {' or '.join(names)} with suffix .tsv or .csv")


# -- counts of an evaluation, which add up over batches and ranks, and the scores that follow from them ------


def classes(loss: Loss) -> Measure:
    """Top-1 and top-5 accuracy of logits; top-5 only if there are more than five classes."""

    def count(found: Any, targets: Tensor) -> Tensor:
        outputs = logits_of(found)
        best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
        right = best == targets[:, None]
        top5 = right.any(1).sum() if outputs.shape[1] > 5 else torch.tensor(-1.0)
        rows = len(targets)
        return torch.tensor(
            [rows, rows * float(loss(outputs, targets)), float(right[:, 0].sum()), float(top5)]
        )

    def scores(sums: Tensor) -> dict[str, float]:
        rows, total, top1, top5 = sums.tolist()
        found = {"loss": total / rows, "top1": top1 / rows}
        return found if top5 < 0 else {**found, "top5": top5 / rows}

    return Measure(count, scores)


def masks(loss: Loss, kinds: int, ignored: int) -> Measure:
    """Mean intersection over union of the classes that occur, and the share of right pixels."""

    def count(found: Any, targets: Tensor) -> Tensor:
        outputs = logits_of(found)
        known = targets != ignored
        pairs = targets[known] * kinds + outputs.argmax(1)[known]
        confusion = torch.bincount(pairs, minlength=kinds * kinds).double()
        rows = len(targets)
        return torch.cat([torch.tensor([rows, rows * float(loss(outputs, targets))]).double(), confusion])

    def scores(sums: Tensor) -> dict[str, float]:
        confusion = sums[2:].view(kinds, kinds)
        right = confusion.diagonal()
        union = confusion.sum(0) + confusion.sum(1) - right
        occurs = union > 0
        iou = float((right[occurs] / union[occurs]).mean())
        return {"loss": float(sums[1] / sums[0]), "iou": iou, "pixels": float(right.sum() / confusion.sum())}

    return Measure(count, scores)


# -- labelled sentences and pairs of them: tables with tabs or commas, as QQP and MNLI come ------------------

PAD, UNKNOWN, START, END = range(4)
WORD = re.compile(r"\w+|[^\w\s]")
KNOWN = (
    ("question1", "question2", "is_duplicate"),  # QQP
    ("sentence1", "sentence2", "gold_label"),  # MNLI, SNLI
    ("sentence1", "sentence2", "label"),
    ("question", "sentence", "label"),  # QNLI
    ("sentence", "label"),  # SST-2, CoLA
    ("text", "label"),
)


class LabelledText(NamedTuple):
    texts: tuple[str, ...]
    label: str


def read_table(path: Path, columns: Sequence[str]) -> list[LabelledText]:
    """The rows of a .tsv or .csv file with a header. ``columns``: the texts' and the label's; by default the
    first of ``KNOWN`` that the header has. Rows without a label or a text are left out.
    """
    tabs = path.suffix.lower() == ".tsv"
    csv.field_size_limit(1 << 24)
    with reading(path), path.open(newline="", encoding="utf-8") as file:
        # GLUE's tables have quotes within texts that no quote ends.
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(file)
        header = next(lines, [])
        *texts, label = places = _places(path, header, columns)
        whole = [line for line in lines if len(line) > max(places)]
        rows = [LabelledText(tuple(line[text] for text in texts), line[label]) for line in whole]
    rows = [row for row in rows if row.label not in ("", "-") and all(row.texts)]
    if not rows:
        raise InputError(f"{path} has no row with a text and a label")
    return rows


def _places(path: Path, header: list[str], columns: Sequence[str]) -> list[int]:
    choices = [tuple(columns)] if columns else KNOWN
    for names in choices:
        if set(names) <= set(header):
            return [header.index(name) for name in names]
    expected = ", ".join(columns) if columns else " or ".join("/".join(names) for names in KNOWN)
    raise InputError(f"{path}: needs columns {expected}, its header has {header}; name them with --columns")


class Vocabulary:
    """The ``size`` most frequent words of the training texts; the others are one unknown word."""

    def __init__(self, rows: Sequence[LabelledText], size: int) -> None:
        counts = Counter(word for row in rows for text in row.texts for word in words_of(text))
        # Ties by the alphabet: every rank must number alike.
        common = sorted(counts, key=lambda word: (-counts[word], word))[: size - END - 1]
        self.numbers = {word: number for number, word in enumerate(common, END + 1)}

    def __len__(self) -> int:
        return len(self.numbers) + END + 1

    def encode(self, text: str, length: int) -> list[int]:
        """``length`` numbers: a start, the words, an end, and padding."""
        words = [self.numbers.get(word, UNKNOWN) for word in words_of(text)[: length - 2]]
        return [START, *words, END, *[PAD] * (length - 2 - len(words))]


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


class Sentences(Dataset[tuple[Tensor, int]]):
    """Sequences of ``length`` numbers: one text, or each half one of two."""

    def __init__(
        self, rows: Sequence[LabelledText], vocabulary: Vocabulary, labels: Sequence[str], length: int
    ) -> None:
        numbers = {label: number for number, label in enumerate(labels)}
        if unknown := sorted({row.label for row in rows} - set(numbers)):
            raise ValueError(
                f"labels {', '.join(unknown)} of the test data do not occur in the training data"
            )
        each = length // len(rows[0].texts)
        if each < 3:
            raise ValueError(
                f"--length {length} leaves {each} places for each of {len(rows[0].texts)} texts; at least 3"
                " are needed"
            )
        encoded = [[n for text in row.texts for n in vocabulary.encode(text, each)] for row in rows]
        self.sequences = torch.tensor(encoded)
        self.labels = [numbers[row.label] for row in rows]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.sequences[index], self.labels[index]
