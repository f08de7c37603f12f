"""``policies.plan`` in a child process: a training process should not keep the 120 MB that numba takes.

The parent pickles (profile, link, policy, options) to stdin; the answer on stdout is a pickled ``Program`` or
``ValueError``.
"""

from __future__ import annotations

import pickle
import sys

from scheduler import policies
from scheduler.ir.program import Program


def serve() -> None:
    """Read one request from stdin, plan, and write the answer to stdout."""
    profile, link, policy, options = pickle.load(sys.stdin.buffer)
    answer: Program | ValueError
    try:
        answer = policies.plan(profile, link, policy, **options)
    except ValueError as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)
