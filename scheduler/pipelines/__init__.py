"""Pipeline programs: generators by name, and the passes that complete what they make.

    program = generate("1f1b", stages=4, microbatches=8)

A generator is called as ``generator(positions, microbatches, **options)`` and returns, for each position of
one replica, what it computes in one period. ``generate`` adds replicas, steps, messages, collectives and
prologue. A variant is a new function with a registry entry.
"""

from __future__ import annotations

from scheduler.ir.layout import Layout
from scheduler.ir.program import delays
from scheduler.pipelines.build import generate, get, names, register

__all__ = ["Layout", "delays", "generate", "get", "names", "register"]
