"""The checks, in the order in which they are reported. Each takes a `Machine` and returns one finding."""

from __future__ import annotations

import re
from collections.abc import Callable

from packaging.version import InvalidVersion, Version

from commsched.doctor import network_checks
from commsched.doctor.finding import NOTE, OK, PROBLEM, Finding
from commsched.doctor.machine import HOROVOD, Machine

OLDEST, NEWEST = Version("2.6"), Version("2.15")  # of torch, as docker/install.sh has them
MANY_FILES = 1024  # every rank holds a few connections to every other
LOCKED_BYTES = 64 << 20
SHARED_BYTES = 512 << 20


def torch(machine: Machine) -> Finding:
    found = machine.torch
    if isinstance(found, str):
        return Finding(
            "torch", PROBLEM, f"torch cannot be imported: {found}", "install it: docker/install.sh"
        )
    text = f"{found['version']}, {'CUDA ' + found['cuda'] if found['cuda'] else 'CPU build'}"
    try:
        release = Version(Version(found["version"]).base_version)
    except InvalidVersion:
        return Finding("torch", NOTE, text, "the version cannot be read; supported are 2.6 to 2.15")
    if release < OLDEST:
        return Finding("torch", PROBLEM, text, f"install torch {OLDEST} or newer")
    if (release.major, release.minor) > (NEWEST.major, NEWEST.minor):
        return Finding("torch", NOTE, text, f"newer than {NEWEST}, the newest that was tested")
    return Finding("torch", OK, text)


def extension(machine: Machine) -> Finding:
    ran = machine.extension
    if ran.status == 0:
        return Finding("extension", OK, "comm_core is built for this torch")
    if "undefined symbol" in ran.output:
        found = f"comm_core was built for another torch: {ran.last_line}"
    elif "comm_core" in ran.last_line and "No module" in ran.last_line:
        found = "comm_core is not built"
    else:
        found = f"comm_core cannot be imported: {ran.last_line}"
    return Finding(
        "extension", PROBLEM, found, "build it: pip install --no-build-isolation . in the checkout"
    )


def compiler(machine: Machine) -> Finding:
    command = machine.environ.get("CXX", "").split() or ["g++"]
    ran = machine.run([*command, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"], "int main() {}")
    level = NOTE if machine.extension.status == 0 else PROBLEM  # a built extension needs no compiler
    advice = "install GCC 10 or newer (Debian: apt-get install g++), or set CXX; building comm_core needs it"
    if ran is None:
        return Finding("compiler", level, f"{command[0]} is not on PATH", advice)
    if ran.status != 0:
        return Finding("compiler", level, f"{' '.join(command)} does not take -std=c++20", advice)
    version = machine.run([*command, "--version"])
    return Finding(
        "compiler", OK, version.output.splitlines()[0] if version and version.output else command[0]
    )


def cuda(machine: Machine) -> Finding:
    driver = machine.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    found = machine.torch
    if driver is None or driver.status != 0:
        return Finding("CUDA", OK, "no GPU: nvidia-smi is missing or finds none; ranks use the CPU")
    gpus = driver.output.strip().replace("\n", "; ")
    if isinstance(found, str) or not found["cuda"]:
        return Finding(
            "CUDA", NOTE, f"{gpus}; torch is a CPU build", "install a CUDA build of torch to use the GPUs"
        )
    if not found["gpus"]:
        text = f"{gpus}; torch for CUDA {found['cuda']} cannot use them"
        return Finding(
            "CUDA", PROBLEM, text, "install a driver for this CUDA version, or another build of torch"
        )
    nvcc = machine.run([machine.environ.get("NVCC") or "nvcc", "--version"])
    release = re.search(r"release ([\d.]+)", nvcc.output) if nvcc else None
    text = f"{gpus}; torch for CUDA {found['cuda']}; nvcc {release[1] if release else 'missing'}"
    if machine.extension.status == 0 and machine.extension.last_line == "True":
        return Finding("CUDA", OK, f"{text}; kernels are compiled in")
    advice = "kernels come from CuPy if it is installed; with nvcc, COMMSCHED_WITH_CUDA=1 compiles them in"
    return Finding("CUDA", NOTE, f"{text}; kernels are not compiled in", advice)


def nccl(machine: Machine) -> Finding:
    found = machine.torch
    if isinstance(found, str) or not found["gpus"]:
        return Finding("NCCL", OK, "not needed without a GPU that torch can use")
    if not found["nccl"]:
        return Finding(
            "NCCL", PROBLEM, "torch was built without NCCL", "install torch from PyTorch's own packages"
        )
    return Finding("NCCL", OK, found["nccl"])


def mpi(machine: Machine) -> Finding:
    ran = machine.run(["mpirun", "--version"])
    if ran is None:
        advice = "only the launcher mpirun needs it (Debian: apt-get install openmpi-bin)"
        return Finding("MPI", NOTE, "mpirun is not on PATH", advice)
    if ran.status != 0:
        return Finding("MPI", NOTE, f"mpirun --version fails: {ran.last_line}", "repair it, or use torchrun")
    return Finding("MPI", OK, ran.output.splitlines()[0] if ran.output else "mpirun")


def horovod(machine: Machine) -> Finding:
    if not machine.has_package("horovod"):
        advice = "only baseline=horovod and horovodrun need it: COMMSCHED_WITH_HOROVOD=1 docker/install.sh"
        return Finding("Horovod", NOTE, "not installed", advice)
    ran = machine.python(HOROVOD)
    if ran.status == 0:
        return Finding("Horovod", OK, ran.last_line)
    advice = "pip uninstall horovod, then COMMSCHED_WITH_HOROVOD=1 docker/install.sh, or do without"
    return Finding("Horovod", PROBLEM, f"installed, but cannot be imported: {ran.last_line}", advice)


def threads(machine: Machine) -> Finding:
    cores, given = machine.cores(), machine.environ.get("OMP_NUM_THREADS", "")
    text = f"{cores} cores, OMP_NUM_THREADS {given or 'not set'}"
    quota = re.fullmatch(r"(\d+) (\d+)", machine.read("/sys/fs/cgroup/cpu.max"))
    if quota and (share := int(quota[1]) / int(quota[2])) < cores:
        cores = max(1, int(share))
        text += f", limited to the time of {share:g} cores"
    advice = "set OMP_NUM_THREADS to the cores divided by the ranks of this host (torchrun sets 1)"
    if given and not given.isdigit():
        return Finding("threads", PROBLEM, f"{text}, which is no number", advice)
    if not given and cores > 1:
        return Finding("threads", NOTE, f"{text}: every rank takes all cores", advice)
    if given and int(given) > cores:
        return Finding("threads", NOTE, f"{text}: more threads than cores", advice)
    return Finding("threads", OK, text)


def limits(machine: Machine) -> Finding:
    files, locked, shared = machine.limit("NOFILE"), machine.limit("MEMLOCK"), machine.shared_memory()
    found = machine.torch
    gpus = not isinstance(found, str) and bool(found["gpus"])
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
    return Finding("limits", NOTE if advice else OK, text, "; ".join(advice))


def _shown(value: int, unit: str = "") -> str:
    if value < 0 or value >= 1 << 60:
        return "unlimited"
    return f"{value / 2**20:.0f} Mi{unit}" if unit else str(value)


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    torch,
    extension,
    compiler,
    cuda,
    nccl,
    mpi,
    horovod,
    *network_checks.CHECKS,
    threads,
    limits,
)


def examine(machine: Machine) -> list[Finding]:
    """Run all checks."""
    return [check(machine) for check in CHECKS]
