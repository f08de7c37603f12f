"""Checkpoints of one rank that is no process of its own, under damage, kills and power cuts.

python -m tests.support.checkpoints damage --times 10000   # flipped bits and zeroed pages
python -m tests.support.checkpoints kills --times 200      # kill -9 at random moments of saves
python -m tests.support.checkpoints cuts --times 4000      # what power cuts at random moments may leave
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from commsched import checkpoint

PAGE = 4096


@contextmanager
def alone() -> Iterator[None]:
    """One rank, without ``commsched.init()``; what this process knows of folders is forgotten before."""
    with mock.patch.multiple(
        checkpoint,
        rank=lambda: 0,
        size=lambda: 1,
        allgather_object=lambda value, name: [value],
        _folders={},
    ):
        yield


def numbered(number: int) -> dict[str, Any]:
    """A state that differs from that of any other number in every page."""
    dice = torch.Generator().manual_seed(number)
    weights = {name: torch.randn(5000, generator=dice) for name in ("first", "second")}
    return {"weights": weights, "number": number, "text": f"state {number}"}


def sign(manifest: Path, data: Any) -> None:
    """Write a manifest that no save has written, with the checksum that it must have."""
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    manifest.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def same(found: dict[str, Any], number: int) -> bool:
    wanted = numbered(number)
    weights = found.pop("weights")
    return (
        found == {name: wanted[name] for name in ("number", "text")}
        and list(weights) == list(wanted["weights"])
        and all(torch.equal(weights[name], value) for name, value in wanted["weights"].items())
    )


def loaded(folder: Path) -> tuple[int, list[str]]:
    """The number of the state that a new process finds (0 for none), whose values must be right; warnings."""
    with alone(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = checkpoint.load({}, folder)
    said = [str(each.message) for each in warned]
    if found is None:
        return 0, said
    number = found["number"]
    assert same(found, number), f"the state {number} differs from the one that was saved"
    return number, said


# -- flipped bits and zeroed pages ---------------------------------------------------------------------------


def damage(folder: Path, count: int, seed: int) -> Counter[str]:
    """Damage the newer of two generations ``count`` times. It must never load with another value."""
    dice, outcomes = random.Random(seed), Counter[str]()
    with alone():
        for number in (1, 2):
            checkpoint.save(numbered(number), folder).wait()
    newest = max(folder.iterdir())
    files = {path: path.read_bytes() for path in sorted(newest.iterdir())}
    for _ in range(count):
        path = dice.choice([*files, newest / "__0_0.distcp"])  # the part twice: most bytes are there
        harmed = bytearray(files[path])
        if dice.random() < 0.5:
            harmed[dice.randrange(len(harmed))] ^= 1 << dice.randrange(8)
        else:
            start = dice.randrange(len(harmed)) // PAGE * PAGE
            harmed[start : start + PAGE] = bytes(len(harmed[start : start + PAGE]))
        assert harmed != files[path]
        path.write_bytes(harmed)
        number, said = loaded(folder)
        path.write_bytes(files[path])
        if path.name == ".metadata":  # only torch.distributed.checkpoint reads it
            assert number == 2, (path, number, said)
        else:
            assert number == 1 and str(path) in said[0] and "damaged" in said[0], (path, number, said)
        outcomes[f"{path.name}: state {number} loaded"] += 1
    return outcomes


# -- kill -9 -------------------------------------------------------------------------------------------------


def kills(folder: Path, count: int, seed: int) -> Counter[str]:
    """Kill a process at a random moment of its saves, ``count`` times one after the other."""
    dice, outcomes, before = random.Random(seed), Counter[str](), 0
    for _ in range(count):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _save_on(folder, writing)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(writing)
        with open(reading) as told:
            told.readline()  # it begins
            start = time.monotonic()
            ended = [int(told.readline() or 0)]
            # In the next save or the one after that.
            time.sleep(2 * dice.random() * (time.monotonic() - start))
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child has ended by itself"
            ended += [int(line) for line in told if line.endswith("\n")]
        number, _ = loaded(folder)
        least = max([before, *ended])
        assert least <= number <= least + 1, f"state {least} was saved, and {number} is loaded"
        outcomes["a save more than was told" if number > least else "the save that was told last"] += 1
        before = number
    outcomes[f"saves in all: {before}"] += 1
    return outcomes


def _save_on(folder: Path, told: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of saves that did not end
    with alone():
        found = checkpoint.load({}, folder)
        number = 0 if found is None else found["number"]
        os.write(told, b"\n")
        while True:
            number += 1
            checkpoint.save(numbered(number), folder).wait()
            os.write(told, b"%d\n" % number)


# -- power cuts ----------------------------------------------------------------------------------------------


class RecordedOs:
    """Stands in for ``os`` in ``commsched.checkpoint``: makes each call, and notes what it changes.

    Files and folders have numbers of their own, since a file system gives those of removed ones out again.
    """

    def __init__(self, syncs: bool = True) -> None:
        self.log: list[tuple[Any, ...]] = []
        self._numbers: dict[str, int] = {}
        self._open: dict[int, int] = {}
        self._gone, self._syncs = 0, syncs
        self.refused: dict[str, int] = {}  # folders that cannot be listed, and the numbers of their errors

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def listdir(self, path: Path) -> list[str]:
        if number := self.refused.get(str(path)):
            raise OSError(number, os.strerror(number), str(path))
        return os.listdir(path)

    def number(self, path: Path) -> int:
        return self._numbers.setdefault(str(path), len(self._numbers) + self._gone)

    def _link(self, path: Path, kind: str) -> None:
        self._forget(path)
        self.log.append(("link", self.number(path.parent), path.name, self.number(path), kind))

    def _forget(self, path: Path) -> None:
        self._gone += self._numbers.pop(str(path), None) is not None

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        new = flags & os.O_CREAT and not os.path.exists(path)
        opened = os.open(path, flags, mode)
        if new:
            self._link(path, "file")
        self._open[opened] = self.number(path)
        return opened

    def close(self, opened: int) -> None:
        del self._open[opened]
        os.close(opened)

    def write(self, opened: int, data: memoryview) -> int:
        count = os.write(opened, data[: 3 * PAGE])  # several calls for a file
        self.log.append(("write", self._open[opened], bytes(data[:count])))
        return count

    def fsync(self, opened: int) -> None:
        os.fsync(opened)
        if self._syncs:
            self.log.append(("sync", self._open[opened]))

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        self._link(path, "folder")

    def replace(self, path: Path, new: Path) -> None:
        os.replace(path, new)
        self.log.append(("rename", self.number(path.parent), path.name, new.name, self.number(path)))
        self._numbers[str(new)] = self._numbers.pop(str(path))

    def unlink(self, path: Path) -> None:
        os.unlink(path)
        self.log.append(("unlink", self.number(path.parent), path.name))

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)
        self.log.append(("unlink", self.number(path.parent), path.name))


def left_by(log: list[tuple[Any, ...]], root: int, target: Path, dice: random.Random) -> None:
    """Put into ``target`` a tree that a file system may have after ``log`` and a power cut.

    Of what no fsync came after, each write is kept, lost, cut short or zeros, and each change of a name is
    kept or lost.
    """
    last = {entry[1]: place for place, entry in enumerate(log) if entry[0] == "sync"}
    names: defaultdict[int, dict[str, tuple[int, str]]] = defaultdict(dict)
    contents: defaultdict[int, bytearray] = defaultdict(bytearray)
    for place, (what, number, *more) in enumerate(log):
        safe = place < last.get(number, -1)
        if what == "write":
            data = more[0]
            fate = "kept" if safe else dice.choice(("kept", "lost", "short", "zeros"))
            data = {"kept": data, "lost": b"", "short": data[: len(data) // 2], "zeros": bytes(len(data))}[
                fate
            ]
            contents[number] += data
        elif what in ("link", "rename", "unlink") and (safe or dice.random() < 0.5):
            if what == "link":
                names[number][more[0]] = (more[1], more[2])
            else:
                names[number].pop(more[0], None)
                if what == "rename":
                    names[number][more[1]] = (more[2], "file")
    _materialise(names, contents, root, target)


def _materialise(names: Any, contents: Any, number: int, target: Path) -> None:
    target.mkdir()
    for name, (inner, kind) in names[number].items():
        if kind == "folder":
            _materialise(names, contents, inner, target / name)
        else:
            (target / name).write_bytes(contents[inner])


def cuts(folder: Path, count: int, seed: int, syncs: bool = True) -> Counter[str]:
    """Cut the power at ``count`` random moments of saves, and load what may then be there."""
    dice, outcomes = random.Random(seed), Counter[str]()
    recorded = RecordedOs(syncs)
    with alone(), mock.patch.object(checkpoint, "os", recorded):
        for number in range(1, max(4, min(200, count // 20)) + 1):
            checkpoint.save(numbered(number), folder / "disk" / "kept").wait()
            recorded.log.append(("ended", -1, number))
    root = recorded.number(folder)
    for trial in range(count):
        before = recorded.log[: dice.randrange(len(recorded.log) + 1)]
        left_by(before, root, folder / f"left-{trial}", dice)
        least = max([entry[2] for entry in before if entry[0] == "ended"], default=0)
        number, _ = loaded(folder / f"left-{trial}" / "disk" / "kept")
        shutil.rmtree(folder / f"left-{trial}")
        assert least <= number <= least + 1, f"state {least} was saved, and {number} is loaded"
        outcomes["a save more than was told" if number > least else "the save that was told last"] += 1
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("damage", "kills", "cuts"))
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    what = {"damage": damage, "kills": kills, "cuts": cuts}[options.what]
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for outcome, times in sorted(what(Path(folder), options.times, options.seed).items()):
            print(f"{times:6} {outcome}")


if __name__ == "__main__":
    main()
