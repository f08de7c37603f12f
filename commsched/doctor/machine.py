"""Everything that the checks ask of the machine, so that tests can replace it. Does not import torch."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commsched.process.network import interface_address

SECONDS = 120.0  # enough to import torch on a busy machine
TORCH = """
import json, torch
cuda = torch.version.cuda
gpus = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
print(json.dumps({"version": torch.__version__, "cuda": cuda or "", "gpus": gpus, "nccl": nccl}))
"""
EXTENSION = "import comm_core; print(comm_core.CUDA_BUILT)"
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
    """This machine."""

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
            found = os.statvfs("/dev/shm")
        except OSError:
            return 0
        return found.f_frsize * found.f_blocks

    def interfaces(self) -> dict[str, str]:
        """Return the IPv4 address of each network interface that has one."""
        found = {name: interface_address(name) for _, name in socket.if_nameindex()}
        return {name: address for name, address in found.items() if address}

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
