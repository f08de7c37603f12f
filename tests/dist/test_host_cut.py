"""A host whose link is cut, and one whose rank stands still: how long the others wait for each."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comm_core import HOST_TIMEOUT
from dnn_bench.cluster import Cluster

pytestmark = [
    pytest.mark.dist,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc (Debian: iproute2)"),
]
ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize("host_timeout", [5, pytest.param(None, marks=pytest.mark.slow)])
def test_a_host_that_is_cut_off_is_named_and_one_that_stands_still_is_not(host_timeout):
    """The other ranks waited until COMMSCHED_TIMEOUT, because they could not notice the cut. The kernel of a
    stopped rank still answers, even with full receive buffers."""
    own = {"COMMSCHED_TIMEOUT": "600", "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"}
    if host_timeout:
        own["COMMSCHED_HOST_TIMEOUT"] = str(host_timeout)
    program = [sys.executable, str(Path(ROOT) / "tests/dist/programs/host_cut.py")]
    with Cluster(hosts=2, link="unlimited", ssh=False) as cluster:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks = cluster.launch(program, own, **options)
        pids = [wait_for_line(rank, r"ready (\d+)")[0] for rank in ranks]
        os.kill(int(pids[1]), signal.SIGSTOP)
        time.sleep(1.5 * (host_timeout or HOST_TIMEOUT))
        os.kill(int(pids[1]), signal.SIGCONT)
        cut_at = time.monotonic()
        cluster.cut(1)
        texts = [rank.communicate(timeout=400)[0] for rank in ranks]
    for rank, text in enumerate(texts):
        assert "all ended" in text and ranks[rank].returncode == 0, text
        ends = re.findall(r"^(\w+) ended at ([\d.]+): (.*)$", text, re.MULTILINE)
        assert len(ends) == 7, text
        for name, at, error in ends:
            assert float(at) > cut_at, (rank, name, text)
            assert f"rank {1 - rank}" in error, error
            assert f"host {cluster.addresses[1 - rank]} does not answer" in error, error


def wait_for_line(process, pattern):
    """The groups of the first line that matches; an error with all lines where none does."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if match := re.match(pattern, line):
            return match.groups()
    raise AssertionError("".join(lines))
