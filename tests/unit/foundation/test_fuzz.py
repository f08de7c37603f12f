"""Mutated files and options: each parser gives a valid object or an error that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.ir.inputs import InputError
from tests import fuzz


@pytest.mark.parametrize("name", fuzz.PARSERS)
def test_mutations_give_an_object_or_a_clear_error(name: str) -> None:
    wrong = list(fuzz.problems(name, 200, seed=1))
    assert not wrong, "\n".join(wrong[:3])


def hangs(text: str) -> None:
    while True:
        pass


def fills(text: str) -> None:
    tuple(range(1 << 40))


def refuses(path: Path) -> None:
    raise InputError("somewhere")


@pytest.mark.parametrize(
    ("name", "read", "message"),
    [
        ("", lambda text: [][1], "IndexError"),
        ("", hangs, "no answer within 0.2 s"),
        ("", fills, "MemoryError"),
        ("a.json", refuses, "does not name the file: somewhere"),
    ],
)
def test_wrong_answers_are_found(
    name: str, read: object, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fuzz, "HANG", 0.2)
    parser = fuzz.Parser(name, read, list)  # type: ignore[arg-type]
    with fuzz._guarded():
        assert message in fuzz.problem(parser, b"text", tmp_path)
