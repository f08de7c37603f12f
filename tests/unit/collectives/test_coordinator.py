"""Rank 0's coordinator thread: ranks do not wait for ever when it fails."""

import json
import os
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from commsched.collectives.torch_carrier import coordinator as coordinator_module
from commsched.collectives.torch_carrier.coordinator import Coordinator, RankConnection, send

BYE = '{{"type": "bye", "error": {}}}'


def end(coordinator: Coordinator, ranks: list[RankConnection], staying: list[RankConnection]) -> None:
    """Let the ranks that have stayed leave, and the coordinator end."""
    for line in staying:
        send(line.messages, [BYE.format('""')])
    coordinator.join(100)
    assert not coordinator.is_alive()
    for line in ranks:
        line.close()


@pytest.mark.parametrize("error", ["", "CommError: rank 7 is lost"])
@pytest.mark.parametrize("leaving", [0, 1])
def test_every_rank_is_told_who_has_left(leaving: int, error: str) -> None:
    """Only rank 0's leave was told: others waited in vain for new connections to a rank that had left. A rank
    that still looked for the cause heard of a rank that had ended for that cause, and named that one.
    """
    pairs = [Pipe() for _ in range(3)]
    coordinator = Coordinator([RankConnection(end) for _, end in pairs], 30.0)
    coordinator.start()
    ranks = [RankConnection(end) for end, _ in pairs]
    send(ranks[leaving].messages, [BYE.format(json.dumps(error))])
    staying = [line for rank, line in enumerate(ranks) if rank != leaving]
    for line in staying:
        assert line.messages.poll(100), "it is not told"
        cause = f"after {error}" if error else "(its script ended or called shutdown())"
        reason = f"rank {leaving} has left the job {cause}"
        assert line.receive() == [{"type": "left", "ranks": [[leaving, reason]]}]
    end(coordinator, ranks, staying)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_the_coordinator_fails_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    pairs = [Pipe() for _ in range(2)]
    coordinator = Coordinator([RankConnection(end) for _, end in pairs], 30.0)
    coordinator.start()
    ranks = [RankConnection(end) for end, _ in pairs]
    send(ranks[0].messages, ['{"type": "request"}'])  # of nothing
    for line in ranks:
        assert line.messages.poll(100), "it still waits"
        with pytest.raises((EOFError, ConnectionError)):
            line.receive()
        line.close()
    coordinator.join(100)
    assert not coordinator.is_alive()


def test_close_ends_a_read_in_the_middle_of_a_message() -> None:
    """The read went on with the number of the closed descriptor, which the next file got; or what came later
    told a rank in its next job who had left the last one, so that it missed a rank of the same number.
    """
    theirs, mine = Pipe()
    line, results = RankConnection(mine), []

    def listen() -> None:
        try:
            results.append(line.receive())
        except OSError as error:
            results.append(error)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    body = json.dumps([{"type": "left", "ranks": [[1, "rank 1 has left"]]}]).encode()
    os.write(theirs.fileno(), struct.pack("!i", len(body)) + body[:9])
    time.sleep(0.2)  # it reads
    line.close()
    with pytest.raises(BrokenPipeError):
        os.write(theirs.fileno(), body[9:])
    listener.join(100)
    assert not listener.is_alive() and isinstance(results[0], OSError), results


def test_a_descriptor_is_closed_after_the_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two reads of one message, its number may already be another file's."""
    theirs, mine = Pipe()
    line, begun, go_on = RankConnection(mine), threading.Event(), threading.Event()

    def slow(connection: Connection) -> bool:
        begun.set()
        go_on.wait(100)
        return connection.closed

    monkeypatch.setattr(coordinator_module, "receive", slow)
    with ThreadPoolExecutor(2) as threads:
        theirs.send_bytes(b"a message")
        was_closed = threads.submit(line.receive)
        assert begun.wait(100)
        closing = threads.submit(line.close)
        theirs.poll(100)  # close() has ended the connection
        assert not mine.closed and not closing.done()
        go_on.set()
        closing.result(100)
        assert not was_closed.result(100) and mine.closed


def sums(*names, start=0):
    """Requests for sums of one number, each with a number of its own."""
    fields = {"type": "request", "kind": "allreduce", "set": 0, "dtypes": ["torch.float32"], "shapes": [[1]]}
    fields |= {"device": "cpu", "root": -1, "splits": None, "ranks": None, "bytes": 4}
    fields |= {"op": 1, "prescale": 1.0, "postscale": 1.0}
    return [json.dumps(fields | {"name": name, "number": i}) for i, name in enumerate(names, start)]


def test_requests_that_come_together_are_answered_together_and_repeated_by_number() -> None:
    pairs = [Pipe() for _ in range(2)]
    coordinator = Coordinator([RankConnection(end) for _, end in pairs], 30.0, fusion_threshold=8)
    coordinator.start()
    ranks = [RankConnection(end) for end, _ in pairs]

    def answers(*texts: list[str]) -> list[list[str]]:
        for line, said in zip(ranks, texts, strict=True):
            send(line.messages, said)
        heard = [line.receive() for line in ranks]
        assert heard[0] == heard[1] and all(message["type"] == "run" for message in heard[0]), heard
        return [message["names"] for message in heard[0]]

    # The ranks have an order of their own, and give numbers of their own.
    assert answers(sums("a", "b", "c"), sums("c", "b", "a", start=5)) in (
        [["a", "b"], ["c"]],  # rank 0's requests were read last
        [["c", "b"], ["a"]],
    )
    assert answers(["1"], ["6"]) == [["b"]]
    # One has a request as a number, the other one is new to it; and a number is given to another request.
    assert answers(["2"], sums("c", start=9)) == [["c"]]
    assert answers(sums("d", start=1), sums("d", start=6)) == [["d"]]
    assert answers(["1"], ["6"]) == [["d"]]
    # What differs is found although one rank sends a number only.
    other = sums("a", start=7)[0].replace("[[1]]", "[[2]]")
    send(ranks[0].messages, ["0"])
    send(ranks[1].messages, [other])
    for line in ranks:
        (message,) = line.receive()
        assert message["type"] == "error" and "rank 0 has [[1]], rank 1 has [[2]]" in message["message"]
    end(coordinator, ranks, ranks)
