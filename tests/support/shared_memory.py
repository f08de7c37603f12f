"""Files in ``/dev/shm`` that tests leave behind."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path("/dev/shm")


@contextmanager
def nothing_left_in_shared_memory() -> Iterator[None]:
    """Fail where the block leaves a file that no process has open or mapped.

    Files of tests that run at the same time have a process that holds them.
    """
    before = set(os.listdir(FOLDER))
    yield
    left = sorted(set(os.listdir(FOLDER)) - before - _held())
    assert not left, f"left in {FOLDER}: {left}"


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
