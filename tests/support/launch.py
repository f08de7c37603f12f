"""Real ranks for tests: start them under any launcher, capture each rank's output, leave nothing behind.

    results = run_ranks(source, nprocs=2, launcher="horovodrun", timeout=60)
    assert [r.stdout for r in results] == ["loss 1.0\\n"] * 2

`source` is a Python program as text, a Path to one, or a function without parameters that imports what
it needs. To act on ranks while they run:

    with start_ranks(source, nprocs=3) as ranks:
        ranks.wait_for_output(1, "ready")
        ranks.kill(1)
        results = ranks.wait(timeout=30)

Ranks that no launcher starts are forked where they can be. Every process carries a mark in its
environment or, forked there, has a session of its own. Leaving the block kills all of them, however the
launcher has regrouped them, and fails when `wait` had said that all was over and some were still there.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType

import psutil

from commsched.process.network import HeldPort
from dnn_bench.launch import Process, popen, spawn_rank
from dnn_bench.rank_environment import environment, rank_variables
from tests.support.checkout import make_script
from tests.support.needs import skip_without_horovod

ROOT = Path(__file__).resolve().parents[2]
CAPTURE = Path(__file__).with_name("capture.py")
MARK = "COMMSCHED_TEST_MARK"
# srun-env: two hosts, of which the variables of Slurm tell; srun-env:16: sixteen; srun-env:3+1: two, of three
# ranks and of one. All are this machine.
# elastic:SCRIPT: horovodrun with at least one rank, on the hosts of this machine that the script prints.
LAUNCHERS = ("torchrun-env", "srun-env", "torchrun", "horovodrun", "elastic", "mpirun", "alone")
LAUNCH_PREFIXES = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM", "TORCHELASTIC_", "GROUP_", "ROLE_")
LAUNCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Seconds after which a test gives ranks up. On a slow machine with other work to do, importing torch alone
# takes several ranks a good part of a minute.
PATIENCE = 400.0

Program = str | Path | Callable[[], object]


@dataclass(frozen=True)
class RankResult:
    """What one rank left. Under horovodrun, mpirun and torchrun, `returncode` is the launcher's."""

    rank: int
    returncode: int
    stdout: str
    stderr: str


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without any launcher's variables; one thread per rank."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCH_NAMES and not k.startswith(LAUNCH_PREFIXES)}
    env |= {**environment(), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    programs = str(Path(sys.executable).parent)
    if env["PATH"].split(os.pathsep)[0] != programs:
        env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    return env | dict(extra or {})


def elastic_hosts(folder: Path, *lines: str) -> tuple[str, str]:
    """Return the file with an elastic job's hosts, which a program may write anew, and the launcher."""
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{line}\n" for line in lines))
    make_script(folder / "hosts.sh", f"cat {hosts}")
    return str(hosts), f"elastic:{folder / 'hosts.sh'}"


def launcher_command(launcher: str, nprocs: int, port: int = 0, hosts: str = "") -> list[str]:
    """What stands before `python script`, empty where ranks start one by one; torchrun needs a `port`."""
    beside = Path(sys.executable).parent
    if launcher == "horovodrun":
        skip_without_horovod()
        # Without --disable-cache it would write to the home folder.
        hosts = ["-H", f"localhost:{nprocs}"]
        return [str(beside / "horovodrun"), "--disable-cache", "--gloo", "-np", str(nprocs), *hosts]
    if launcher == "elastic":
        skip_without_horovod()
        command = [str(beside / "horovodrun"), "--disable-cache", "--gloo", "-np", "1", "--min-np", "1"]
        found = ["--host-discovery-script", hosts, "--network-interface", "lo"]  # else it needs two hosts
        return [*command, "--max-np", str(nprocs), *found]
    if launcher == "mpirun":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mpirun = shutil.which("mpirun") or "mpirun"
        return [
            mpirun,
            *root,
            "--oversubscribe",
            "--bind-to",
            "none",
            "--mca",
            "btl",
            "tcp,self",
            "-np",
            str(nprocs),
        ]
    if launcher == "torchrun":
        module = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "1",
            "--nproc-per-node",
            str(nprocs),
        ]
        return [*module, "--master-addr", "127.0.0.1", "--master-port", str(port), "--no-python"]
    return []


def program_file(program: Program, folder: Path) -> Path:
    if isinstance(program, Path):
        return program
    if callable(program):
        name = program.__name__
        program = f"{textwrap.dedent(inspect.getsource(program))}\n\n{name}()\n"
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program))
    return path


class Ranks:
    """Ranks that run; made by `start_ranks`, to be used in a `with` statement."""

    def __init__(
        self, program: Program, nprocs: int, args: Sequence[str], env: Mapping[str, str], launcher: str
    ) -> None:
        launcher, _, hosts = launcher.partition(":")
        if launcher not in LAUNCHERS:
            raise ValueError(f"launcher must be one of {LAUNCHERS}, not {launcher!r}")
        self.nprocs = nprocs
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        script = program_file(program, self.folder)
        self.arguments = [str(CAPTURE), str(self.folder), str(script), *args]
        base = clean_environment({MARK: self.mark} | dict(env))
        self.port = HeldPort()
        self.prefix = launcher_command(launcher, nprocs, self.port.number, hosts)
        counts = [int(count) for count in hosts.split("+")] if "+" in hosts else []
        srun = partial(srun_environments, hosts=int(hosts) if hosts.isdigit() else 2, counts=counts)
        one_by_one = {"torchrun-env": torchrun_environments, "srun-env": srun}.get(launcher)
        environments = one_by_one(base, nprocs, self.port.number) if one_by_one else [base]
        self.sessions: set[int] = set()
        self.processes = [self.start(i, environment) for i, environment in enumerate(environments)]
        self.over = False
        self.grace = 60.0  # seconds in which what the ranks have started must end, too

    def start(self, index: int, environment: Mapping[str, str]) -> Process:
        with (self.folder / f"launcher.{index}.out").open("ab") as output:
            if self.prefix:
                command = [*self.prefix, sys.executable, *self.arguments]
                return popen(command, environment, self.folder, output)
            base = clean_environment()
            process = spawn_rank(index, self.arguments, environment, base, self.folder, output)
            self.sessions.add(process.pid)
            return process

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.left_behind(self.grace if self.over else 0.0)
        names = [line for line in map(command_of, left) if line] if self.over else []
        for process in left:
            kill_quietly(process)
        for started in self.processes:
            started.wait(60)
        # Killed is not gone: a busy machine takes its time to end a process.
        self.left_behind(60)
        self.port.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if names and error is None:
            raise AssertionError(f"processes were left behind: {names}")

    def left_behind(self, grace: float) -> list[psutil.Process]:
        """Our processes that still run after `grace` seconds."""
        deadline = time.monotonic() + grace
        while True:
            left = [p for p in psutil.process_iter() if carries(p, self.mark, self.sessions)]
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(0.05)

    def output(self, rank: int, stream: str = "stdout") -> str:
        path = self.folder / f"rank.{rank}.{stream}"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_output(self, rank: int, text: str, timeout: float = PATIENCE) -> None:
        """Until `text` stands in the rank's output; fails after `timeout` seconds or when all ended."""
        deadline = time.monotonic() + timeout
        while text not in self.output(rank):
            ended = all(p.poll() is not None for p in self.processes)
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"rank {rank} never printed {text!r}\n{self.report()}")
            time.sleep(0.05)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"rank.{rank}.pid").read_text())

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one rank (not to its launcher); the rank must have started."""
        os.kill(self.pid(rank), signum)

    def wait(self, timeout: float = PATIENCE) -> list[RankResult]:
        """Wait for every process; AssertionError with all output when that takes over `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running after {timeout} s\n{self.report()}") from None
        self.over = True
        codes = [p.returncode for p in self.processes]
        codes = codes if len(codes) == self.nprocs else codes * self.nprocs
        return [RankResult(i, codes[i], self.output(i), self.error(i)) for i in range(self.nprocs)]

    def error(self, rank: int) -> str:
        """The rank's stderr; what its launcher said stands in it where the rank itself never began."""
        captured = self.output(rank, "stderr")
        own = self.folder / f"rank.{rank}.stderr"
        launcher = self.folder / f"launcher.{min(rank, len(self.processes) - 1)}.out"
        return captured if own.exists() and captured else captured + launcher.read_text(errors="replace")

    def report(self) -> str:
        parts = [
            f"--- rank {rank} {stream}\n{self.output(rank, stream)[-4000:]}"
            for rank in range(self.nprocs)
            for stream in ("stdout", "stderr")
        ]
        parts += [
            f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted(self.folder.glob("launcher.*.out"))
        ]
        return "\n".join(parts)


def torchrun_environments(base: Mapping[str, str], nprocs: int, port: int) -> list[dict[str, str]]:
    """One environment per rank with the variables that torchrun sets."""
    found = [rank_variables(rank, nprocs, rank, nprocs, "127.0.0.1", port) for rank in range(nprocs)]
    return [{**base, **own} | explicit(base) for own in found]


def srun_environments(
    base: Mapping[str, str], nprocs: int, job: int, hosts: int = 2, counts: Sequence[int] = ()
) -> list[dict[str, str]]:
    """One environment per rank with the variables that `srun` sets on several nodes; all are this machine.

    Without the ranks' `counts` on each node, the first nodes have one rank more where the ranks cannot be
    divided equally.
    """
    counts = counts or [nprocs // hosts + (node < nprocs % hosts) for node in range(hosts)]
    assert sum(counts) == nprocs
    hosts = len(counts)
    names = ["localhost", *(f"node{number}" for number in range(2, hosts + 1))]
    job_wide = {
        "JOB_ID": str(job),
        "NTASKS": str(nprocs),
        "STEP_NUM_TASKS": str(nprocs),
        "STEP_ID": "0",
        "NODELIST": f"localhost,node[2-{hosts + 1}]",  # the step does not use the last one
        "STEP_NODELIST": ",".join(names),
        "NNODES": str(hosts),
        "STEP_TASKS_PER_NODE": ",".join(f"{n}(x{len(list(same))})" for n, same in groupby(counts)),
    }
    found = []
    for node, count in enumerate(counts):
        for local_rank in range(count):
            own = {"PROCID": str(len(found)), "LOCALID": str(local_rank), "NODEID": str(node)}
            slurm = {f"SLURM_{name}": value for name, value in (job_wide | own).items()}
            found.append({**base, **slurm, "SLURMD_NODENAME": names[node]})
    return found


def explicit(base: Mapping[str, str]) -> dict[str, str]:
    """Launch variables that the test itself has set (to be wrong, for instance) win over ours."""
    return {k: base[k] for k in LAUNCH_NAMES if k in base}


def carries(process: psutil.Process, mark: str, sessions: Collection[int] = ()) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get(MARK) == mark or os.getsid(process.pid) in sessions
    except (psutil.Error, OSError):
        return False


def command_of(process: psutil.Process) -> str:
    """Its number and the beginning of its command line; "" where it has ended by now."""
    try:
        return f"{process.pid} {' '.join(process.cmdline()[:4])}"
    except (psutil.Error, OSError):
        return ""


def kill_quietly(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


def start_ranks(
    program: Program,
    nprocs: int,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    launcher: str = "torchrun-env",
) -> Ranks:
    """Start `nprocs` ranks and return at once; use the result in a `with` statement."""
    return Ranks(program, nprocs, args, env or {}, launcher)


def run_ranks(
    program: Program,
    nprocs: int,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = PATIENCE,
    launcher: str = "torchrun-env",
    check: bool = False,
) -> list[RankResult]:
    """Run `nprocs` ranks to their end. With `check`, a failing rank fails the test and shows all output."""
    with start_ranks(program, nprocs, args, env, launcher) as ranks:
        results = ranks.wait(timeout)
        if check and any(result.returncode for result in results):
            codes = [result.returncode for result in results]
            raise AssertionError(f"ranks ended with {codes}\n{ranks.report()}")
        return results
