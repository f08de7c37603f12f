"""Where plans are made: shipped policies in a child, the user's own here, all here without children."""

import importlib
import logging
import subprocess
import sys

import pytest

from commsched.optimizer import planner_process
from commsched.optimizer.planner_process import plan_in_child
from scheduler import policies, profiles
from scheduler.ir.link import Link

LINK = Link(1e-4, 8e-9)
PROFILE = profiles.shipped("resnet50")


def test_a_policy_of_the_users_own_is_called_here(monkeypatch):
    monkeypatch.setattr(policies, "_ADDED", {})
    monkeypatch.setattr(planner_process.subprocess, "run", lambda *a, **k: pytest.fail("a child was started"))
    policies.register("mine", lambda profile, link, **options: policies.plan(profile, link, "wfbp"))
    assert plan_in_child(PROFILE, LINK, "mine", {}).policy == "wfbp"


def test_no_child_is_started_where_the_compiler_is_loaded(monkeypatch):
    monkeypatch.setattr(planner_process.subprocess, "run", lambda *a, **k: pytest.fail("a child was started"))
    importlib.import_module("numba")
    assert plan_in_child(PROFILE, LINK, "dear", {}).policy == "dear"


@pytest.mark.parametrize("name", policies.names())
def test_which_policies_need_the_compiler(name):
    code = f"""
import sys
from scheduler import policies, profiles
from scheduler.ir.link import Link
policies.plan(profiles.shipped("resnet50"), Link(1e-4, 8e-9), {name!r})
assert ("numba" in sys.modules) == policies.needs_compiler({name!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_without_children_the_plan_is_made_here(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(planner_process.child_planner, "command", lambda: ["/no/such/interpreter"])
    with caplog.at_level(logging.WARNING, logger="commsched"):
        program = plan_in_child(PROFILE, LINK, "dear", {"ranks": 4})
    assert program.hash == policies.plan(PROFILE, LINK, "dear", ranks=4).hash
    assert "no/such/interpreter" in caplog.text
