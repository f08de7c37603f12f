"""The profiles that come with commsched, by name. Each says in ``source`` how it was made (see
``scheduler.profiles.flops``).
"""

from __future__ import annotations

from pathlib import Path

from scheduler.ir.profile import Profile

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The shipped profiles."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def shipped(name: str) -> Profile:
    """The shipped profile of this name."""
    if name not in names():
        raise ValueError(f"there is no profile {name!r}; the shipped profiles are {', '.join(names())}")
    return Profile.load(_FOLDER / f"{name}.json")


def find(text: str) -> Profile:
    """A profile by file (``.json``, or ``.txt`` for a graph.txt) or by shipped name."""
    path = Path(text)
    if path.suffix == ".txt":
        from scheduler.formats.graph_txt import read_graph

        return read_graph(path)
    if path.suffix == ".json" or path.exists():
        return Profile.load(path)
    return shipped(text)
