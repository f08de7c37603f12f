"""Pipeline programs: generators by name, and the passes that complete what they make.

    program = generate("1f1b", stages=4, microbatches=8)

A generator is called as ``generator(positions, microbatches, **options)`` and returns, for each position of
one replica, what it computes in one period. ``generate`` adds replicas, steps, messages, collectives and
prologue. A variant is a new function with a registry entry.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler.pipeline.build import generate, get, names, register
    from scheduler.pipeline.layout import Layout
    from scheduler.pipeline.meaning import delays

# On first use only: every program imports the layout from here, and few have one.
_HOME = {
    "generate": "build",
    "get": "build",
    "names": "build",
    "register": "build",
    "Layout": "layout",
    "delays": "meaning",
}

__all__ = ["Layout", "delays", "generate", "get", "names", "register"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
