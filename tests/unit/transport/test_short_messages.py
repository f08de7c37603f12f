"""Short messages over sockets: order, what the socket does not take at once, and what is said of failures."""

from __future__ import annotations

import socket
import threading
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core import Host, TcpConnection
from commsched.errors import CommError
from commsched.transport.short_messages import MOST_BYTES, ShortMessages


def pair(timeout: float = 10.0) -> tuple[ShortMessages, ShortMessages]:
    """Ranks 0 and 1."""
    data, keepalive = socket.socketpair(), connected()
    left, right = (TcpConnection(data[i], Host(keepalive[i], 25.0)) for i in range(2))
    return ShortMessages(0, [None, left], timeout), ShortMessages(1, [right, None], timeout)


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_a_message_of_several_buffers_of_any_type() -> None:
    left, right = pair()
    sent = [torch.randn(5).to(torch.bfloat16), torch.arange(3), torch.tensor([True, False])]
    received = [torch.empty_like(buffer) for buffer in sent]
    left.send(1, 7, sent, "test").wait()
    right.receive(0, 7, received, "test").wait()
    for one, other in zip(sent, received, strict=True):
        assert torch.equal(one, other)


def test_a_message_of_more_buffers_than_a_system_call_takes() -> None:
    left, right = pair()
    received = [numbers(0) for _ in range(1500)]
    left.send(1, 0, [numbers(i) for i in range(1500)], "test").wait()
    right.receive(0, 0, received, "test").wait()
    assert [float(value) for value in received] == list(range(1500))


def test_what_is_sent_may_be_written_over_at_once() -> None:
    left, right = pair()
    buffer, received = torch.ones(MOST_BYTES // 4), torch.empty(MOST_BYTES // 4)
    leaving = []
    for number in range(20):  # more than the sockets take
        buffer.fill_(number)
        leaving.append(left.send(1, 0, [buffer], "test"))
    for number in range(20):
        right.receive(0, 0, [received], "test").wait()
        assert torch.equal(received, torch.full_like(received, number))
    for pending in leaving:
        pending.wait()


def test_both_send_more_than_the_sockets_take_before_anybody_receives() -> None:
    ends = pair()
    buffer = torch.ones(MOST_BYTES // 4)
    leaving = [end.send(1 - rank, 0, [buffer], "test") for _ in range(40) for rank, end in enumerate(ends)]
    coming = [
        end.receive(1 - rank, 0, [torch.empty_like(buffer)], "test")
        for _ in range(40)
        for rank, end in enumerate(ends)
    ]
    for pending in (*coming, *leaving):
        pending.wait()


Message = tuple[int, int]
"""Lane and number of elements."""


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 3, 100, MOST_BYTES // 4])), max_size=30),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_lanes_keep_their_order_however_they_are_asked_for(messages: list[Message], random) -> None:
    left, right = pair()
    lanes = defaultdict(list)
    for number, (lane, size) in enumerate(messages):
        sent = torch.full((size,), float(number))
        left.send(1, lane, [sent], "test")
        lanes[lane].append(sent)
    wanted = [lane for lane, sent in lanes.items() for _ in sent]
    random.shuffle(wanted)
    found = defaultdict(list)
    pendings = []
    for lane in wanted:  # asked for in any order of the lanes, some ahead of others
        buffer = torch.empty_like(lanes[lane][len(found[lane])])
        found[lane].append(buffer)
        pendings.append(right.receive(0, lane, [buffer], "test"))
        if random.random() < 0.5:
            pendings.pop(random.randrange(len(pendings))).wait()
    random.shuffle(pendings)
    for pending in pendings:
        pending.wait()
    for lane, sent in lanes.items():
        for one, other in zip(sent, found[lane], strict=True):
            assert torch.equal(one, other)


def test_nothing_comes() -> None:
    left, _right = pair(timeout=0.1)
    with pytest.raises(CommError, match=r"stages: rank 0 has lost rank 1 .*0\.1 s"):
        left.receive(1, 0, [numbers(0)], "stages").wait()


def test_nobody_takes_what_is_sent() -> None:
    left, _right = pair(timeout=0.2)
    leaving = [left.send(1, 0, [torch.ones(MOST_BYTES // 4)], "stages") for _ in range(40)]
    with pytest.raises(CommError, match=r"rank 0 has lost rank 1 .*could be sent within 0\.2 s"):
        leaving[-1].wait()


def test_a_rank_that_gives_up_is_noticed_by_who_waits_for_it() -> None:
    left, right = pair()
    said: list[str] = []

    def wait() -> None:
        try:
            left.receive(1, 0, [numbers(0)], "stages").wait()
        except CommError as error:
            said.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    right.abort()
    waiting.join(5)
    assert len(said) == 1 and "lost rank 1" in said[0] and "first error on rank 1" in said[0]


def test_what_was_sent_before_the_end_still_arrives() -> None:
    left, right = pair()
    right.send(0, 0, [numbers(1, 2)], "stages").wait()
    right.abort()
    received = numbers(0, 0)
    left.receive(1, 0, [received], "stages").wait()
    assert received.tolist() == [1, 2]
    with pytest.raises(CommError, match="lost rank 1"):
        for _ in range(2):
            left.send(1, 0, [numbers(3)], "stages").wait()


@pytest.mark.parametrize("early", [False, True])
def test_a_message_of_another_size(early: bool) -> None:
    left, right = pair()
    left.send(1, 3, [numbers(1, 2)], "stages")
    left.send(1, 4, [numbers(1)], "stages")
    if early:
        right.receive(0, 4, [numbers(0)], "stages").wait()
    with pytest.raises(CommError, match="rank 1 expected 4 bytes of rank 0 and got 8: the ranks run"):
        right.receive(0, 3, [numbers(0)], "stages").wait()
