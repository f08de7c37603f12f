"""The modules that own an optimizer's parameters, found among all objects."""

from __future__ import annotations

import threading

from torch import nn

from commsched.optimizer.hooks import owners


def test_threads_may_build_tuples_meanwhile() -> None:
    """A tuple that grows from a generator must have one holder. `gc.get_objects` holds all tuples: in threads
    of a job, ``f(*(x for x in y))`` failed now and then with "bad argument to internal function".
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    params = list(model.parameters())
    ended, failed = threading.Event(), []

    def build() -> None:
        while not ended.is_set():
            try:
                tuple(number for number in range(2000))
            except SystemError as error:
                failed.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    found = [owners(params) for _ in range(30)]
    ended.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert found == [[(model[0], (0, 1)), (model[1], (2, 3))]] * 30


class Proxy:
    """Says that it is a module, and is none."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise AssertionError("nobody may ask")


def test_proxies_are_not_asked() -> None:
    kept = [Proxy()]
    model = nn.Linear(2, 2)
    assert owners(list(model.parameters())) == [(model, (0, 1))] and kept
