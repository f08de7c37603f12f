"""Emulated clusters: hosts with their own network stack, joined by links of a chosen speed, on one machine.

>>> from dnn_bench.cluster import Cluster
>>> with Cluster(hosts=2, link="250mbit") as cluster:
...     process = cluster.run(0, ["ping", "-c1", "host1"])
...     process.wait()
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dnn_bench.fork_server import SHARED
from dnn_bench.rank_environment import rank_variables
from scheduler.ir.inputs import LARGEST, InputError

# -- ``Cluster``: hosts as network namespaces around a switch, each behind a shaped link ---------------------

# The switch is a bridge in a namespace of its own, so nothing appears in the machine's own network, two
# clusters can use the same addresses at the same time, and removing the namespaces removes everything.

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
        self._servers: list[Process] = []  # each host's sshd
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
        require(["ip", "tc", "unshare", "taskset", *(TOOLS if self._with_ssh else ())])
        remove_leftovers()
        self.identity = claim()
        self._state = STATE / self.identity
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
        used = ",".join(map(str, cores(host, len(self))))
        place = ["taskset", "-c", used, "ip", "netns", "exec", self._namespace(host)]
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
        require(TOOLS)
        namespaces = [self._namespace(host) for host in range(len(self))]
        deadline = time.monotonic() + 60  # a busy machine
        for host, argv in enumerate(prepare(self._state, namespaces, self.addresses)):
            with (self._state / f"sshd_{host}.log").open("w+") as log:
                server = self.run(host, argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                self._servers.append(server)
                while not is_listening(server.pid):
                    if server.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise ClusterError(f"sshd of host {host}: {log.read()}")
                    time.sleep(0.01)
        self._has_ssh = True

    def set_link(self, link: str | Sequence[str]) -> None:
        """Give the links another speed. Packets on their way are lost: nobody should be sending."""
        if self._closed:
            raise ClusterError("the cluster is not running: use it inside `with Cluster(...)`")
        self.links = links(link, len(self), None)
        for host in range(len(self)):
            self._shape(host, again=True)

    def cut(self, host: int) -> None:
        """Unplugs a host at the switch: its own interface stays up, and nobody is told."""
        command(["ip", "-n", f"{self.identity}-sw", "link", "set", f"port{host}", "nomaster"])

    def mend(self, host: int) -> None:
        """Plugs a host in again after `cut`."""
        command(["ip", "-n", f"{self.identity}-sw", "link", "set", f"port{host}", "master", "bridge"])

    def mute(self, host: int, hosts: Sequence[int], muted: bool = True) -> None:
        """Lose what a host sends to others, which it hears all the same; with `muted=False` no more.

        The host takes a card that nobody has for theirs.
        """
        place = ["ip", "-n", self._namespace(host), "neighbour", "replace" if muted else "delete"]
        nobody = ["lladdr", "02:00:00:00:00:00", "nud", "permanent"] if muted else []
        for other in set(hosts) - {host}:
            command([*place, self.addresses[other], "dev", DEVICE, *nobody])

    def inside(self, host: int, argv: Sequence[str]) -> str:
        """Runs a short command where programs run that come by ssh: among other things, with their mounts."""
        return command(["nsenter", "-t", str(self._servers[host].pid), "-m", "-n", "--", *argv])

    def hosts_argument(self, slots: int = 1) -> str:
        """`host0:1,host1:1`, for `horovodrun -H` and `mpirun -H`."""
        return ",".join(f"{name}:{slots}" for name in self.names)

    def close(self) -> None:
        """Ends every process on the hosts and removes the cluster. Safe to call twice."""
        # A forked child must not take the parent's cluster down.
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        for name in namespaces():
            if name.startswith(f"{self.identity}-"):
                remove_namespace(name)
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
        directory = ETC / name
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
                self._old_handlers[number] = signal.signal(number, lambda number, _: sys.exit(128 + number))

    def _restore_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            while self._old_handlers:
                signal.signal(*self._old_handlers.popitem())


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


# -- the speed of a link: parsing, and the traffic shaper's commands -----------------------------------------

PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
MIN_BURST = 256 * 1024  # bytes; several of the 64 KiB segments the kernel hands to a device at once
BURST_SECONDS = 1e-3
PACKET = 2048  # bytes; tbf loses what is larger than a burst
QUEUE = "100ms"


@dataclass(frozen=True)
class Link:
    """A full-duplex link; `rate` in bits per second, None when unlimited; `delay` as tc writes it ("1ms")."""

    rate: int | None = None
    delay: str | None = None

    @classmethod
    def parse(cls, text: str, delay: str | None = None) -> Link:
        """`250mbit`, `1gbit`, `2.5gbit`, or `unlimited`."""
        if text == "unlimited":
            return cls(None, delay)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
        rate = float(match[1]) * PREFIXES[match[2]] if match else 0.0
        if not 0 < rate <= LARGEST:
            raise ClusterError(
                f"a link is a rate in bits such as 250mbit or 1gbit, or unlimited; not {text!r}"
            )
        return cls(round(rate), delay)

    @property
    def bytes_per_second(self) -> float:
        return float("inf") if self.rate is None else self.rate / 8

    def __str__(self) -> str:
        if self.rate is None:
            return "unlimited"
        prefix, factor = next(pair for pair in reversed(PREFIXES.items()) if self.rate >= pair[1])
        return f"{self.rate / factor:g}{prefix}bit"

    def advice(self, refused: Sequence[str]) -> str:
        """Advice for a system that refuses one of `commands`."""
        if "netem" in refused:
            return "a delay looks like 1ms and needs a kernel with netem; do without --delay"
        return "rates from 1kbit to 10gbit are safe; or take unlimited"

    def commands(self, device: str) -> list[list[str]]:
        """The tc commands that make `device` send at this rate, after this delay."""
        commands, parent = [], ["root"]
        if self.delay is not None:
            delayed = ["root", "handle", "1:", "netem", "delay", self.delay, "limit", "100000"]
            commands.append(["tc", "qdisc", "add", "dev", device, *delayed])
            parent = ["parent", "1:"]
        if self.rate is not None:
            # A slow link's, of a second: more would hold all that small programs send.
            least = max(PACKET, min(MIN_BURST, self.rate // 8))
            burst = max(least, round(self.rate / 8 * BURST_SECONDS))
            shaper = ["tbf", "rate", f"{self.rate}bit", "burst", str(burst), "latency", QUEUE]
            commands.append(["tc", "qdisc", "add", "dev", device, *parent, *shaper])
        return commands


def links(spec: str | Sequence[str], hosts: int, delay: str | None = None) -> list[Link]:
    """One link per host from one rate for all, or a list (or `a,b,c`) of one each."""
    texts = spec.split(",") if isinstance(spec, str) else list(spec)
    if len(texts) == 1:
        texts *= hosts
    if len(texts) != hosts:
        raise ClusterError(
            f"{hosts} hosts need one link for all or {hosts} links, not {len(texts)}: {spec!r}"
        )
    return [Link.parse(text, delay) for text in texts]


# -- an sshd per emulated host, with a throwaway key that only the cluster's hosts know ----------------------

# `ip netns exec` lays /etc/netns/NAME/* over /etc, so inside a host plain `ssh host1` finds the key and the
# settings, and nothing outside the cluster is touched. ServerAlive ends the wait for a program on a host that
# is cut off: horovodrun's driver would wait for ever.

TOOLS = ("sshd", "ssh", "ssh-keygen")
CLIENT = """Host *
  IdentityFile {key}
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ConnectTimeout 10
  ServerAliveInterval 2
  ServerAliveCountMax 3
"""
SERVER = """ListenAddress {address}
HostKey {key}
AuthorizedKeysFile {key}.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
AcceptEnv *
"""
LISTEN = "0A"  # the state's code in /proc/net/tcp


def prepare(state: Path, namespaces: Sequence[str], addresses: Sequence[str]) -> list[list[str]]:
    """Write keys and settings; return each host's command that serves ssh in the foreground."""
    server, key = shutil.which("sshd"), state / "key"
    assert server is not None  # the caller has asked for TOOLS
    command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "throwaway", "-f", str(key)])
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where sshd confines itself before a login
    commands = []
    for namespace, address in zip(namespaces, addresses, strict=True):
        directory = ETC / namespace / "ssh"  # replaces /etc/ssh inside the namespace
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "ssh_config").write_text(CLIENT.format(key=key))
        config = state / f"{namespace}.sshd.conf"
        config.write_text(SERVER.format(address=address, key=key))
        commands.append([server, "-D", "-e", "-f", str(config)])
    return commands


def is_listening(pid: int, port: int = 22) -> bool:
    """Whether something listens on the port in the network namespace of process `pid`."""
    try:
        rows = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    fields = [row.split() for row in rows]
    return any(row[1].endswith(f":{port:04X}") and row[3] == LISTEN for row in fields)


# -- commands as root, network namespaces, and the clean-up of namespaces whose owner has died ---------------

PREFIX = "csb"  # csb-<pid of the owner>-<its start time>-<number>, and -sw or -h<index> for its namespaces
STATE = Path("/run/commsched-bench")
ETC = Path("/etc/netns")
NAME = re.compile(rf"({PREFIX}-(\d+)-(\d+)-\d+)(?:-sw|-h\d+)?")
_numbers = itertools.count()


class ClusterError(InputError):
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
    names = [line.split()[0] for line in command(["ip", "netns", "list"]).splitlines() if line.strip()]
    return [name for name in names if NAME.fullmatch(name)]


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
        pids = [int(pid) for pid in command(["ip", "netns", "pids", namespace]).split()]
        return [pid for pid in pids if not _is_zombie(pid)]
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
