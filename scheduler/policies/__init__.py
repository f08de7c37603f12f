"""Policies: functions from a profile and a link to a program, by name.

    policies.plan(profile, link, "dear", gather="parameters", ranks=4)

Each of the package's own is a function of its name in ``published`` or ``optimal``, which takes a ``Problem``
and returns a data-parallel ``Program``. A policy of a user's own is called as
``policy(profile, link, **options)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

from scheduler.ir.program import Program

Policy = Callable[..., Program]

_PUBLISHED = ("sequential", "wfbp", "mgwfbp", "bytescheduler", "dear", "pipedap")
# The module with the function of a policy's name; imported on first use.
_OWN = {**dict.fromkeys(_PUBLISHED, "published"), "optimal": "optimal"}
_ALL_REDUCE = {"wfbp", "mgwfbp", "bytescheduler"}  # no place between RS and AG for the update of shards
_LIGHT = {"sequential", "wfbp", "mgwfbp"}  # plan without the search's kernels
_LIGHT_IF_TOLD = {"dear"}  # so does this one where the caller gives the buckets or their size
_ADDED: dict[str, Policy] = {}


def names(gather: str = "gradients") -> list[str]:
    """Return the names that ``get`` knows; with ``gather="parameters"`` only policies that support it."""
    known = [*_OWN, *_ADDED]
    return [name for name in known if name not in _ALL_REDUCE] if gather == "parameters" else known


def register(name: str, policy: Policy) -> None:
    """Add a policy of your own under a new name."""
    if _key(name) in map(_key, names()):
        raise ValueError(f"policy {name!r} exists already; choose another name")
    _ADDED[name] = policy


def needs_compiler(name: str, options: Mapping[str, Any]) -> bool:
    """Return whether this policy, one of the package's own, loads the compiler of the search's kernels."""
    told = any(options.get(option) is not None for option in ("buckets", "bucket_bytes"))
    return _key(name) in set(_OWN) - _LIGHT - (_LIGHT_IF_TOLD if told else set())


def get(name: str) -> Policy:
    """Return the policy of this name, in any case; a ``ValueError`` lists the names there are."""
    wanted = _key(name)
    for added, policy in _ADDED.items():
        if _key(added) == wanted:
            return policy
    if wanted not in _OWN:
        raise ValueError(f"there is no policy {name!r}; the policies are {', '.join(names())}")
    return _own(wanted)


@cache
def _own(name: str) -> Policy:
    return partial(_plan_by_own, name)


def _plan_by_own(
    name: str,
    profile: Any,
    link: Any,
    *,
    gather: str = "gradients",
    early_step: bool = False,
    ranks: int = 2,
    buckets: Any = None,
    bucket_bytes: float | None = None,
    **options: Any,
) -> Program:
    from scheduler.policies.problem import Problem

    problem = Problem(profile, link, gather, early_step, ranks, buckets, bucket_bytes)
    if name not in names(gather):
        raise ValueError(
            f"policy {name!r} all-reduces gradients, and gather='parameters' updates between RS and AG;"
            " use sequential, dear, pipedap or optimal, or gather='gradients'"
        )
    return getattr(import_module(f"scheduler.policies.{_OWN[name]}"), name)(problem, **options)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def plan(profile: Any, link: Any, policy: str = "optimal", **options: Any) -> Program:
    """Return a program by the policy of this name."""
    return get(policy)(profile, link, **options)
