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
        for number, shape in enumerate(SHAPES):
            (folder / part / shape).mkdir(parents=True)
            for image in range(count):
                _drawn(number, dice, size)[0].save(folder / part / shape / f"{image}.png")


def masks(folder: Path, count: int = 60, seed: int = 0, size: int = SIZE) -> None:
    """``images/N.png`` and ``masks/N.png``; class 0 is the ground, the shapes are 1 to 3."""
    dice = random.Random(seed)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        image, mask = _drawn(number % len(SHAPES), dice, size)
        image.save(folder / "images" / f"{number}.png")
        mask.save(folder / "masks" / f"{number}.png")


def _drawn(number: int, dice: random.Random, size: int) -> tuple[Any, Any]:
    """A shape on a noisy ground, and its mask. Each shape has shades of its own colour."""
    ground = bytes(dice.randrange(60) for _ in range(3 * size * size))
    image, mask = Image.frombytes("RGB", (size, size), ground), Image.new("L", (size, size))
    radius = dice.randrange(size // 5, size // 3)
    x, y = (dice.randrange(radius, size - radius) for _ in range(2))
    colour = tuple(dice.randrange(180, 256) if band == number else 90 for band in range(3))
    for target, fill in ((image, colour), (mask, number + 1)):
        pen, third = ImageDraw.Draw(target), radius // 3
        if SHAPES[number] == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        elif SHAPES[number] == "square":
            pen.rectangle((x - radius, y - radius, x + radius, y + radius), fill=fill)
        else:
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
    """``train.tsv`` and ``dev.tsv`` with QQP's columns: pieces of Python's documentation, and most of
    the same words in another order (1) or another piece (0).
    """
    dice = random.Random(seed)
    text = pydoc_data.topics.topics
    known = re.findall(r"\w+", " ".join(text[name] for name in sorted(text)[:30]).lower())
    folder.mkdir(parents=True, exist_ok=True)

    def piece() -> list[str]:
        first = dice.randrange(len(known) - 10)
        return known[first : first + 10]

    for name, count in (("train", train), ("dev", test)):
        lines = ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"]
        for number in range(count):
            one = piece()
            other = dice.sample(one, 7) if number % 2 else piece()
            fields = [str(number), "0", "0", " ".join(one), " ".join(other), str(number % 2)]
            lines.append("\t".join(fields))
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
