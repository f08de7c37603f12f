"""``commsched doctor``: whether a machine can build and run commsched, and what to do where it cannot.

Nothing here imports torch, which may be what is broken.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from commsched.errors import CommError
from commsched.process.launch import by_host, detect_launch
from commsched.process.network import interface_address, is_loopback

# -- the command ---------------------------------------------------------------------------------------------


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    findings = examine(Machine())
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print("\n".join(report_lines(findings)))
    return int(any(finding.level == PROBLEM for finding in findings))


def report_lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line per finding, and one more where there is something to do."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.check:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.advice}")
    return lines


# -- the checks, in the order in which they are reported -----------------------------------------------------

OK, NOTE, PROBLEM = "ok", "note", "problem"
OLDEST, NEWEST = Version("2.6"), Version("2.15")  # of torch, as docker/install.sh has them
MANY_FILES = 1024  # every rank holds a few connections to every other
LOCKED_BYTES = 64 << 20
SHARED_BYTES = 512 << 20
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
INTERFACES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
FEW_PORTS = 1000


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` says what to do, and is empty where nothing needs to be done."""

    check: str
    level: str
    found: str
    advice: str = ""


Answer = tuple[str, ...]  # level, what was found, and where something needs to be done, advice
CHECKS: list[Callable[[Machine], Finding]] = []


def check(name: str) -> Callable[[Callable[[Machine], Answer]], Callable[[Machine], Finding]]:
    def add(judge: Callable[[Machine], Answer]) -> Callable[[Machine], Finding]:
        @wraps(judge)
        def named(machine: Machine) -> Finding:
            return Finding(name, *judge(machine))

        CHECKS.append(named)
        return named

    return add


def examine(machine: Machine) -> list[Finding]:
    return [run(machine) for run in CHECKS]


@check("torch")
def torch(machine: Machine) -> Answer:
    facts = machine.torch
    if isinstance(facts, str):
        return PROBLEM, f"torch cannot be imported: {facts}", "install it: docker/install.sh"
    text = f"{facts['version']}, {'CUDA ' + facts['cuda'] if facts['cuda'] else 'CPU build'}"
    try:
        release = Version(Version(facts["version"]).base_version)
    except InvalidVersion:
        return NOTE, text, "the version cannot be read; supported are 2.6 to 2.15"
    if release < OLDEST:
        return PROBLEM, text, f"install torch {OLDEST} or newer"
    if (release.major, release.minor) > (NEWEST.major, NEWEST.minor):
        return NOTE, text, f"newer than {NEWEST}, the newest that was tested"
    return OK, text


@check("extension")
def extension(machine: Machine) -> Answer:
    ran = machine.extension
    if ran.status == 0:
        return OK, "comm_core is built for this torch"
    if "undefined symbol" in ran.output:
        text = f"comm_core was built for another torch: {ran.last_line}"
    elif "comm_core" in ran.last_line and "No module" in ran.last_line:
        text = "comm_core is not built"
    else:
        text = f"comm_core cannot be imported: {ran.last_line}"
    return PROBLEM, text, "build it: pip install --no-build-isolation . in the checkout"


@check("ranks")
def ranks(machine: Machine) -> Answer:
    """Connect the ranks of the job whose launcher has started this command as one of them."""
    try:
        launch = detect_launch(machine.environ, machine.environ.get("COMMSCHED_LAUNCHER", ""))
    except CommError as error:
        return PROBLEM, str(error), "start the command as you start your script, or unset these variables"
    if launch.size == 1:
        return OK, "this process is alone: no launcher has started it with others"
    ran = machine.python(RANKS)
    joined = re.search(r"^joined (\S+) (.*)$", ran.output, re.MULTILINE)
    if ran.status != 0 or joined is None:
        text = (
            f"rank {launch.rank} of {launch.size} ({launch.launcher}) cannot join the others: {ran.last_line}"
        )
        return PROBLEM, text, "start the command on every rank; look at what it finds on the others"
    nodes = json.loads(joined[2])
    text = f"rank {launch.rank} of {launch.size} ({launch.launcher}): {by_host(nodes)}; transport {joined[1]}"
    named = machine.environ.get("COMMSCHED_TRANSPORT", "auto").lower() not in ("", "auto", "plain", "stream")
    if len(set(nodes)) < len(nodes) and joined[1] != "tiers" and not named:
        advice = "run the ranks of a host in one container, as one user: they share no memory, and "
        return NOTE, text, advice + ("send more" if len(set(nodes)) > 1 else "use the loopback")
    return OK, text


@check("compiler")
def compiler(machine: Machine) -> Answer:
    command = machine.environ.get("CXX", "").split() or ["g++"]
    ran = machine.run([*command, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"], "int main() {}")
    level = NOTE if machine.extension.status == 0 else PROBLEM  # a built extension needs no compiler
    advice = "install GCC 10 or newer (Debian: apt-get install g++), or set CXX; building comm_core needs it"
    if ran is None:
        return level, f"{command[0]} is not on PATH", advice
    if ran.status != 0:
        return level, f"{' '.join(command)} does not take -std=c++20", advice
    version = machine.run([*command, "--version"])
    return OK, version.output.splitlines()[0] if version and version.output else command[0]


@check("CUDA")
def cuda(machine: Machine) -> Answer:
    driver = machine.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    facts = machine.torch
    if driver is None or driver.status != 0:
        return OK, "no GPU: nvidia-smi is missing or finds none; ranks use the CPU"
    gpus = driver.output.strip().replace("\n", "; ")
    if isinstance(facts, str) or not facts["cuda"]:
        return NOTE, f"{gpus}; torch is a CPU build", "install a CUDA build of torch to use the GPUs"
    if not facts["gpus"]:
        text = f"{gpus}; torch for CUDA {facts['cuda']} cannot use them"
        return PROBLEM, text, "install a driver for this CUDA version, or another build of torch"
    nvcc = machine.run([machine.environ.get("NVCC") or "nvcc", "--version"])
    release = re.search(r"release ([\d.]+)", nvcc.output) if nvcc else None
    text = f"{gpus}; torch for CUDA {facts['cuda']}; nvcc {release[1] if release else 'missing'}"
    if machine.extension.status == 0 and machine.extension.last_line == "True":
        return OK, f"{text}; kernels are compiled in"
    advice = "kernels come from CuPy if it is installed; with nvcc, COMMSCHED_WITH_CUDA=1 compiles them in"
    return NOTE, f"{text}; kernels are not compiled in", advice


@check("NCCL")
def nccl(machine: Machine) -> Answer:
    facts = machine.torch
    if isinstance(facts, str) or not facts["gpus"]:
        return OK, "not needed without a GPU that torch can use"
    if not facts["nccl"]:
        return PROBLEM, "torch was built without NCCL", "install torch from PyTorch's own packages"
    return OK, facts["nccl"]


@check("MPI")
def mpi(machine: Machine) -> Answer:
    ran = machine.run(["mpirun", "--version"])
    if ran is None:
        advice = "only the launcher mpirun needs it (Debian: apt-get install openmpi-bin)"
        return NOTE, "mpirun is not on PATH", advice
    if ran.status != 0:
        return NOTE, f"mpirun --version fails: {ran.last_line}", "repair it, or use torchrun"
    return OK, ran.output.splitlines()[0] if ran.output else "mpirun"


@check("Horovod")
def horovod(machine: Machine) -> Answer:
    if not machine.has_package("horovod"):
        advice = "only baseline=horovod and horovodrun need it: COMMSCHED_WITH_HOROVOD=1 docker/install.sh"
        return NOTE, "not installed", advice
    ran = machine.python(HOROVOD)
    if ran.status == 0:
        return OK, ran.last_line
    advice = "pip uninstall horovod, then COMMSCHED_WITH_HOROVOD=1 docker/install.sh, or do without"
    return PROBLEM, f"installed, but cannot be imported: {ran.last_line}", advice


@check("ports")
def ports(machine: Machine) -> Answer:
    try:
        port = machine.free_port()
    except OSError as error:
        return PROBLEM, f"cannot listen: {error}", "allow this user to listen on TCP ports"
    low, _, high = machine.read(PORTS).partition("\t")
    text = f"listening works (port {port})"
    if not (low.isdigit() and high.strip().isdigit()):
        return OK, text
    text += (
        f"; free ports are taken from {low} to {high.strip()}, which a firewall between hosts must let pass"
    )
    if int(high) - int(low) < FEW_PORTS:
        return NOTE, text, f"widen the range: sysctl -w net.ipv4.ip_local_port_range='{low} 60999'"
    return OK, text


@check("interfaces")
def interfaces(machine: Machine) -> Answer:
    addresses = machine.interfaces()
    shown = ", ".join(f"{name} {address}{_speed(machine, name)}" for name, address in addresses.items())
    variable = next((name for name in INTERFACES if machine.environ.get(name)), "")
    if variable:
        wanted = machine.environ[variable].split(",")[0].strip()
        if wanted not in addresses:
            text = f"{variable}={wanted}, but the interfaces with an IPv4 address are {shown or 'none'}"
            return PROBLEM, text, f"set {variable} to one of these, or unset it"
        return OK, f"{shown}; {wanted} is used ({variable})"
    others = [name for name, address in addresses.items() if not is_loopback(address)]
    if not others:
        return NOTE, f"loopback only ({shown or 'none'})", "ranks of other hosts cannot connect"
    if len(others) == 1:
        return OK, f"{shown}; several hosts use {others[0]}"
    text = f"{shown}; several hosts use the one that reaches rank 0"
    return OK, text, "set GLOO_SOCKET_IFNAME to choose another"


def _speed(machine: Machine, name: str) -> str:
    speed = machine.read(f"/sys/class/net/{name}/speed")
    return f" ({int(speed)} Mbit/s)" if speed.isdigit() and int(speed) else ""


@check("host name")
def host_name(machine: Machine) -> Answer:
    name, address = machine.host_address()
    if not address:
        return PROBLEM, f"{name} does not resolve", f"add {name} to /etc/hosts"
    text = f"{name} is {address}"
    several = any(not is_loopback(other) for other in machine.interfaces().values())
    if is_loopback(address) and several:
        advice = "on several hosts, map it to the host's own address in /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return NOTE, f"{text}, which other hosts cannot reach", advice
    return OK, text


@check("congestion control")
def congestion(machine: Machine) -> Answer:
    name = machine.read(CONGESTION)
    if name == "bbr":
        advice = (
            "with four or more ranks it leaves the link idle: sysctl -w net.ipv4.tcp_congestion_control=cubic"
        )
        return NOTE, name, advice
    return OK, name or "the kernel does not say"


@check("threads")
def threads(machine: Machine) -> Answer:
    cores, given = machine.cores(), machine.environ.get("OMP_NUM_THREADS", "")
    text = f"{cores} cores, OMP_NUM_THREADS {given or 'not set'}"
    quota = re.fullmatch(r"(\d+) (\d+)", machine.read("/sys/fs/cgroup/cpu.max"))
    if quota and (share := int(quota[1]) / int(quota[2])) < cores:
        cores = max(1, int(share))
        text += f", limited to the time of {share:g} cores"
    advice = "set OMP_NUM_THREADS to the cores divided by the ranks of this host (torchrun sets 1)"
    if given and not given.isdigit():
        return PROBLEM, f"{text}, which is no number", advice
    if not given and cores > 1:
        return NOTE, f"{text}: every rank takes all cores", advice
    if given and int(given) > cores:
        return NOTE, f"{text}: more threads than cores", advice
    return OK, text


@check("limits")
def limits(machine: Machine) -> Answer:
    files, locked, shared = machine.limit("NOFILE"), machine.limit("MEMLOCK"), machine.shared_memory()
    facts = machine.torch
    gpus = not isinstance(facts, str) and bool(facts["gpus"])
    advice = []
    if 0 <= files < MANY_FILES:
        advice.append(f"raise the limit of open files: ulimit -n {MANY_FILES * 4}")
    if 0 <= locked < LOCKED_BYTES and (gpus or machine.exists("/sys/class/infiniband")):
        advice.append(
            "raise the limit of locked memory, which RDMA and pinned memory need: ulimit -l unlimited"
        )
    if shared < SHARED_BYTES and gpus:
        advice.append("give NCCL and DataLoaders more shared memory (Docker: --shm-size=1g)")
    text = f"open files {_shown(files)}, locked memory {_shown(locked, 'B')}, /dev/shm {_shown(shared, 'B')}"
    return NOTE if advice else OK, text, "; ".join(advice)


def _shown(value: int, unit: str = "") -> str:
    if value < 0 or value >= 1 << 60:
        return "unlimited"
    return f"{value / 2**20:.0f} Mi{unit}" if unit else str(value)


# -- everything that the checks ask of the machine, so that tests can replace it. Does not import torch ------

SECONDS = 120.0  # enough to import torch on a busy machine
TORCH = """
import json, torch
cuda = torch.version.cuda
gpus = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
print(json.dumps({"version": torch.__version__, "cuda": cuda or "", "gpus": gpus, "nccl": nccl}))
"""
EXTENSION = "import comm_core; print(comm_core.CUDA_BUILT)"
RANKS = """
import json, os
os.environ.setdefault("COMMSCHED_START_TIMEOUT", "100")
import commsched as hvd
from commsched.backends.cpu import make_transport
from commsched.collectives.carrier import carrier
from commsched.env import settings
hvd.init()
own = "auto" if settings().transport in ("plain", "stream") else None  # of devices: the ranks' own is asked
transport, _ = make_transport(own, hvd.global_process_set, 0, 100.0)
hvd.barrier()
print("joined", transport, json.dumps([record.node for record in carrier().meeting.records]))
"""
HOROVOD = "import horovod, horovod.torch; print(horovod.__version__)"


@dataclass(frozen=True)
class Ran:
    """A program's exit status and what it printed."""

    status: int
    output: str

    @property
    def last_line(self) -> str:
        return (self.output.strip().splitlines() or ["it printed nothing"])[-1]


@dataclass
class Machine:
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def run(self, command: Sequence[str], text: str = "") -> Ran | None:
        """Run a program with `text` as its input; None where it is not installed."""
        if shutil.which(command[0]) is None:
            return None
        try:
            done = subprocess.run(
                command, input=text, capture_output=True, text=True, timeout=SECONDS, env=dict(self.environ)
            )
        except subprocess.TimeoutExpired:
            return Ran(124, f"no answer within {SECONDS:g} s")
        return Ran(done.returncode, done.stdout + done.stderr)

    def python(self, code: str) -> Ran:
        """Run Python code in a process of its own: a broken library may abort it."""
        return self.run([sys.executable, "-c", code]) or Ran(127, f"{sys.executable} cannot be run")

    def read(self, path: str) -> str:
        """Return a file's text without spaces around it; empty where it cannot be read."""
        try:
            return Path(path).read_text().strip()
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def has_package(self, name: str) -> bool:
        code = f"import importlib.util as u, sys; sys.exit(not u.find_spec({name!r}))"
        return self.python(code).status == 0

    @functools.cached_property
    def torch(self) -> dict[str, Any] | str:
        """Return torch's version, CUDA version, number of GPUs and NCCL, or why it cannot be imported."""
        ran = self.python(TORCH)
        return json.loads(ran.last_line) if ran.status == 0 else ran.last_line

    @functools.cached_property
    def extension(self) -> Ran:
        """Return how importing comm_core ends; the last line is then whether CUDA was compiled in."""
        return self.python(EXTENSION)

    def cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def limit(self, name: str) -> int:
        """Return a soft limit such as NOFILE; -1 means unlimited."""
        return resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]

    def shared_memory(self) -> int:
        """Return the bytes of /dev/shm; 0 where there is none."""
        try:
            system = os.statvfs("/dev/shm")
        except OSError:
            return 0
        return system.f_frsize * system.f_blocks

    def interfaces(self) -> dict[str, str]:
        """Return the IPv4 address of each network interface that has one."""
        addresses = {name: interface_address(name) for _, name in socket.if_nameindex()}
        return {name: address for name, address in addresses.items() if address}

    def host_address(self) -> tuple[str, str]:
        """Return this host's name and the address that the name resolves to, empty if it does not resolve."""
        name = socket.gethostname()
        try:
            return name, socket.gethostbyname(name)
        except OSError:
            return name, ""

    def free_port(self) -> int:
        """Listen on a free port and return its number; `OSError` where that is not possible."""
        with socket.socket() as listener:
            listener.bind(("0.0.0.0", 0))
            listener.listen()
            return int(listener.getsockname()[1])
