"""Cases: functions that run on every rank of one launch, one after the other, each reported by itself.

A program file defines cases and ends with ``main(__name__)``; a test file makes its tests with ``parameters``
and ``check``:

    @case(ranks=(2, 3))
    def sums_are_equal(me: Me) -> None:
        assert ...

Starting ranks takes seconds and a case often milliseconds, so all cases of a program share one launch for
each number of ranks. A case that fails on any rank is that case's failure alone: ranks meet after every case
through a store of their own.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsched.process.network import HeldPort
from tests.support.launch import Ranks, start_ranks

if TYPE_CHECKING:
    import torch

TESTS = Path(__file__).resolve().parents[1]
PROGRAMS = TESTS / "dist" / "programs"
PREFIX = "CASE "
_PORT, _SEED = "CASES_PORT", "CASES_SEED"
_LONG = 480.0
"""Seconds that a launch may take."""
_PATIENCE = 200.0
"""Seconds that a case may take on one rank after it is over on another. Ranks print where they are before."""
# Jobs that the search of one plan may place: a hundredth of the default. Cases compare results, which no plan
# changes, and make hundreds of plans.
SEARCH = 40_000


@dataclass
class Me:
    """What a case knows of where it runs."""

    rank: int
    size: int
    seed: int
    name: str = ""
    store: Any = None
    meetings: int = 0
    twins: int = 0

    def everybody(self, value: str = "", timeout: float = _PATIENCE) -> list[str]:
        """Every rank's text, in rank order; works whatever state the library under test is in."""
        from datetime import timedelta

        self.meetings += 1
        keys = [f"{self.name}/{self.meetings}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], value)
        self.store.wait(keys, timedelta(seconds=timeout))
        return [self.store.get(key).decode() for key in keys]

    def shake(self, model: torch.nn.Module, longest: float = 0.003) -> None:
        """Random delays before the model's forwards and behind its gradients, other ones on every rank."""
        dice = random.Random(f"{self.seed} {self.name} {self.rank}")

        def pause(*_: Any) -> None:
            if dice.random() < 0.3:
                time.sleep(dice.random() * longest)

        for module in model.modules():
            module.register_forward_pre_hook(pause)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(pause)


@dataclass
class Case:
    body: Callable[[Me], None]
    ranks: tuple[int, ...]
    slow: tuple[int, ...]  # those of `ranks` at which it runs only where slow tests are asked for


_cases: dict[str, Case] = {}


def case(
    ranks: Sequence[int] = (2, 3), slow: Sequence[int] = ()
) -> Callable[[Callable[[Me], None]], Callable[[Me], None]]:
    """Run this case at each of these numbers of ranks, and in the slow run at the numbers in `slow`, too."""

    def register(body: Callable[[Me], None]) -> Callable[[Me], None]:
        _cases[body.__name__] = Case(body, (*ranks, *slow), tuple(slow))
        return body

    return register


# -- in the ranks --------------------------------------------------------------------------------------------


def main(name: str) -> None:
    """Runs the program's cases: those named on the command line, or all for this number of ranks."""
    if name != "__main__":
        return
    faulthandler.dump_traceback_later(_LONG)  # while modules are imported
    # Plans are then made in this process: hundreds of cases need not start hundreds of children.
    import numba  # noqa: F401
    import torch

    import commsched as hvd
    from scheduler.policies import optimal

    optimal.optimal = partial(optimal.optimal, budget=SEARCH)
    torch.set_num_threads(1)
    hvd.init()
    me = Me(hvd.rank(), hvd.size(), int(os.environ.get(_SEED, "0")))
    me.store = torch.distributed.TCPStore(
        "127.0.0.1", int(os.environ[_PORT]), is_master=me.rank == 0, wait_for_workers=False
    )
    for chosen in sys.argv[1:]:
        me.name, me.meetings, me.twins = chosen, 0, 0
        _report(me, _cases[chosen].body)
    me.name, me.meetings = "the end", 0
    me.everybody()
    hvd.shutdown()
    me.everybody()


def _report(me: Me, body: Callable[[Me], None]) -> None:
    start, busy, trouble = time.monotonic(), time.process_time(), ""
    faulthandler.dump_traceback_later(0.9 * _PATIENCE)
    try:
        body(me)
    except Exception:
        trouble = traceback.format_exc()
    took = f"{time.monotonic() - start:.3f} s, {time.process_time() - busy:.3f} s of a processor"
    print(PREFIX + json.dumps({"case": me.name, "trouble": trouble}), flush=True)
    print(f"{me.name} took {took}", file=sys.stderr, flush=True)
    # A rank whose case failed may have left others waiting for it until the time-out.
    me.meetings = 1000
    me.everybody()


# -- in the tests --------------------------------------------------------------------------------------------


def _file(program: str) -> Path:
    return next(TESTS.glob(f"*/programs/{program}.py"))


@cache
def _cases_of(program: str) -> dict[str, Case]:
    """The program's cases, found by importing it (its ``main`` does nothing then)."""
    before = dict(_cases)
    _cases.clear()
    spec = importlib.util.spec_from_file_location(f"program_{program}", _file(program))
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    found = dict(_cases)
    _cases.clear()
    _cases.update(before)
    return found


def parameters(*programs: str, quick: Sequence[int] = ()) -> list[Any]:
    """(program, ranks, case) of all cases, launch by launch, for ``pytest.mark.parametrize``.

    ``quick``: the numbers of ranks at which they are part of the quick run.

    With ``--dist loadscope``, the cases of a launch go to one worker and launches to different ones.
    """
    import pytest

    rows = []
    for program in programs:
        cases = _cases_of(program)
        for ranks in sorted({n for c in cases.values() for n in c.ranks}):
            for name, one in cases.items():
                if ranks in one.ranks:
                    marks = [pytest.mark.slow] if ranks in one.slow else []
                    marks += [pytest.mark.quick] if ranks in quick else []
                    id = f"{program}-{name}-{ranks}"
                    rows.append(pytest.param(program, ranks, name, marks=marks, id=id))
    return rows


def scope_of(test: str) -> str:
    """Return the name of what pytest-xdist runs in one process: a file, or the cases that share a launch.

    Random programs share nothing.
    """
    file, _, name = test.partition("::")
    case = re.search(r"\[(\w+)-\w+-(\d+)\]$", name)
    if case and any(TESTS.glob(f"*/programs/{case[1]}.py")):
        return f"{file} {case[1]} {case[2]}"
    return test if name.startswith("test_random_programs[") else file


def cases_for(program: str, ranks: int) -> list[str]:
    """The names of the program's cases for this number of ranks."""
    return [name for name, one in _cases_of(program).items() if ranks in one.ranks]


def place_of(shape: str) -> tuple[int, str]:
    """Ranks and launcher of `4` ranks on one host, or of `3+1` on two."""
    return sum(map(int, shape.split("+"))), f"srun-env:{shape}" if "+" in shape else "torchrun-env"


def launch(
    program: str,
    ranks: int,
    names: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout: float = _LONG + 60,
    launcher: str = "torchrun-env",
    keep: Path | None = None,
) -> dict[str, list[str]]:
    """Runs these cases; what went wrong by case and rank, "" for nothing. ``keep``: a file for all output."""
    port = HeldPort()
    settings = {
        "COMMSCHED_TIMEOUT": "60",
        _PORT: str(port.number),
        _SEED: os.environ.get(_SEED, "0"),
        **(env or {}),
    }
    ranks_of = start_ranks(_file(program), ranks, list(names), settings, launcher)
    with closing(port), ranks_of as started:
        try:
            started.wait(timeout)
            end = "ended before"
        except AssertionError:
            end = f"had not come here after {timeout} s"
        if keep is not None:
            keep.write_text(started.report())
        return {name: [_said(started, rank, name, end) for rank in range(ranks)] for name in names}


def _said(started: Ranks, rank: int, name: str, end: str) -> str:
    for line in started.output(rank).splitlines():
        if line.startswith(PREFIX):
            said = json.loads(line[len(PREFIX) :])
            if said["case"] == name:
                return str(said["trouble"])
    return f"rank {rank} {end}\n{started.error(rank)[-3000:]}"


@cache
def _outcomes(program: str, ranks: int, names: tuple[str, ...], launcher: str) -> dict[str, list[str]]:
    return launch(program, ranks, names, launcher=launcher)


def check(program: str, ranks: int, name: str, launcher: str = "torchrun-env") -> None:
    """Fails where the case failed on any rank. All cases of the program that are as slow run at the first
    call.
    """
    cases = _cases_of(program)
    slow = ranks in cases[name].slow
    together = tuple(n for n, c in cases.items() if ranks in c.ranks and (ranks in c.slow) == slow)
    troubles = _outcomes(program, ranks, together, launcher)[name]
    assert not any(troubles), "".join(f"\n--- rank {r}\n{text}" for r, text in enumerate(troubles) if text)


def _command_line() -> int:
    """``python -m tests.support.cases PROGRAM RANKS [CASE...]``: run cases by hand; all output in /tmp.

    RANKS may be those of several hosts, which are all this machine: 3+1.
    """
    program, shape, *names = sys.argv[1:]
    ranks, launcher = place_of(shape)
    keep = Path(tempfile.gettempdir(), f"{program}.{shape}.log")
    names = names or cases_for(program, ranks)
    start = time.monotonic()
    failed = 0
    for name, troubles in launch(program, ranks, names, launcher=launcher, keep=keep).items():
        failed += any(troubles)
        print("FAILED" if any(troubles) else "passed", name)
        for rank, text in enumerate(troubles):
            if text:
                print(f"  rank {rank}: {text}")
    print(f"{failed} of {len(names)} failed in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    from tests.support import cases  # this module again, under the name that programs import it by

    sys.exit(cases._command_line())
