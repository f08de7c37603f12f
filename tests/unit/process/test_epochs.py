"""A process's place in the epochs of an elastic job, asked from a driver of the test."""

from __future__ import annotations

import os
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from commsched.errors import CommError
from commsched.process import rendezvous
from commsched.process.launch import Launch, detect_launch
from commsched.process.network import KeyValueServer

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
        def do_GET(self):
            asked.append(self.path)
            answer = answers.get(self.path)
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


@pytest.mark.parametrize("call", ["put", "clear", "ask", "wait"])
def test_each_call_names_a_server_that_is_gone(call):
    """Of urllib came an error that named no server."""
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
    monkeypatch.setattr(urllib.request, "_opener", None)  # it has the variables of its first use
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
        rendezvous._connect(launch(), None)


def rendezvous_settings():
    from commsched.env import read_settings

    return read_settings({"COMMSCHED_MASTER_ADDR": "b", "COMMSCHED_MASTER_PORT": "1"})


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
