"""A thread that waits in C++ for other ranks: signals end its wait, or run their handlers during it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Rank 1 does nothing, so that rank 0 waits for its time-out of 300 s.
BEGIN = """
import signal, sys, torch
from comm_core import DirectTransport, Engine, Traffic, link_gate, local_channels, local_message_channels

signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.alarm(100)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs in a shell's background
left, right = local_message_channels(2)
channels = local_channels(2)
transport = DirectTransport(channels[0], 0, 2)


def stepping():
    engine = Engine(transport, 0, 2)
    engine.add_bucket(torch.ones(4))
    engine.install([("RS", 0), ("AG", 0)])
    engine.begin_step()
    engine.mark_ready(0)
    return engine


def held_back():
    link_gate().begin(Traffic.halo, 1, 300.0)
    link_gate().passing(Traffic.activation, 1)


"""

WAITS = {
    "message": 'left.receive(1, 0, [torch.ones(1)], "x").wait()',
    "reduce-scatter": "stepping().wait_rs(0)",
    "all-gather": "stepping().wait_ag(0)",
    "end of a step": "stepping().wait_all()",
    "operation outside of a plan": "transport.all_reduce(torch.ones(4))",
    "turn on the link": "held_back()",
}

INTERRUPTED = """
try:
    print("waits", flush=True)
    {wait}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def run(program: str, *signals: tuple[int, str]) -> str:
    """Return what the program prints after the last signal; each is sent, and answered by one line."""
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        time.sleep(0.5)  # until it does; a signal that comes sooner does not reach C++
        for number, answer in signals:
            os.kill(process.pid, number)
            assert process.stdout.readline() == f"{answer}\n"
        rest = process.stdout.read()
        assert process.wait() == 0
        return rest


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_ctrl_c_ends_a_wait(wait: str) -> None:
    """Only the waits for messages ended; every other one lasted for the time-out."""
    assert run(INTERRUPTED.format(wait=wait), (signal.SIGINT, "interrupted")) == ""


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_handler_runs_and_the_wait_goes_on(wait: str) -> None:
    handler = 'signal.signal(signal.SIGTERM, lambda *_: print("terminated", flush=True))\n'
    program = handler + INTERRUPTED.format(wait=wait)
    assert run(program, *[(signal.SIGTERM, "terminated")] * 2, (signal.SIGINT, "interrupted")) == ""


def test_a_handler_may_wait_for_messages_itself() -> None:
    """The wait that it interrupts moved the bytes of all, and left nobody to move those of the handler."""
    handler = """
def answer(*_):
    received = torch.zeros(3)
    right.send(0, 1, [torch.ones(3)], "y")
    left.receive(1, 1, [received], "y").wait()
    print("received", received.sum().item(), flush=True)


signal.signal(signal.SIGTERM, answer)
"""
    program = handler + INTERRUPTED.format(wait=WAITS["message"])
    assert run(program, (signal.SIGTERM, "received 3.0"), (signal.SIGINT, "interrupted")) == ""


def test_an_interrupted_operation_leaves_its_transport_unusable() -> None:
    """What its peer sends afterwards would be read into memory that may be gone."""
    program = "import os; from comm_core import set_warning; set_warning(0.2); os.dup2(1, 2)\n"
    program += INTERRUPTED.format(wait=WAITS["operation outside of a plan"])
    program += """
for own in (transport, DirectTransport(channels[1], 1, 2)):
    try:
        own.all_reduce(torch.ones(4))
    except RuntimeError as error:
        print(error)
"""
    where = "AR of bucket 0 (step 0, position 0 of the plan)"
    waits = f"commsched: rank 0 has waited 0.2 s for rank 1 in {where}; it waits 300 s (COMMSCHED_TIMEOUT)"
    said = run(program, (0, waits), (signal.SIGINT, "interrupted")).splitlines()
    assert said[0] == "rank 0 was interrupted by a signal"
    assert said[1] == "rank 0 gave up: rank 0 was interrupted by a signal"
