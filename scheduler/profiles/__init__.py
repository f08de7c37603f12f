"""The profiles that come with commsched, by name; ``flops`` computes their times from a FLOP model."""

from __future__ import annotations

from pathlib import Path

from scheduler.ir.profile import Profile
from scheduler.profiles.flops import MODELS


def names() -> list[str]:
    """Return the names of the shipped profiles."""
    return sorted(MODELS)


def shipped(name: str) -> Profile:
    """Return the shipped profile of this name."""
    if name not in MODELS:
        raise ValueError(f"there is no profile {name!r}; the shipped profiles are {', '.join(names())}")
    return MODELS[name]()


def find(text: str) -> Profile:
    """Return a profile by file (``.json``, or ``.txt`` for a graph.txt) or by shipped name."""
    path = Path(text)
    if path.suffix == ".txt":
        from scheduler.formats.graph_txt import Graph

        return Graph.load(path).profile(path.stem)
    if path.suffix == ".json" or path.exists():
        return Profile.load(path)
    return shipped(text)
