"""A searched plan that is slower than DDP's way, because the network was timed wrongly."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dnn_bench.cluster import Cluster
from tests.support.launch import PATIENCE
from tests.support.needs import needs, needs_root

pytestmark = [pytest.mark.dist, pytest.mark.root, needs_root, needs("ip", "tc")]
ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/dist/programs/slow_network.py"


def test_ddps_way_is_used_where_it_is_faster():
    """A single bucket looked best, all of which travels after the backward; four overlap with it."""
    own = {
        "COMMSCHED_TIMEOUT": "300",
        "COMMSCHED_WAIT_FOR_PLAN": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with Cluster(hosts=2, link="250mbit", ssh=False) as cluster:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks = cluster.launch([sys.executable, str(PROGRAM)], own, **pipes)
        texts = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(texts)
    told = [re.findall(r"^(searched .*)\n(used .*)$", text, re.MULTILINE) for text in texts]
    assert told[0] == told[1] and len(told[0]) == 1, texts
    ((searched, used),) = told[0]
    assert searched == "searched 1 bucket, tried [2, 4]"
    assert used.startswith(("used 1", "used 2")), used
