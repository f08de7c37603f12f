"""Commands as root, network namespaces, and the clean-up of namespaces whose owner has died."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

PREFIX = "csb"  # csb-<pid of the owner>-<its start time>-<number>, and -sw or -h<index> for its namespaces
STATE = Path("/run/commsched-bench")
ETC = Path("/etc/netns")
NAME = re.compile(rf"({PREFIX}-(\d+)-(\d+)-\d+)(?:-sw|-h\d+)?")
_numbers = itertools.count()


class ClusterError(ValueError):
    """An emulated cluster cannot be built as asked; the message says what to do."""


PACKAGES = {  # Debian's
    "ip": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "unshare": "util-linux",
    "taskset": "util-linux",
}


def require(tools: Sequence[str]) -> None:
    """Root and the named programs, or an error that says what is missing."""
    if os.geteuid() != 0:
        raise ClusterError(
            "an emulated cluster needs root, to make network namespaces and shape links: run as root, or "
            "name real hosts instead"
        )
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[tool] for tool in missing}))
        raise ClusterError(
            f"an emulated cluster needs {', '.join(missing)}: apt-get install {packages} on Debian"
        )


def command(argv: Sequence[str]) -> str:
    """Runs a short command; its words on failure become a `ClusterError`."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(argv)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def in_namespace(namespace: str, argv: Sequence[str]) -> str:
    return command(["ip", "netns", "exec", namespace, *argv])


def cores(host: int, hosts: int) -> list[int]:
    """The processors of one host. On a real cluster one host's traffic does not slow another's computation;
    here the kernel would put the work of all links on one processor, and one rank would lag behind."""
    usable = sorted(os.sched_getaffinity(0))
    if hosts > len(usable):
        return [usable[host % len(usable)]]
    return usable[host * len(usable) // hosts : (host + 1) * len(usable) // hosts]


def namespaces() -> list[str]:
    """This project's namespaces, whoever owns them."""
    found = [line.split()[0] for line in command(["ip", "netns", "list"]).splitlines() if line.strip()]
    return [name for name in found if NAME.fullmatch(name)]


def remove_namespace(name: str) -> None:
    """Ends every process inside, then removes the namespace and its /etc files, where they exist."""
    end_processes(name)
    with contextlib.suppress(ClusterError):
        command(["ip", "netns", "delete", name])
    shutil.rmtree(ETC / name, ignore_errors=True)


def end_processes(namespace: str, grace: float = 2.0) -> None:
    """SIGTERM, then SIGKILL, until nothing runs in the namespace."""
    kill_at = time.monotonic() + grace
    give_up_at = kill_at + 30.0  # a killed process needs its turn to end
    asked: set[int] = set()
    # A process that ends leaves its namespace before it is gone.
    while left := {*(inside := _pids(namespace)), *(pid for pid in asked if not _is_zombie(pid))}:
        now = time.monotonic()
        if now > give_up_at:
            raise ClusterError(f"processes {left} in {namespace} do not end")
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                if now > kill_at:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    os.kill(pid, signal.SIGTERM)
        asked.update(inside)
        time.sleep(0.02)


def _pids(namespace: str) -> list[int]:
    with contextlib.suppress(ClusterError):
        found = [int(pid) for pid in command(["ip", "netns", "pids", namespace]).split()]
        return [pid for pid in found if not _is_zombie(pid)]
    return []


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def claim() -> str:
    """A new name that says who owns the cluster, and its folder in `STATE`."""
    identity = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"
    (STATE / identity).mkdir(parents=True, mode=0o700)
    return identity


def remove_leftovers() -> list[str]:
    """Removes the clusters whose owner is dead; returns their names."""
    removed: set[str] = set()
    folders = [path.name for root in (STATE, ETC) for path in root.glob(f"{PREFIX}-*")]
    for name in [*namespaces(), *folders]:
        match = NAME.fullmatch(name)
        if match is None or _started(int(match[2])) == int(match[3]):
            continue
        remove_namespace(name)
        shutil.rmtree(STATE / match[1], ignore_errors=True)
        removed.add(match[1])
    return sorted(removed)


def _started(pid: int) -> int:
    """When a process started; 0 if there is none. A process id may have been given away again.

    In the kernel's ticks since it booted: psutil adds the time of the boot, which two processes may see one
    second apart where the clock is adjusted. One would then remove the other's cluster.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[19])
