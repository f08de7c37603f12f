"""What users hand over, files and texts: read in one place, within bounds, with one error.

The error names the file or the option, the place in it and the rule. ``LARGEST`` bounds numbers because a
float holds every whole number up to it; the other bounds keep memory and time small, whatever a file says.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

MOST_BYTES = 32 << 20  # of a file
DEEPEST = 32  # lists and objects of JSON within each other
LARGEST = 1 << 53
MOST_DIGITS = 20  # of a whole number: Python needs quadratic time for more
MOST_SHOWN = 2000  # characters of an error

Layers = Annotated[int, 100_000]
"""A field that counts layers, and the most that it may say: every check goes through all of them."""

Microbatches = Annotated[int, 10_000]


class InputError(ValueError):
    """A file, an option or another text cannot be used; the message names the place and the rule."""

    def __init__(self, message: str) -> None:
        half = MOST_SHOWN // 2
        short = len(message) <= MOST_SHOWN
        super().__init__(message if short else f"{message[:half]} ... {message[-half:]}")


@contextmanager
def reading(where: object) -> Iterator[None]:
    """Turn what wrong values raise in the block into an ``InputError`` that begins with ``where``."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError, csv.Error) as error:
        if isinstance(error, InputError) and str(error).startswith(str(where)):
            raise
        kind = "" if type(error) in (ValueError, InputError) else f"{type(error).__name__}: "
        raise InputError(f"{where}: {kind}{error}") from error


def read_text(path: str | Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def read_json(path: str | Path) -> Any:
    return parse_json(_read(path), path)


def parse_json(content: bytes, path: str | Path) -> Any:
    """Return the data of the content of the file ``path``."""
    try:
        data = json.loads(content, parse_int=_whole_of_json)
        level, depth = [data], 0
        while level:
            depth += 1
            if depth > DEEPEST:
                raise RecursionError
            level = [item for each in level for item in _items(each)]
    except RecursionError:
        raise InputError(f"{path}: has more than {DEEPEST} lists and objects within each other") from None
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error})") from None
    return data


def _read(path: str | Path) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > MOST_BYTES:
        raise InputError(f"{path}: is larger than {MOST_BYTES >> 20} MiB, the most that is read")
    return content


def _whole_of_json(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"{text[:MOST_DIGITS]}... has {len(text)} digits, the most are {MOST_DIGITS}")
    return int(text)


def _items(data: Any) -> Any:
    return data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()


def whole(text: str, what: str, most: int = LARGEST) -> int:
    """Return the whole number that a text is; ``what`` names the text in errors."""
    digits = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    if not digits or int(text) > most:
        raise InputError(f"{what} must be a whole number, at most {most:,}, got {text!r}")
    return int(text)
