"""Plans and predicts in a child process: the compiler that this needs would stay in this process's memory."""

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
from scheduler.policies.prediction import Prediction, predict

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
    if policies.needs_compiler(policy):
        answer = _answer_of_child("plan", profile, link, policy, dict(options))
        if answer is not None:
            assert isinstance(answer, Program)
            return answer
    return policies.plan(profile, link, policy, **options)


def predict_in_child(
    program: Program, profile: Profile, link: Link, dense: Profile | None = None
) -> Prediction:
    """Return what ``predict`` does, from a child process unless the compiler is loaded already."""
    answer = _answer_of_child("predict", program, profile, link, dense)
    if answer is None:
        return predict(program, profile, link, dense)
    assert isinstance(answer, Prediction)
    return answer


def _answer_of_child(*request: Any) -> Any:
    """Return or raise a child's answer; None where this process must do the work itself."""
    if "numba" in sys.modules:
        return None
    try:
        # The search uses one processor; other jobs may share the host.
        child = subprocess.run(
            [sys.executable, "-c", _CODE],
            input=pickle.dumps(request),
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=settings().timeout,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the planning process failed, so this training process does its work: %s", error)
        return None
    answer = pickle.loads(child.stdout)
    if isinstance(answer, ValueError):
        raise answer
    return answer
