"""What every test gets: one thread, no launcher's variables from the shell, servers that fork ranks."""

import faulthandler
import gc
import os
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dnn_bench import fork_server
from tests.support import needs
from tests.support.cases import scope_of
from tests.support.launch import clean_environment

# Some images set this. Every process that a test starts would compile torch's thousands of sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Before anything imports torch or numpy: ranks started by tests share few cores. Ranks of tests and ranks of
# dnn_bench have one environment, so that they come from the same servers.
variables = clean_environment()
os.environ.clear()
os.environ.update(variables)
fork_server.share()

if find_spec("hypothesis"):  # the environment of tests/models has none
    from hypothesis import HealthCheck, settings

    # By default an example that takes 200 ms fails, and so do ten that take a second to draw: a busy machine
    # decides that. Settings of single tests start from this profile.
    # And chance does not decide what is tested: new cases are for the checkers (python -m tests.checker).
    slow = [HealthCheck.too_slow]
    settings.register_profile("busy machine", deadline=None, derandomize=True, suppress_health_check=slow)
    settings.load_profile("busy machine")

# pytest-timeout raises in the main thread once that runs Python again. If it never does, this many seconds
# later its process ends; the stacks stand in the output, and pytest-xdist starts another process.
GRACE = float(os.environ.get("PYTEST_STUCK_GRACE", 60))
SEED = 67280421310721  # torch's own default
STDERR = pytest.StashKey[int]()
COLLECTED = pytest.StashKey[dict[str, list[str]]]()


def pytest_collection_finish() -> None:
    """Let collections, and an optimizer's search for its modules, pass over everything imported so far."""
    gc.freeze()


FEW = 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before ``-m`` leaves tests out: mark cases thorough; where all are collected, note names and marks."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not any(map(item.get_closest_marker, ("slow", "thorough"))):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        kept = {round(place * (len(each) - 1) / (FEW - 1)) for place in range(FEW)}  # the first ... the last
        for place in set(range(len(each))) - kept:
            each[place].add_marker("thorough")
    if [Path(argument).resolve() for argument in config.args] == [Path(__file__).parent]:
        config.stash[COLLECTED] = {i.nodeid: [mark.name for mark in i.iter_markers()] for i in items}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope``, keep together what shares something.

    ``--dist loadgroup`` would need no code here, but with pytest 9.2 pytest-xdist 3.8 loses the groups: each
    worker then starts every launch anew.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Together(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # before pytest captures it
    if config.getoption("dist", "no") == "loadscope":
        # A worker that dies ends the run. Where no other is left, pytest-xdist 3.8 gives a new one all groups
        # of the dead one, the finished first: of those it reports nothing, and the run waits without end.
        config.option.maxworkerrestart = "0"


THREADS: list[int] = []
"""Torch's, before the first test."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give every test the random numbers and threads that it has alone, whichever ran here before."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(SEED)
        THREADS.append(torch.get_num_threads())
        if THREADS[-1] != THREADS[0]:  # a command that ran in this process has set its own
            torch.set_num_threads(THREADS[0])
        del THREADS[1:]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process of a test that its time-out could not end."""
    own = item.get_closest_marker("timeout")
    asked = item.config.getoption("timeout")
    usual = item.config.getini("timeout") if asked is None else asked
    if limit := float(own.args[0] if own else usual or 0):
        faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was not tested and how to get it, at the end, where it is read."""
    lines = needs.summary(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    if lines:
        terminalreporter.section("not tested")
        for line in lines:
            terminalreporter.write_line(line)
