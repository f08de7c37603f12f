"""Reads what `srun` tells each task: its place in the step, and a host and port at which all tasks can meet.

Needs neither MPI nor `scontrol`: lists of hosts such as `node[01-03,7],login` are parsed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from commsched.errors import CommError

RANK, SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
RESERVED_STEPS = 0xFFFFFFF0  # Slurm numbers its own steps, such as the batch script, from here on
MOST = 100_000  # nodes of a job, and tasks of a node
FIRST_PORT, PORTS = 20000, 12000  # below the ports that kernels give to outgoing connections


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process. A batch script has SLURM_PROCID too, but runs once."""
    step = _first(environ, *STEP)
    return RANK in environ and step.isdigit() and int(step) < RESERVED_STEPS


def sizes(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of tasks of the step and of this node."""
    counts = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    size = number(environ, SIZE, "SLURM_NTASKS", "SLURM_NPROCS")
    if not counts:
        return size, size  # one node, as far as Slurm says
    per_node, node = tasks_per_node(counts), number(environ, "SLURM_NODEID")
    if node >= len(per_node) or sum(per_node) != size:
        raise CommError(
            f"Slurm's variables disagree: {size} tasks, {counts} per node, and this is node {node}; start "
            "the script with srun itself, and do not change its variables"
        )
    return size, per_node[node]


def meeting_place(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port of rank 0: MASTER_ADDR and MASTER_PORT, else the step's first host and a
    port that follows from the numbers of job and step.
    """
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address:
        nodes = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        address = next(iter(hosts(nodes)), "")
    if port:
        return address, number(environ, "MASTER_PORT")
    job = number(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    return address, FIRST_PORT + (131 * job + number(environ, *STEP)) % PORTS


def hosts(text: str) -> list[str]:
    """Return the hosts of a list such as `node[01-03,7]-ib,login`, in its order."""
    if re.search(r"[\[\]]", re.sub(r"\[[^\[\]]*\]", "", text)):
        raise CommError(f"{text!r} is no list of hosts as Slurm writes them: a bracket has no partner")
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        names = [""]
        for outside, inside in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            endings = [outside] if outside else _numbers(inside, text)
            _check_count(len(found) + len(names) * len(endings), text)
            names = [name + ending for name in names for ending in endings]
        found += names
    return found


def _numbers(text: str, whole: str) -> list[str]:
    """`01-03,7` as 01, 02, 03, 7."""
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", part.strip(), re.ASCII)
        if match is None:
            raise CommError(
                f"{whole!r} is no list of hosts as Slurm writes them: [{text}] is no list of numbers"
            )
        first, last = match[1], match[2] or match[1]
        _check_count(len(found) + int(last) - int(first), whole)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` as 2, 2, 2, 1."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,15})(?:\(x(\d{1,15})\))?", part.strip(), re.ASCII)
        if match is None:
            raise CommError(f"SLURM_TASKS_PER_NODE must look like '2(x3),1', but is {text!r}")
        _check_count(max(int(match[1]), len(found) + int(match[2] or 1)), text)
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _check_count(count: int, text: str) -> None:
    if count > MOST:
        shown = text if len(text) < 200 else f"{text[:200]}..."
        raise CommError(f"Slurm's {shown!r} stands for more than {MOST} nodes or tasks of a node")


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def number(environ: Mapping[str, str], *names: str) -> int:
    """Return the first of these variables that is set, as a number."""
    text = _first(environ, *names)
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise CommError(
            f"{' or '.join(names)} (set by srun) must be a whole number, but is {text!r}; start the script "
            "with srun, or set COMMSCHED_LAUNCHER=none to run it alone"
        )
    return int(text)
