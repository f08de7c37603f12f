"""Ranks come to an agreement through the job's store, which tells who has joined, and who is missing."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from commsched.backends.ranks import Ranks
from commsched.errors import CommError


def ranks_of(size: int, store: Any, monkeypatch: pytest.MonkeyPatch) -> list[Ranks]:
    monkeypatch.setattr(Ranks, "_store", lambda self, kind: PrefixStore(kind, store))
    sets: list[Any] = [
        SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size, ranks=None) for rank in range(size)
    ]
    return [Ranks(process_set) for process_set in sets]


def store_threads() -> int:
    return sum(thread.name == "commsched-store" for thread in threading.enumerate())


def test_all_learn_whether_some_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    ranks = ranks_of(3, store, monkeypatch)
    for joined in (None, 1, None, 0):
        early = [each.arrive(each.rank == joined, 60.0) for each in ranks[:2]]
        time.sleep(0.05)
        assert not any(future.done() for future in early), "a rank that had not come was not waited for"
        late = ranks[2].arrive(False, 60.0)
        assert [future.result(60) for future in (*early, late)] == [joined is not None] * 3
    assert store.num_keys() == 1, "the keys of former agreements are still there"


def test_a_rank_that_comes_last_asks_the_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question takes two ways on a slow link, behind the gradients; ``append`` waits for no answer."""
    first, second = ranks_of(2, HashStore(), monkeypatch)
    asked, store = list[str](), second._store("meetings")

    class Counted:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(store, name)

    waits = first.arrive(False, 60.0)
    while not store.num_keys():
        time.sleep(0.01)
    monkeypatch.setattr(second, "_store", lambda kind: Counted())
    assert not second.arrive(False, 60.0).result(60) and not waits.result(60)
    assert asked == ["append", "compare_set"]


def test_who_has_not_come_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    first, *_ = ranks_of(3, HashStore(), monkeypatch)
    with pytest.raises(CommError, match=r"rank 0 has waited 0\.2 s \(COMMSCHED_TIMEOUT\) for ranks 1, 2 to"):
        first.arrive(False, 0.2).result(60)
    monkeypatch.setattr("commsched.backends.ranks.settings", lambda: SimpleNamespace(warning=0.05))
    waits = first.arrive(False, 60.0)
    while "ranks 1, 2 to agree on a plan" not in caplog.text:
        time.sleep(0.01)
    assert waits.cancel()


def test_a_wait_that_is_given_up_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = ranks_of(2, HashStore(), monkeypatch)
    while store_threads():  # of the tests before
        time.sleep(0.01)
    waits: Future[bool] = first.arrive(True)
    assert store_threads() == 1 and waits.cancel()
    while store_threads():
        time.sleep(0.01)


def test_a_store_that_has_ended_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(HashStore):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise RuntimeError("Connection reset by peer\n#0 some frame")

    _, second = ranks_of(2, None, monkeypatch)
    monkeypatch.setattr(Ranks, "_store", lambda self, kind: Ended())
    with pytest.raises(CommError, match=r"rank 1: the job's store .* rank 0's process .* reset by peer$"):
        second.arrive(False, 60.0).result(60)
