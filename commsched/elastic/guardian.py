"""Kills this process when it is stopped: horovodrun's driver waits for every process that has not ended.

After SIGSTOP the other ranks raise an error and ask the driver for their next places. It answers once all
processes have asked or ended, and a stopped one does neither. So a small child process watches for that.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Counts looks, not seconds: while the whole machine is frozen, no look finds the process stopped. "T" is
# stopped by a signal; "t" is a debugger's stop, which has time. Every error ends the watch, such as no /proc.
_WATCH = """
import os, signal, sys, time
process, seconds, stopped = int(sys.argv[1]), float(sys.argv[2]), 0
while os.getppid() == process:
    if stopped == 10:
        os.kill(process, signal.SIGKILL)
    time.sleep(seconds / 10)
    with open(f"/proc/{process}/stat", errors="replace") as status:
        stopped = stopped + 1 if status.read().rpartition(")")[2].split()[0] == "T" else 0
"""


@contextmanager
def killed_when_stopped(seconds: float = 10.0) -> Iterator[None]:
    """Within this context this process is killed once it has been stopped for so long.

    The guardian ends with the context, or soon after this process. It holds no file or socket of it.
    """
    command = [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid()), str(seconds)]
    null = subprocess.DEVNULL
    try:
        started = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, cwd="/")
    except (OSError, TypeError) as error:  # no room for a process; an embedded Python without sys.executable
        logging.getLogger("commsched").warning(
            "the others would wait for this rank if it is stopped: %s", error
        )
        yield
        return
    with started as guardian:
        try:
            yield
        finally:
            guardian.kill()
