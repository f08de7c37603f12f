"""The exchange in two tiers between processes, also of one host: sums, lost ranks, bytes that leave hosts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dnn_bench.cluster import Cluster
from dnn_bench.rank_environment import rank_variables
from tests.dist.test_optimizer_failures import PROGRAM as FAILURES
from tests.dist.test_optimizer_failures import end_of
from tests.support.cases import check, parameters
from tests.support.launch import PATIENCE, run_ranks, start_ranks
from tests.support.needs import needs, needs_root
from tests.support.shared_memory import nothing_left_in_shared_memory

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/dist/programs/tier_ranks.py"
MANY = ROOT / "tests/dist/programs/many_ranks.py"
# Two hosts, as the launcher says; both are this machine.
TWO_HOSTS = "srun-env"
# A rank that is lost is noticed without any time-out: this one no test reaches.
PATIENT = {"COMMSCHED_TIMEOUT": "900"}


@pytest.mark.parametrize("program, ranks, name", parameters("two_tiers", "one_host"))
def test_case(program, ranks, name):
    check(program, ranks, name, TWO_HOSTS if program == "two_tiers" else "torchrun-env")


@pytest.mark.parametrize(
    "hosts, ranks", [pytest.param(16, 64, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
def test_many_ranks_train_to_the_bits_of_sums_by_host(hosts, ranks):
    """64 forked ranks share the memory of what they have imported."""
    options = {"launcher": f"srun-env:{hosts}", "check": True, "timeout": 2700}
    results = run_ranks(MANY, ranks, env=PATIENT | {"COMMSCHED_START_TIMEOUT": "900"}, **options)
    assert results[0].stdout == f"{ranks} ranks on {hosts} hosts over tiers\n"


def boards_in(pid):
    """How many boards the process has mapped; None where it has ended."""
    try:
        return Path(f"/proc/{pid}/maps").read_text().count("memfd:commsched board")
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.mark.parametrize("operation", ["RS", "AG"])
@pytest.mark.parametrize(("ranks", "launcher"), [(4, TWO_HOSTS), (3, TWO_HOSTS), (2, "torchrun-env")])
def test_a_killed_rank_ends_all_others(operation, ranks, launcher):
    with nothing_left_in_shared_memory():
        results = run_ranks(PROGRAM, ranks, [operation], PATIENT, launcher=launcher)
    assert results[-1].returncode == -9, results[-1].stderr
    for result in results[:-1]:
        assert result.returncode == 3, result.stderr
        said = result.stdout.strip().splitlines()[-1]
        assert said.startswith(f"EngineError peer_lost {ranks - 1}: rank {result.rank}: "), said
        assert f"{operation} of bucket 0 (weights) in step 2 failed" in said, said
        assert f"rank {ranks - 1}" in said and said.count("look at the output of rank") == 1, said


@pytest.mark.parametrize(("ranks", "launcher"), [(4, TWO_HOSTS), (3, TWO_HOSTS), (2, "torchrun-env")])
def test_a_rank_killed_at_any_moment_ends_all_others(ranks, launcher):
    with start_ranks(PROGRAM, ranks, ["any"], PATIENT, launcher) as started:
        started.wait_for_output(ranks - 1, "going")
        started.kill(ranks - 1)
        results = started.wait(PATIENCE)
    for result in results[:-1]:
        said = result.stdout.strip().splitlines()[-1]
        assert result.returncode == 3 and said.startswith(f"EngineError peer_lost {ranks - 1}: "), result
        assert re.search(r": (RS|AG) of bucket 0 \(weights\) in step \d+ failed", said), said


def test_a_killed_ranks_data_workers_keep_no_memory():
    """They live on, and have neither its connections nor its board."""
    with start_ranks(FAILURES, 4, ["killed in the backward with workers"], PATIENT, TWO_HOSTS) as started:
        for rank in (0, 2, 3):
            started.processes[rank].wait(PATIENCE)
        workers = re.findall(r"workers=\[(\d+), (\d+)\]", started.output(1))[0]
        assert [boards_in(worker) for worker in workers] == [0, 0]
        ends = [end_of(started.output(rank), 3, "") for rank in (0, 2, 3)]
    for end in ends:
        assert "rank 1" in end.message and "bucket" in end.message, end.message


@pytest.mark.root
@needs_root
@needs("ip", "tc")
@pytest.mark.few
@pytest.mark.parametrize(
    "members",
    [(2, 2), (2, 2, 2), (3, 1), (4, 4), (2, 2, 2, 2), (2, 1, 1)],
    ids=lambda m: "+".join(map(str, m)),
)
def test_a_host_sends_as_much_as_one_rank_a_host_would(members):
    """In RS, in AG, in both in blocks of int8, and in training steps with all that an optimizer sends.

    A flat direct exchange sends as many times as much as the host has ranks; with equal shards, a host of
    more ranks than the others would send more in AG, and one of fewer ranks in RS. Shards of parameters are
    equal: for two hosts, what one of them saves in RS it sends in AG.
    """
    megabytes, times, hosts = 12, 3, len(members)
    own = {"COMMSCHED_TIMEOUT": "300", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM), "bytes", str(megabytes), str(times)]
    with Cluster(hosts=hosts, link="unlimited", ssh=False) as cluster:
        ranks = []
        for host, count in enumerate(members):
            for place in range(count):
                whole = len(ranks), sum(members)
                variables = rank_variables(*whole, place, count, cluster.addresses[0], 29400)
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                ranks.append(cluster.run(host, command, variables | own, **pipes))
        texts = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(texts)
    once = times * (hosts - 1) / hosts * (megabytes << 20)
    least = {"reduce_scatter": once, "all_gather": once, "blocks": 2 * once * 260 / 1024}
    least |= {"gradients": 2 * once, "parameters": 2 * once}
    for rank, text in enumerate(texts):
        sent = re.findall(r"^(\w+) sent (\d+)$", text, re.MULTILINE)
        shares = {what: round(int(count) / least[what], 4) for what, count in sent}
        print(f"rank {rank}: {shares}")
        assert shares.keys() == least.keys(), text
        if members == (2, 1, 1):
            del shares["parameters"]
        assert all(1 <= share <= 1.03 for share in shares.values()), shares
