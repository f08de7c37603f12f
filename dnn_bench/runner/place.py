"""Where ranks run, and how each launcher starts them there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dnn_bench.baselines.registry import Baseline, MissingPeer
from dnn_bench.cluster import Cluster, ClusterError
from dnn_bench.runner.ports import HeldPort

Process = subprocess.Popen[Any]
ROOT = Path(__file__).resolve().parents[2]


class Place(Protocol):
    """`size` ranks somewhere; `rate` is a host's bytes per second, if it is known."""

    size: int
    rate: float | None

    def start(self, baseline: Baseline, argv: Sequence[str], log: Any) -> list[Process]: ...

    def describe(self) -> dict[str, Any]: ...


def environment(extra: Mapping[str, str], threads: int = 1) -> dict[str, str]:
    """For ranks: one thread, this checkout importable, and the baseline's own variables."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, **extra}


def horovodrun(size: int, hosts: str, argv: Sequence[str]) -> list[str]:
    beside = Path(sys.executable).with_name("horovodrun")
    program = str(beside) if beside.exists() else shutil.which("horovodrun")
    if program is None:
        raise MissingPeer("horovodrun is not installed, without which Horovod cannot be started")
    return [program, "--disable-cache", "--gloo", "-np", str(size), "-H", hosts, *argv]


class Hosts:
    """One rank on each host of an emulated cluster."""

    def __init__(self, cluster: Cluster, threads: int = 1) -> None:
        self.cluster, self.size, self.threads = cluster, len(cluster), threads
        rates = [link.bytes_per_second for link in cluster.links]
        self.rate = None if min(rates) == float("inf") else min(rates)

    def start(self, baseline: Baseline, argv: Sequence[str], log: Any) -> list[Process]:
        variables = environment(baseline.environment, self.threads)
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        if baseline.launcher == "horovod":
            command = horovodrun(self.size, self.cluster.hosts_argument(), argv)
            self._need_ssh()
            return [self.cluster.run(0, command, variables, **options)]
        return self.cluster.launch(argv, variables, **options)

    def _need_ssh(self) -> None:
        """horovodrun starts ranks on other hosts by ssh; other baselines run without."""
        try:
            self.cluster.start_ssh()
        except ClusterError as error:
            raise MissingPeer(f"horovodrun reaches other hosts by ssh, and {error}") from None

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "emulated hosts",
            "hosts": self.size,
            "links": [str(link) for link in self.cluster.links],
            "congestion": self.cluster.congestion,
        }


class ThisMachine:
    """All ranks on this machine, talking over loopback."""

    def __init__(self, size: int, threads: int = 1) -> None:
        self.size, self.threads = size, threads
        self.rate: float | None = None
        self._ports: list[HeldPort] = []

    def start(self, baseline: Baseline, argv: Sequence[str], log: Any) -> list[Process]:
        variables = {**os.environ, **environment(baseline.environment, self.threads)}
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        if baseline.launcher == "horovod":
            command = horovodrun(self.size, f"localhost:{self.size}", argv)
            return [subprocess.Popen(command, env=variables, **options)]
        self._ports.append(HeldPort())
        port = str(self._ports[-1].number)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(self.size)}
        common |= {"LOCAL_WORLD_SIZE": str(self.size)}
        return [
            subprocess.Popen(
                argv, env={**variables, **common, "RANK": str(i), "LOCAL_RANK": str(i)}, **options
            )
            for i in range(self.size)
        ]

    def describe(self) -> dict[str, Any]:
        return {"kind": "this machine", "ranks": self.size}
