"""Plans and predictions in a child process: a training process should not keep the 120 MB that numba takes.

The parent pickles ("plan", profile, link, policy, options) or ("predict", program, profile, link, dense) to
stdin. The answer on stdout is a pickled ``Program``, ``Prediction`` or ``ValueError``.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

from scheduler import policies


def serve() -> None:
    """Read one request from stdin and write its answer to stdout."""
    task, *arguments = pickle.load(sys.stdin.buffer)
    answer: Any
    try:
        answer = _plan(*arguments) if task == "plan" else _predict(*arguments)
    except ValueError as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)


def _plan(profile: Any, link: Any, policy: str, options: dict[str, Any]) -> Any:
    return policies.plan(profile, link, policy, **options)


def _predict(*arguments: Any) -> Any:
    from scheduler.policies.prediction import predict

    return predict(*arguments)
