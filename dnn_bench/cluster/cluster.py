"""`Cluster`: hosts as network namespaces around a switch, each behind a shaped link.

The switch is a bridge in a namespace of its own, so nothing appears in the machine's own network, two
clusters can use the same addresses at the same time, and removing the namespaces removes everything.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dnn_bench.cluster import ssh as sshd
from dnn_bench.cluster import system
from dnn_bench.cluster.link import Link, links
from dnn_bench.cluster.system import ClusterError, command, in_namespace
from dnn_bench.fork_server import SHARED
from dnn_bench.rank_environment import rank_variables

NETWORK = "10.77.0"
MAX_HOSTS = 200
DEVICE = "eth0"
# Every kernel has it and lets every namespace use it; on short links, such as these, `cubic` does the same.
CONGESTION = "reno"
CONGESTION_FILE = "/proc/sys/net/ipv4/tcp_congestion_control"
SET_HOSTNAME = 'hostname "$0" && exec "$@"'
Process = subprocess.Popen[Any]


class Cluster:
    """Emulated hosts on this machine; a context manager.

    Every host has its own network stack, address (`addresses`) and name (`names`: host0, …). With `ssh`
    it has an sshd, which horovodrun and mpirun need. `link` is the speed of all links or of each
    (`"1gbit,250mbit"`). Hosts share files and memory; each has processors of its own, if there are enough.
    """

    def __init__(
        self,
        hosts: int = 2,
        link: str | Sequence[str] = "1gbit",
        *,
        delay: str | None = None,
        congestion: str = CONGESTION,
        ssh: bool = False,
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ClusterError(f"a cluster has 1 to {MAX_HOSTS} hosts, not {hosts}")
        self.links: list[Link] = links(link, hosts, delay)
        self.names = [f"host{i}" for i in range(hosts)]
        self.addresses = [f"{NETWORK}.{i + 1}" for i in range(hosts)]
        self.congestion = congestion
        self._with_ssh = ssh
        self._has_ssh = False
        self._closed = True
        self._owner = os.getpid()
        self._processes: list[Process] = []
        self._ports = itertools.count(29500)
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.names)

    def start(self) -> Cluster:
        """Builds the cluster; `close` removes it. `with Cluster(...)` does both."""
        system.require(["ip", "tc", "unshare", "taskset", *(sshd.TOOLS if self._with_ssh else ())])
        system.remove_leftovers()
        self.identity = system.claim()
        self._state = system.STATE / self.identity
        self._closed = False
        atexit.register(self.close)
        self._close_on_signals()
        try:
            self._build()
            if self._with_ssh:
                self.start_ssh()
        except BaseException:
            self.close()
            raise
        return self

    def run(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> Process:
        """Starts a program on a host; `env` is added to this process's environment, the rest goes to `Popen`.

        The program gets a session of its own: Ctrl-C reaches only this process, which ends the others.
        """
        if self._closed:
            raise ClusterError("the cluster is not running: use it inside `with Cluster(...)`")
        if not 0 <= host < len(self):
            raise ClusterError(f"there are hosts 0 to {len(self) - 1}, not {host}")
        cores = ",".join(map(str, system.cores(host, len(self))))
        place = ["taskset", "-c", cores, "ip", "netns", "exec", self._namespace(host)]
        prefix = [*place, "unshare", "--uts", "sh", "-c", SET_HOSTNAME]
        popen = {"env": self.environment(env), "start_new_session": True, **popen}
        process: Process = subprocess.Popen([*prefix, self.names[host], *argv], **popen)
        self._processes.append(process)
        return process

    def launch(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> list[Process]:
        """Starts one process per host with the environment that torchrun would give it."""
        variables = self.rank_variables()
        return [self.run(i, argv, {**own, **(env or {})}, **popen) for i, own in enumerate(variables)]

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a program on a host: this process's, with `env` added.

        Programs on a host start fork servers of their own: those of this process are in another network.
        """
        own = {name: value for name, value in os.environ.items() if name != SHARED}
        return {**own, "GLOO_SOCKET_IFNAME": DEVICE, **(env or {})}

    def rank_variables(self, per_host: int = 1) -> list[dict[str, str]]:
        """The variables of `per_host` ranks on each host, host by host.

        Each call names a port that no earlier job has used.
        """
        size, port = len(self) * per_host, next(self._ports)
        place = (per_host, self.addresses[0], port)
        return [rank_variables(rank, size, rank % per_host, *place) for rank in range(size)]

    def start_ssh(self) -> None:
        """Starts an sshd on every host, once. Programs that run already do not see the new /etc/ssh."""
        if self._has_ssh:
            return
        system.require(sshd.TOOLS)
        namespaces = [self._namespace(host) for host in range(len(self))]
        deadline = time.monotonic() + 10
        for host, argv in enumerate(sshd.prepare(self._state, namespaces, self.addresses)):
            with (self._state / f"sshd_{host}.log").open("w+") as log:
                server = self.run(host, argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                while not sshd.is_listening(server.pid):
                    if server.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise ClusterError(f"sshd of host {host}: {log.read()}")
                    time.sleep(0.01)
        self._has_ssh = True

    def set_link(self, link: str | Sequence[str]) -> None:
        """Gives the links another speed. What is on its way is lost: nobody should be sending."""
        if self._closed:
            raise ClusterError("the cluster is not running: use it inside `with Cluster(...)`")
        self.links = links(link, len(self), None)
        for host in range(len(self)):
            self._shape(host, again=True)

    def cut(self, host: int) -> None:
        """Unplugs a host at the switch, for good: its own interface stays up, and nobody is told."""
        command(["ip", "-n", f"{self.identity}-sw", "link", "set", f"port{host}", "nomaster"])

    def hosts_argument(self, slots: int = 1) -> str:
        """`host0:1,host1:1`, for `horovodrun -H` and `mpirun -H`."""
        return ",".join(f"{name}:{slots}" for name in self.names)

    def close(self) -> None:
        """Ends every process on the hosts and removes the cluster. Safe to call twice."""
        # A forked child must not take the parent's cluster down.
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        for name in system.namespaces():
            if name.startswith(f"{self.identity}-"):
                system.remove_namespace(name)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        shutil.rmtree(self._state, ignore_errors=True)
        self._restore_signals()
        atexit.unregister(self.close)

    def _namespace(self, host: int) -> str:
        return f"{self.identity}-h{host}"

    def _build(self) -> None:
        switch = f"{self.identity}-sw"
        command(["ip", "netns", "add", switch])
        command(["ip", "-n", switch, "link", "add", "bridge", "type", "bridge"])
        command(["ip", "-n", switch, "link", "set", "bridge", "up"])
        for host in range(len(self)):
            self._build_host(host, switch)

    def _build_host(self, host: int, switch: str) -> None:
        """The host's namespace, its cable to the switch, and both ends of the cable shaped.

        Its /etc/hosts has all hosts, and no loopback address for the machine's own name.
        """
        name, port = self._namespace(host), f"port{host}"
        directory = system.ETC / name
        directory.mkdir(parents=True, exist_ok=True)
        lines = [f"{address} {name}\n" for address, name in zip(self.addresses, self.names, strict=True)]
        (directory / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        command(["ip", "netns", "add", name])
        cable = ["link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", name]
        command(["ip", "-n", switch, *cable])
        command(["ip", "-n", switch, "link", "set", port, "master", "bridge", "up"])
        command(["ip", "-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", DEVICE])
        for device in ("lo", DEVICE):
            command(["ip", "-n", name, "link", "set", device, "up"])
        try:
            in_namespace(name, ["sh", "-c", f'echo "$0" > {CONGESTION_FILE}', self.congestion])
        except ClusterError:
            raise ClusterError(congestion_advice(self.congestion)) from None
        self._shape(host)

    def _shape(self, host: int, again: bool = False) -> None:
        """Shape both ends of a host's cable."""
        link = self.links[host]
        for namespace, device in ((self._namespace(host), DEVICE), (f"{self.identity}-sw", f"port{host}")):
            if again:
                with contextlib.suppress(ClusterError):  # an unlimited link has no shaper to remove
                    in_namespace(namespace, ["tc", "qdisc", "del", "dev", device, "root"])
            for shaper in link.commands(device):
                try:
                    in_namespace(namespace, shaper)
                except ClusterError as error:
                    what = str(error).partition("\n")[0].rstrip(".")  # the usage of tc follows
                    said = f"the system refuses the link {link} of host {host}: {what}; {link.advice(shaper)}"
                    raise ClusterError(said) from None

    def _close_on_signals(self) -> None:
        """When asked to end, run the clean-up, which the default action of these signals skips."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._old_handlers[number] = signal.signal(number, _exit_on_signal)

    def _restore_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            while self._old_handlers:
                signal.signal(*self._old_handlers.popitem())


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def congestion_advice(refused: str) -> str:
    """Why hosts cannot avoid congestion in this way, and what would let them."""
    folder = Path(CONGESTION_FILE).parent
    known = (folder / "tcp_available_congestion_control").read_text().split()
    allowed = (folder / "tcp_allowed_congestion_control").read_text().split()
    said = (
        f"emulated hosts cannot use the congestion control {refused!r}: "
        f"the system has {', '.join(known)} and allows hosts {', '.join(allowed)}"
    )
    if refused not in known:
        return said
    wanted = " ".join([*allowed, refused])
    return f"{said}; `sysctl -w net.ipv4.tcp_allowed_congestion_control='{wanted}'` allows it"
