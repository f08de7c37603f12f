"""Ranks that die, hang, leave or skip an operation: the others end with an error that says so."""

import os
import re
import signal
import time

import pytest

from tests.support.launch import PATIENCE, run_ranks, start_ranks

pytestmark = pytest.mark.dist
# These are noticed without any time-out: this one no test reaches.
PATIENT = {"COMMSCHED_TIMEOUT": "900"}
WAITING = """
import os, sys, time, torch, commsched as hvd
hvd.init()
hvd.allreduce(torch.ones(3))
if hvd.rank() == int(sys.argv[1]):
    child = os.fork()  # outlives it, as the workers of a DataLoader do
    if child == 0:
        time.sleep(900)
    print(f"child={child}")
print("ready", flush=True)
if hvd.rank() == int(sys.argv[1]):
    time.sleep(900)
try:
    hvd.allreduce(torch.ones(3), name="lonely")
except hvd.HorovodInternalError as error:
    print("error:", error, flush=True)
    sys.exit(7)
"""


def run_without(victim, signum, timeout_setting="900"):
    """The survivors' results after `victim` got a signal while the others waited for it."""
    with start_ranks(WAITING, 3, args=[str(victim)], env={"COMMSCHED_TIMEOUT": timeout_setting}) as ranks:
        for rank in range(3):
            ranks.wait_for_output(rank, "ready")
        ranks.kill(victim, signum)
        survivors = [rank for rank in range(3) if rank != victim]
        for rank in survivors:
            ranks.processes[rank].wait(PATIENCE)
        os.kill(int(re.findall(r"child=(\d+)", ranks.output(victim))[0]), signal.SIGKILL)  # still there
        if signum == signal.SIGSTOP:
            ranks.kill(victim, signal.SIGKILL)
        results = ranks.wait()
    return [results[rank] for rank in survivors]


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank(victim):
    """Noticed at once, although a child of the dead rank lives on: no test waits for the time-out."""
    for result in run_without(victim, signal.SIGKILL):
        assert result.returncode == 7 and "lonely" in result.stdout
        assert ("rank 2 died" if victim == 2 else "rank 0 is gone") in result.stdout


INTERRUPTED = """
import signal, time, torch, commsched as hvd
from commsched.collectives.torch_carrier import algorithms
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs in a shell's background
hvd.init()
hvd.allreduce(torch.ones(3))
if hvd.rank() == 1:
    algorithms.allreduce = lambda *_: time.sleep(900)
print("ready", flush=True)
hvd.allreduce(torch.ones(3), name="half")
"""


def test_ctrl_c_in_an_operation_that_has_begun_ends_the_process():
    """At its exit it waited for the operation, for the time-out, which no test reaches."""
    with start_ranks(INTERRUPTED, 2, env=PATIENT) as ranks:
        for rank in range(2):
            ranks.wait_for_output(rank, "ready")
        time.sleep(2)
        ranks.kill(0, signal.SIGINT)
        assert ranks.processes[0].wait(PATIENCE) == -signal.SIGINT, ranks.report()


SKIPPING = """
import torch, commsched as hvd
from commsched.collectives.carrier import carrier
hvd.init()
hvd.barrier()
if hvd.rank() == 0:
    handle = hvd.allreduce_async(torch.ones(3), name="step")
else:
    handle = hvd.broadcast_async(torch.ones(3), 0, name="other")
try:
    hvd.synchronize(handle)
except hvd.CommError as error:
    print(error)
store = carrier().meeting.store
store.set(f"told {hvd.rank()}", "yes")
store.wait(["told 0", "told 1"])  # the next operation would be what the faster one waits in
hvd.allreduce(torch.ones(3), name="and on")
"""


@pytest.fixture(scope="module")
def timed_out():
    """Ranks wait for one that hangs, and ranks are in two operations: both take a whole time-out, at once."""
    with start_ranks(SKIPPING, 2, env={"COMMSCHED_TIMEOUT": "20"}) as skipping:
        hanging = run_without(1, signal.SIGSTOP, timeout_setting="20")
        return hanging, skipping.wait()


def test_rank_that_hangs(timed_out):
    for result in timed_out[0]:
        assert result.returncode == 7
        assert "allreduce.lonely waited 20 s (COMMSCHED_TIMEOUT) for ranks [1]" in result.stdout


def test_skipped_operation_names_what_the_others_wait_in(timed_out):
    """Any rank's time may be up first: that rank "waited in vain" then, the other one "waits" until then."""
    first, second = timed_out[1]
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    waits = r"rank {} (waits|waited in vain) in {}\."
    assert "allreduce.step waited 20 s" in first.stdout
    assert re.search(waits.format(1, "broadcast.other"), first.stdout), first.stdout
    assert "broadcast.other waited 20 s" in second.stdout and "ranks [0]" in second.stdout
    assert re.search(waits.format(0, "allreduce.step"), second.stdout), second.stdout


def test_rank_that_ends_early_and_rank_that_raises():
    program = """
    import torch, commsched as hvd
    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("a mistake in the script")
    hvd.allreduce(torch.ones(3), name="lonely")
    """
    first, second = run_ranks(program, 2, env=PATIENT)
    assert second.returncode != 0 and "a mistake in the script" in second.stderr
    assert (
        first.returncode != 0
        and "rank 1 has left the job after ValueError: a mistake in the script" in first.stderr
        and "allreduce.lonely" in first.stderr
    )


def test_join_ends_when_another_rank_dies_and_later_operations_name_themselves():
    """A rank between two collectives when another died was told of the death without the operation's name."""
    program = """
    import os, signal, time, torch, commsched as hvd
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    for ask in (hvd.join, *(lambda n=n: hvd.allreduce(torch.ones(3), name=n) for n in ("first", "second"))):
        try:
            ask()
        except hvd.CommError as error:
            print(error)
    """
    first, _ = run_ranks(program, 2, env=PATIENT)
    for name, line in zip(
        ("join", "allreduce.first", "allreduce.second"), first.stdout.splitlines(), strict=True
    ):
        assert name in line and "rank 1 died" in line


def test_death_within_a_large_collective():
    """The bytes are under way when the rank dies; gloo or the coordinator reports it, no rank waits on."""
    program = """
    import os, signal, sys, threading, torch, commsched as hvd
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        for _ in range(1000):
            hvd.allreduce(torch.ones(4_000_000), name="large")
    except hvd.CommError as error:
        print("error:", error)
        sys.exit(7)
    """
    results = run_ranks(program, 3, env=PATIENT)
    assert [result.returncode for result in results] == [7, -signal.SIGKILL, 7]
    for rank in (0, 2):
        assert "allreduce.large" in results[rank].stdout and "rank 1 died" in results[rank].stdout


def test_death_while_all_reduces_run_as_one():
    """Each of them has an error with its own name."""
    program = """
    import os, signal, torch, commsched as hvd
    from commsched.collectives.torch_carrier.operation_queue import OperationRunner
    hvd.init()
    run = OperationRunner.run
    def dies(runner, operations, message):
        if len(operations) > 1 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(runner, operations, message)
    OperationRunner.run = dies
    hvd.barrier()
    handles = [hvd.allreduce_async(torch.ones(9), name=f"part {i}") for i in range(20)]
    failed = 0
    for i, handle in enumerate(handles):
        try:
            hvd.synchronize(handle)
        except hvd.CommError as error:
            assert f"allreduce.part {i} failed: rank 1 died" in str(error), error
            failed += 1
    print("failed", failed)
    """
    results = run_ranks(program, 3, env=PATIENT)
    assert [result.returncode for result in results] == [0, -signal.SIGKILL, 0], results[0].stderr
    for rank in (0, 2):
        assert int(results[rank].stdout.split("failed ")[1]) > 1


def test_a_death_is_told_although_its_broken_connections_are_told_first():
    """A rank said what it heard first, its connection's "closed by peer" or rank 0's word of the death.

    And rank 0 told itself first: its process could end before it had told the others.
    """
    program = """
    import os, signal, time, torch, commsched as hvd
    from commsched.collectives.torch_carrier import coordinator
    from commsched.collectives.carrier import carrier
    from commsched.collectives.torch_carrier.algorithms import ChannelGroup
    hvd.init()
    send = coordinator.send
    coordinator.send = lambda *what: (send(*what), time.sleep(0.3))
    store = carrier().meeting.store
    def breaks_off(*arguments):
        store.set("broken off", "yes")
        raise RuntimeError("Connection closed by peer")
    def dies(*arguments):
        store.wait(["broken off"])
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    ChannelGroup.exchange = [breaks_off, dies, lambda *arguments: time.sleep(600)][hvd.rank()]
    try:
        hvd.alltoall(torch.ones(3000))
    except hvd.CommError as error:
        print(error, flush=True)
        os._exit(7)
    """
    results = run_ranks(program, 3)
    assert [result.returncode for result in results] == [7, -signal.SIGKILL, 7]
    assert results[0].stdout == results[2].stdout
    assert "alltoall" in results[0].stdout and "rank 1 died" in results[0].stdout


def test_a_rank_that_asks_long_after_rank_0_has_left_is_told_that_it_left():
    """Ranks were told that rank 0's process had ended where the coordinator's had, too, in the meantime."""
    program = """
    import torch, commsched as hvd
    from commsched.collectives.carrier import carrier
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        carrier()._queue._listener.join()  # the listener: it ends with rank 0's process
        try:
            hvd.allreduce(torch.ones(3), name="late")
        except hvd.CommError as error:
            print(error)
    """
    _, second = run_ranks(program, 2, check=True)
    assert "allreduce.late failed: rank 0 has left the job" in second.stdout


def test_a_rank_that_ends_within_a_collective_ends_as_its_script_says():
    """Rank 2 heard of rank 1's death while its running thread was still waiting for rank 0. When rank 0 went
    too, that thread came back from C++ into an interpreter that was ending, which aborted the process
    (SIGABRT instead of the script's own exit code)."""
    program = """
    import os, signal, sys, threading, time, torch, commsched as hvd
    from commsched.collectives.torch_carrier.algorithms import ChannelGroup

    class EndsSlowly:
        def __del__(self, sleep=time.sleep):
            sleep(5)

    hvd.init()
    kept = EndsSlowly() if hvd.rank() == 2 else None
    if hvd.rank() == 2:
        def exchange(group, outgoing, incoming):
            group._channel.receive(0, 1, [incoming[0]], "x").wait()

        ChannelGroup.exchange = exchange
    else:
        ChannelGroup.exchange = lambda *arguments: time.sleep(60)
    hvd.barrier()
    if hvd.rank() == 1:
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        hvd.alltoall(torch.ones(3000))
    except hvd.CommError as error:
        print("error:", error, flush=True)
        if hvd.rank() == 0:
            time.sleep(4)
            os._exit(7)
        sys.exit(7)
    """
    results = run_ranks(program, 3, env=PATIENT)
    assert [result.returncode for result in results] == [7, -signal.SIGKILL, 7], results[2].stderr
    assert "rank 1 died" in results[2].stdout


def test_a_forked_child_that_ends_does_not_leave_the_job_for_its_parent():
    program = """
    import os, sys, torch, commsched as hvd
    hvd.init()
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    def step():
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        hvd.data_group().barrier().wait()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    step()
    child = os.fork()
    if child == 0:
        try:
            hvd.allreduce(torch.ones(1), name="in the child")
        except hvd.CommError as error:
            print(error, hvd.rank())
        sys.exit(0)  # runs what is registered for the end of a process
    os.waitpid(child, 0)
    step()
    print("still there", hvd.allgather_object(hvd.rank()))
    """
    for result in run_ranks(program, 2, check=True):
        assert "still there [0, 1]" in result.stdout
        child = f"in the child can not run: this process was forked from rank {result.rank}"
        assert child in result.stdout, result.stdout
