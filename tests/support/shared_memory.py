"""Files in ``/dev/shm`` that tests leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path("/dev/shm")


SECONDS = 30.0


@contextmanager
def nothing_left_in_shared_memory(seconds: float = SECONDS) -> Iterator[None]:
    """Fail where the block leaves a file that stays for so long, and that no process has open or mapped.

    Tests that run at the same time have files, too: processes hold them, or they go away soon, as the
    semaphores do with which horovodrun runs its script each second.
    """
    before = set(os.listdir(FOLDER))
    yield
    deadline = time.monotonic() + seconds
    left = set(os.listdir(FOLDER)) - before
    while left := (left & set(os.listdir(FOLDER))) - _held():
        assert time.monotonic() < deadline, f"left in {FOLDER}: {sorted(left)}"
        time.sleep(0.2)


def _held() -> Collection[str]:
    names = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process that has ended, or is another user's
            lines = (process / "maps").read_text(errors="replace").splitlines()
            names.update(line.partition(f" {FOLDER}/")[2] for line in lines)
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    names.add(os.readlink(descriptor).removeprefix(f"{FOLDER}/"))
    return names
