"""``policies.plan`` for another process: a pickled question comes in, a pickled answer goes out.

Planning loads numba, 120 MB that a training process should not keep. A caller starts ``command()`` as a child
process, writes ``question(...)`` to it and reads the reply with ``answer``.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from scheduler import policies
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program


def command() -> list[str]:
    """Starts ``serve`` in this interpreter and with this very package, wherever it lies."""
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import serve; serve()"
    return [sys.executable, "-c", code]


def question(profile: Profile, link: Link, policy: str, options: Mapping[str, Any]) -> bytes:
    """The bytes that ``serve`` reads: one planning request."""
    return pickle.dumps((profile, link, policy, dict(options)))


def answer(reply: bytes) -> Program:
    """The program in the reply of ``serve``; raises the ``ValueError`` that planning raised there."""
    outcome = pickle.loads(reply)
    if isinstance(outcome, ValueError):
        raise outcome
    assert isinstance(outcome, Program)
    return outcome


def serve(source: BinaryIO | None = None, target: BinaryIO | None = None) -> None:
    """Read one request from stdin, plan, and write the reply to stdout."""
    profile, link, policy, options = pickle.load(source or sys.stdin.buffer)
    outcome: Program | ValueError
    try:
        outcome = policies.plan(profile, link, policy, **options)
    except ValueError as error:
        outcome = error
    pickle.dump(outcome, target or sys.stdout.buffer)
