"""Each check of `commsched doctor` on machines that do not exist, and all of them on this one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from commsched import cli, doctor
from commsched.doctor import CHECKS, NOTE, OK, PROBLEM, Finding, Machine, Ran, examine

CPU = {"version": "2.13.0+cpu", "cuda": "", "gpus": 0, "nccl": ""}
GPU = {"version": "2.15.0+cu132", "cuda": "13.2", "gpus": 1, "nccl": "2.29.3"}
BBR = {doctor.CONGESTION: "bbr"}


class FakeMachine(Machine):
    """A machine where everything is as it should be, but for what a test says."""

    def __init__(self, **given: Any) -> None:
        super().__init__(given.get("environ", {"OMP_NUM_THREADS": "1"}))
        self.torch = given.get("torch", CPU)  # type: ignore[misc]
        self.extension = given.get("extension", Ran(0, "False"))  # type: ignore[misc]
        self.programs: dict[str, Ran] = {
            "g++": Ran(0, "g++ 12.2.0\nmore"),
            "mpirun": Ran(0, "mpirun (Open MPI) 4.1.4\n"),
            "nvcc": Ran(0, "Cuda compilation tools, release 13.0, V13.0.48"),
        } | given.get("programs", {})
        self.files: dict[str, str] = {
            doctor.CONGESTION: "cubic",
            doctor.PORTS: "32768\t60999",
        } | given.get("files", {})
        self.addresses = given.get("addresses", {"lo": "127.0.0.1", "eth0": "10.0.0.1"})
        self.given = given

    def run(self, command: Any, text: str = "") -> Ran | None:
        found: Ran | None = self.programs.get(command[0])
        return found

    def python(self, code: str) -> Ran:
        return self.given.get("ranks" if code == doctor.RANKS else "horovod", Ran(0, "0.28.1"))

    def has_package(self, name: str) -> bool:
        return "without_horovod" not in self.given

    def read(self, path: str) -> str:
        return self.files.get(path, "")

    def exists(self, path: str) -> bool:
        return path in self.files

    def cores(self) -> int:
        return self.given.get("cores", 4)

    def limit(self, name: str) -> int:
        return self.given.get(name, -1)

    def shared_memory(self) -> int:
        return self.given.get("shared", 1 << 30)

    def interfaces(self) -> dict[str, str]:
        return self.addresses

    def host_address(self) -> tuple[str, str]:
        return "node1", self.given.get("address", "10.0.0.1")

    def free_port(self) -> int:
        if "no_ports" in self.given:
            raise OSError("Permission denied")
        return 40000


FOUR = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
SMI = {"nvidia-smi": Ran(0, "NVIDIA H100, 580.1\n")}
Check = Callable[[Machine], Finding]
CASES: list[tuple[Check, dict[str, Any], str, str, str]] = [
    (
        doctor.torch,
        {"torch": "ModuleNotFoundError: No module named 'torch'"},
        PROBLEM,
        "No module",
        "install",
    ),
    (doctor.torch, {"torch": CPU | {"version": "2.5.1"}}, PROBLEM, "2.5.1, CPU build", "2.6 or newer"),
    (doctor.torch, {"torch": CPU | {"version": "2.16.0a0+git1"}}, NOTE, "2.16.0a0", "newer than 2.15"),
    (doctor.torch, {"torch": CPU | {"version": "2.15.1"}}, OK, "2.15.1", ""),
    (doctor.torch, {"torch": CPU | {"version": "mine"}}, NOTE, "mine", "cannot be read"),
    (
        doctor.extension,
        {"extension": Ran(1, "x\nImportError: undefined symbol: _ZN3c10")},
        PROBLEM,
        "built for another torch",
        "pip install --no-build-isolation",
    ),
    (
        doctor.extension,
        {"extension": Ran(1, "No module named 'comm_core._C'")},
        PROBLEM,
        "is not built",
        "build",
    ),
    (doctor.extension, {"extension": Ran(-11, "Segmentation fault")}, PROBLEM, "Segmentation fault", "build"),
    (doctor.ranks, {}, OK, "alone", ""),
    (doctor.ranks, {"environ": {"RANK": "1"}}, PROBLEM, "WORLD_SIZE is not set", "unset"),
    (
        doctor.ranks,
        {"environ": FOUR, "ranks": Ran(0, 'joined tiers ["a", "b", "a", "b"]\nW: slow disk')},
        OK,
        "rank 2 of 4 (torchrun): host a [0 2], host b [1 3]; transport tiers",
        "",
    ),
    (
        doctor.ranks,
        {"environ": FOUR, "ranks": Ran(0, 'joined direct ["a", "a", "b", "b"]')},
        NOTE,
        "host a [0 1], host b [2 3]; transport direct",
        "in one container",
    ),
    (
        doctor.ranks,
        {"environ": FOUR, "ranks": Ran(0, 'joined direct ["a", "a", "a", "a"]')},
        NOTE,
        "host a [0 1 2 3]; transport direct",
        "they share no memory, and use the loopback",
    ),
    (
        doctor.ranks,
        {
            "environ": {**FOUR, "COMMSCHED_TRANSPORT": "direct"},
            "ranks": Ran(0, 'joined direct ["a", "a", "a", "a"]'),
        },
        OK,
        "host a [0 1 2 3]; transport direct",
        "",
    ),
    (
        doctor.ranks,
        {"environ": FOUR, "ranks": Ran(1, "CommError: missing: [3]")},
        PROBLEM,
        "rank 2 of 4 (torchrun) cannot join the others: CommError: missing: [3]",
        "every rank",
    ),
    (doctor.compiler, {"environ": {"CXX": "clang++ -m64"}}, NOTE, "clang++ is not on PATH", "GCC 10"),
    (
        doctor.compiler,
        {"environ": {"CXX": "icc"}, "extension": Ran(1, "")},
        PROBLEM,
        "icc is not on PATH",
        "CXX",
    ),
    (doctor.compiler, {"programs": {"g++": Ran(1, "unknown option")}}, NOTE, "not take -std=c++20", "GCC 10"),
    (doctor.cuda, {"programs": SMI}, NOTE, "torch is a CPU build", "CUDA build"),
    (doctor.cuda, {"programs": SMI, "torch": GPU | {"gpus": 0}}, PROBLEM, "cannot use them", "driver"),
    (doctor.cuda, {"programs": SMI, "torch": GPU}, NOTE, "nvcc 13.0; kernels are not compiled in", "CuPy"),
    (
        doctor.cuda,
        {"programs": SMI, "torch": GPU, "extension": Ran(0, "True")},
        OK,
        "kernels are compiled in",
        "",
    ),
    (doctor.cuda, {"programs": {"nvidia-smi": Ran(9, "no driver")}}, OK, "no GPU", ""),
    (doctor.nccl, {"torch": GPU}, OK, "2.29.3", ""),
    (doctor.nccl, {"torch": GPU | {"nccl": ""}}, PROBLEM, "without NCCL", "install torch"),
    (doctor.mpi, {"programs": {"mpirun": None}}, NOTE, "not on PATH", "openmpi-bin"),
    (doctor.mpi, {"programs": {"mpirun": Ran(1, "no plugins")}}, NOTE, "no plugins", "torchrun"),
    (doctor.horovod, {"without_horovod": 1}, NOTE, "not installed", "COMMSCHED_WITH_HOROVOD=1"),
    (
        doctor.horovod,
        {"horovod": Ran(1, "undefined symbol: _ZN")},
        PROBLEM,
        "undefined symbol",
        "pip uninstall",
    ),
    (doctor.ports, {"no_ports": 1}, PROBLEM, "Permission denied", "allow"),
    (
        doctor.ports,
        {"files": {doctor.PORTS: "60000\t60100"}},
        NOTE,
        "60000 to 60100",
        "widen",
    ),
    (doctor.interfaces, {"addresses": {"lo": "127.0.0.1"}}, NOTE, "loopback only", "other hosts"),
    (doctor.interfaces, {"files": {"/sys/class/net/eth0/speed": "25000"}}, OK, "(25000 Mbit/s)", ""),
    (doctor.interfaces, {"environ": {"GLOO_SOCKET_IFNAME": "ib0"}}, PROBLEM, "eth0 10.0.0.1", "ib0"),
    (doctor.interfaces, {"environ": {"GLOO_SOCKET_IFNAME": "eth0"}}, OK, "eth0 is used", ""),
    (doctor.host_name, {"address": ""}, PROBLEM, "does not resolve", "/etc/hosts"),
    (doctor.host_name, {"address": "127.0.1.1"}, NOTE, "cannot reach", "/etc/hosts"),
    (
        doctor.host_name,
        {"address": "127.0.1.1", "addresses": {"lo": "127.0.0.1"}},
        OK,
        "127.0.1.1",
        "",
    ),
    (doctor.congestion, {"files": BBR}, NOTE, "bbr", "cubic"),
    (doctor.threads, {"environ": {}}, NOTE, "every rank takes all cores", "OMP_NUM_THREADS"),
    (doctor.threads, {"environ": {"OMP_NUM_THREADS": "8"}}, NOTE, "more threads than cores", "torchrun"),
    (doctor.threads, {"environ": {"OMP_NUM_THREADS": "two"}}, PROBLEM, "no number", "OMP_NUM_THREADS"),
    (
        doctor.threads,
        {"environ": {"OMP_NUM_THREADS": "3"}, "files": {"/sys/fs/cgroup/cpu.max": "250000 100000"}},
        NOTE,
        "limited to the time of 2.5 cores",
        "OMP_NUM_THREADS",
    ),
    (doctor.limits, {"NOFILE": 256}, NOTE, "open files 256", "ulimit -n 4096"),
    (doctor.limits, {"MEMLOCK": 65536, "torch": GPU}, NOTE, "locked memory 0 MiB", "ulimit -l unlimited"),
    (doctor.limits, {"MEMLOCK": 65536}, OK, "locked memory", ""),
    (doctor.limits, {"shared": 64 << 20, "torch": GPU}, NOTE, "/dev/shm 64 MiB", "--shm-size"),
]


@pytest.mark.parametrize(
    ("check", "given", "level", "found", "advice"),
    CASES,
    ids=[f"{case[0].__name__}-{case[3]}" for case in CASES],
)
def test_what_a_check_finds(check: Check, given: dict[str, Any], level: str, found: str, advice: str) -> None:
    result = check(FakeMachine(**given))
    said = f"{result.found} {result.advice}"
    assert result.level == level and found in said, result
    assert advice in said and bool(result.advice) >= (level != OK), result


def test_a_good_machine_has_nothing_to_do() -> None:
    findings = examine(FakeMachine())
    assert [finding for finding in findings if finding.level != OK] == []
    assert len({finding.check for finding in findings}) == len(CHECKS)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("commsched.doctor.Machine", FakeMachine)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "ok       torch               2.13.0+cpu, CPU build"
    bad = FakeMachine(address="", files=BBR)
    monkeypatch.setattr("commsched.doctor.Machine", lambda: bad)
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("problem  host name           node1 does not resolve")
    assert lines[at + 1].split() == ["->", "add", "node1", "to", "/etc/hosts"]
    assert cli.main(["doctor", "--json"]) == 1
    found = {entry["check"]: entry["level"] for entry in json.loads(capsys.readouterr().out)}
    assert (found["host name"], found["congestion control"], found["torch"]) == (PROBLEM, NOTE, OK)


def test_this_machine() -> None:
    """The tests run here, so torch, the extension and ports are as they should be."""
    found = {finding.check: finding for finding in examine(Machine())}
    assert [found[name].level for name in ("extension", "ports")] == [OK, OK]
    assert found["torch"].level in (OK, NOTE) and found["limits"].found.startswith("open files ")
    assert "lo 127.0.0.1" in found["interfaces"].found


def test_a_library_that_aborts_is_a_finding() -> None:
    ran = Machine().python("import os; print('going'); os.abort()")
    assert ran.status < 0 and "going" in ran.output
    assert Machine().run(["no-such-program"]) is None
