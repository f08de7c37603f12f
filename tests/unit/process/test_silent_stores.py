"""The process that serves the job's store is stopped: torch waits for its answer without end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, Store

from commsched.backends import ranks
from commsched.collectives import horovod_carrier
from commsched.env import read_settings
from commsched.errors import CommError
from commsched.process import groups
from commsched.process.launch import Launch


class Silent(Store):
    """Answers nothing for 20 s, then with an error, so that a test of a wait without end ends."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def _wait(self, *_: Any) -> Any:
        self.released.wait(20)
        raise RuntimeError("the test is over")

    set = get = wait = check = delete_key = _wait  # type: ignore[assignment]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    for module in (groups, horovod_carrier, ranks):
        monkeypatch.setattr(module, "settings", lambda: read_settings({"COMMSCHED_TIMEOUT": "0.2"}))
    monkeypatch.setattr(groups, "_GRACE_SECONDS", 0.0, raising=False)
    store = Silent()
    yield store
    store.released.set()
    for thread in threading.enumerate():  # one that comes back from C++ while Python ends aborts the process
        if thread.name == "commsched-store":
            thread.join(60)


def test_a_gloo_group(silent: Silent) -> None:
    with pytest.raises(CommError, match=r"rank 1 of 2 could not connect .* did not answer within 0\.2 s"):
        groups.gloo_group(silent, "data", 1, [0, 1], "127.0.0.1")


def test_the_addresses_of_an_earlier_init(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_carrier, "launcher_server", lambda *_: object())
    launch = Launch("horovodrun", 1, 2, 1, 2, "host0")
    with pytest.raises(CommError, match=r"rank 1 was not told that rank 0 .* did not answer within 0\.2 s"):
        horovod_carrier._forget_former_init(SimpleNamespace(launch=launch, store=silent))  # type: ignore[arg-type]


@pytest.mark.parametrize("has_joined", [False, True])
def test_orders_to_ranks_that_have_joined(
    silent: Silent, monkeypatch: pytest.MonkeyPatch, has_joined: bool
) -> None:
    monkeypatch.setattr(ranks.Ranks, "_store", lambda self, kind: silent)
    process_set: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 2, ranks=None)
    one = ranks.Ranks(process_set)
    one.joined = (0,)
    with pytest.raises(
        CommError, match=r"rank 1: the job's store .* is stopped.* did not answer within 0\.2 s"
    ):
        one.next_order() if has_joined else one.tell_joined("step")


class NcclOnPaper:
    """Connects through the store at once, as ``ProcessGroupNCCL`` does with its first collective."""

    class Options:
        pass

    modes: list[str | None] = []

    def __init__(self, store: Store, rank: int, size: int, options: Any) -> None:
        self.store, self.connected_to = store, None
        self.modes.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.store.get("0")
        self.connected_to = device


def on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NcclOnPaper, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(NcclOnPaper, "modes", [])


def test_an_nccl_group(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited in the first collective, without a limit."""
    on_paper(monkeypatch)
    with pytest.raises(
        CommError,
        match=r"rank 1 of 2 could not connect cuda:3 .* NCCL: .* did not answer within 0\.2 s.*NCCL_DEBUG",
    ):
        groups.nccl_group(silent, "data", 1, [0, 1])


def test_an_nccl_group_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's watchdog ended it for a lost rank, before the failure monitor said which one it was."""
    on_paper(monkeypatch)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    store = torch.distributed.HashStore()
    PrefixStore("data", store).set("0", b"an id")
    group = groups.nccl_group(store, "data", 0, [0, 1])
    assert group.connected_to == torch.device("cuda", 3)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ  # other groups are the script's
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    groups.nccl_group(store, "data", 0, [0, 1])
    assert NcclOnPaper.modes == ["2", "1"]
