"""Messages of stages and tiles: order, lengths, messages that nobody has asked for, and every way to end."""

from __future__ import annotations

import gc
import math
import random
import subprocess
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from comm_core import (
    EngineError,
    MessageChannel,
    PendingMessages,
    Traffic,
    link_gate,
    local_message_channels,
    message_channel,
    set_warning,
    tcp_connections,
)
from tests.support.engines import on_ranks
from tests.unit.comm_core.test_closing import left_over, threads_and_files

ROOT = Path(__file__).resolve().parents[3]
LONG = 3600.0  # seconds that no test waits
SHORT = MessageChannel.SHORT // 4  # elements of float32 in the longest short message
MUCH = 4 << 20  # elements: more than the sockets' buffers take


def over_local(size: int) -> list[MessageChannel]:
    channels = local_message_channels(size)
    for channel in channels:
        channel.set_timeout(LONG)
    return channels


def over_tcp(size: int) -> list[MessageChannel]:
    store = HashStore()

    def one(rank: int) -> MessageChannel:
        channel = message_channel(rank, tcp_connections(store, rank, size, "127.0.0.1", timeout_seconds=LONG))
        channel.set_timeout(LONG)
        return channel

    return on_ranks(size, one)


both = pytest.mark.parametrize("connect", [over_local, over_tcp])
Connect = Callable[[int], "list[MessageChannel]"]


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def failure(call: Callable[[], object]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call()
    return caught.value


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


@both
@pytest.mark.parametrize("size", [0, 1, SHORT, SHORT + 1, MUCH])
@pytest.mark.parametrize("early", [False, True])
def test_one_message_each_way(connect: Connect, size: int, early: bool) -> None:
    ends = connect(2)
    data = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    received = [torch.empty(size) for _ in range(2)]

    def one(rank: int) -> None:
        sends, receives = [(1 - rank, [data[rank]])], [(1 - rank, [received[rank]])]
        if early:
            pending = [ends[rank].exchange(sends, [], 0, "x"), ends[rank].exchange([], receives, 0, "x")]
        else:
            pending = [ends[rank].exchange(sends, receives, 0, "x")]
        for each in pending:
            each.wait()
            assert each.done()

    on_ranks(2, one)
    for rank in range(2):
        torch.testing.assert_close(received[rank], data[1 - rank], rtol=0, atol=0)


@both
def test_pieces_of_any_type_and_length(connect: Connect) -> None:
    left, right = connect(2)
    sent = [
        torch.randn(0),
        torch.randn(5).to(torch.bfloat16),
        torch.arange(3),
        torch.empty(0, dtype=torch.int8),
        torch.tensor([True, False]),
        torch.randn(MUCH // 8),
        torch.randn(0),
        *(numbers(i) for i in range(1500)),
        torch.randn(0),
    ]
    for count in (5, len(sent)):
        received = [torch.empty_like(piece) for piece in sent[:count]]
        pending = left.send(1, 7, sent[:count], "pieces")
        right.receive(0, 7, received, "pieces").wait()
        pending.wait()
        for one, other in zip(sent, received):
            assert torch.equal(one, other)


def test_other_cuts_of_the_same_bytes() -> None:
    left, right = over_local(2)
    for size in (6, 6 * SHORT):
        whole, thirds = torch.randn(size), torch.empty(3, size // 3)
        pending = left.send(1, 0, [whole], "x")
        right.receive(0, 0, list(thirds), "x").wait()
        pending.wait()
        assert torch.equal(whole, thirds.view(-1))


Message = tuple[int, int]
"""Lane and number of elements."""


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 100, SHORT, SHORT + 1, 300_000])), max_size=30
    ),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_lanes_keep_their_order_however_they_are_asked_for(
    messages: list[Message], chance: random.Random
) -> None:
    left, right = over_local(2)
    lanes, leaving = defaultdict(list), []
    for number, (lane, size) in enumerate(messages):
        sent = torch.full((size,), float(number))
        leaving.append(left.send(1, lane, [sent], "test"))
        lanes[lane].append(sent)
    wanted = [lane for lane, sent in lanes.items() for _ in sent]
    chance.shuffle(wanted)
    received, coming = defaultdict(list), []
    for lane in wanted:
        buffer = torch.empty_like(lanes[lane][len(received[lane])])
        received[lane].append(buffer)
        coming.append(right.receive(0, lane, [buffer], "test"))
        if chance.random() < 0.5:
            coming.pop(chance.randrange(len(coming))).wait()
    for pending in chance.sample(coming, len(coming)) + leaving:
        pending.wait()
    for lane, sent in lanes.items():
        assert all(map(torch.equal, sent, received[lane]))
    left.close()
    right.close()


def test_a_lane_that_nobody_reads_blocks_no_other_one() -> None:
    """Long messages wait at their sender, and short ones are read into memory of their own."""
    left, right = over_tcp(2)
    unread = [left.send(1, 0, [torch.full((size,), 1.0)], "later") for size in (MUCH, SHORT) * 100]
    received = torch.empty(MUCH)
    last = left.send(1, 1, [torch.full((MUCH,), 2.0)], "now")
    right.receive(0, 1, [received], "now").wait()
    last.wait()
    assert received.eq(2).all()
    for size in (MUCH, SHORT) * 100:
        right.receive(0, 0, [torch.empty(size)], "later").wait()
    for pending in unread:
        pending.wait()


def test_what_is_sent_shortly_may_be_written_over_at_once() -> None:
    left, right = over_tcp(2)
    buffer, received = torch.ones(SHORT), torch.empty(SHORT)
    leaving = []
    for number in range(200):  # more than the sockets take
        buffer.fill_(number)
        leaving.append(left.send(1, 0, [buffer], "test"))
    for number in range(200):
        right.receive(0, 0, [received], "test").wait()
        assert received.eq(number).all()
    for pending in leaving:
        pending.wait()


@both
def test_long_messages_move_while_nobody_waits(connect: Connect) -> None:
    left, right = connect(2)
    for _ in range(2):
        received = torch.empty(MUCH)
        coming = right.receive(0, 0, [received], "x")
        leaving = left.send(1, 0, [torch.ones(MUCH)], "x")
        until(coming.done)
        until(leaving.done)
        assert received.eq(1).all()


def test_short_messages_move_while_nobody_waits_if_they_are_watched() -> None:
    left, right = over_tcp(2)
    received = torch.empty(10)
    coming = right.receive(0, 0, [received], "x")
    coming.watch()
    left.send(1, 0, [torch.ones(10)], "x")
    until(coming.done)
    coming.wait()
    assert received.eq(1).all()


def test_a_ring_of_ranks_that_all_send_before_they_receive() -> None:
    ends = over_tcp(3)

    def one(rank: int) -> None:
        data, received = torch.full((MUCH,), float(rank)), torch.empty(MUCH)
        short = [ends[rank].send((rank + 1) % 3, 1, [data[:SHORT]], "short") for _ in range(300)]
        leaving = ends[rank].send((rank + 1) % 3, 0, [data], "ring")
        ends[rank].receive((rank + 2) % 3, 0, [received], "ring").wait()
        leaving.wait()
        for _ in range(300):
            ends[rank].receive((rank + 2) % 3, 1, [received[:SHORT]], "short").wait()
        for pending in short:
            pending.wait()
        assert received.eq((rank + 2) % 3).all()

    on_ranks(3, one)


def test_many_threads_wait_at_once() -> None:
    ends = over_tcp(2)

    def one(thread: int) -> None:
        rank, lane = thread % 2, thread // 2
        for size in (1, SHORT, 200_000) * 10:
            sent, received = torch.full((size,), float(lane)), torch.empty(size)
            leaving = ends[rank].send(1 - rank, lane, [sent], "x")
            ends[rank].receive(1 - rank, lane, [received], "x").wait()
            leaving.wait()
            assert received.eq(lane).all()

    on_ranks(12, one)


@both
def test_another_size_or_another_operation(connect: Connect) -> None:
    for sent, expected in ((1, 2), (1, MUCH), (MUCH, 1), (MUCH, MUCH + 1), (SHORT, SHORT + 1)):
        for send_first in (True, False):
            left, right = connect(2)
            if send_first:
                left.send(1, 0, [torch.ones(sent)], "stages")
            receiving = right.receive(0, 0, [torch.ones(expected)], "stages")
            if not send_first:
                left.send(1, 0, [torch.ones(sent)], "stages")
            error = failure(receiving.wait)
            assert error.kind in ("mismatch", "peer_lost") and "the ranks run different programs" in str(
                error
            )
    left, right = connect(2)
    left.send(1, 0, [numbers(1)], "forward of step 3")
    error = failure(right.receive(0, 0, [numbers(1)], "forward of step 4").wait)
    assert str(error) == (
        "forward of step 4: rank 1 got a message of another operation of rank 0: the ranks run different"
        " operations"
    )
    error = failure(left.receive(1, 5, [numbers(1)], "other").wait)
    assert "rank 0 has lost rank 1 (it gave up: forward of step 4: rank 1 got a message" in str(error)


def test_nothing_comes_and_nothing_can_be_sent(capfd: pytest.CaptureFixture[str]) -> None:
    left, _right = over_tcp(2)
    left.set_timeout(0.1)
    late = left.receive(1, 0, [numbers(0)], "stages")
    with pytest.raises(
        EngineError,
        match=r"^stages: rank 0 heard nothing of rank 1 within 0\.1 s; look for the first error on rank 1$",
    ):
        late.wait()
    said = "commsched: rank 0 has waited 0.01 s for rank 1 in stages; it waits 0.1 s (COMMSCHED_TIMEOUT)\n"
    assert capfd.readouterr().err == said
    unread = [left.send(1, 0, [torch.ones(SHORT)], "stages") for _ in range(200)]
    for pending in (unread[-1], left.send(1, 1, [torch.ones(MUCH)], "stages")):
        error = failure(pending.wait)
        assert "stages: rank 0 could send nothing to rank 1 within 0.1 s" in str(error)
        assert (error.kind, error.rank, error.peer, error.op) == ("timeout", 0, 1, "stages")


def test_the_warning_comes_when_it_was_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    """It came after a tenth of the time-out, or after 30 s."""
    left, _right = over_tcp(2)
    left.set_timeout(0.4)
    try:
        for asked, said in (
            (0.2, ["commsched: rank 0 has waited 0.2 s for rank 1 in x; it waits 0.4 s"]),
            (math.inf, []),
        ):
            set_warning(asked)
            failure(left.receive(1, 0, [numbers(0)], "x").wait)
            assert [line.partition(" (COMM")[0] for line in capfd.readouterr().err.splitlines()] == said
    finally:
        set_warning(0)


def test_a_message_that_came_late_still_arrives() -> None:
    left, right = over_tcp(2)
    left.set_timeout(0.05)
    received = torch.zeros(3)
    coming = left.receive(1, 0, [received], "x")
    failure(coming.wait)
    right.send(0, 0, [torch.ones(3)], "x").wait()
    left.set_timeout(LONG)
    coming.wait()
    assert received.eq(1).all()


def test_the_buffers_of_a_dropped_message_live_until_it_is_over() -> None:
    left, right = over_tcp(2)
    array = np.empty(MUCH, dtype=np.float32)
    memory = weakref.ref(array)
    right.receive(0, 0, [torch.from_numpy(array)], "x")
    del array
    gc.collect()
    assert memory() is not None
    left.send(1, 0, [torch.ones(MUCH)], "x").wait()
    until(lambda: memory() is None)


def test_an_abort_ends_every_wait_here_and_there() -> None:
    ends = over_tcp(3)
    waits: list[Callable[[], object]] = [
        ends[0].receive(1, 0, [numbers(0)], "tiles").wait,
        ends[0].send(2, 0, [torch.ones(MUCH)], "tiles").wait,
        ends[1].receive(0, 3, [torch.ones(MUCH)], "tiles").wait,
        ends[2].receive(0, 3, [numbers(1)], "tiles").wait,
    ]
    errors: list[str] = [""] * len(waits)

    def one(index: int) -> None:
        errors[index] = str(failure(waits[index]))

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(waits))]
    for thread in threads:
        thread.start()
    ends[0].abort("the disk of rank 0 is full")
    for thread in threads:
        thread.join()
    assert errors[0] == "tiles: rank 0 waited for rank 1, but the disk of rank 0 is full"
    assert errors[1] == "tiles: rank 0 waited for rank 2, but the disk of rank 0 is full"
    for rank in (1, 2):
        assert errors[rank + 1] == (
            f"tiles: rank {rank} has lost rank 0 (it gave up: the disk of rank 0 is full);"
            " look for the first error on rank 0"
        )
    assert "the disk of rank 0 is full" in str(failure(ends[0].send(1, 0, [numbers(1)], "x").wait))


def test_the_first_culprit_is_passed_on() -> None:
    ends = over_tcp(3)
    ends[2].abort("out of memory")
    failure(ends[1].receive(2, 0, [numbers(0)], "x").wait)
    ends[1].abort("rank 1 lost rank 2")
    error = failure(ends[0].receive(1, 0, [numbers(0)], "x").wait)
    assert "look for the first error on rank 2" in str(error) and error.peer == 2


@both
def test_what_was_sent_before_the_end_still_arrives(connect: Connect) -> None:
    left, right = connect(2)
    for _ in range(100):  # more than the sockets take
        right.send(0, 0, [torch.full((SHORT // 2,), 3.0)], "stages")
    closing = threading.Thread(target=right.close)
    closing.start()
    received = torch.empty(SHORT // 2)
    for _ in range(100):
        left.receive(1, 0, [received.zero_()], "stages").wait()
        assert received.eq(3).all()
    closing.join()
    error = failure(left.receive(1, 0, [received], "stages").wait)
    assert "rank 0 has lost rank 1 (it gave up: rank 1 closed its connections)" in str(error)
    assert "rank 0 has lost rank 1" in str(failure(left.send(1, 0, [received], "stages").wait))


def test_a_full_socket_loses_no_farewell() -> None:
    """With one number of messages, the last takes the socket's last room, and the farewell found none."""
    for count in range(1, 24):
        left, right = over_local(2)
        for _ in range(count):
            right.send(0, 0, [torch.ones(SHORT)], "stages")
        closing = threading.Thread(target=right.close)
        closing.start()
        closing.join(0.1)
        received = torch.empty(SHORT)
        for _ in range(count):
            left.receive(1, 0, [received], "stages").wait()
        error = failure(left.receive(1, 0, [received], "stages").wait)
        assert "it gave up: rank 1 closed its connections" in str(error), count
        closing.join()
        left.close()


@both
def test_closing_gives_back_threads_and_descriptors(connect: Connect) -> None:
    gc.collect()
    before = threads_and_files()
    ends = connect(2)
    late = ends[0].receive(1, 0, [torch.ones(MUCH)], "x")
    coming, leaving = (
        ends[1].receive(0, 0, [torch.empty(MUCH)], "x"),
        ends[0].send(1, 0, [torch.ones(MUCH)], "x"),
    )
    coming.wait()
    leaving.wait()
    for end in ends * 2:
        end.close()
    assert not left_over(before)
    assert "closed its connections" in str(failure(late.wait))
    assert "closed its connections" in str(failure(ends[1].send(0, 0, [numbers(1)], "x").wait))


def test_a_channel_without_references_closes() -> None:
    gc.collect()
    before = threads_and_files()
    left, right = over_local(2)
    late: list[PendingMessages] = [right.receive(0, 0, [torch.empty(MUCH)], "x")]
    del left, right
    gc.collect()
    assert "has lost rank 0" in str(failure(late[0].wait))
    late.clear()
    gc.collect()
    assert not left_over(before)


def test_a_turn_at_the_gate_ends_with_its_messages() -> None:
    gate = link_gate()
    left, right = over_tcp(2)
    for size in (10, MUCH):
        coming = right.exchange([], [(0, [torch.empty(size)])], 0, "halo", Traffic.halo)
        coming.watch()
        left.send(1, 0, [torch.ones(size)], "halo").wait()
        until(coming.done)
        number = gate.begin(Traffic.activation, 1, LONG)  # does not wait, or the test would take MUCH longer
        gate.end(number)
    failing = right.exchange([], [(0, [torch.empty(1)])], 0, "halo", Traffic.halo)
    left.abort("on purpose")
    failure(failing.wait)
    gate.end(gate.begin(Traffic.activation, 1, LONG))


def test_nonsense_is_refused() -> None:
    left, _right = over_local(2)
    assert "rank 0 of 2 has no connection to rank 0" in str(
        failure(lambda: left.send(0, 0, [numbers(1)], "x"))
    )
    assert "no connection to rank 7" in str(failure(lambda: left.send(7, 0, [numbers(1)], "x")))
    strided = torch.ones(4, 4).t()
    assert "contiguous tensors on the CPU" in str(failure(lambda: left.send(1, 0, [strided], "x")))
    meta = torch.ones(1, device="meta")
    assert "contiguous tensors on the CPU" in str(failure(lambda: left.send(1, 0, [meta], "x")))


FORKED = """
import os, signal, sys, torch
from comm_core import EngineError, local_message_channels
signal.alarm(100)
left, right = local_message_channels(2)
late = right.receive(0, 0, [torch.empty(4 << 20)], "x")  # starts the thread
late.watch()
child = os.fork()
if child == 0:
    for call in (late.wait, lambda: left.send(1, 0, [torch.ones(1)], "x")):
        try:
            call()
        except EngineError as error:
            assert "forked" in str(error), error
        else:
            os._exit(3)
    left.abort("a child's")
    left.close()
    del left, right, late
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
leaving = left.send(1, 0, [torch.ones(4 << 20)], "x")
late.wait()
leaving.wait()
print("alive")
"""


def test_a_forked_child_neither_hangs_nor_disturbs() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0 and ran.stdout == "alive\n", ran.stderr


DYING = """
import os, sys, torch
from torch.distributed import TCPStore
from comm_core import message_channel, tcp_connections
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
channel = message_channel(1, tcp_connections(store, 1, 2, "127.0.0.1"))
channel.receive(0, 0, [torch.ones(1)], "go").wait()
os.kill(os.getpid(), 9)
"""


def test_a_process_that_dies_is_noticed() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with subprocess.Popen([sys.executable, "-c", DYING, str(store.port)], cwd=ROOT):
        channel = message_channel(0, tcp_connections(store, 0, 2, "127.0.0.1"))
        coming = channel.receive(1, 0, [torch.empty(MUCH)], "stages")
        leaving = channel.send(1, 1, [torch.empty(MUCH)], "stages")
        channel.send(1, 0, [torch.ones(1)], "go")
        for pending in (coming, leaving):
            error = failure(pending.wait)
            assert (error.kind, error.peer) == ("peer_lost", 1)
            assert "stages: rank 0 has lost rank 1 (" in str(error)
