"""Emulated clusters: hosts with their own network stack, joined by links of a chosen speed, on one machine.

>>> from dnn_bench.cluster import Cluster
>>> with Cluster(hosts=2, link="250mbit") as cluster:
...     process = cluster.run(0, ["ping", "-c1", "host1"])
...     process.wait()
"""

from dnn_bench.cluster.cluster import Cluster
from dnn_bench.cluster.link import Link
from dnn_bench.cluster.system import ClusterError

__all__ = ["Cluster", "ClusterError", "Link"]
