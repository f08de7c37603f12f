"""Data sets of labelled sentences and pairs of them: tables with tabs or commas, as QQP and MNLI come."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

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


class Row(NamedTuple):
    texts: tuple[str, ...]
    label: str


def read_table(path: Path, columns: Sequence[str]) -> list[Row]:
    """The rows of a .tsv or .csv file with a header. ``columns``: the texts' and the label's; by default the
    first of ``KNOWN`` that the header has. Rows without a label or a text are left out.
    """
    tabs = path.suffix.lower() == ".tsv"
    csv.field_size_limit(1 << 24)
    with path.open(newline="", encoding="utf-8") as file:
        # GLUE's tables have quotes within texts that no quote ends.
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(file)
        header = next(lines, [])
        places = _places(path, header, columns)
        rows = [
            Row(tuple(line[p] for p in places[:-1]), line[places[-1]])
            for line in lines
            if len(line) > max(places)
        ]
    rows = [row for row in rows if row.label not in ("", "-") and all(row.texts)]
    if not rows:
        raise ValueError(f"{path} has no row with a text and a label")
    return rows


def _places(path: Path, header: list[str], columns: Sequence[str]) -> list[int]:
    choices = [tuple(columns)] if columns else KNOWN
    for names in choices:
        if set(names) <= set(header):
            return [header.index(name) for name in names]
    expected = ", ".join(columns) if columns else " or ".join("/".join(names) for names in KNOWN)
    raise ValueError(f"{path}: needs columns {expected}, its header has {header}; name them with --columns")


class Vocabulary:
    """The ``size`` most frequent words of the training texts; the others are one unknown word."""

    def __init__(self, rows: Sequence[Row], size: int) -> None:
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
        self, rows: Sequence[Row], vocabulary: Vocabulary, labels: Sequence[str], length: int
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
