"""Runs a command on a machine made unsteady: python -m tests.support.unsteady [--seed N] COMMAND...

Processes that the command starts are stopped for a moment, single threads of theirs get next to no processor
time for a while; with `--burn 1` another process is busy all the time. What depends on who comes first, or on
nothing taking long, shows within a few runs:

    python -m tests.support.unsteady python -m pytest -n 2 --dist loadscope tests/dist
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import psutil

GONE = (psutil.Error, OSError)


def stop_for_a_while(process: psutil.Process, seconds: float) -> None:
    """A process that is stopped already is left alone: a test does it."""
    with contextlib.suppress(*GONE):
        if process.status() == psutil.STATUS_STOPPED:
            return
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)


def starve_a_thread(thread: int, seconds: float) -> None:
    with contextlib.suppress(*GONE):
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        time.sleep(seconds)
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def disturb(root: psutil.Process, dice: random.Random) -> None:
    """One disturbance of one process, for a moment or, now and then, long."""
    seconds = min(dice.expovariate(1 / 0.25), 3.0)
    with contextlib.suppress(*GONE):
        process = dice.choice(root.children(recursive=True) or [root])
        if dice.random() < 0.4:
            threading.Thread(target=stop_for_a_while, args=(process, seconds)).start()
        else:
            thread = dice.choice(process.threads()).id
            threading.Thread(target=starve_a_thread, args=(thread, 2 * seconds)).start()


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seed", type=int, help="of the disturbances (default: chosen, and printed)")
    parser.add_argument("--every", type=float, default=0.25, help="seconds between two (default: 0.25)")
    parser.add_argument("--burn", type=int, default=0, help="processes always busy (default: 0)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"unsteady: --seed {seed}", flush=True)
    dice = random.Random(seed)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.burn)]
    command = subprocess.Popen(options.command)
    try:
        root = psutil.Process(command.pid)
        while command.poll() is None:
            disturb(root, dice)
            time.sleep(options.every)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    return command.returncode


if __name__ == "__main__":
    sys.exit(main())
