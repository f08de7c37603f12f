"""`python -m dnn_bench faults`: elastic training on emulated hosts, and faults in it that a seed draws.

[Note: what is trained, and what is measured]
One more host, which never fails, runs horovodrun. It starts a rank on each of the others by ssh, and starts
one again a second or two after it was lost. A job trains until a fault that must end it, or for some faults;
then another job begins, with another optimizer. The ranks note what they do, and everything here is read from
these notes (``runner/elastic_worker.py``):

    seen      from the fault to the exception on the last of the ranks that are left
    again     from the fault to the first step that all ranks complete afterwards, whatever their number; of a
              fault in which nobody is lost: the longest time without a step
    whole     from the fault (or the return of its host) to the first step of as many ranks as before
    lost      samples that no committed step of an epoch of the data has used; doubled: more than one has
    problems  hangs, ranks that were lost without need, errors that do not name the rule and the rank,
              parameters that differ between ranks, or from those of one process with the same batches
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import psutil

from dnn_bench.baselines import MissingPeer
from dnn_bench.cluster import DEVICE, Cluster, ClusterError
from dnn_bench.command_line import check_least, chosen, console, one_line_errors, parser, table
from dnn_bench.launch import installed
from dnn_bench.rank_environment import environment

KINDS = {
    "kill": "SIGKILL to a rank other than 0",
    "rank0": "SIGKILL to rank 0, where the job's store is",
    "two": "SIGKILL to two ranks at once",
    "recovery": "SIGKILL to a rank, and to another one while the others meet",
    "term": "SIGTERM to a rank",
    "stop": "SIGSTOP to a rank",
    "link": "a host's link is cut until the others train again",
    "oneway": "what a host sends is lost until the others train again",
    "pair": "what a host sends to another one is lost for ten seconds; all reach horovodrun",
    "slow": "a host's link has 64 kbit/s for some seconds",
    "back": "a host is taken out of the list of hosts, and comes back",
    "disk": "the disk of a host's checkpoints is full",
    "garbage": "arbitrary bytes to every port of the job",
    "flood": "connections to every port of the job, while a rank is killed and the others meet",
    "skip": "a rank leaves out a step",
    "shape": "a rank sums a tensor of another shape",
    "dtype": "a rank sums a tensor of another type",
    "lr": "a rank has another learning rate",
    "model": "a rank is killed, and its new process has another model",
}
# By kind: what the error must say, beside the rank at fault. After all but `skip` the job must end.
RULES = {
    "skip": r"step\(\)|missing|the same step|the same operations",
    "shape": "disagree about the shape",
    "dtype": "disagree about the data type",
    "lr": r"settings must be the same .*\blr\b",
    "model": r"same optimizers|same objects|disagree about the (shape|data type)|parameters",
}
UNHARMED = ("slow", "garbage", "disk")  # no rank may be lost
MODELS = ("wider", "deeper", "float32")  # other ones
PER_JOB = 12
SLOW = "64kbit"
DISK = "1m"
T = TypeVar("T")
Note = dict[str, Any]


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser(
        "faults",
        "Trains with horovodrun on emulated hosts (as root), lets ranks, links, disks and programs fail as a "
        "seed draws, and checks that the others train on with every sample once and the parameters of one "
        "process. Exit status 1: a hang, a lost or doubled sample, a difference.",
    )
    command.add_argument("--hosts", type=int, default=3, metavar="N", help="emulated hosts, at least 3")
    command.add_argument(
        "--per-host", type=int, default=1, metavar="N", help="ranks on each host (default 1)"
    )
    command.add_argument("--faults", type=int, default=100, metavar="N", help="faults")
    command.add_argument("--seed", type=int, default=1, help="what the faults are drawn from")
    text = f"kinds of faults (default: all of {', '.join(KINDS)})"
    command.add_argument("--only", default="", metavar="A,B", help=text)
    text = "seconds without a step, or without the end of a job that must end, that count as a hang"
    command.add_argument("--patience", type=float, default=240, metavar="S", help=text)
    text = (
        "write faults.csv, faults.json, faults.svg and what the ranks of failed jobs noted into this folder"
    )
    command.add_argument("--output", type=Path, metavar="DIR", help=text)
    return command.parse_args(arguments)


@one_line_errors(ClusterError, MissingPeer, ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    check_least(options, 3, "hosts")
    check_least(options, 1, "faults", "per_host", "patience")
    kinds = chosen("kind of fault", options.only, list(KINDS)) or list(KINDS)
    faults = draw(options.seed, options.faults, kinds)
    print(f"seed {options.seed}: {', '.join(fault.kind for fault in faults)}", flush=True)
    outcomes: list[Outcome] = []
    with Cluster(options.hosts + 1, "unlimited", ssh=True) as cluster:
        try:
            for outcome in suffered(cluster, deque(faults), options):
                outcomes.append(outcome)
        finally:
            report(outcomes, options)
    return int(any(outcome.is_wrong for outcome in outcomes))


# -- what is drawn, and what became of it --------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault as the seed draws it; fractions of 1 choose among what there is when it comes."""

    number: int
    kind: str
    victim: float
    second: float  # of the other victim
    pause: float  # seconds of training before it
    delay: float  # seconds between its two parts


def draw(seed: int, count: int, kinds: Sequence[str]) -> list[Fault]:
    """Return the faults of a seed: as many of each kind, up to one, in any order."""
    drawn, faults = random.Random(seed), list[Fault]()
    while len(faults) < count:
        for kind in drawn.sample(list(kinds), len(kinds))[: count - len(faults)]:
            fractions = drawn.random(), drawn.random()
            faults.append(Fault(len(faults), kind, *fractions, drawn.random(), drawn.random()))
    return faults


@dataclass
class Outcome:
    """What became of a fault. ``at``: when it came, on the clock of the notes, as all times are."""

    fault: Fault
    job: int
    at: float = 0.0
    over: float = float("inf")  # when all trained again
    target: str = ""
    size: int = 0  # of the ranks that trained again first
    seen: float | None = None
    again: float | None = None
    whole: float | None = None
    named: bool | None = None  # every error tells the rank at fault
    hung: bool = False
    ended: bool = False  # the job, as it must
    lost: int = 0
    doubled: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        return bool(self.hung or self.lost or self.doubled or self.problems)

    def __str__(self) -> str:
        times = [(name, getattr(self, name)) for name in ("seen", "again", "whole")]
        told = [f"{name} {value:.1f} s" for name, value in times if value is not None]
        ended = ["the job ends with an error"] if self.ended else []
        wrong = [f"PROBLEM: {problem.splitlines()[0]}" for problem in self.problems]
        return f"{self.fault.kind:<9}{self.target:<16} {', '.join([*told, *ended, *wrong])}"


class Trouble(Exception):
    """The job cannot be used any more; ``hung`` if it still runs."""

    def __init__(self, text: str, hung: bool) -> None:
        super().__init__(text)
        self.hung = hung


# -- a job and its notes -------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A step that all ranks of its epoch have completed."""

    at: float
    epoch: str
    number: int
    size: int


class Member(NamedTuple):
    """A process of an epoch. ``place``: its host and its number there."""

    rank: int
    place: str
    pid: int

    @property
    def host(self) -> int:
        return int(self.place.partition("-")[0].removeprefix("host"))


class Job:
    """A job of horovodrun on all hosts but the last one, which runs horovodrun itself."""

    def __init__(self, cluster: Cluster, number: int, folder: Path, options: argparse.Namespace) -> None:
        drawn = random.Random(f"{options.seed} {number}")
        self.training: dict[str, Any] = {
            "seed": drawn.randrange(1000),
            "optimizer": drawn.choice(["sgd", "adamw"]),
            "gather": drawn.choice(["gradients", "parameters"]),
        }
        self.cluster, self.folder, self.patience = cluster, folder, options.patience
        self.hosts, self.per_host = range(options.hosts), options.per_host
        self.size = options.hosts * options.per_host
        self._read: Counter[Path] = Counter()  # bytes of each file
        self.begins: defaultdict[str, dict[int, Note]] = defaultdict(dict)  # by epoch and rank
        self.uses: defaultdict[tuple[str, int], dict[int, Note]] = defaultdict(dict)  # by epoch, step, rank
        self.dones: defaultdict[tuple[str, int], dict[int, Note]] = defaultdict(dict)
        self.steps: list[Step] = []  # in the order of their reading
        self.notes: defaultdict[str, list[Note]] = defaultdict(list)  # the others, by what they tell

    def __enter__(self) -> Job:
        for name in ("orders", "disk"):
            (self.folder / name).mkdir()
        (self.folder / "hosts.sh").write_text(f"#!/bin/sh\ncat {self.folder / 'hosts'}\n")
        (self.folder / "hosts.sh").chmod(0o755)
        self.list_hosts(self.hosts)
        for host in self.hosts:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "faults", str(self.folder / "disk")]
            self.cluster.inside(host, mount)
        with (self.folder / "output").open("wb") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "cwd": self.folder}
            head = len(self.hosts)
            self.process = self.cluster.run(head, self._command(), self._environment(), **streams)
        return self

    def __exit__(self, *error: object) -> None:
        """End every process of the job; all have its folder on their command line."""
        deadline = time.monotonic() + 60
        while left := [process for process in psutil.process_iter() if self._owns(process)]:
            if time.monotonic() > deadline:
                raise ClusterError(f"processes {left} of the job do not end")
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        self.process.wait(60)
        for host in self.hosts:
            with suppress(ClusterError):
                self.cluster.inside(host, ["umount", "--lazy", str(self.folder / "disk")])

    def _owns(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return str(self.folder) in " ".join(process.cmdline()) and process.pid != os.getpid()
        return False

    def _command(self) -> list[str]:
        hosts = ["--host-discovery-script", str(self.folder / "hosts.sh"), "--network-interface", DEVICE]
        again = ["--blacklist-cooldown-range", "1", "2", "--elastic-timeout", "120"]
        size = ["-np", str(self.size), "--min-np", "1", "--max-np", str(self.size)]
        worker = ["-m", "dnn_bench.runner.elastic_worker", str(self.folder), json.dumps(self.training)]
        launcher = [installed("horovodrun"), "--disable-cache", "--gloo"]
        return [*launcher, *size, *hosts, *again, sys.executable, *worker]

    def _environment(self) -> dict[str, str]:
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"TIMEOUT": "30", "START_TIMEOUT": "60", "HOST_TIMEOUT": "5", "COMPARE_EVERY": "20"}
        own["WAIT_FOR_PLAN"] = ""  # else ranks without a plan wait for rank 0's search, before each epoch
        names = {f"COMMSCHED_{name}": value for name, value in own.items()}
        return {**environment(), "PATH": programs, **{n: os.environ.get(n, v) for n, v in names.items()}}

    def list_hosts(self, hosts: Sequence[int]) -> None:
        """Write the file that horovodrun's script prints, at once: the script may read it at any time."""
        lines = [f"{self.cluster.names[host]}:{self.per_host}\n" for host in hosts]
        (self.folder / "new").write_text("".join(lines))
        (self.folder / "new").replace(self.folder / "hosts")

    def order(self, member: Member, what: str) -> None:
        (self.folder / "new").write_text(what)
        (self.folder / "new").replace(self.folder / "orders" / member.place)

    # -- reading -----------------------------------------------------------------------------------------

    def read(self) -> None:
        """Take the lines that were noted since the last call."""
        for path in self.folder.glob("*.notes"):
            with path.open("rb") as file:
                file.seek(self._read[path])
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] += len(whole) + bool(whole)
            place, _, pid = path.stem.partition(".")
            for line in whole.splitlines():
                self.take({"place": place, "pid": int(pid), **json.loads(line)})

    def take(self, note: Note) -> None:
        match note["what"]:
            case "begin":
                self.begins[note["epoch"]][note["rank"]] = note
            case "use":
                self.uses[note["epoch"], note["step"]][note["rank"]] = note
            case "done":
                noted = self.dones[note["epoch"], note["step"]]
                noted[note["rank"]] = note
                size = next(iter(self.begins[note["epoch"]].values()))["size"]
                if len(noted) == size:
                    at = max(each["at"] for each in noted.values())
                    self.steps.append(Step(at, note["epoch"], note["step"], size))
            case what:
                self.notes[what].append(note)

    def wait(self, wanted: Callable[[], T | None], what: str) -> T:
        """Return what `wanted` returns, once that is something; `Trouble` if the job ends, or hangs."""
        deadline = time.monotonic() + self.patience
        while True:
            is_over = self.process.poll() is not None
            self.read()
            if found := wanted():
                return found
            if is_over:
                text = (self.folder / "output").read_text(errors="replace")[-3000:]
                raise Trouble(
                    f"the job ended with status {self.process.returncode} before {what}\n{text}", False
                )
            if time.monotonic() > deadline:
                raise Trouble(f"hang: no {what} within {self.patience:g} s\n{self.stacks()}", True)
            time.sleep(0.02)

    def stacks(self) -> str:
        """Return the stacks of the ranks that still run, and the last lines of horovodrun."""
        for note in self.notes["hello"]:
            with suppress(psutil.Error):
                process = psutil.Process(note["pid"])
                if self._owns(process):  # it may have ended, and another program have its number
                    process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        files = [*sorted(self.folder.glob("*.stacks")), self.folder / "output"]
        texts = {path.name: path.read_text(errors="replace")[-4000:] for path in files}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items() if text)

    def members(self, epoch: str) -> dict[int, Member]:
        return {rank: Member(rank, n["place"], n["pid"]) for rank, n in sorted(self.begins[epoch].items())}

    def began(self, epoch: str) -> float:
        return min(note["at"] for note in self.begins[epoch].values())

    def has_begun(self, since: float) -> bool:
        """Return whether a new epoch has begun after a moment."""
        return any(self.began(epoch) > since for epoch in self.begins)

    def step(self, since: float, *, new: bool = True, size: int = 0) -> Step | None:
        """Return the first step after a moment; `new`: of an epoch that began after it."""
        steps = [
            step
            for step in self.steps[-2000:]
            if step.at > since and step.size >= size and (not new or self.began(step.epoch) > since)
        ]
        return min(steps, default=None)

    def is_whole(self) -> bool:
        """Whether all ranks have trained for some steps, and no epoch has begun since."""
        last = [step for step in self.steps[-5:] if step.size == self.size]
        newest = max(self.began(epoch) for epoch in self.begins) if self.begins else 0.0
        return len(last) == 5 and {self.began(step.epoch) for step in last} == {newest}

    def errors(self, since: float, members: Sequence[Member], what: str = "error") -> list[Note] | None:
        """Return the first error of each process after a moment; None while one has none."""
        firsts: dict[int, Note] = {}
        for note in self.notes[what]:
            if note["at"] > since:
                firsts.setdefault(note["pid"], note)
        found = [firsts[member.pid] for member in members if member.pid in firsts]
        return found if len(found) == len(members) else None

    def longest_gap(self, since: float, until: float) -> float:
        """Return the longest time without a step between two moments."""
        at = sorted(step.at for step in self.steps if since < step.at < until)
        return max(after - before for before, after in zip([since, *at], [*at, until], strict=True))

    def pace(self, since: float, until: float) -> float:
        """Return the steps a second between two moments."""
        return sum(since < step.at < until for step in self.steps) / (until - since)

    # -- the end -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let the job end at the end of an epoch of the data, as it does without a fault."""
        (self.folder / "stop").touch()
        self.wait(lambda: self.process.poll() is not None, "end of the job")
        members = list(self.members(max(self.steps).epoch).values())
        ends = self.errors(0.0, members, "end") or ()
        if self.process.returncode or len(ends) < self.size:
            text = (self.folder / "output").read_text(errors="replace")[-3000:]
            raise Trouble(
                f"the job ended with status {self.process.returncode}, {len(ends)} ranks in order\n{text}",
                False,
            )

    def history(self) -> list[tuple[str, int]]:
        """Return epoch and number of the steps that the parameters come from."""
        if self.notes["end"]:
            runs = self.notes["end"][0]["runs"]
        elif self.steps:
            epoch = max(self.steps, key=lambda step: self.began(step.epoch)).epoch
            begin = self.begins[epoch][0]
            last = max(step.number for step in self.steps if step.epoch == epoch)
            runs = [*begin["runs"], [epoch, begin["step"], last + 1]]
        else:
            runs = []
        return [(epoch, step) for epoch, first, end in runs for step in range(first, end)]


def suffered(cluster: Cluster, waiting: deque[Fault], options: argparse.Namespace) -> Iterator[Outcome]:
    """Run jobs until all faults have come; return what became of each, once its job is judged."""
    for number in range(1, len(waiting) + 1):
        outcomes: list[Outcome] = []
        with ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True)
            job = stack.enter_context(Job(cluster, number, Path(stack.enter_context(temporary)), options))
            print(f"job {number}: {', '.join(map(str, job.training.values()))}", flush=True)
            try:
                while waiting and len(outcomes) < PER_JOB and not (outcomes and outcomes[-1].ended):
                    outcomes.append(Outcome(waiting.popleft(), number))
                    inflict(job, outcomes[-1])
                    print(f"[{outcomes[-1].fault.number + 1:3}/{options.faults}] {outcomes[-1]}", flush=True)
                if not outcomes[-1].ended:
                    job.finish()
            except Trouble as trouble:
                if not job.steps and number == 1:
                    raise ClusterError(f"no step of the training was made: {trouble}") from None
                outcomes[-1].hung = trouble.hung
                outcomes[-1].problems.append(str(trouble))
                print(f"[{outcomes[-1].fault.number + 1:3}/{options.faults}] {outcomes[-1]}", flush=True)
            known = [len(outcome.problems) for outcome in outcomes]
            judge(job, outcomes)
            for outcome, count in zip(outcomes, known, strict=True):
                for problem in outcome.problems[0 if outcome is outcomes[-1] else count :]:
                    print(
                        f"      fault {outcome.fault.number + 1}, {outcome.fault.kind}: {problem}", flush=True
                    )
            if options.output and any(outcome.is_wrong for outcome in outcomes):
                shutil.copytree(job.folder, options.output / f"job{number}", dirs_exist_ok=True)
        yield from outcomes
        if not waiting:
            return


# -- the faults ----------------------------------------------------------------------------------------------


def inflict(job: Job, outcome: Outcome) -> None:
    """Let all ranks train, make the fault, wait until all train again or the job has ended as it must."""
    job.wait(job.is_whole, "step of all ranks")
    time.sleep(outcome.fault.pause)
    job.wait(job.is_whole, "step of all ranks")  # an epoch that has begun meanwhile has other numbers
    members = list(job.members(job.steps[-1].epoch).values())
    kind = outcome.fault.kind
    how = {"back": leave_and_return, **dict.fromkeys(UNHARMED, disturb)}
    how.get(kind, differ if kind in RULES else lose)(job, outcome, members)
    outcome.over = time.monotonic()


def pick(members: Sequence[Member], fraction: float) -> Member:
    return members[int(fraction * len(members))]


def told(victims: Sequence[Member]) -> str:
    return ", ".join(f"rank {victim.rank}" for victim in victims)


def lose(job: Job, outcome: Outcome, members: list[Member]) -> None:
    """Take ranks away. The others must train on, and so must all when the hosts are back."""
    fault, cluster = outcome.fault, job.cluster
    kind = fault.kind
    may = members[:1] if kind == "rank0" else members[1:] if kind in ("kill", "flood") else members
    first = pick(may, fault.victim)
    rest = [member for member in members if member.host != first.host]
    second = pick(rest, fault.second)
    victims = [first, second] if kind in ("two", "recovery", "pair") else [first]
    hosts = {victim.host for victim in victims}
    left = members if kind == "pair" else [member for member in members if member.host not in hosts]
    outcome.target = told(victims)
    strangers = strange(cluster, "flood", fault) if kind == "flood" else []
    with ExitStack() as back:
        back.callback(leave, strangers, outcome)
        time.sleep(0.5 if strangers else 0)  # they make a connection to each port every few milliseconds
        outcome.at = moment = time.monotonic()
        if kind == "link":
            cluster.cut(first.host)
            back.callback(cluster.mend, first.host)
        elif kind in ("oneway", "pair"):
            to = [second.host] if kind == "pair" else range(len(cluster))
            cluster.mute(first.host, to)
            back.callback(cluster.mute, first.host, to, muted=False)
        else:
            sent = {"term": signal.SIGTERM, "stop": signal.SIGSTOP}.get(kind, signal.SIGKILL)
            os.kill(first.pid, sent)
        if kind == "pair":
            time.sleep(10)
            back.close()
        if kind == "recovery":
            job.wait(lambda: any(job.errors(moment, [one]) for one in rest), "error on another rank")
            end = time.monotonic() + fault.delay
            job.wait(lambda: time.monotonic() > end or job.has_begun(moment), "new epoch")
            outcome.target += " (had met)" if job.has_begun(moment) else ""
        if kind in ("two", "recovery"):
            with suppress(ProcessLookupError):
                os.kill(second.pid, signal.SIGKILL)
            moment = time.monotonic()
        step = job.wait(lambda: job.step(moment), f"step of {told(left)}")
        outcome.again, outcome.size = step.at - outcome.at, step.size
    check_members(job, outcome, step, left, [member for member in members if member not in left])
    returned = time.monotonic() if kind in ("link", "oneway") else outcome.at
    first_errors(outcome, job.errors(outcome.at, left) or (), victims)
    step = job.wait(lambda: job.step(moment, size=job.size), "step of all ranks, with the lost one's host")
    check_members(job, outcome, step, left)
    outcome.whole = step.at - returned


def check_members(
    job: Job, outcome: Outcome, step: Step, stay: Sequence[Member], gone: Sequence[Member] = ()
) -> None:
    """Note which processes are not in the epoch of a step, though the fault is none of theirs; or are."""
    pids = {note["pid"] for note in job.begins[step.epoch].values()}
    if lost := [member for member in stay if member.pid not in pids]:
        outcome.problems.append(f"the process that was {told(lost)} is lost without need")
    if there := [member for member in gone if member.pid in pids]:
        outcome.problems.append(f"the fault has not come: the process that was {told(there)} trains on")


def leave_and_return(job: Job, outcome: Outcome, members: list[Member]) -> None:
    """Take a host out of the list, and put it in again."""
    victim = pick(members, outcome.fault.victim)
    outcome.target, outcome.at = f"host of {told([victim])}", time.monotonic()
    job.list_hosts([host for host in job.hosts if host != victim.host])
    left = [member for member in members if member.host != victim.host]
    step = job.wait(lambda: job.step(outcome.at), f"step of {told(left)}")
    outcome.again, outcome.size = step.at - outcome.at, step.size
    check_members(job, outcome, step, left, [member for member in members if member not in left])
    if notes := job.errors(outcome.at, left):
        outcome.seen = max(note["at"] for note in notes) - outcome.at
    time.sleep(outcome.fault.delay)
    returned = time.monotonic()
    job.list_hosts(job.hosts)
    step = job.wait(
        lambda: job.step(returned, size=job.size), "step of all ranks, with the host that came back"
    )
    check_members(job, outcome, step, left)
    outcome.whole = step.at - returned


def disturb(job: Job, outcome: Outcome, members: list[Member]) -> None:
    """Make a fault for which no rank may be lost."""
    fault, cluster = outcome.fault, job.cluster
    victim = pick(members, fault.victim)
    time.sleep(2 if fault.kind == "slow" else 0)  # steps to compare with
    outcome.at = time.monotonic()
    if fault.kind == "slow":
        outcome.target = told([victim])
        cluster.set_link([SLOW if host == victim.host else "unlimited" for host in range(len(cluster))])
        time.sleep(5)
        cluster.set_link("unlimited")
    elif fault.kind == "garbage":
        leave(strange(cluster, "garbage", fault), outcome)
    else:
        outcome.target = told([victim])
        file = job.folder / "disk" / "filler"

        def unsaved() -> Sequence[Note] | None:
            # All the time: a save needs no more than what the oldest generation has just freed.
            cluster.inside(victim.host, [sys.executable, "-c", FILLER, str(file)])
            return job.errors(outcome.at, members, "unsaved")

        notes = job.wait(unsaved, "CheckpointError on all ranks")
        first_errors(outcome, notes, [victim])
        if wrong := [note["text"] for note in notes if "No space left" not in note["text"]]:
            outcome.problems.append(f"the error does not tell that the disk is full: {wrong[0]}")
        cluster.inside(victim.host, ["rm", str(file)])
        freed = time.monotonic()
        job.wait(lambda: job.errors(freed, members, "saved"), "checkpoint of all ranks, once there is space")
    over = time.monotonic()
    step = job.wait(lambda: job.step(over, new=False), "step of all ranks")
    outcome.again, outcome.size = job.longest_gap(outcome.at, step.at), step.size
    check_members(job, outcome, step, members)
    before, during = (job.pace(*times) for times in ((outcome.at - 2, outcome.at), (outcome.at, over)))
    if fault.kind == "slow" and during > before / 2:
        outcome.problems.append(f"the fault has not come: {before:.1f} steps a second, {during:.1f} with it")


def differ(job: Job, outcome: Outcome, members: list[Member]) -> None:
    """Let a rank do something else than the others: every rank must raise an error that says so."""
    fault = outcome.fault
    kind, victim = fault.kind, pick(members, fault.victim)
    outcome.target, outcome.at = told([victim]), time.monotonic()
    job.order(victim, MODELS[int(fault.second * len(MODELS))] if kind == "model" else kind)
    if kind == "model":
        os.kill(victim.pid, signal.SIGKILL)
    if kind == "skip":
        notes: Sequence[Note] = job.wait(lambda: job.errors(outcome.at, members), "error on every rank")
        step = job.wait(lambda: job.step(outcome.at), "step of all ranks")
        outcome.again, outcome.size = step.at - outcome.at, step.size
        check_members(job, outcome, step, members)
    else:
        job.wait(lambda: job.process.poll() is not None, "end of the job, which must not train on")
        outcome.ended = True
        notes = [note for note in job.notes["failed"] if note["at"] > outcome.at]
        if kind == "model":  # the new process has another number
            ranks = {note["place"]: note["rank"] for note in notes}
            victim = victim._replace(rank=ranks.get(victim.place, -1))
    first_errors(outcome, job.errors(outcome.at, members) or notes, [victim], must=False)
    if len(notes) < job.size:
        outcome.problems.append(f"{len(notes)} of {job.size} ranks raised an error")
    for note in notes:
        text = note["text"]
        # The rank that has left out a step knows only for whom it waits.
        named = names(text, [victim]) or (kind == "skip" and note["rank"] == victim.rank)
        if not (re.search(RULES[kind], text) and named):
            wanted = f"name {told([victim])} and say {RULES[kind]!r}"
            outcome.problems.append(f"rank {note['rank']} must {wanted}, but said {text}")


def first_errors(
    outcome: Outcome, notes: Sequence[Note], victims: Sequence[Member], must: bool = True
) -> None:
    """Note when the last process has raised, and whether all of them name a rank at fault, as they must."""
    outcome.seen = max((note["at"] for note in notes), default=outcome.at) - outcome.at
    outcome.named = bool(notes) and all(names(note["text"], victims) for note in notes)
    if must and not outcome.named:
        text = f"every rank left must raise an error that names {outcome.target}, but there is"
        outcome.problems.append(f"{text} {[note['text'] for note in notes]}")


def names(text: str, ranks: Sequence[Member]) -> bool:
    listed = re.findall(r"\branks? (\d+)\b|\branks \[([\d, ]+)\]", text)
    found = {int(number) for one, several in listed for number in re.findall(r"\d+", one or several)}
    return bool(found & {member.rank for member in ranks})


def strange(cluster: Cluster, mode: str, fault: Fault) -> list[subprocess.Popen[Any]]:
    """Start on every host a program that is no part of the job, and knows no secret of it; wait for the first
    connection of each.
    """
    command = [sys.executable, "-c", STRANGER, mode, str(fault.victim)]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    started = [cluster.run(host, command, **streams) for host in range(len(cluster))]
    for stranger in started:
        assert stranger.stdout
        stranger.stdout.readline()
    return started


def leave(strangers: Sequence[subprocess.Popen[Any]], outcome: Outcome) -> None:
    for stranger in strangers:
        stranger.communicate(timeout=60)
        if stranger.returncode:
            outcome.problems.append("the fault has not come: a stranger has reached no port of its host")


FILLER = """
import os, sys, time
file, end = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND), time.monotonic() + 1
while time.monotonic() < end:
    try:
        os.write(file, bytes(4096))
    except OSError:
        pass
"""

STRANGER = r"""
import random, socket, struct, sys, time
mode, drawn, end, held, begun = sys.argv[1], random.Random(sys.argv[2]), time.monotonic() + 4, {}, False

def listening():
    for name in ("tcp", "tcp6"):
        for row in open(f"/proc/self/net/{name}").read().splitlines()[1:]:
            place, _, port = row.split()[1].partition(":")
            if row.split()[3] == "0A" and int(port, 16) != 22:
                own = name == "tcp" and int(place, 16)
                yield socket.inet_ntoa(struct.pack("<I", own)) if own else "127.0.0.1", int(port, 16)

def payload():
    size = drawn.choice([1, 4, 8, 32, 64, 1000, 100_000])
    return drawn.choice([drawn.randbytes(size), b"\xff" * size, b"\0" * size, b"GET / HTTP/1.0\r\n\r\n",
                         struct.pack("<Q", 1 << 40) + b"x" * size, struct.pack(">I", 1 << 30) + b"x" * size])

while time.monotonic() < end:
    for place in set(listening()):
        try:
            if mode == "flood" and len(held.get(place, ())) < 300:
                held.setdefault(place, []).append(socket.create_connection(place, 1))
            elif mode == "flood":
                drawn.choice(held[place]).send(b"x")
            else:
                with socket.create_connection(place, 1) as one:
                    one.settimeout(0.1)
                    one.sendall(payload())
                    if drawn.random() < 0.5:
                        one.recv(100)
                    elif drawn.random() < 0.5:  # a reset
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            begun = begun or print("begun", flush=True) is None
        except OSError:
            pass
    time.sleep(0.001 if mode == "flood" else 0.02)
sys.exit(not begun)
"""


# -- what the parameters come from ---------------------------------------------------------------------------


def judge(job: Job, outcomes: Sequence[Outcome]) -> None:
    """Add what the whole job's notes tell to the outcomes: samples, and parameters."""
    from dnn_bench.runner.elastic_worker import Training, replayed

    training = Training(**job.training)
    history = job.history()
    rates = [outcome.at for outcome in outcomes if outcome.fault.kind == "lr"]
    until = rates[0] if rates else float("inf")  # from then on one rank's parameters are not the others'
    batches: list[list[list[int]]] = []
    noted: dict[int, list[float]] = {}
    times: list[float] = []
    used: defaultdict[int, Counter[int]] = defaultdict(Counter)  # by epoch of the data
    last_use: dict[int, float] = {}
    are_equal = True

    def blamed(at: float) -> Outcome:
        return [outcomes[0], *(each for each in outcomes if 0 < each.at <= at)][-1]

    for epoch, number in history:
        uses, dones = job.uses[epoch, number], job.dones[epoch, number]
        at = max((note["at"] for note in [*uses.values(), *dones.values()]), default=0.0)
        if at > until:
            break
        if number != len(batches) or len(uses) != len(job.begins[epoch]):
            text = (
                f"step {number} of epoch {epoch} follows {len(batches)} steps, and {len(uses)} ranks noted it"
            )
            blamed(at).problems.append(text)
            break
        if are_equal and len({note["digest"] for note in dones.values()}) > 1:
            ranks, are_equal = {rank: note["digest"] for rank, note in sorted(dones.items())}, False
            blamed(at).problems.append(f"the ranks' parameters differ after step {number}: {ranks}")
        batches.append([uses[rank]["indices"] for rank in sorted(uses)])
        times.append(at)
        noted |= {note["step"]: note["values"] for note in dones.values() if "values" in note}
        for note in uses.values():
            used[note["data"]].update(note["indices"])
            last_use[note["data"]] = at
    for note in job.notes["error"]:
        guilty = blamed(note["at"])
        may = guilty.fault.kind not in UNHARMED and guilty.at <= note["at"] < guilty.over
        if not may and note["kind"] != "HostsUpdatedInterrupt":  # which costs no rank
            guilty.problems.append(f"no rank was lost, and rank {note['rank']} raised {note['text']}")
    ends = job.notes["end"]  # at the end of an epoch of the data
    if any((note["runs"], note["digest"]) != (ends[0]["runs"], ends[0]["digest"]) for note in ends):
        outcomes[-1].problems.append("the ranks end with other steps, or other parameters")
    noted |= {note["step"] - 1: note["values"] for note in ends}
    for data in range(max(used, default=-1) + 1):
        guilty, counts = blamed(last_use.get(data, 0.0)), used[data]
        guilty.doubled += counts.total() - len(counts)
        if data != max(used) or ends:
            guilty.lost += training.samples - len(counts)
    if difference := replayed(training, batches, noted):
        step, text = difference
        blamed(times[step]).problems.append(f"after step {step} a parameter is {text}")


# -- what is told --------------------------------------------------------------------------------------------

TIMES = ("seen", "again", "whole")
COLUMNS = (
    "kind",
    "count",
    "hangs",
    *(f"{n}_{h}" for n in TIMES for h in ("median", "max")),
    "lost",
    "doubled",
    "problems",
)


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each kind."""
    rows = []
    for kind in KINDS:
        same = [outcome for outcome in outcomes if outcome.fault.kind == kind]
        row: dict[str, Any] = {"kind": kind, "count": len(same), "hangs": sum(each.hung for each in same)}
        for name in TIMES:
            seconds = [value for each in same if (value := getattr(each, name)) is not None]
            row[f"{name}_median"] = round(median(seconds), 2) if seconds else ""
            row[f"{name}_max"] = round(max(seconds), 2) if seconds else ""
        row |= {name: sum(getattr(each, name) for each in same) for name in ("lost", "doubled")}
        row["problems"] = sum(len(each.problems) for each in same)
        rows += [row] if same else []
    return rows


def report(outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    rows = summary(outcomes)
    shown = table(f"faults of seed {options.seed}, times in seconds", COLUMNS, ("kind",))
    for row in rows:
        wrong = row["hangs"] or row["lost"] or row["doubled"] or row["problems"]
        shown.add_row(*map(str, row.values()), style="red" if wrong else None)
    console().print(shown)
    if not options.output or not rows:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    every = {
        "seed": options.seed,
        "hosts": options.hosts,
        "per_host": options.per_host,
        "outcomes": [*map(asdict, outcomes)],
    }
    (options.output / "faults.json").write_text(json.dumps(every, indent=1) + "\n")
    shape = f"--hosts {options.hosts} --per-host {options.per_host}"
    command = f"python -m dnn_bench faults {shape} --faults {options.faults} --seed {options.seed}"
    command += f" --patience {options.patience:g}"
    about = {
        "title": f"{len(outcomes)} faults in elastic training on {options.hosts} emulated hosts",
        "command": command + (f" --only {options.only}" if options.only else ""),
        "unit": "seconds",
        "label": "kind",
        "bars": "seen_median again_median again_max",
        "axis": "seconds after the fault",
    }
    text = io.StringIO()
    text.writelines(f"# {key}: {value}\n" for key, value in about.items())
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = options.output / "faults.csv"
    path.write_text(text.getvalue())
    from dnn_bench.report.results import draw as draw_table
    from dnn_bench.report.results import read as read_table

    draw_table(read_table(path), path.with_suffix(".svg"))
    print(f"wrote {path}, faults.json and faults.svg")
