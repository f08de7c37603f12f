"""Lower bounds: iteration times that no schedule can beat. One theorem a file."""

from __future__ import annotations

from scheduler.bounds.preemptive import lower_bound
from scheduler.bounds.startup import relaxed_cuts, startup_bound
from scheduler.bounds.trivial import trivial_bound

__all__ = ["lower_bound", "relaxed_cuts", "startup_bound", "trivial_bound"]
