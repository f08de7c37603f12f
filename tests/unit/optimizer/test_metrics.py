"""The figures of ``commsched.metrics``, and where they are shown."""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
import urllib.request
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import commsched
from commsched.backends.cuda import StreamBackend
from commsched.devices import Device
from commsched.env import Settings
from commsched.optimizer.measuring import NOTICED, SETTLE, StepTimes
from commsched.optimizer.planner import Plan
from commsched.optimizer.reports import Metrics, StepReports, endpoint, metrics_of
from commsched.process.network import HeldPort
from scheduler import policies
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from tests.support.local_backend import Channels, local_backend, round_of, run_threads

PROFILE = Profile("two layers", (Layer("first", 0.01, 0.02, 1 << 20), Layer("last", 0.01, 0.02, 1 << 20)))
LINK = Link(1e-4, 1e-8)
EVENT = [("step", "i8"), ("start", "f8"), ("end", "f8"), ("bytes", "i8")]
FIGURES = Metrics(
    steps=8,
    rank=0,
    ranks=2,
    policy="dear",
    step=0.1,
    exposed=0.02,
    bytes=4e6,
    link_rate=3e7,
    link_busy=0.5,
    waits=(0.02, 0.03),
    predicted_step=0.09,
    predicted_exposed=0.01,
    predicted_link_busy=0.6,
    ddp_step=0.12,
    ddp_exposed=0.04,
)


def plan() -> Plan:
    return Plan(policies.plan(PROFILE, LINK, "wfbp"), PROFILE, LINK, (0, 1))


class FakeBackend:
    """Events that the test made; marks are seconds, and known once the device's clock has passed them."""

    def __init__(self) -> None:
        self.clock = float("inf")
        rows = [(step, step + 0.1, step + 0.3, 600) for step in range(6) for _ in range(2)]
        self.log = np.array(rows, EVENT)

    def events(self, clear: bool) -> Any:
        assert not clear, "the planner needs them"
        return self.log

    def seconds(self, mark: float) -> float | None:
        return mark if mark <= self.clock else None


class FakeRound:
    def __init__(self) -> None:
        self.waits: list[tuple[float, float]] = []
        self.waits_of_ranks: deque[list[int]] = deque()

    def take_waits(self) -> list[tuple[float, float]]:
        waits, self.waits = self.waits, []
        return waits


def times_of(backend: FakeBackend, steps: int = 7) -> tuple[StepTimes, FakeRound]:
    fake: Any = FakeRound()
    times = StepTimes(fake, backend)
    for step in range(steps):
        fake.waits = [(10.0 * step, 10.0 * step + 0.1), (10.0 * step + 1, 10.0 * step + 1.2)]
        times.step()
    return times, fake


def test_measured_figures_by_hand() -> None:
    times, fake = times_of(FakeBackend())
    fake.waits_of_ranks.extend([[0, 5], [1001, 3001], [2001, 3001], [2001, 4001]])
    found = metrics_of(times, plan(), SimpleNamespace(rank=0, size=2))  # type: ignore[arg-type]
    assert found.steps == 7 - SETTLE and found.exposed == pytest.approx(0.3)
    assert found.bytes == 1200 and found.link_rate == pytest.approx(1200 / 0.4)
    assert found.waits == pytest.approx((0.002, 0.003)), "the row in which a rank had no wait yet counts not"
    predicted = plan().prediction
    assert (found.predicted_exposed, found.ddp_exposed) == (predicted.exposed, predicted.ddp_exposed)
    assert times.last_wait() == pytest.approx(300_001, abs=1)


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    times, fake = times_of(FakeBackend())
    found = metrics_of(times, plan(), SimpleNamespace(rank=0, size=3))  # type: ignore[arg-type]
    found = replace(found, step=1.0, waits=(0.4, 0.1, 0.3))
    assert found.awaited == 1 and "(for the compute of rank 1)" in found.line
    assert [line for line in str(found).splitlines() if "the others wait for" in line][0].startswith(
        "wait of rank 1"
    )
    for waits in ((0.4, 0.1, 0.15), (0.1, 0.1, 0.4), ()):
        assert (
            replace(found, waits=waits).awaited is None and "compute" not in replace(found, waits=waits).line
        )


def test_compute_that_contradicts_what_was_measured() -> None:
    times, _ = times_of(FakeBackend(), steps=SETTLE + NOTICED - 1)
    assert not times.contradicts(1.0), "so far nothing is known"
    times, _ = times_of(FakeBackend(), steps=SETTLE + NOTICED)
    times._compute = 1.0
    assert times.contradicts(1.2) and not times.contradicts(1.05)
    assert not times.contradicts(0.5), "what is slower now may have been stopped for a while"
    times._compute = 0.01
    assert not times.contradicts(0.015), "short iterations vary"


def test_waits_of_steps_that_the_device_has_not_finished_are_read_later() -> None:
    backend = FakeBackend()
    backend.clock = 41.1  # within the second wait of the fifth step
    times, _ = times_of(backend, steps=7)
    assert len(times._waits) == 2 and len(times._unread) == 3
    backend.clock = 61.1
    times.step()
    assert len(times._waits) == 4
    backend.clock = 100.0
    times.step()
    assert len(times._unread) == 0 and times.measured().exposed == pytest.approx(0.3)


def test_a_stream_backend_marks_the_stream_and_never_waits_for_it() -> None:
    passed: set[str] = set()
    moments = {"early": 1.0, "late": 2.0}
    device = SimpleNamespace(
        asynchronous=True,
        current=lambda: "main",
        record=lambda stream: f"mark on {stream}",
        has_passed=passed.__contains__,
        moment=lambda mark: moments[mark] if mark in passed else pytest.fail("the host waited"),
    )
    backend: Any = SimpleNamespace(streams=device)
    assert StreamBackend.now(backend) == "mark on main"
    assert StreamBackend.seconds(backend, "early") is None
    passed.add("early")
    assert StreamBackend.seconds(backend, "early") == 1.0
    on_host: Any = SimpleNamespace(streams=Device(torch.device("cpu")))
    assert StreamBackend.seconds(on_host, StreamBackend.now(on_host)) is not None


def test_every_rank_learns_how_long_each_one_waited() -> None:
    def rank_body(rank: int, channels: Channels) -> list[int]:
        model = torch.nn.Linear(4, 4)
        now, _ = round_of(model, local_backend(channels, rank))
        for _ in range(3):
            now.waited = 100 + rank
            model(torch.ones(2, 4)).sum().backward()
            now.mode.gather_gradients()
            now.finish_step()
        now.backend.close()
        return now.waits_of_ranks[-1]

    assert run_threads(3, rank_body) == [[100, 101, 102]] * 3


def test_one_rank_has_no_figures() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    assert commsched.metrics(optimizer) is None
    commsched.log_metrics(optimizer, None, 0)


def test_texts_and_dictionaries() -> None:
    text = str(FIGURES)
    for part in (
        "dear",
        "100.00 ms",
        "20.00 ms",
        "90.00 ms",
        "40.00 ms",
        "50 %",
        "4.00 MB",
        "wait of rank 1",
    ):
        assert part in text
    assert "exposed communication 20.00 ms (predicted 10.00 ms, DDP 40.00 ms)" in FIGURES.line
    assert json.loads(json.dumps(FIGURES.to_dict()))["waits"] == [0.02, 0.03]
    scalars = FIGURES.to_scalars()
    assert scalars["wait_of_rank_1"] == 0.03 and scalars["ddp_exposed"] == 0.04 and "policy" not in scalars


def test_a_summary_writer_gets_every_scalar(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    seen: dict[str, float] = {}
    monkeypatch.setattr("commsched.optimizer.reports.metrics", lambda optimizer: FIGURES)
    recorder = SimpleNamespace(add_scalar=lambda name, value, step: seen.update({f"{name} {step}": value}))
    commsched.log_metrics(None, recorder, 7)
    assert seen["commsched/exposed 7"] == 0.02 and len(seen) == len(FIGURES.to_scalars())
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        commsched.log_metrics(None, writer, 7)
    (file,) = tmp_path.iterdir()
    assert b"commsched/ddp_exposed" in file.read_bytes()


# -- Prometheus and lines ------------------------------------------------------------------------------------


def page_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def test_the_optimizers_of_a_process_share_one_port() -> None:
    pytest.importorskip("prometheus_client")
    held = HeldPort()
    port = held.number
    one, first = endpoint(port, 3)
    two, second = endpoint(port, 3)
    assert one is two
    one.show(first, FIGURES.to_scalars())
    two.show(second, {"exposed": 0.5})
    page = page_of(port)
    assert 'commsched_exposed_seconds{optimizer="0",rank="3"} 0.02' in page
    assert 'commsched_exposed_seconds{optimizer="1",rank="3"} 0.5' in page
    one.remove(first)
    assert 'optimizer="0"' not in page_of(port)
    two.remove(second)
    with pytest.raises(OSError):
        page_of(port)
    endpoint(port, 3)[0].remove(0)  # the port is free again
    held.close()


def test_many_silent_clients_cost_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They held a thread and a descriptor each, for ever, and could come from anywhere."""
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("commsched.optimizer.reports._Scrape.timeout", 3600.0)
    held = HeldPort()
    served, number = endpoint(held.number, 0)
    assert served._server.server_address[0] == "127.0.0.1"
    threads = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", held.number), timeout=100) for _ in range(100)]
    end = time.monotonic() + 100
    while len(refused := select.select(silent, [], [], 0.05)[0]) < 100 - 16:
        assert time.monotonic() < end, f"{len(refused)} of 100 are refused"
    assert len(refused) == 100 - 16 and threading.active_count() <= threads + 16
    for client in silent:
        client.close()
    served.remove(number)
    held.close()


def test_a_silent_client_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("commsched.optimizer.reports._Scrape.timeout", 0.2)
    held = HeldPort()
    served, number = endpoint(held.number, 0)
    served.show(number, {"exposed": 0.5})
    with socket.create_connection(("127.0.0.1", held.number), timeout=100) as silent:
        assert silent.recv(1) == b""
    assert "commsched_exposed_seconds" in page_of(held.number)
    served.remove(number)
    held.close()


def test_a_taken_port_is_named() -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"rank 1 cannot serve its metrics on 127.0.0.1, port {port}"):
            endpoint(port, 1)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"pip install commsched\[metrics\]"):
        endpoint(9, 0)


@pytest.mark.parametrize(("rank", "lines"), [(0, 2), (1, 0)])
def test_rank_0_prints_a_line_every_so_many_steps(
    rank: int, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    times, _ = times_of(FakeBackend())
    ranks: Any = SimpleNamespace(rank=rank, size=2)
    reports = StepReports(Settings(log_every=3), ranks, rank, times)
    shown = plan()
    assert shown.prediction  # made now: the line does not wait for it
    for _ in range(7):
        reports.step(shown)
    reports.close()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == lines and all("exposed communication 300.00 ms" in line for line in printed)
