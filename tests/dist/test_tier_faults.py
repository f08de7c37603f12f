"""Faults of ranks of two hosts, or of one, in every phase of the exchange in two tiers: who is named, and
how soon.

Each launch makes one fault in all phases at once: see the program.
"""

import re
import signal
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from dnn_bench.cluster import Cluster, namespaces
from dnn_bench.rank_environment import environment
from tests.support.launch import PATIENCE, start_ranks
from tests.support.needs import needs, needs_root
from tests.support.shared_memory import nothing_left_in_shared_memory

pytestmark = pytest.mark.dist
PROGRAM = Path(__file__).with_name("programs") / "tier_faults.py"
RANKS, HOSTS = 4, [0, 0, 1, 1]
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "close": signal.SIGUSR1,
    "exit": signal.SIGUSR2,
}
PHASES = {
    "standing": ["optimizer", "connections", "boards", "inside", "between", "gather", "idle"],
    "moving": ["scatters", "steps", "training"],
}

# What the error says about rank {v}: of phases that connect, and of those that are connected.
CONNECT = ("connections", "optimizer")
ERRORS = {
    ("kill", True): "rank {v} died|rank {v} is gone|rank {v} at .* cannot be reached|store does not",
    ("kill", False): "the connection to rank {v} is lost",
    ("stop", True): r"ranks \[{v}\] did not connect|rank {v} did not publish its address"
    "|store, in the process of rank {v} .* did not answer",
    ("stop", False): "nothing (came from|could be sent to) rank {v}",
    ("close", True): "rank {v} has left the job|rank {v} is gone|store does not",
    ("close", False): "rank {v} gave up: .*clos|the connection to rank {v} is lost",
    ("exit", True): "rank {v} has left the job|rank {v} is gone|store does not",
    ("exit", False): "rank {v} gave up: .*clos|the connection to rank {v} is lost",
    ("cut", True): r"host 10\.77\.0\.\d does not answer",
    ("cut", False): r"host 10\.77\.0\.\d does not answer",
}

# Seconds after the fault, on a machine that is busy. Without a fault that needs a time-out, none is reached.
TIMEOUT, HOST_TIMEOUT = 12, 5
BUSY = 30
LIMITS = {
    "kill": BUSY,
    "close": BUSY,
    "exit": BUSY,
    "stop": 2 * TIMEOUT + BUSY,  # a wait for a rank that itself waits takes two
    "cut": HOST_TIMEOUT + BUSY,
}

# A rank whom a text finds at fault. One that "gave up" has only passed the name on, unless nothing follows.
BLAMES = re.compile(
    r"(?:nothing (?:came from|could be sent to|was heard from)|connection to|in the process of|is|look at the"
    r" output of) rank (\d+)\b|\brank (\d+)(?: at \S+)? (?:died|is gone|is lost|has left|did not|cannot be)"
    r"|\branks \[([\d, ]+)\]"
)


@dataclass
class End:
    """How one phase of one rank has ended."""

    rank: int
    phase: str
    at: float
    error: str

    def blamed(self) -> set[int]:
        texts = [text for groups in BLAMES.findall(self.error) for text in groups if text]
        peer = re.match(r"(?:timeout|peer_lost) (\d+): ", self.error)
        return {
            int(number) for text in [*texts, *(peer.groups() if peer else ())] for number in text.split(",")
        }


def check(how, fault, fault_at, outputs, culprits, limit=None):
    """`outputs` and `culprits` by rank: of each surviving rank, and whom it may name. `limit`: seconds."""
    limit = limit or LIMITS[fault]
    wrong = []
    for rank, text in outputs.items():
        lines = re.findall(r"^(\w+) ended at ([\d.]+): (.*)$", text, re.MULTILINE)
        ends = [End(rank, phase, float(at), error) for phase, at, error in lines]
        if sorted(end.phase for end in ends) != sorted(PHASES[how]):
            wrong.append(f"rank {rank} ended in {[end.phase for end in ends]}, not in {PHASES[how]}")
        for end in ends:
            pattern = ERRORS[fault, end.phase in CONNECT]
            named = "|".join(pattern.format(v=v) for v in culprits[rank])
            if not re.search(named, end.error) or not end.blamed() or not end.blamed() <= culprits[rank]:
                wrong.append(f"{end} names {end.blamed()}, not one of {culprits[rank]} with {named!r}")
            if not end.at < fault_at + limit:
                wrong.append(f"{end} took {end.at - fault_at:.1f} s, more than {limit}")
    assert not wrong, "\n".join([*wrong, *outputs.values()])


QUICK = {
    ("standing", "kill", 3),
    ("moving", "kill", 0),
    ("standing", "stop", 0),
    ("moving", "stop", 1),
    ("standing", "close", 2),
    ("standing", "exit", 0),
    ("moving", "close", 2),
    ("moving", "exit", 1),
}


def cases():
    for case in product(PHASES, SIGNALS, range(RANKS)):
        yield pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize("how, fault, victim", list(cases()))
def test_every_survivor_names_the_rank(how, fault, victim, tmp_path):
    """A stopped rank's partner on the other host was blamed by its own neighbour, and a stopped rank 0 made
    new connections hang. So did, up to the time-out, a rank that had left in order."""
    make_fault(how, fault, victim, tmp_path / "fault", RANKS, "srun-env")


@pytest.mark.parametrize("fault", [*SIGNALS])
@pytest.mark.parametrize("how, victim", [("standing", 1), ("moving", 0)])
def test_the_neighbour_on_a_single_host_names_the_rank(how, fault, victim, tmp_path):
    """After one time-out: there is no third rank that either could be waiting for."""
    limit = TIMEOUT + BUSY if fault == "stop" else BUSY
    make_fault(how, fault, victim, tmp_path / "fault", 2, "torchrun-env", limit)


def make_fault(how, fault, victim, sign, ranks, launcher, limit=None):
    timeout = {"COMMSCHED_TIMEOUT": str(TIMEOUT if fault == "stop" else 900)}
    arguments = [how, str(victim), str(sign)]
    with (
        nothing_left_in_shared_memory(),
        start_ranks(PROGRAM, ranks, arguments, timeout, launcher) as started,
    ):
        for rank in range(ranks):
            started.wait_for_output(rank, "ready")
        fault_at = time.monotonic()
        started.kill(victim, SIGNALS[fault])
        sign.touch()
        survivors = [rank for rank in range(ranks) if rank != victim]
        codes = [started.processes[rank].wait(PATIENCE) for rank in survivors]
        if fault == "stop":
            started.kill(victim, signal.SIGKILL)
        ended = started.wait()[victim].returncode
        outputs = {rank: started.output(rank) for rank in survivors}
        expected = 0 if fault in ("close", "exit") else -9
        assert codes == [3] * len(survivors) and ended == expected, started.report()
    check(how, fault, fault_at, outputs, {rank: {victim} for rank in survivors}, limit)


CUTS = [("moving", None), *(("standing", late) for late in range(RANKS))]


@pytest.mark.root
@needs_root
@needs("ip", "tc")
@pytest.mark.parametrize(
    "how, late", [pytest.param(*cut, marks=[] if cut == CUTS[0] else [pytest.mark.slow]) for cut in CUTS]
)
def test_a_cut_between_the_hosts_names_a_rank_of_the_other_one(how, late, tmp_path):
    """Also while all wait for the rank `late`, which is on one side of the cut."""
    sign = tmp_path / "fault"
    own = {"COMMSCHED_TIMEOUT": "900", "COMMSCHED_HOST_TIMEOUT": str(HOST_TIMEOUT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(PROGRAM), how, str(-1 if late is None else late), str(sign)]
    files = [tmp_path / f"rank {rank}" for rank in range(RANKS)]
    with nothing_left_in_shared_memory(), Cluster(hosts=2, link="unlimited", ssh=False) as cluster:
        ranks = []
        for rank, variables in enumerate(cluster.rank_variables(per_host=2)):
            with files[rank].open("w") as output:
                streams = {"stdout": output, "stderr": output}
                ranks.append(cluster.run(HOSTS[rank], command, variables | own | environment(), **streams))
        patience = time.monotonic() + PATIENCE
        while not all("ready" in file.read_text() for file in files):
            assert time.monotonic() < patience, [file.read_text() for file in files]
            time.sleep(0.05)
        fault_at = time.monotonic()
        cluster.cut(1)
        sign.touch()
        waiting = [rank for rank in range(RANKS) if rank != late]
        codes = [ranks[rank].wait(PATIENCE) for rank in waiting]
    outputs = {rank: files[rank].read_text() for rank in waiting}
    assert codes == [3] * len(waiting), outputs
    others = {rank: {other for other in range(RANKS) if HOSTS[other] != HOSTS[rank]} for rank in waiting}
    check(how, "cut", fault_at, outputs, others)
    assert not [name for name in namespaces() if name.startswith(cluster.identity)]
