"""``python -m tests.checker``: run random programs and print those that differ from plain PyTorch."""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

import torch

from tests.checker import programs
from tests.checker.processes import run_in_processes
from tests.checker.programs import Failure, Program, Run, Tally, draw, run_on_threads, same_class, shrink


def warm_up() -> None:
    """Load what the first program would wait for, and let later searches pass over it."""
    import numba  # noqa: F401

    sys.setswitchinterval(2e-4)  # ranks wait for each other many times in a program
    run_on_threads(
        Program(
            0,
            dict(programs.PLAINEST),
            (("train", 0, False, dict(loss={}, steps=1, clear="optimizer", first=True)),),
        ),
        300.0,
    )
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.checker", description=__doc__)
    parser.add_argument("--programs", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--seed", type=int, default=None, help="of the first program (default: a fresh one)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each program (default 2)")
    parser.add_argument("--processes", action="store_true", help="on real ranks, over the real transports")
    parser.add_argument(
        "--hosts", type=int, default=1, help="hosts of which the launcher of real ranks tells (default 1)"
    )
    parser.add_argument(
        "--only", default="", help="actions to draw, with commas; training and reading always are"
    )
    parser.add_argument("--replay", type=int, default=None, help="run the program of this seed alone")
    parser.add_argument("--shrink", action="store_true", help="reduce failing programs")
    parser.add_argument(
        "--show", type=int, default=1, help="failing programs to print of each class (default 1)"
    )
    parser.add_argument("--set", action="append", default=[], help="fix an option, such as gather=parameters")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the programs (default 1)")
    parser.add_argument("--tally", action="store_true", help="print which actions ran")
    parser.add_argument(
        "--findings", help="write failures by class, each with its smallest program, to this file"
    )
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    asked = parser.parse_args()
    if not 1 <= asked.hosts <= asked.ranks or (asked.hosts > 1 and not asked.processes):
        parser.error(
            f"--hosts is for --processes, and at most the number of ranks: got --hosts {asked.hosts},"
            f" --ranks {asked.ranks}"
        )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fixed = dict(item.split("=", 1) for item in asked.set)
    fixed = {k: (eval(v) if v[:1] in "0123456789TFN" else v) for k, v in fixed.items()}
    fixed |= {"hosts": asked.hosts}
    if asked.jobs > 1:
        return share(asked)
    if not asked.processes:
        warm_up()
    seed = asked.seed if asked.seed is not None else time.time_ns() % 10**9
    seeds = [asked.replay] if asked.replay is not None else range(seed, seed + asked.programs)
    only = [name for name in asked.only.split(",") if name]
    classes: Counter[str] = Counter()
    tally, findings = Tally(), Findings()
    failed, start = 0, time.monotonic()
    print(f"programs from seed {seeds[0]} on {asked.ranks} ranks", flush=True)
    drawn = [draw(each, asked.ranks, only, fixed, asked.processes) for each in seeds]
    if asked.processes:
        outcomes = run_in_processes(drawn, asked.ranks, asked.hosts)
        again = in_processes
    else:
        outcomes = ((program, on_threads(program, tally=tally)) for program in drawn)
        again = partial(on_threads, patience=5.0)
    for count, (program, failure) in enumerate(outcomes, 1):
        if failure is not None:
            failed += 1
            classes[failure.name] += 1
            if asked.findings:
                findings.add(program, failure, again)
                findings.write(asked.findings)
            elif classes[failure.name] <= asked.show:
                report(program, failure, again if asked.shrink else None)
            if asked.stop:
                break
        if count % 50 == 0:
            gc.collect()
            print(
                f"{count} programs from seed {seed}, {failed} failed, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    seconds = time.monotonic() - start
    print(
        f"{count} programs from seed {seeds[0]}, {failed} failed, {seconds:.1f} s,"
        f" cpu {time.process_time():.1f}"
    )
    for name, number in classes.most_common():
        print(f"{number:6} {name}")
    if asked.tally:
        print(
            f"programs met listed errors: {dict(tally.listed.most_common())};"
            f" close(wait=False) raised {tally.closing} times"
        )
        for what in ("ran", "skipped", "stopped"):
            print(what, dict(getattr(tally, what).most_common()))
    return 1 if failed else 0


class Findings:
    """Failures, put together where their smallest programs have the same actions and options."""

    def __init__(self) -> None:
        self.classes: dict[str, list[tuple[Program, Failure]]] = {}

    def add(self, program: Program, failure: Failure, again: Run) -> None:
        seed = program.seed
        program, failure = reduced(program, failure, again)
        options = {k: v for k, v in program.options.items() if programs.PLAINEST.get(k) != v}
        actions = [name for name, *_ in program.steps]
        key = f"{failure.name.split(':')[0]} | {' '.join(actions)} | {programs.arguments(options)}"
        self.classes.setdefault(key, []).append((program, failure))
        print(f"seed {seed}: {key}", flush=True)

    def write(self, path: str) -> None:
        with open(path, "w") as file:
            for key, cases in sorted(self.classes.items(), key=lambda item: -len(item[1])):
                seeds = ", ".join(str(program.seed) for program, _ in cases[:8])
                detail = str(cases[0][1]).splitlines()
                shown = [*detail[:3], *detail[-2:]] if len(detail) > 5 else detail
                text = "\n    ".join(line[:300] for line in shown)
                file.write(f"{len(cases)} x {key}\n    seeds {seeds}\n{cases[0][0]}\n    {text}\n\n")


def share(asked: argparse.Namespace) -> int:
    """Let several processes run a part of the programs each."""
    seed = asked.seed if asked.seed is not None else time.time_ns() % 10**9
    flags = [f"--{name}" for name in ("processes", "shrink", "tally") if getattr(asked, name)]
    for name in ("ranks", "hosts", "only", "show"):
        flags += [f"--{name}", str(getattr(asked, name))]
    for item in asked.set:
        flags += ["--set", item]
    jobs = []
    for job in range(asked.jobs):
        first, last = (asked.programs * edge // asked.jobs for edge in (job, job + 1))
        part = ["--programs", str(last - first), "--seed", str(seed + first)]
        jobs.append(subprocess.Popen([sys.executable, "-m", "tests.checker", *part, *flags]))
    return max(job.wait() for job in jobs)


def on_threads(program: Program, patience: float = 60.0, tally: Tally | None = None) -> Failure | None:
    """Run a program on threads; a fault of the checker itself is a failure like another one."""
    try:
        return run_on_threads(program, patience, tally)
    except AssertionError as error:
        return Failure("checker", "the checker is wrong", 0, 0, "?", str(error))


def reduced(program: Program, failure: Failure, again: Run) -> tuple[Program, Failure]:
    """Return the smallest program that fails like this; threads are faster, where they fail too."""
    if again is in_processes:
        options = {**program.options, "processes": False}
        steps = tuple(step for step in program.steps if step[0] != "join")
        same = replace(program, options=options, steps=steps)
        warm_up()
        quick = partial(on_threads, patience=5.0)
        reason = quick(same)
        if reason is not None and same_class(failure, reason):
            return shrink(same, reason, quick)
    return shrink(program, failure, again, 300.0)


def in_processes(program: Program) -> Failure | None:
    return next(run_in_processes([program], program.options["ranks"], program.options["hosts"]))[1]


def report(program: Program, failure: Failure, again: Run | None) -> None:
    """Print a failing program, the smallest that fails like it if ``again`` can run it."""
    if again is not None:
        print(f"seed {program.seed}: {failure.name}; looking for a smaller program", flush=True)
        program, failure = reduced(program, failure, again)
    print(f"\n{program}\n{failure}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
