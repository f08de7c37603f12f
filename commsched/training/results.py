"""Figures of a training run as JSON, and its curves as an SVG picture that needs no other library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Epoch = dict[str, Any]
"""Of an epoch: ``epoch`` (from 1 on), ``loss``, ``steps``, ``seconds``, ``rows_per_second``, ``test``."""

_WIDE, _HIGH, _EDGE, _TOP = 380, 260, 50, 40
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756")


def described(epoch: Epoch, epochs: int) -> str:
    """One line for the terminal."""
    scores = "".join(f", test {name} {value:.4f}" for name, value in epoch["test"].items())
    return (
        f"epoch {epoch['epoch']}/{epochs}: loss {epoch['loss']:.4f}{scores}, {epoch['seconds']:.1f} s,"
        f" {epoch['rows_per_second']:.1f} rows per second"
    )


def write(folder: Path, facts: Mapping[str, Any], epochs: Sequence[Epoch]) -> None:
    """Writes ``results.json`` and ``curves.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({**facts, "epochs": list(epochs)}, indent=1) + "\n")
    (folder / "curves.svg").write_text(curves(epochs))


def curves(epochs: Sequence[Epoch]) -> str:
    """A panel for the losses, and one for the other scores of the test data."""
    numbers = [epoch["epoch"] for epoch in epochs]
    losses = {"training": [epoch["loss"] for epoch in epochs]}
    scores: dict[str, list[float]] = {}
    for epoch in epochs:
        for name, value in epoch["test"].items():
            (losses if name == "loss" else scores).setdefault("test" if name == "loss" else name, []).append(
                value
            )
    panels = [("loss", losses), *([("test data", scores)] if scores else [])]
    drawn = [_panel(title, lines, numbers, _WIDE * place) for place, (title, lines) in enumerate(panels)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE * len(panels)}" height="{_HIGH}"'
            ' font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def _panel(title: str, lines: Mapping[str, Sequence[float]], numbers: Sequence[int], left: int) -> str:
    values = [value for line in lines.values() for value in line]
    low, high = min(0.0, *values), max(values)
    high = high if high > low else low + 1.0
    room, tall = _WIDE - 2 * _EDGE, _HIGH - 2 * _TOP
    span = max(1, numbers[-1] - numbers[0])

    def at(number: int, value: float) -> tuple[float, float]:
        x = left + _EDGE + (number - numbers[0]) / span * room
        return x, _TOP + (high - value) / (high - low) * tall

    parts = [f'<text x="{left + _EDGE}" y="16" font-size="13">{escape(title)}</text>']
    for value in (low, (low + high) / 2, high):
        x, y = at(numbers[0], value)
        parts.append(f'<line x1="{x}" x2="{x + room}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for number in sorted({numbers[0], numbers[-1]}):
        x, y = at(number, low)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">epoch {number}</text>')
    for place, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        spots = [at(number, value) for number, value in zip(numbers, line, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in spots]
        label = f"{name} {line[-1]:.4g}"
        parts.append(f'<text x="{left + _EDGE + 110 * place}" y="32" fill="{colour}">{escape(label)}</text>')
    return "\n".join(parts)
