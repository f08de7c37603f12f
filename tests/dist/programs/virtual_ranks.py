"""Trains over virtual ranks, and prints a digest of all bits.

Arguments: steps, "gradients" or "parameters" or both with a comma, and, in an elastic job, the file with the
hosts: of the four ranks that begin, the last is killed, which takes its host with it; then a host with one
rank comes.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import commsched as hvd
from tests.support.virtual_training import trained

steps, gathers, hosts = int(sys.argv[1]), sys.argv[2].split(","), Path(sys.argv[3] if sys.argv[3:] else "")


def last_rank_dies(state: Any) -> None:
    if sys.argv[3:] and hvd.size() == 4 and state.step == steps // 3 and hvd.rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def host_comes(state: Any) -> None:
    comes = sys.argv[3:] and hvd.size() == 2 and state.step == 2 * steps // 3
    if comes and hvd.rank() == 0:
        hosts.write_text("localhost:2\n127.0.0.1:2\n127.1:1\n")
        deadline = time.monotonic() + 300
        while state._host_messages.empty() and time.monotonic() < deadline:
            time.sleep(0.05)


hvd.init()
results = {each: trained(each, steps, before_step=last_rank_dies, after_step=host_comes) for each in gathers}
print(json.dumps(results), flush=True)
