"""A real Slurm on emulated hosts: slurmctld on the first, slurmd on each, without munge and a database.

Needs root and Debian's packages slurmctld, slurmd and slurm-client.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dnn_bench.cluster import Cluster

CONF = """
ClusterName=commsched
SlurmctldHost=host0
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SlurmdParameters=config_overrides
NodeName=host[0-{last}] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
PATIENCE = 60.0


@contextmanager
def slurm(cluster: Cluster, folder: Path) -> Iterator[dict[str, str]]:
    """Start it on the cluster; the variables let `srun` on a host find it."""
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, last=len(cluster) - 1))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environ = {"SLURM_CONF": str(conf)}
    daemons = [(0, "slurmctld"), *((host, "slurmd") for host in range(len(cluster)))]
    with ExitStack() as stack:
        for number, (host, name) in enumerate(daemons):
            log = stack.enter_context((folder / f"daemon.{number}.log").open("w"))
            process = cluster.run(host, [name, "-D"], environ, stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        wait_until_idle(cluster, environ, folder)
        yield environ


def wait_until_idle(cluster: Cluster, environ: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    command = ["sinfo", "--noheader", "--format", "%D %t"]
    while True:
        asking = cluster.run(0, command, environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = asking.communicate(timeout=PATIENCE)[0]
        if said.strip() == f"{len(cluster)} idle":
            return
        if time.monotonic() > deadline:
            logs = [path.read_text()[-1500:] for path in sorted(folder.glob("daemon.*.log"))]
            raise AssertionError(f"the nodes are not idle: {said}\n" + "\n".join(logs))
        time.sleep(0.2)
