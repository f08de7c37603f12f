"""Emulated clusters: what can be checked without building one."""

import os

import pytest

from dnn_bench import cluster as emulated
from dnn_bench import launch
from dnn_bench.cluster import Cluster, ClusterError, Link, links


@pytest.mark.parametrize(
    ("text", "rate"),
    [("250mbit", 250_000_000), ("1gbit", 10**9), ("2.5Gbit", 2_500_000_000), ("800kbit", 800_000)],
)
def test_rates(text: str, rate: int) -> None:
    link = Link.parse(text)
    assert link.rate == rate
    assert link.bytes_per_second == rate / 8
    assert Link.parse(str(link)) == link


@pytest.mark.parametrize("text", ["", "fast", "250", "250mbps", "0mbit", "-1gbit", "1gbit/s"])
def test_what_is_not_a_rate(text: str) -> None:
    with pytest.raises(ClusterError, match="rate in bits such as 250mbit"):
        Link.parse(text)


def test_shaper_commands() -> None:
    assert Link.parse("unlimited").commands("eth0") == []
    (slow,) = Link.parse("250mbit").commands("eth0")
    assert " ".join(slow) == "tc qdisc add dev eth0 root tbf rate 250000000bit burst 262144 latency 100ms"
    (fast,) = Link.parse("10gbit").commands("eth0")
    assert "1250000" in fast  # a millisecond's worth, or the bucket would run dry between two timers
    (modem,) = Link.parse("64kbit").commands("eth0")
    assert "8000" in modem  # a second's worth; small programs would not notice with 256 KB in hand
    delayed, shaped = Link.parse("1gbit", "2ms").commands("eth0")
    assert " ".join(delayed).endswith("dev eth0 root handle 1: netem delay 2ms limit 100000")
    assert " ".join(shaped[5:8]) == "parent 1: tbf"


def test_one_link_for_all_or_one_each() -> None:
    assert [str(link) for link in links("1gbit", 3)] == ["1gbit"] * 3
    assert [str(link) for link in links("1gbit,250mbit", 2)] == ["1gbit", "250mbit"]
    with pytest.raises(ClusterError, match="3 hosts need one link for all or 3 links, not 2"):
        links("1gbit,250mbit", 3)


def test_host_arguments() -> None:
    cluster = Cluster(hosts=3, link="1gbit")
    assert cluster.hosts_argument(slots=2) == "host0:2,host1:2,host2:2"
    assert cluster.addresses == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]


def test_bad_sizes_and_use_outside_the_context() -> None:
    with pytest.raises(ClusterError, match="1 to 200 hosts, not 0"):
        Cluster(hosts=0)
    with pytest.raises(ClusterError, match="inside `with Cluster"):
        Cluster(hosts=2).run(0, ["true"])


def test_without_root_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="needs root, to make network namespaces"), Cluster(hosts=2):
        pass


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match="needs ip, tc: apt-get install iproute2 on Debian"):
        emulated.require(["ip", "tc"])


def test_only_own_names_are_recognised() -> None:
    assert emulated.NAME.fullmatch("csb-123-17-0-h11")
    assert emulated.NAME.fullmatch("csb-123-17-0")
    for name in ("csb-x-17-0-h1", "mycsb-123-17-0-h1", "csb-123-17-0-h1-old", "t1"):
        assert emulated.NAME.fullmatch(name) is None


def test_command_line_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.run_on_hosts(["--hosts", "2", "--"]) == 2
    assert "which command?" in capsys.readouterr().err
