"""Rank 0's coordinator thread: ranks do not wait for ever when it fails."""

import json
import os
import struct
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe

import pytest

from commsched.collectives.torch_carrier.coordinator import Coordinator, RankConnection, send


@pytest.mark.parametrize("leaving", [0, 1])
def test_every_rank_is_told_who_has_left(leaving: int) -> None:
    """Only rank 0's leave was told: others waited in vain for new connections to a rank that had left."""
    pairs = [Pipe() for _ in range(3)]
    coordinator = Coordinator([RankConnection(end) for _, end in pairs], 30.0)
    coordinator.start()
    ranks = [RankConnection(end) for end, _ in pairs]
    send(ranks[leaving].messages, {"type": "bye"})
    staying = [line for rank, line in enumerate(ranks) if rank != leaving]
    for line in staying:
        assert line.messages.poll(100), "it is not told"
        reason = f"rank {leaving} has left the job (its script ended or called shutdown())"
        assert line.receive() == {"type": "left", "ranks": [[leaving, reason]]}
    for line in staying:
        send(line.messages, {"type": "bye"})
    coordinator.join(100)
    assert not coordinator.is_alive()
    for line in ranks:
        line.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_the_coordinator_fails_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    pairs = [Pipe() for _ in range(2)]
    coordinator = Coordinator([RankConnection(end) for _, end in pairs], 30.0)
    coordinator.start()
    ranks = [RankConnection(end) for end, _ in pairs]
    send(ranks[0].messages, {"type": "request"})  # of nothing
    for line in ranks:
        assert line.messages.poll(100), "it still waits"
        with pytest.raises((EOFError, ConnectionError)):
            line.receive()
        line.close()
    coordinator.join(100)
    assert not coordinator.is_alive()


def test_the_second_half_of_a_message_comes_after_close() -> None:
    """A rank then heard in its next job who had left the last one, and missed a rank of the same number."""
    theirs, mine = Pipe()
    line, results = RankConnection(mine), []

    def listen() -> None:
        try:
            results.append(line.receive())
        except OSError as error:
            results.append(error)

    listener = threading.Thread(target=listen)
    listener.start()
    body = json.dumps({"type": "left", "ranks": [[1, "rank 1 has left"]]}).encode()
    os.write(theirs.fileno(), struct.pack("!i", len(body)) + body[:9])
    time.sleep(0.2)  # it reads
    line.close()
    with suppress(BrokenPipeError):  # on a busy machine it may not have read yet
        os.write(theirs.fileno(), body[9:])
    listener.join(100)
    assert isinstance(results[0], OSError), results
