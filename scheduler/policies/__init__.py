"""Policies: functions from a profile and a link to a program, by name.

A policy is called as ``policy(profile, link, buckets=None, gather="gradients", **options)`` and returns a
data-parallel ``Program``. A variant is a new function with a registry entry.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from scheduler.ir.program import Program

Policy = Callable[..., Program]

# Modules by policy name; imported on first use, so that a plan by one policy does not pay for the others.
_MODULES: dict[str, str] = {
    name: f"scheduler.policies.{name}"
    for name in ("sequential", "wfbp", "mgwfbp", "bytescheduler", "dear", "pipedap", "optimal")
}
_LIGHT = {"sequential", "wfbp", "mgwfbp"}  # plan without the search's kernels
_ADDED: dict[str, Policy] = {}


def names() -> list[str]:
    """The names that ``get`` knows."""
    return [*_MODULES, *_ADDED]


def register(name: str, policy: Policy) -> None:
    """Adds a policy of your own under a new name."""
    if name in _MODULES or name in _ADDED:
        raise ValueError(f"policy {name!r} exists already; choose another name")
    _ADDED[name] = policy


def needs_compiler(name: str) -> bool:
    """Whether this policy, one of the package's own, loads the compiler of the search's kernels."""
    return _key(name) in set(_MODULES) - _LIGHT


def get(name: str) -> Policy:
    """The policy of this name, in any case; a ``ValueError`` lists the names there are."""
    wanted = _key(name)
    if wanted in _ADDED:
        return _ADDED[wanted]
    if wanted not in _MODULES:
        raise ValueError(f"there is no policy {name!r}; the policies are {', '.join(names())}")
    return getattr(import_module(_MODULES[wanted]), wanted)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def plan(profile: Any, link: Any, policy: str = "optimal", **options: Any) -> Program:
    """A program by the policy of this name."""
    return get(policy)(profile, link, **options)
