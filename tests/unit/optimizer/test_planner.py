"""Where plans are made: shipped policies in a child, the user's own here, all here without children."""

import importlib
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from commsched.env import Settings
from commsched.errors import CommError
from commsched.optimizer import planner
from commsched.optimizer.planner import Model, Plan, Planner, plan_in_child
from scheduler import policies, profiles
from scheduler.ir.actions import parse_actions
from scheduler.ir.buckets import one_per_layer
from scheduler.ir.link import Link
from scheduler.ir.program import Program
from scheduler.pipelines import generate
from tests.unit.optimizer.test_trials import planner_of

LINK = Link(1e-4, 8e-9)
TWO = Model(("a", "b"), (16, 16), (torch.float32,) * 2)
PROFILE = profiles.shipped("resnet50")


def test_a_policy_of_the_users_own_is_called_here(monkeypatch):
    monkeypatch.setattr(policies, "_ADDED", {})
    monkeypatch.setattr(planner, "Child", lambda *a: pytest.fail("a child was started"))
    policies.register("mine", lambda profile, link, **options: policies.plan(profile, link, "wfbp"))
    assert plan_in_child(PROFILE, LINK, "mine", {}).policy == "wfbp"


def test_no_child_is_started_where_the_compiler_is_loaded(monkeypatch):
    monkeypatch.setattr(planner, "Child", lambda *a: pytest.fail("a child was started"))
    importlib.import_module("numba")
    assert plan_in_child(PROFILE, LINK, "dear", {}).policy == "dear"


def ask(policy, monkeypatch, folder, **options):
    """What a child answers in this folder."""
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(policies, "plan", lambda *a, **k: pytest.fail("no child was started"))
    monkeypatch.chdir(folder)
    return plan_in_child(PROFILE, LINK, policy, options)


def test_the_answer_of_a_child_is_the_plan(monkeypatch, tmp_path):
    (tmp_path / "scheduler.py").write_text("raise ImportError")
    here = policies.plan(PROFILE, LINK, "dear", ranks=4)
    assert ask("dear", monkeypatch, tmp_path, ranks=4).hash == here.hash


def test_the_answer_of_a_child_is_the_error(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="bucket"):
        ask("pipedap", monkeypatch, tmp_path, bucket_bytes=-1)


def test_a_killed_rank_leaves_no_search_that_keeps_its_output_open():
    """horovodrun took rank 0 for running until the search was over."""
    code = """
import os, signal
from commsched.optimizer import planner
planner._CODE = "import time; time.sleep(100)"
print(planner.Child("plan")._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as rank:
        search = int(rank.stdout.readline())
        try:
            assert rank.communicate(timeout=50) == (b"", b"")
        finally:
            os.kill(search, signal.SIGKILL)


def test_a_failed_search_tells_its_error(monkeypatch):
    monkeypatch.setattr(planner, "_CODE", "raise MemoryError('the search needs more')")
    with pytest.raises(subprocess.SubprocessError, match="status 1: MemoryError: the search needs more"):
        planner.Child("plan").answer()


def test_a_search_ends_before_the_other_ranks_give_up(monkeypatch, caplog):
    """It had as long as they waited, and then rank 0 searched itself."""
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(planner, "_CODE", "import time; time.sleep(100)")
    monkeypatch.setattr(planner, "settings", lambda: Settings(timeout=2.0, wait_for_plan=1))
    profile = TWO.guess([0, 1], LINK)
    with caplog.at_level(logging.WARNING, logger="commsched"):
        assert planner_of(TWO).begin(profile, [0, 1], meanwhile=True) == (None, None), "no plan is kept"
        first = planner_of(TWO, profile=replace(profile, layers=profile.layers[1:])).first([0, 1])
    assert first.program.policy == "dear", "there was no plan that could be kept"
    assert caplog.text.count("it took 1 s (COMMSCHED_TIMEOUT is 2)") == 2


@pytest.mark.thorough
def test_the_asking_process_does_not_load_the_compiler():
    code = """
import sys
from commsched.optimizer.planner import plan_in_child
from scheduler import profiles
from scheduler.ir.link import Link
plan_in_child(profiles.shipped("resnet50"), Link(1e-4, 8e-9), "dear", {})
sys.exit("numba" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=400).returncode == 0


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in policies.names()), ("dear", {"bucket_bytes": 4 << 20})]
)
def test_which_policies_need_the_compiler(name, options):
    code = f"""
import sys
from scheduler import policies, profiles
from scheduler.ir.link import Link
policies.plan(profiles.shipped("resnet50"), Link(1e-4, 8e-9), {name!r}, **{options})
assert ("numba" in sys.modules) == policies.needs_compiler({name!r}, {options})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_without_children_the_plan_is_made_here(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(planner.sys, "executable", "/no/such/interpreter")
    with caplog.at_level(logging.WARNING, logger="commsched"):
        program = plan_in_child(PROFILE, LINK, "dear", {"ranks": 4})
    assert program.hash == policies.plan(PROFILE, LINK, "dear", ranks=4).hash
    assert "no/such/interpreter" in caplog.text


def test_a_rank_that_reads_another_plan_than_rank_0_made_ends_the_job():
    plan = Plan(policies.plan(PROFILE, LINK, "dear", ranks=2), PROFILE, LINK, ())
    told, aborted = [[plan], 7, [plan.program.hash]], []
    mine = Planner.__new__(Planner)
    mine.ranks = SimpleNamespace(rank=1, share=lambda value: told)
    mine.backend, mine.model = SimpleNamespace(abort=aborted.append), SimpleNamespace(sent_whole=lambda: None)
    assert mine._agreed([None]) == ([plan], 7) and not aborted
    told[2] = ["another"]
    with pytest.raises(
        CommError, match=f"rank 1 has read plan {plan.program.hash}, but rank 0 has made another"
    ) as error:
        mine._agreed([None])
    assert aborted == [str(error.value)], "the other ranks were not told"


def one_link(*lanes: tuple[str, str]) -> Program:
    """A program of two layers of 64 bytes and the time between iterations."""
    kernel = {"compute": parse_actions("B2 B1 B0 F0+1 F1+1 F2+1")}
    kernel |= {name: parse_actions(order) for name, order in lanes}
    return Program("mine", one_per_layer((0, 64, 64)), (kernel,), 3)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (one_link(("link", "RS0 AG0"), ("other", "RS1 AG1")), "collectives outside of lane link"),
        (one_link(("other", "AR0 AR1")), "collectives outside of lane link"),
        (generate("gpipe", 2, profile=TWO.guess([0, 1], LINK), cuts=(0, 2)), "stages"),
    ],
)
def test_a_given_program_is_an_order_on_one_link(program, words):
    """Else the first backward said that a bucket is not in the installed plan."""
    planner_of(TWO, schedule=one_link(("link", "RS0 RS1 AG1 AG0"))).first([0, 1])
    with pytest.raises(ValueError, match=f"has {words}, but DistributedOptimizer executes one order"):
        planner_of(TWO, schedule=program).first([0, 1])


def test_a_given_program_does_the_step_that_was_asked_for():
    """With gather='parameters' each AG waits for an update in step(), and so did the RS after it: for ever.
    A program for early steps took them although ``early_step`` was False.
    """
    mixed, late = one_link(("link", "RS0 AG0 RS1 AG1")), one_link(("link", "RS0 RS1 AG1 AG0"))
    early = replace(late, gather="parameters", early_step=True)
    with pytest.raises(ValueError, match="AG0 gathers updated parameters before the last RS"):
        planner_of(TWO, schedule=mixed, gather="parameters").first([0, 1])
    with pytest.raises(ValueError, match="AR0 gathers gradients"):
        planner_of(TWO, schedule=one_link(("link", "AR0 AR1")), gather="parameters").first([0, 1])
    for program, asked in ((mixed, {}), (early, {}), (early, {"gather": "parameters"})):
        used = planner_of(TWO, schedule=program, **asked).first([0, 1]).program
        assert (used.link, used.early_step) == (program.link, False)
        assert used.gather == asked.get("gather", "gradients")
    again = planner_of(TWO, schedule=early, gather="parameters", early_step=True).first([0, 1])
    assert again.program.hash == early.hash
