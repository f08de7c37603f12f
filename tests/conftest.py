"""What every test gets: one thread, no launcher's variables from the shell, and servers that fork ranks."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dnn_bench import fork_server
from tests.support import needs
from tests.support.launch import clean_environment

# Before anything imports torch or numpy: ranks started by tests share few cores. Ranks of tests and ranks of
# dnn_bench have one environment, so that they come from the same servers.
variables = clean_environment()
os.environ.clear()
os.environ.update(variables)
fork_server.share()


def pytest_collection_finish() -> None:
    """Let collections, and an optimizer's search for its modules, pass over everything imported so far."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was not tested and how to get it, at the end, where it is read."""
    lines = needs.summary(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    if lines:
        terminalreporter.section("not tested")
        for line in lines:
            terminalreporter.write_line(line)
