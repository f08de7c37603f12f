"""Planning in a child process where it needs a compiler, which would stay in this process's memory."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import scheduler
from commsched.env import settings
from scheduler import policies
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program

_log = logging.getLogger("commsched")
_FOLDER = str(Path(scheduler.__file__).resolve().parents[1])
# Uses this very package, wherever it lies and whatever lies in the current folder.
_CODE = f"""
import sys
sys.path.insert(0, {_FOLDER!r})
from scheduler.policies.planner_process import serve
serve()
"""


def plan_in_child(profile: Profile, link: Link, policy: str, options: Mapping[str, Any]) -> Program:
    """Return or raise what ``policies.plan`` does, from a child process if the policy needs a compiler.

    Policies without a compiler, also the user's own, run here. So does every policy where the compiler is
    loaded already or no child can be started.
    """
    if policies.needs_compiler(policy) and "numba" not in sys.modules:
        try:
            # The search uses one processor; other jobs may share the host.
            child = subprocess.run(
                [sys.executable, "-c", _CODE],
                input=pickle.dumps((profile, link, policy, dict(options))),
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                timeout=settings().timeout,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("the planning process failed, so this training process plans itself: %s", error)
        else:
            answer = pickle.loads(child.stdout)
            if isinstance(answer, ValueError):
                raise answer
            assert isinstance(answer, Program)
            return answer
    return policies.plan(profile, link, policy, **options)
