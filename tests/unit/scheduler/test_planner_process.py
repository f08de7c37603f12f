"""Planning in a child: the same plan, the same errors, and nothing of the compiler in this process."""

import io
import subprocess
import sys

import pytest

from scheduler import policies, profiles
from scheduler.ir.link import Link
from scheduler.policies import planner_process as aside

LINK = Link(1e-4, 8e-9)


def ask(policy, **options):
    target = io.BytesIO()
    aside.serve(io.BytesIO(aside.question(profiles.shipped("resnet50"), LINK, policy, options)), target)
    return aside.answer(target.getvalue())


def test_the_answer_is_the_plan():
    here = policies.plan(profiles.shipped("resnet50"), LINK, "dear", ranks=4)
    assert ask("dear", ranks=4).hash == here.hash


def test_the_answer_is_the_error():
    with pytest.raises(ValueError, match="bucket"):
        ask("dear", bucket_bytes=-1)


def test_the_command_answers_from_any_folder(tmp_path):
    question = aside.question(profiles.shipped("resnet50"), LINK, "wfbp", {})
    reply = subprocess.run(
        aside.command(), input=question, stdout=subprocess.PIPE, cwd=tmp_path, timeout=400, check=True
    )
    assert aside.answer(reply.stdout).policy == "wfbp"


def test_the_asking_process_does_not_load_the_compiler():
    code = """
import sys
from commsched.optimizer.planner_process import plan_in_child
from scheduler import profiles
from scheduler.ir.link import Link
plan_in_child(profiles.shipped("resnet50"), Link(1e-4, 8e-9), "dear", {})
sys.exit("numba" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=400).returncode == 0
