"""The link's gate: halos before activations before gradients, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from comm_core import (
    DirectTransport,
    Engine,
    EngineError,
    PythonTransport,
    RingTransport,
    Traffic,
    Transport,
    link_gate,
    local_channels,
)
from tests.support.engines import on_ranks, run_step

HALO, ACTIVATION, GRADIENT = Traffic.halo, Traffic.activation, Traffic.gradient
LONG = 3600.0  # seconds that no test waits


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    link_gate().record(True)
    yield
    link_gate().record(False)


def until(condition: Callable[[], bool]) -> None:
    """However long the other threads take to get there."""
    while not condition():
        time.sleep(0.001)


def until_held_back(count: int = 1) -> None:
    until(lambda: link_gate().held_back() == count)


def later(traffic: Traffic) -> tuple[threading.Thread, list[float]]:
    """A message of this class that asks for the link now, and when it got it."""
    started: list[float] = []

    def run() -> None:
        link_gate().passing(traffic, 1)
        started.append(time.monotonic())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, started


@pytest.mark.parametrize(("urgent", "other"), [(HALO, GRADIENT), (HALO, ACTIVATION), (ACTIVATION, GRADIENT)])
def test_the_less_urgent_waits_for_the_end_of_the_urgent(urgent: Traffic, other: Traffic) -> None:
    gate = link_gate()
    first, second = gate.begin(urgent, 100, LONG), gate.begin(urgent, 100, LONG)
    thread, started = later(other)
    until_held_back()
    gate.end(first)
    time.sleep(0.05)
    assert not started
    gate.end(second)
    thread.join()
    assert started and gate.held_back() == 0
    passages = gate.passages()
    of_other = [p for p in passages if p["traffic"] == other.value]
    ends = sorted(p["end"] for p in passages if p["traffic"] == urgent.value)
    assert len(of_other) == 1 and of_other[0]["waiting"] == 0
    assert of_other[0]["asked"] < ends[0] < ends[1] <= of_other[0]["start"]


@pytest.mark.parametrize(("urgent", "other"), [(HALO, GRADIENT), (HALO, ACTIVATION), (ACTIVATION, GRADIENT)])
def test_the_urgent_waits_for_nobody(urgent: Traffic, other: Traffic) -> None:
    gate = link_gate()
    number = gate.begin(other, 100, LONG)
    for same_or_more in (urgent, other):
        thread, started = later(same_or_more)
        thread.join()
        assert started
    gate.end(number)


def test_patience_ends() -> None:
    gate = link_gate()
    number = gate.begin(HALO, 100, 0.1)
    start = time.monotonic()
    gate.passing(GRADIENT, 1)
    assert time.monotonic() - start > 0.09
    gate.end(number)
    assert gate.passages()[0]["waiting"] == 1


def test_an_activation_that_begins_waits_its_turn() -> None:
    gate = link_gate()
    halo = gate.begin(HALO, 100, LONG)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(gate.begin, ACTIVATION, 10, LONG)
        until_held_back()
        assert not future.done()
        gate.end(halo)
        gate.end(future.result())


@pytest.mark.parametrize("kind", [DirectTransport, RingTransport])
def test_no_segment_starts_while_a_halo_waits(kind: type) -> None:
    """Engines reduce and gather while halos come and go: every segment passes the gate between them."""
    gate, channels, size, segment, elements, steps = link_gate(), local_channels(2), 2, 64, 2048, 20
    stop = threading.Event()

    first = gate.begin(HALO, 1, LONG)

    def halos() -> None:
        until_held_back(size)  # so that at least these have waited
        gate.end(first)
        while not stop.is_set():
            number = gate.begin(HALO, 1, LONG)
            time.sleep(0.002)
            gate.end(number)
            time.sleep(0.0005)

    def rank(number: int) -> torch.Tensor:
        transport = kind(channels[number], number, size, segment_bytes=segment, depth=2)
        engine = Engine(transport, number, size, LONG)
        data = torch.full((elements,), float(number + 1))
        engine.add_bucket(data)
        engine.install([("RS", 0), ("AG", 0)])
        for _ in range(steps):
            data.fill_(float(number + 1))
            run_step(engine, [0])
        engine.close()
        return data

    thread = threading.Thread(target=halos, daemon=True)
    thread.start()
    results = on_ranks(size, rank)
    stop.set()
    thread.join()
    assert all(bool((data == 3).all()) for data in results)
    passages = gate.passages()
    chunks, others = (passages[passages["traffic"] == t.value] for t in (GRADIENT, HALO))
    # Each rank sends half of the bucket in RS and half in AG, in segments.
    assert len(chunks) == size * steps * 2 * (elements // 2 * 4 // segment)
    assert (chunks["bytes"] == segment).all() and (chunks["waiting"] == 0).all()
    assert (chunks["asked"] < others["end"].min()).sum() >= size
    for halo in others:
        assert not ((chunks["start"] > halo["start"]) & (chunks["start"] < halo["end"])).any()


def started(transport: Transport) -> Engine:
    """An engine that has begun to reduce a bucket of 64 segments of 64 bytes, with one peer at most."""
    engine = Engine(transport, 0, transport.size, LONG)
    engine.add_bucket(torch.zeros(1024 * transport.size))
    engine.install([("RS", 0), ("AG", 0)])
    engine.begin_step()
    engine.mark_ready(0)
    return engine


def test_little_is_under_way_where_halos_come_and_go() -> None:
    """A segment that has started is not called back: beside halos one starts at a time. Nobody answers."""
    gate = link_gate()

    def of_engine() -> np.ndarray:
        return np.array([p for p in gate.passages(clear=False) if p["bytes"] > 1], gate.passages(False).dtype)

    time.sleep(1.05)  # a halo is forgotten after a second
    for urgent, expected in ((GRADIENT, 3), (HALO, 1)):
        for kind in (DirectTransport, RingTransport):
            longest = 1.0
            while longest > 0.5:  # a halo was almost forgotten: this machine is busy, try once more
                gate.passages()
                gate.end(gate.begin(urgent, 1, LONG))
                mine, silent = local_channels(2)
                engine = started(kind(mine, 0, 2, segment_bytes=64, depth=3))
                longest, last = 0.0, time.monotonic()
                while len(of_engine()) < expected:
                    gate.end(gate.begin(urgent, 1, LONG))
                    longest, last = max(longest, time.monotonic() - last), time.monotonic()
                    time.sleep(0.001)
                time.sleep(0.05)
                engine.abort("enough")
                engine.close()
                longest = max(longest, time.monotonic() - last)
            assert list(of_engine()["bytes"]) == [64] * expected, (urgent, kind, silent)
            gate.passages()


class Alone:
    """The collectives of a rank without others, as a Python transport wants them."""

    rank, size = 0, 1

    def scatter_sum(self, full: torch.Tensor, shard: torch.Tensor, name: str) -> None:
        shard.copy_(full)

    def gather(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        full.copy_(shard)


def test_whole_collectives_wait_for_halos_too() -> None:
    gate = link_gate()
    number = gate.begin(HALO, 1, LONG)
    engine = started(PythonTransport(Alone()))
    until_held_back()
    assert not len(gate.passages())
    gate.end(number)
    engine.wait_all()
    engine.close()
    passages = gate.passages()
    chunks = [p for p in passages if p["traffic"] == GRADIENT.value]
    (halo,) = [p for p in passages if p["traffic"] == HALO.value]
    assert [int(p["bytes"]) for p in chunks] == [4096, 4096]
    assert chunks[0]["asked"] < halo["end"] <= chunks[0]["start"]


@pytest.mark.parametrize("collectives", [False, True])
def test_an_engine_that_is_aborted_leaves_the_gate(collectives: bool) -> None:
    gate = link_gate()
    number = gate.begin(HALO, 1, LONG)
    channels = local_channels(2)  # the other one stays open
    exchange = DirectTransport(channels[0], 0, 2)
    engine = started(PythonTransport(Alone()) if collectives else exchange)
    until_held_back()
    engine.abort("enough")
    with pytest.raises(EngineError, match="enough"):
        engine.wait_all()
    engine.close()
    until_held_back(0)  # while the halo is still under way
    gate.end(number)
