"""Emulated clusters, built for real (as root)."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dnn_bench import cluster as emulated
from dnn_bench.baselines import MissingPeer
from dnn_bench.cluster import CONGESTION_FILE, Cluster, ClusterError
from dnn_bench.launch import Hosts
from tests.support.checkout import make_path, make_script
from tests.support.needs import needs, needs_root, skip_without_horovod

pytestmark = [
    pytest.mark.dist,
    pytest.mark.root,
    needs_root,
    needs("ip", "tc"),
]
needs_ssh = needs("sshd", "ssh")
ROOT = str(Path(__file__).parents[2])

# Sends 4 MB on request, again until they arrive at the wanted rate: a busy machine may delay them, but cannot
# make them early, because the clock starts with the request.
SEND = """
import os, socket, sys, time
size, wanted = 4_000_000, float(sys.argv[1])
if os.environ["RANK"] == "0":
    with socket.create_server(("0.0.0.0", 5000)) as server:
        peer, _ = server.accept()
        rates = []
        while not rates or (max(rates) < wanted and len(rates) < 50):
            got, start = 0, time.perf_counter()
            peer.sendall(b"?")
            while got < size and (chunk := peer.recv(1 << 20)):
                got += len(chunk)
            rates.append(8 * size / (time.perf_counter() - start))
        print(max(rates))
else:
    while True:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], 5000))
            break
        except OSError:
            time.sleep(0.05)
    while peer.recv(1):
        peer.sendall(bytes(size))
"""
HOLD = """
import re, sys, time
from dnn_bench import cluster as emulated
from dnn_bench.cluster import Cluster
emulated.PREFIX, emulated.NAME = sys.argv[1], re.compile(sys.argv[2])
with Cluster(hosts=2, link="100mbit", ssh=False) as cluster:
    process = cluster.run(0, ["sleep", "3600"])
    print(cluster.identity, process.pid, flush=True)
    time.sleep(3600)
"""


def output(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=400)
    assert process.returncode == 0, text
    return text.strip()


@pytest.fixture(autouse=True)
def clusters_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep clusters of other tests, which remove the remains of dead owners, away from this test's."""
    pattern = emulated.NAME.pattern
    monkeypatch.setattr(emulated, "PREFIX", f"cst{os.getpid()}")
    monkeypatch.setattr(emulated, "NAME", re.compile(pattern.replace("csb", emulated.PREFIX)))


def own_namespaces(identity: str) -> list[str]:
    return [name for name in emulated.namespaces() if name.startswith(f"{identity}-")]


def heed_signals() -> None:
    """What runs in the background ignores Ctrl-C, and under nohup SIGHUP, and so would its children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: neither another process with its old number nor one that nobody has asked for yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def hold_cluster() -> tuple[subprocess.Popen[str], str, psutil.Process]:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, emulated.PREFIX, emulated.NAME.pattern],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
        preexec_fn=heed_signals,
    )
    assert owner.stdout is not None
    identity, pid = owner.stdout.readline().split()
    assert len(own_namespaces(identity)) == 3
    return owner, identity, psutil.Process(int(pid))


def test_hosts_have_names_addresses_and_the_asked_speed() -> None:
    with Cluster(hosts=2, link="100mbit", ssh=False) as cluster:
        names = [
            output(cluster.run(i, ["sh", "-c", "hostname; hostname -I"], stdout=subprocess.PIPE, text=True))
            for i in range(2)
        ]
        assert names == ["host0\n10.77.0.1", "host1\n10.77.0.2"]
        said = cluster.run(0, ["cat", CONGESTION_FILE], stdout=subprocess.PIPE, text=True)
        assert output(said) == "reno"  # whatever this machine's own is
        send = [sys.executable, "-c", SEND, "80e6"]
        receiver, sender = cluster.launch(send, stdout=subprocess.PIPE, text=True)
        output(sender)
        assert 80e6 < float(output(receiver)) < 108e6  # 4 MB with 0.25 MB sent at once
    assert own_namespaces(cluster.identity) == []


def test_the_congestion_control_can_be_chosen() -> None:
    """Hosts silently got the kernel's own `bbr` where `cubic` was not allowed."""
    known, allowed = (
        Path(CONGESTION_FILE.replace("congestion", f"{which}_congestion")).read_text().split()
        for which in ("available", "allowed")
    )
    for chosen in [*known, "nothing"]:
        if chosen in allowed:
            with Cluster(hosts=1, congestion=chosen, ssh=False) as cluster:
                said = cluster.run(0, ["cat", CONGESTION_FILE], stdout=subprocess.PIPE, text=True)
                assert output(said) == chosen
            continue
        advice = r"; .sysctl -w .* allows it$" if chosen in known else "$"
        has = "the system has .*reno.* allows hosts .*reno.*"
        words = f"cannot use the congestion control '{chosen}': {has}{advice}"
        with pytest.raises(ClusterError, match=words), Cluster(hosts=1, congestion=chosen, ssh=False):
            pass


def test_a_slow_host_is_slow_in_both_directions() -> None:
    with Cluster(hosts=2, link="50mbit,1gbit", ssh=False) as cluster:  # host1 sends to the slow host0
        send = [sys.executable, "-c", SEND, "0"]
        receiver, sender = cluster.launch(send, stdout=subprocess.PIPE, text=True)
        output(sender)
        assert float(output(receiver)) < 54e6


def test_links_change_their_speed() -> None:
    with Cluster(hosts=2, link="unlimited", ssh=False) as cluster:
        cluster.set_link("50mbit")
        assert [str(link) for link in cluster.links] == ["50mbit"] * 2
        send = [sys.executable, "-c", SEND]
        receiver, sender = cluster.launch([*send, "0"], stdout=subprocess.PIPE, text=True)
        output(sender)
        assert float(output(receiver)) < 54e6
        cluster.set_link("unlimited")
        receiver, sender = cluster.launch([*send, "100e6"], stdout=subprocess.PIPE, text=True)
        output(sender)
        assert float(output(receiver)) > 100e6
        with pytest.raises(ClusterError, match="a link is a rate in bits"):
            cluster.set_link("fast")


def test_two_clusters_at_once() -> None:
    with Cluster(hosts=2, ssh=False) as one, Cluster(hosts=2, ssh=False) as other:
        assert one.identity != other.identity
        for cluster in (one, other):
            ping = [sys.executable, "-c", SEND, "0"]
            receiver, sender = cluster.launch(ping, stdout=subprocess.PIPE, text=True)
            output(sender)
            assert float(output(receiver)) > 0


def test_leaving_ends_what_runs_even_when_it_ignores_sigterm() -> None:
    with Cluster(hosts=1, ssh=False) as cluster:
        stubborn = (
            "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(3600)"
        )
        process = cluster.run(0, [sys.executable, "-c", stubborn], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "1\n"
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_owner_takes_the_cluster_down(number: signal.Signals) -> None:
    owner, identity, process = hold_cluster()
    owner.send_signal(number)
    owner.wait(timeout=400)
    assert own_namespaces(identity) == []
    assert not is_alive(process)
    assert not (emulated.STATE / identity).exists() and not (emulated.ETC / f"{identity}-h0").exists()


def test_what_a_killed_owner_left_is_removed_at_the_next_start() -> None:
    owner, identity, process = hold_cluster()
    owner.kill()
    owner.wait(timeout=400)
    assert is_alive(process) and len(own_namespaces(identity)) == 3
    with Cluster(hosts=1, ssh=False):
        assert own_namespaces(identity) == []
    assert not is_alive(process)
    assert not (emulated.STATE / identity).exists()


def test_an_adjusted_clock_makes_no_owner_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, identity, process = hold_cluster()
    shifted = psutil.Process(owner.pid).create_time() + 1
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: shifted)
    assert identity not in emulated.remove_leftovers() and is_alive(process)
    owner.kill()
    owner.wait(timeout=400)
    assert identity in emulated.remove_leftovers()


def test_a_process_with_the_owners_old_number_does_not_protect_leftovers() -> None:
    owner, identity, _ = hold_cluster()
    owner.kill()
    owner.wait(timeout=400)
    reused = identity.replace(str(owner.pid), str(os.getpid()))
    (emulated.STATE / reused).mkdir()
    assert set(emulated.remove_leftovers()) >= {identity, reused}
    assert not (emulated.STATE / reused).exists()


def test_a_refused_link_is_a_clear_error_and_leaves_nothing() -> None:
    cluster = Cluster(hosts=2, link="1gbit", delay="soon", ssh=False)
    with pytest.raises(
        ClusterError, match="refuses the link 1gbit of host 0.*netem delay soon.*without --delay"
    ):
        cluster.start()
    assert own_namespaces(cluster.identity) == []
    cluster = Cluster(hosts=2, link="1bit", ssh=False)
    with pytest.raises(
        ClusterError, match="^the system refuses the link 1bit of host 0.*rates from 1kbit.*$"
    ):
        cluster.start()
    assert own_namespaces(cluster.identity) == []


def test_unknown_hosts_are_refused() -> None:
    with Cluster(hosts=2, ssh=False) as cluster, pytest.raises(ClusterError, match="hosts 0 to 1, not 2"):
        cluster.run(2, ["true"])


def test_only_horovodrun_and_mpirun_need_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison of other baselines on emulated hosts did not start without sshd."""
    tools = ("ip", "tc", "unshare", "taskset", "hostname")
    path = make_path(tmp_path / "bin", *tools)
    make_script(path / "horovodrun", "")
    monkeypatch.setenv("PATH", str(path))
    with Cluster(hosts=2) as cluster:
        assert output(cluster.run(1, ["hostname"], stdout=subprocess.PIPE, text=True)) == "host1"
        message = (
            "horovodrun reaches other hosts by ssh, and .* apt-get install openssh-client openssh-server"
        )
        with pytest.raises(MissingPeer, match=message):
            Hosts(cluster).start(["-c", ""], subprocess.DEVNULL, launcher="horovod")


@needs_ssh
def test_ssh_between_hosts_needs_no_password() -> None:
    with Cluster(hosts=3, ssh=True) as cluster:
        script = "for i in 0 1 2; do ssh host$i hostname; done"
        assert (
            output(cluster.run(1, ["sh", "-c", script], stdout=subprocess.PIPE, text=True)).split()
            == cluster.names
        )


HOROVOD = """
import socket, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum).item()
names = hvd.allgather_object(socket.gethostname())
if hvd.rank() == 0:
    print("result", hvd.size(), hvd.cross_size(), total, *names)
"""


@needs_ssh
@pytest.mark.parametrize(
    "launcher",
    [pytest.param("horovodrun", marks=pytest.mark.slow), pytest.param("mpirun", marks=needs("mpirun"))],
)
def test_several_hosts_under_a_real_launcher(launcher: str, tmp_path: Path) -> None:
    skip_without_horovod()
    script = tmp_path / "job.py"
    script.write_text(HOROVOD)
    with Cluster(hosts=2, link="1gbit", ssh=True) as cluster:
        hosts = ["-np", "2", "-H", cluster.hosts_argument(), sys.executable, str(script)]
        command = ["horovodrun", "--disable-cache", "--gloo", *hosts]
        if launcher == "mpirun":
            command = ["mpirun", "--allow-run-as-root", *hosts]
        process = cluster.run(
            0, command, {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        text = output(process)
    assert "result 2 2 3.0 host0 host1" in text


def test_command_on_every_host() -> None:
    command = [sys.executable, "-m", "dnn_bench", "cluster", "--hosts", "3", "--"]
    script = 'echo "$RANK $(hostname)"; exit $RANK'
    done = subprocess.run(
        [*command, "sh", "-c", script], capture_output=True, text=True, timeout=400, cwd=ROOT
    )
    assert done.returncode in (1, 2), done.stderr
    assert "0 host0" in done.stdout.splitlines()
    assert set(done.stdout.splitlines()) <= {"0 host0", "1 host1", "2 host2"}
