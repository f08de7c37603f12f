"""A process's place in the epochs of an elastic job, asked from a driver of the test."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from torch.distributed import PrefixStore

import commsched as hvd
from comm_core import Waiting
from commsched.collectives import job
from commsched.errors import CommError
from commsched.process import rendezvous
from commsched.process.launch import Launch, detect_launch
from commsched.process.network import KeyValueServer

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_HOSTNAME": "b",
    "HOROVOD_ELASTIC": "1",
}


@pytest.fixture
def driver(monkeypatch):
    """Answers a path from its dictionary, and 404 where it has none; notes what was asked."""
    answers, asked = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            answers[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self):
            asked.append(self.path)
            answer = answers.get(self.path)
            answer = answer() if callable(answer) else answer
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(answer or b"")))
            self.end_headers()
            self.wfile.write(answer or b"")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.server_port))
    for name in ("CROSS_RANK", "CROSS_SIZE"):
        monkeypatch.setenv(f"HOROVOD_{name}", "0")
    monkeypatch.setattr(rendezvous, "_has_met", True)
    monkeypatch.setattr(rendezvous, "_name", socket.socket())  # those of several tests are the same
    yield answers, asked
    server.shutdown()
    server.server_close()


def launch() -> Launch:
    return detect_launch(os.environ)


def test_the_driver_tells_the_next_place(driver):
    answers, asked = driver
    answers["/rank_and_size/b:1"] = b"1,2,1,2,0,1"
    assert launch().elastic and launch().rank == 3
    rendezvous.renew(launch())
    now = launch()
    assert (now.rank, now.size, now.local_rank, now.local_size, now.node) == (1, 2, 1, 2, "b")
    rendezvous.renew(now)  # not used yet: the driver would take it for the end of an epoch
    assert asked == ["/rank_and_size/b:1"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"-1,-1,-1,-1,-1,-1", "process 1 of host b is no longer part of the job"),
        (b"1,2", "must answer with 6 numbers"),
        (b"one,2,1,2,0,1", "must answer with 6 numbers"),
        (None, "does not know rank_and_size/b:1"),
    ],
)
def test_answers_that_end_the_job(driver, answer, text):
    answers, _ = driver
    answers["/rank_and_size/b:1"] = answer
    with pytest.raises(CommError, match=text):
        rendezvous.renew(launch())


def test_a_driver_that_is_gone(driver, monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    with pytest.raises(CommError, match="has horovodrun ended"):
        rendezvous.renew(launch())


def test_a_process_that_is_cut_off_tries_the_driver_anew(driver, monkeypatch):
    """The kernel's next try came as late after the cut as the cut had lasted."""
    answers, _ = driver
    answers["/rank_and_size/b:1"] = b"1,2,1,2,0,1"
    connect, failures = socket.create_connection, [TimeoutError(), OSError(errno.EHOSTUNREACH, "no route")]

    def cut(address, timeout, *arguments):
        assert timeout <= 3
        if failures:
            raise failures.pop()
        return connect(address, timeout, *arguments)

    monkeypatch.setattr(socket, "create_connection", cut)
    rendezvous.renew(launch())
    assert launch().rank == 1 and not failures


@pytest.mark.parametrize("call", ["put", "clear", "ask", "wait"])
def test_each_call_names_a_server_that_is_gone(call):
    """The error named no server."""
    server = KeyValueServer("127.0.0.1", 1, 5)
    arguments = {"put": (b"",), "clear": (1,)}.get(call, ())
    with pytest.raises(
        CommError, match=r"server \(http://127\.0\.0\.1:1\) .*refused.*; has horovodrun ended"
    ):
        getattr(server, call)("commsched", "rank0", *arguments)


def test_no_proxy_stands_between_the_ranks_and_the_driver(driver, monkeypatch):
    answers, asked = driver
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    answers["/rank_and_size/b:1"] = b"1,2,1,2,0,1"
    rendezvous.renew(launch())
    assert asked == ["/rank_and_size/b:1"]


def test_a_driver_that_nobody_has_named(driver, monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    with pytest.raises(CommError, match="HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        rendezvous.renew(launch())


def test_rank_0_of_an_elastic_job_has_no_fixed_address(driver, monkeypatch):
    monkeypatch.setattr(rendezvous, "settings", lambda: rendezvous_settings())
    with pytest.raises(CommError, match="COMMSCHED_MASTER_ADDR"):
        rendezvous.renew(launch())


def rendezvous_settings():
    from commsched.env import read_settings

    return read_settings({"COMMSCHED_MASTER_ADDR": "b", "COMMSCHED_MASTER_PORT": "1"})


# -- two processes in one place ------------------------------------------------------------------------------

IN_ONE_PLACE = """
import os, sys

from commsched.process import rendezvous
from commsched.process.launch import detect_launch

rendezvous.renew(detect_launch(os.environ))
print("has the place", flush=True)
end = sys.stdin.readline().strip()
if end == "again":
    rendezvous.tell_end(detect_launch(os.environ))
    rendezvous.tell_begin(detect_launch(os.environ))
elif end:
    rendezvous.tell_end(detect_launch(os.environ), ValueError("other optimizers") if end == "fail" else None)
"""


@pytest.mark.parametrize("end", ["killed", "in order", "with an error", "outside", "in a second run"])
def test_a_process_waits_for_an_earlier_one_in_its_place(driver, end):
    """horovodrun had taken the earlier one for ended, and told both the same rank.

    Where all ranks failed, the later one of one of them began the training anew, alone.
    """
    answers, asked = driver
    answers["/rank_and_size/b:1"] = b"1,2,1,2,0,1"
    told = {"in order": "end\n", "with an error": "fail\n"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", IN_ONE_PLACE]
    with (
        subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as earlier,
        subprocess.Popen(
            command, cwd=ROOT, text=True, env={**os.environ, "HOROVOD_LOCAL_RANK": "0"}, **pipes
        ) as another,
    ):
        try:
            assert earlier.stdout.readline() == another.stdout.readline() == "has the place\n"
            with subprocess.Popen(
                command, cwd=ROOT, text=True, **pipes | {"stdin": subprocess.DEVNULL}
            ) as later:
                try:
                    said = later.stderr.readline()
                    assert "process 1 of host b waits: an earlier one" in said
                    if end == "killed":
                        earlier.kill()
                    else:
                        line = "again\n" if end == "in a second run" else "\n"
                        earlier.communicate(told.get(end, line), timeout=300)
                    shown, said = later.communicate(timeout=300)
                finally:
                    later.kill()
        finally:
            earlier.kill()
            another.kill()
    assert later.returncode == (end == "with an error")
    if end in told:
        assert not shown and "process 1 of host b ends: an earlier one in its place has ended" in said
        assert end == "in order" or "other optimizers" in said
    else:
        assert shown == "has the place\n"
    # Its rank is of an ended epoch: it looked for the others, who waited for its question.
    assert asked.count("/rank_and_size/b:1") == (end not in told)


def test_a_process_waits_for_no_place_where_horovodrun_has_ended(driver):
    answers, _ = driver

    def end() -> bytes:
        raise ConnectionAbortedError

    server = rendezvous.launcher_server(1.0)
    with rendezvous._hold_name(launch(), server)[0]:
        answers["/commsched/end-b:1"] = end
        with pytest.raises(CommError, match="did not answer GET commsched/end-b:1"):
            rendezvous._hold_name(launch(), server)


def test_a_process_that_is_no_longer_part_of_the_job_gives_its_place_up(driver):
    answers, _ = driver
    answers["/rank_and_size/b:1"] = b"-1,-1,-1,-1,-1,-1"
    with pytest.raises(CommError, match="no longer part"):
        rendezvous.renew(launch())
    assert rendezvous._name.fileno() == -1


# -- a rank is lost, or late, while the ranks meet -----------------------------------------------------------


@pytest.fixture
def rank_0(driver, monkeypatch):
    """This process is rank 0 of two, and has not met the other yet."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("SIZE", "2")):
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    monkeypatch.setattr(rendezvous, "_has_met", False)
    yield
    hvd.shutdown()
    job._launch()  # reads the settings again


def leave_a_record(answers):
    """What rank 1 does in a meeting, up to its connection to the coordinator."""
    while "/commsched/rank0" not in answers:
        time.sleep(0.01)
    contact, waiting = json.loads(answers["/commsched/rank0"]), Waiting(1, 60)
    connection = rendezvous._join(contact["addresses"], contact["port"], contact["token"], 60)
    mine = rendezvous.Record(1, 2, 1, "b", "127.0.0.1", "127.0.0.1")
    number, meeting = rendezvous._arrive(connection.store, mine, waiting)
    store = PrefixStore(f"commsched/{number}/{meeting}", connection.store)
    return [each.rank for each in rendezvous._exchange_records(store, mine, waiting, connection)]


@pytest.mark.parametrize(("seconds", "leaves_record"), [("4", False), ("64", True)])
def test_a_rank_that_is_lost_while_the_ranks_meet(driver, rank_0, monkeypatch, seconds, leaves_record):
    """The others waited for the whole COMMSCHED_START_TIMEOUT, and then a process's first init() failed."""
    answers, asked = driver
    answers["/rank_and_size/b:0"] = b"0,1,0,1,0,1"
    monkeypatch.setenv("COMMSCHED_START_TIMEOUT", seconds)
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(leave_a_record, answers) if leaves_record else None
        hvd.init()
        assert lost is None or lost.result() == [0, 1]
    assert hvd.size() == 1 and asked == ["/rank_and_size/b:0"]


def test_ranks_that_never_meet_give_up(driver, rank_0, monkeypatch):
    """``elastic.run`` asked the driver again for ever."""
    answers, asked = driver
    answers["/rank_and_size/b:0"] = b"0,2,0,2,0,1"
    monkeypatch.setenv("COMMSCHED_START_TIMEOUT", "1.6")
    said = r"rank 0 of 2 has not met the others for \d+ s, at last for the whole COMMSCHED_START_TIMEOUT"
    with pytest.raises(CommError, match=said + r" \(1\.6 s\): rank 0 waited 1\.6 s .*missing: \[1\]"):
        hvd.init()
    assert asked == ["/rank_and_size/b:0"] * 3


def test_the_driver_answers_after_the_last_rank_has_noticed(driver, monkeypatch):
    """renew() gave up after COMMSCHED_TIMEOUT, while others still waited for the lost rank."""
    answers, _ = driver
    answers["/rank_and_size/b:1"] = lambda: time.sleep(1.5) or b"1,2,1,2,0,1"
    monkeypatch.setenv("COMMSCHED_TIMEOUT", "0.5")
    monkeypatch.setenv("COMMSCHED_START_TIMEOUT", "60")
    assert job.renew().size == 2


LATE = """
import os, time, urllib.request

import commsched as hvd

driver = f"http://127.0.0.1:{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
deadline = time.monotonic() + 200
while urllib.request.urlopen(driver + "/test/asked").read() != b"yes" and time.monotonic() < deadline:
    time.sleep(0.05)
hvd.init()
print(hvd.rank(), hvd.size(), flush=True)
"""


def test_a_process_that_starts_after_the_others_have_asked_again(driver, rank_0, monkeypatch):
    """It finds no rank 0, and the driver waits for its question: all meet in their next try."""
    answers, asked = driver
    both, listens = threading.Barrier(2, action=lambda: answers.pop("/commsched/rank0")), []

    def answer(rank):
        if rank == 0:
            with closing(socket.socket()) as probe:
                port = json.loads(answers["/commsched/rank0"])["port"]
                listens.append(probe.connect_ex(("127.0.0.1", port)) == 0)
            answers["/test/asked"] = b"yes"
        both.wait(300)
        return b"%d,2,%d,2,0,1" % (rank, rank)

    answers["/test/asked"] = b"no"
    for rank in (0, 1):
        answers[f"/rank_and_size/b:{rank}"] = lambda rank=rank: answer(rank)
    monkeypatch.setenv("COMMSCHED_START_TIMEOUT", "40")
    env = {**os.environ, "HOROVOD_RANK": "1", "HOROVOD_LOCAL_RANK": "1"}
    with subprocess.Popen([sys.executable, "-c", LATE], cwd=ROOT, env=env, stdout=subprocess.PIPE) as late:
        try:
            hvd.init()
            assert hvd.size() == 2 and not any(listens), "the store of an ended meeting still listens"
            assert late.communicate(timeout=300)[0] == b"1 2\n"
        finally:
            late.kill()
    assert {f"/rank_and_size/b:{rank}" for rank in (0, 1)} <= set(asked)


def test_a_loss_in_one_job_aborts_nothing_of_the_next():
    from commsched.process.failure_monitor import FailureMonitor

    class Waiter:
        def __init__(self):
            self.aborted = threading.Event()

        def abort(self, reason):
            self.aborted.set()

    monitor, old, new = FailureMonitor(), Waiter(), Waiter()
    try:
        monitor.register(old, [0, 1])
        with monitor._lock:  # the thread has not got to it when the next job begins
            monitor.report(1, "rank 1 died")
            monitor.begin_job()
            monitor.register(new, [0, 1])
        assert old.aborted.wait(60) and not new.aborted.is_set()
    finally:
        monitor.close()
