"""Starts the ranks of one program: on this machine, on emulated hosts, or through horovodrun.

    place = ThisMachine(4)
    processes = place.start(["-m", "dnn_bench.runner.worker", ...])

Ranks are forked from processes that have imported torch (`fork_server`), except where horovodrun starts them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from commsched.process.network import HeldPort
from dnn_bench import fork_server
from dnn_bench.baselines import MissingPeer
from dnn_bench.cluster import CONGESTION, Cluster, ClusterError
from dnn_bench.command_line import one_line_errors, parser
from dnn_bench.fork_server import Forked, ForkServer, Output
from dnn_bench.rank_environment import environment, rank_variables

Process = subprocess.Popen[Any] | Forked
LAUNCHED = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")


def launched() -> bool:
    """Whether a launcher has started this process as a rank."""
    return any(name in os.environ for name in LAUNCHED)


class Place:
    """A place where `size` ranks run; `rate` is a host's bytes per second, if it is known.

    `per_host` ranks share each link between emulated hosts, `hosts` as horovodrun names them.
    """

    kind = hosts = ""
    per_host = 1
    rate: float | None = None

    def __init__(self, size: int, threads: int) -> None:
        self.size, self.threads = size, threads

    def start(
        self,
        program: Sequence[str],
        output: Output = None,
        *,
        launcher: str = "",
        extra: Mapping[str, str] | None = None,
    ) -> list[Process]:
        """Run `python PROGRAM...` as every rank of this machine, with `extra` variables.

        `output` takes the output of all ranks; a list has one for each rank. With ``launcher="horovod"`` the
        only process that is returned is horovodrun's.
        """
        variables = environment(self.threads) | dict(extra or {})
        if launcher == "horovod":
            command = [*horovodrun(self.size, self.hosts), sys.executable, *program]
            return [self.run_launcher(command, variables, output)]
        outputs = output if isinstance(output, list) else [output] * self.size
        ranks = enumerate(zip(self.rank_variables(), outputs, strict=False))
        return [self.start_rank(i, program, variables | own, stream) for i, (own, stream) in ranks]

    def rank_variables(self) -> list[dict[str, str]]:
        """For each rank of this machine, the variables that torchrun sets."""
        raise NotImplementedError

    def start_rank(
        self, index: int, program: Sequence[str], variables: dict[str, str], output: Output
    ) -> Process:
        raise NotImplementedError

    def run_launcher(self, command: Sequence[str], variables: dict[str, str], output: Output) -> Process:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """The place as a report has it."""
        return {"kind": self.kind, "ranks": self.size, "rate": self.rate}


class ThisMachine(Place):
    """All ranks on this machine, talking over loopback; or this machine's part of a larger job.

    `host` of `hosts` is this machine. The machines meet at `address` and `port`, which must be free on the
    first.
    """

    kind = "this machine"

    def __init__(
        self,
        size: int,
        threads: int = 1,
        *,
        host: int = 0,
        hosts: int = 1,
        address: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        super().__init__(size, threads)
        self._local = size // hosts
        self._first = host * self._local
        self._address, self._port = address, port
        self._held: list[HeldPort] = []  # one for each start: the port of an earlier one may still be in use

    def rank_variables(self) -> list[dict[str, str]]:
        if not self._port:
            self._held.append(HeldPort())
        port = self._port or self._held[-1].number
        place = (self._local, self._address, port)
        return [rank_variables(self._first + i, self.size, i, *place) for i in range(self._local)]

    def start_rank(
        self, index: int, program: Sequence[str], variables: dict[str, str], output: Output
    ) -> Process:
        base = {**os.environ, **environment(self.threads)}
        return spawn_rank(index, program, base | variables, base, output=output)

    def run_launcher(self, command: Sequence[str], variables: dict[str, str], output: Output) -> Process:
        return popen(command, {**os.environ, **variables}, Path.cwd(), output)


class Hosts(Place):
    """`per_host` ranks on each host of an emulated cluster, host by host."""

    kind = "emulated hosts"

    def __init__(self, cluster: Cluster, threads: int = 1, per_host: int = 1) -> None:
        super().__init__(len(cluster) * per_host, threads)
        self.cluster, self.per_host, self.hosts = cluster, per_host, cluster.hosts_argument(per_host)
        rates = [link.bytes_per_second for link in cluster.links]
        self.rate = None if min(rates) == float("inf") else min(rates)
        self._servers: dict[int, ForkServer] = {}  # by rank, in its host's network

    def rank_variables(self) -> list[dict[str, str]]:
        return self.cluster.rank_variables(self.per_host)

    def start_rank(
        self, index: int, program: Sequence[str], variables: dict[str, str], output: Output
    ) -> Process:
        base = self.cluster.environment(environment(self.threads))
        environ = self.cluster.environment(variables)
        if not fork_server.can_fork(environ, base):
            return self._run(index // self.per_host, [sys.executable, *program], variables, output)
        if index not in self._servers:  # the cluster ends it with everything else on its hosts
            self._servers[index] = ForkServer.start(base, partial(self.cluster.run, index // self.per_host))
        return self._servers[index].spawn(program, environ, Path.cwd(), output)

    def run_launcher(self, command: Sequence[str], variables: dict[str, str], output: Output) -> Process:
        try:
            self.cluster.start_ssh()
        except ClusterError as error:
            raise MissingPeer(f"horovodrun reaches other hosts by ssh, and {error}") from None
        return self._run(0, command, variables, output)

    def _run(self, host: int, command: Sequence[str], variables: dict[str, str], output: Output) -> Process:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return self.cluster.run(host, command, variables, **streams)

    def describe(self) -> dict[str, Any]:
        links, congestion = [str(link) for link in self.cluster.links], self.cluster.congestion
        hosts = {"hosts": len(self.cluster), "per_host": self.per_host}
        return {**super().describe(), **hosts, "links": links, "congestion": congestion}


def spawn_rank(
    index: int,
    program: Sequence[str],
    variables: Mapping[str, str],
    base: Mapping[str, str],
    folder: Path | None = None,
    output: Output = None,
    errors: Output = None,
) -> Process:
    """Run `python PROGRAM...` on this machine, in a session of its own, with these variables and no others.

    It is forked by the server of the environment `base` if `variables` differ from it only where that is
    safe.
    """
    folder = folder or Path.cwd()
    if fork_server.can_fork(variables, base):
        return fork_server.server(index, base).spawn(program, variables, folder, output, errors)
    return popen([sys.executable, *program], variables, folder, output, errors)


def popen(
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    output: Output = None,
    errors: Output = None,
) -> Process:
    """Start a command on this machine, in a session of its own; `output` takes errors without `errors`."""
    errors = output if errors is None else errors
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
    return subprocess.Popen(command, env=variables, cwd=folder, start_new_session=True, **streams)


def find(name: str) -> str | None:
    """The launcher that belongs to this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def installed(name: str) -> str:
    """The path of a launcher; `MissingPeer` where there is none."""
    if path := find(name):
        return path
    raise MissingPeer(
        f"{name} is not installed; run COMMSCHED_WITH_HOROVOD=1 docker/install.sh, or choose another launcher"
    )


def horovodrun(size: int, hosts: str = "") -> list[str]:
    """The command that starts what follows on `size` ranks of these hosts."""
    # Without --disable-cache horovodrun keeps its checks in ~/.horovod.
    options = ["--disable-cache", "--gloo", "-np", str(size), "-H", hosts or f"localhost:{size}"]
    return [installed("horovodrun"), *options]


def wait_for_all(processes: Sequence[Process]) -> int:
    """Wait until one fails or all have ended well; returns the first failure's exit status or 0."""
    while True:
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def run(place: Place, program: Sequence[str]) -> int:
    """Run `python PROGRAM...` on all ranks of a place and leave none behind; returns as `wait_for_all`."""
    processes = place.start(program)
    try:
        return wait_for_all(processes)
    finally:
        end(processes)


def end(processes: Sequence[Process]) -> None:
    """Kill what still runs, and wait for it."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(60)  # killed is not gone: a busy machine takes its time


def add_cluster(command: argparse.ArgumentParser, link: str = "1gbit") -> None:
    """The options that describe an emulated cluster."""
    command.add_argument("--hosts", type=int, default=2, metavar="N", help="emulated hosts")
    text = "speed of the links: 250mbit, unlimited, or one per host: 1gbit,250mbit"
    command.add_argument("--link", default=link, help=text)
    command.add_argument("--delay", help="latency of each link, such as 1ms (needs the kernel's netem)")
    text = "congestion control of the hosts' TCP, such as bbr"
    command.add_argument("--congestion", default=CONGESTION, help=text)


def add_place(command: argparse.ArgumentParser, link: str = "1gbit") -> None:
    """The options of an emulated cluster, and of ranks without one."""
    add_cluster(command, link)
    text = "ranks on each emulated host (default 1)"
    command.add_argument("--per-host", type=int, default=1, metavar="N", help=text)
    text = "run N ranks here, without emulated hosts and without root"
    command.add_argument("--local", type=int, metavar="N", help=text)
    command.add_argument("--threads", type=int, default=1, help="threads per rank")


@contextmanager
def place_of(options: argparse.Namespace) -> Iterator[Place]:
    if options.per_host < 1 or (options.per_host > 1 and options.local is not None):
        raise ValueError(f"--per-host needs emulated hosts and at least one rank, not {options.per_host}")
    if options.local is not None:
        if options.local < 1:
            raise ValueError(f"--local needs at least one rank, not {options.local}")
        yield ThisMachine(options.local, options.threads)
        return
    with Cluster(options.hosts, options.link, delay=options.delay, congestion=options.congestion) as cluster:
        yield Hosts(cluster, options.threads, options.per_host)


# -- `python -m dnn_bench cluster`: run a command on every host of an emulated cluster -----------------------


def _parse_cluster(arguments: list[str]) -> argparse.Namespace:
    command = parser(
        "cluster",
        "Builds hosts joined by links of a chosen speed on this machine (as root), runs the command once on "
        "each, with the environment torchrun would give it, and removes everything.",
    )
    add_cluster(command)
    text = "run it on host0 only, as for horovodrun and mpirun, and let the hosts reach each other by ssh"
    command.add_argument("--first-only", action="store_true", help=text)
    text = "the command to run on the hosts"
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=text)
    return command.parse_args(arguments)


@one_line_errors(ClusterError)
def run_on_hosts(arguments: list[str]) -> int:
    options = _parse_cluster(arguments)
    argv = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not argv:
        raise ClusterError("which command? python -m dnn_bench cluster --hosts 2 -- COMMAND")
    link = {"delay": options.delay, "congestion": options.congestion}
    with Cluster(options.hosts, options.link, **link, ssh=options.first_only) as cluster:
        processes = [cluster.run(0, argv)] if options.first_only else cluster.launch(argv)
        return wait_for_all(processes)
