"""Small data sets of files in the layouts of large ones: drawn shapes, digits, sentences, masks.

``python -m tests.support.small_data KIND FOLDER`` writes one, to try commands by hand.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import re
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIZE = 32
SHAPES = ("circle", "cross", "square")


def shapes(folder: Path, train: int = 40, test: int = 12, seed: int = 0, size: int = SIZE) -> None:
    """``train/CLASS/N.png`` and ``val/CLASS/N.png``: so many of each shape, anywhere on a noisy ground."""
    dice = random.Random(seed)
    for part, count in (("train", train), ("val", test)):
        for shape in SHAPES:
            (folder / part / shape).mkdir(parents=True)
            for number in range(count):
                _drawn(shape, dice, size)[0].save(folder / part / shape / f"{number}.png")


def masks(folder: Path, count: int = 60, seed: int = 0, size: int = SIZE) -> None:
    """``images/N.png`` and ``masks/N.png``; class 0 is the ground, the shapes are 1 to 3."""
    dice = random.Random(seed)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        image, mask = _drawn(SHAPES[number % len(SHAPES)], dice, size)
        image.save(folder / "images" / f"{number}.png")
        mask.save(folder / "masks" / f"{number}.png")


def _drawn(shape: str, dice: random.Random, size: int) -> tuple[Any, Any]:
    ground = bytes(dice.randrange(60) for _ in range(3 * size * size))
    image, mask = Image.frombytes("RGB", (size, size), ground), Image.new("L", (size, size))
    radius = dice.randrange(size // 5, size // 3)
    x, y = (dice.randrange(radius, size - radius) for _ in range(2))
    box, colour = (
        (x - radius, y - radius, x + radius, y + radius),
        tuple(dice.randrange(150, 256) for _ in range(3)),
    )
    for target, fill in ((image, colour), (mask, SHAPES.index(shape) + 1)):
        pen = ImageDraw.Draw(target)
        if shape == "circle":
            pen.ellipse(box, fill=fill)
        elif shape == "square":
            pen.rectangle(box, fill=fill)
        else:
            third = radius // 3
            pen.rectangle((x - radius, y - third, x + radius, y + third), fill=fill)
            pen.rectangle((x - third, y - radius, x + third, y + radius), fill=fill)
    return image, mask


def digits(folder: Path, size: int = 8) -> None:
    """scikit-learn's digits as ``train/DIGIT/N.png`` and ``val/DIGIT/N.png``."""
    from sklearn.datasets import load_digits

    found = load_digits()
    for number, (pixels, digit) in enumerate(zip(found.images, found.target, strict=True)):
        part = "val" if number % 5 == 0 else "train"
        (folder / part / str(digit)).mkdir(parents=True, exist_ok=True)
        grey = bytes(int(value * 255 // 16) for value in pixels.flatten())
        image = Image.frombytes("L", (8, 8), grey).resize((size, size))
        image.save(folder / part / str(digit) / f"{number}.png")


def sentences(folder: Path, train: int = 600, test: int = 150, seed: int = 0) -> None:
    """``train.tsv`` and ``dev.tsv`` with QQP's columns: pairs of pieces of Python's documentation, from the
    same topic (1) or from different ones (0).
    """
    dice = random.Random(seed)
    topics = [re.findall(r"\w+", text.lower()) for _, text in sorted(pydoc_data.topics.topics.items())]
    topics = sorted(topics, key=len)[-8:]
    folder.mkdir(parents=True, exist_ok=True)

    def piece(topic: int) -> str:
        first = dice.randrange(len(topics[topic]) - 12)
        return " ".join(topics[topic][first : first + 12])

    for name, count in (("train", train), ("dev", test)):
        lines = ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"]
        for number in range(count):
            same = number % 2
            one, other = dice.sample(range(len(topics)), 2)
            pair = piece(one), piece(one if same else other)
            lines.append("\t".join([str(number), "0", "0", *pair, str(same)]))
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")


def topics(folder: Path, train: int = 600, test: int = 150, seed: int = 0) -> None:
    """``train.tsv`` and ``dev.tsv`` with columns text and label: pieces of documentation and their topics."""
    dice = random.Random(seed)
    longest = sorted(pydoc_data.topics.topics.items(), key=lambda item: len(item[1]))[-4:]
    words = {name: re.findall(r"\w+", text.lower()) for name, text in longest}
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("dev", test)):
        lines = ["text\tlabel"]
        for number in range(count):
            name = sorted(words)[number % len(words)]
            first = dice.randrange(len(words[name]) - 20)
            lines.append(" ".join(words[name][first : first + 20]) + f"\t{name}")
        (folder / f"{part}.tsv").write_text("\n".join(lines) + "\n")


KINDS = {"shapes": shapes, "masks": masks, "digits": digits, "sentences": sentences, "topics": topics}

if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]))
