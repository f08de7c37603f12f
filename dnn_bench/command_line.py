"""Parsers, options, exit statuses and tables, which the commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsched.cli import HelpFormatter
from scheduler.ir.inputs import LARGEST, InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Main = Callable[[list[str]], int]
WIDTH = 150  # of a table that goes to a file


def parser(command: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        f"python -m dnn_bench {command}", description=description, formatter_class=HelpFormatter
    )


def add_job(command: argparse.ArgumentParser, model: str, baseline: str) -> None:
    """The options that describe what is trained, and how."""
    from dnn_bench import baselines, models

    known = f"{', '.join(models.names())}, or {models.FORMS}"
    add = command.add_argument
    add("--model", default=model, help=f"one of: {known} (default: {model})")
    if baseline:
        known = (
            "all, or names with commas between them" if baseline == "all" else ", ".join(baselines.names())
        )
        add("--baseline", default=baseline, metavar="NAME", help=known)
    add("--batch-size", type=int, default=0, help="samples per rank (default: the model's usual)")
    add("--seq-len", type=int, default=0, help="tokens per sentence (default: the model's)")
    add("--image-size", type=int, default=0, help="height and width of images (default: the model's)")


def add_data_dir(command: argparse.ArgumentParser) -> None:
    text = "folder of images or text (default: synthetic data)"
    command.add_argument("--data-dir", default="", metavar="PATH", help=text)


def shape_of(options: argparse.Namespace) -> dict[str, int]:
    """The sizes of inputs that were given."""
    return {name: getattr(options, name) for name in ("seq_len", "image_size") if getattr(options, name)}


def one_line_errors(*errors: type[Exception], prefix: str = "error") -> Callable[[Main], Main]:
    """Decorate a command's ``main``: print these errors in one line and return 2; return 130 on Ctrl-C."""

    def decorate(main: Main) -> Main:
        @wraps(main)
        def wrapped(arguments: list[str]) -> int:
            try:
                return main(arguments)
            except errors as error:
                print(f"{prefix}: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                return 130

        return wrapped

    return decorate


def chosen(kind: str, names: str, known: Sequence[str]) -> list[str]:
    """The names in a list with commas; `ValueError` for one that is not known."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise InputError(f"unknown {kind} {unknown[0]!r}; choose of: {', '.join(known)}")
    return wanted


def numbers(option: str, text: str, kind: Callable[[str], Any] = int, least: float = 1) -> list[Any]:
    """The numbers in a list with commas, each at least ``least``."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(least <= value <= LARGEST for value in values):
        rule = f"whole numbers of at least {least}" if kind is int else "numbers above 0"
        raise InputError(f"{option} takes {rule} with commas between them, not {text!r}")
    return values


def check_least(options: argparse.Namespace, least: int, *names: str) -> None:
    """Raise `ValueError` if one of these options is below ``least``."""
    for name in names:
        if (value := getattr(options, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def save(text: str, file: Path | None) -> None:
    """Write a text to the file of an option, and say so; nothing where the option was left out."""
    if file is not None:
        file.write_text(text)
        print(f"wrote {file}")


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


def table(title: str, columns: Iterable[str], words: Sequence[str]) -> Table:
    """An empty table; the columns in `words` hold words, the others numbers, which are right-aligned."""
    from rich.table import Table

    empty = Table(title=title, title_justify="left")
    for column in columns:
        empty.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    return empty


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
