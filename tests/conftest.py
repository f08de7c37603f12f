"""What every test gets: one thread, and no launcher's variables from the shell it was started in."""

import os
import sys
from pathlib import Path
from typing import Any

# Ranks started by tests share few cores; set before anything imports torch or numpy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support import needs


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was not tested and how to get it, at the end, where it is read."""
    lines = needs.summary(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    if lines:
        terminalreporter.section("not tested")
        for line in lines:
            terminalreporter.write_line(line)
