"""Several hosts: ranks find each other, and private connections use the network, under every launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dnn_bench.cluster import Cluster
from tests.support.needs import needs, needs_horovod, needs_root

pytestmark = [
    pytest.mark.dist,
    pytest.mark.root,
    needs_root,
    needs("ip", "tc"),
]
ROOT = str(Path(__file__).parents[2])
JOB = """
import torch, commsched as hvd
from commsched.collectives.carrier import carrier
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum).item()
tensor = torch.ones(3)
hvd.data_group().allreduce([tensor]).wait()
addresses = hvd.allgather_object(carrier().meeting.address)
places = hvd.allgather_object((hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()))
if hvd.rank() == 0:
    print("result", hvd.engine_name(), total, tensor[0].item(), len(set(addresses)), places)
    assert not any(address.startswith("127.") for address in addresses), addresses
hvd.shutdown()
"""


@pytest.mark.parametrize(
    ("launcher", "engine"),
    [
        ("torchrun", "torch"),
        pytest.param("horovodrun", "torch", marks=[needs_horovod, needs("sshd", "ssh"), pytest.mark.slow]),
        pytest.param("horovodrun", "horovod", marks=[needs_horovod, needs("sshd", "ssh")]),
        pytest.param("mpirun", "torch", marks=[needs("mpirun", "sshd", "ssh"), pytest.mark.slow]),
    ],
)
def test_two_hosts(launcher, engine, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    own = {
        "COMMSCHED_RUNTIME": engine,
        "COMMSCHED_TIMEOUT": "200",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ROOT,
        "PATH": search_path(),
    }
    with Cluster(hosts=2, link="1gbit", ssh=launcher != "torchrun") as cluster:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        if launcher == "torchrun":  # the variables that it sets, one rank per host
            processes = cluster.launch([sys.executable, str(script)], own, **options)
        else:
            hosts = ["-np", "2", "-H", cluster.hosts_argument()]
            command = ["horovodrun", "--disable-cache", "--gloo", *hosts]
            if launcher == "mpirun":
                command = ["mpirun", "--allow-run-as-root", *hosts]
                command += [word for name in own for word in ("-x", name)]
            processes = [cluster.run(0, [*command, sys.executable, str(script)], own, **options)]
        texts = [process.communicate(timeout=400)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(texts)
    expected = f"result {engine} 3.0 2.0 2 [(0, 1, 0, 2), (0, 1, 1, 2)]"
    assert expected in texts[0], texts[0]


def search_path():
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
