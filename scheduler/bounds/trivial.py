"""The trivial bound: neither the compute nor the wire can be shorter than its work."""

from __future__ import annotations

from scheduler.bounds.window import compute_seconds
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile


def trivial_bound(profile: Profile, link: Link, *, gather: str = "gradients", ranks: int = 2) -> float:
    """The larger of the compute and the link time of all bytes; ignores dependencies."""
    return max(compute_seconds(profile, gather), 2 * link.beta * profile.total_bytes)
