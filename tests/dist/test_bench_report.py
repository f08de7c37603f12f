"""The report's page in a real browser: the numbers on it, its charts, zooming, and a silent console.

Needs Chromium and its driver (Debian: apt-get install chromium chromium-driver).
"""

import json
import os
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dnn_bench.report import page
from tests.support.needs import find, needs

CHROMIUM = find("chromium")
DRIVER = find("chromedriver")
pytestmark = pytest.mark.dist
needs_browser = needs("chromium", "chromedriver")


def entry(name: str, kind: str, time: float, exposed: float, **more: Any) -> dict[str, Any]:
    known = {"low": time * 0.9, "high": time * 1.1, "times": [time], "throughput": 64 / time, "cpu": 0.3}
    shares = {"compute": time - exposed, "overhead": 0.0, "exposed": exposed}
    ratios = {"to_floor": 1.1, "to_limit": 1.2, "to_best_peer": 1.3, "best_peer": "ddp"}
    rest = {"about": "", "status": "ok", "reason": "", "predicted": None, "trace": None, "memory": 4e8}
    extra = {"utilisation": 0.5, "communication_cpu": 0.1, "sent": 25e6}
    return {"name": name, "kind": kind, "time": time, **known, **shares, **ratios, **rest, **extra, **more}


def trace() -> dict[str, Any]:
    return {
        "layers": ["first", "second </script>"], "forward": [[0.0, 0.1], [0.1, 0.2]],
        "backward": [[0.4, 0.6], [0.2, 0.4]], "update": [0.6, 0.65], "end": 0.8,
        "operations": [["AG1", 0.0, 0.08, 10**6], ["RS1", 0.45, 0.6, 10**6], ["RS0", 0.62, 0.8, 10**6]],
        "sent": [[0.0, 0], [0.4, 10**6], [0.8, 4 * 10**6]],
    }  # fmt: skip


def report(ranks: int = 2) -> dict[str, Any]:
    rows = [
        entry("local", "limit", 0.5, 0.0),
        entry("floor", "limit", 0.6, 0.0),
        entry("ddp", "peer", 1.234, 0.634),
        entry("auto", "commsched", 0.7, 0.1, predicted=0.77, trace=trace()),
        {
            "name": "horovod",
            "kind": "peer",
            "about": "",
            "status": "missing",
            "reason": "it is not installed",
        },
    ]
    return {
        "version": 1, "kind": "compare", "interrupted": False, "bound": 0.65,
        "scaling": {"auto": [[2, 0.7], [4, 0.8]]},
        "environment": {
            "date": "today", "command": "python -m dnn_bench compare", "processor": "x", "cores": 2,
            "packages": {"torch": "2"},
        },
        "job": {"model": "mlp", "batch": 32, "device": "cpu"},
        "place": {
            "kind": "emulated hosts", "hosts": ranks, "links": ["250mbit"] * ranks, "ranks": ranks,
            "rate": 31250000,
        },
        "effort": {"repetitions": 1, "iterations": 2, "interleaved": True}, "baselines": rows,
    }  # fmt: skip


class Browser:
    """As much of the WebDriver protocol as is needed here."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1600"]
        wanted = {
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = self.ask("/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{session['sessionId']}"

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.base + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=400) as answer:
            return json.load(answer)["value"]

    def open(self, path: Path) -> None:
        self.ask(f"{self.session}/url", {"url": path.as_uri()})

    def run(self, script: str) -> Any:
        return self.ask(f"{self.session}/execute/sync", {"script": f"return {script}", "args": []})

    def console(self) -> list[str]:
        return [record["message"] for record in self.ask(f"{self.session}/se/log", {"type": "browser"})]

    def wheel(self, x: int, y: int, amount: int) -> None:
        scroll = {
            "type": "scroll",
            "x": x,
            "y": y,
            "deltaX": 0,
            "deltaY": amount,
            "duration": 0,
            "origin": "viewport",
        }
        self.ask(f"{self.session}/actions", {"actions": [{"type": "wheel", "id": "w", "actions": [scroll]}]})

    def close(self) -> None:
        self.ask(self.session, method="DELETE")


def started_driver(env: dict[str, str]) -> tuple[subprocess.Popen[str], int]:
    """Start chromedriver; return it and its port.

    It takes a free port for IPv6, and ends if another program has that one for IPv4. Then it starts again.
    """
    while True:
        driver = subprocess.Popen(
            [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        assert driver.stdout is not None
        said = ""
        for line in driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                return driver, int(found[1])
            said += line
        assert driver.wait(timeout=400) and "port not available" in said, said


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert DRIVER is not None
    # Chromium leaves things at home and among temporary files. tmp_path is too long for its sockets' names.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), home)
        driver, port = started_driver({**os.environ, **places})
        try:
            found = connect(port)
            yield found
            found.close()
        finally:
            driver.terminate()
            driver.wait(timeout=400)


def connect(port: int) -> Browser:
    deadline = time.monotonic() + 90
    while True:
        try:
            return Browser(port)
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def show(browser: Browser, directory: Path, *reports: dict[str, Any]) -> None:
    path = directory / "page.html"
    path.write_text(page.render(reports))
    browser.open(path)


@needs_browser
def test_the_numbers_on_the_page(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, report())
    assert browser.console() == []
    row = browser.run(
        "[...document.querySelectorAll('tr[data-baseline=auto] td')].map((cell) => cell.textContent)"
    )
    assert row == [
        "auto",
        "700",
        "630-770",
        "91.4",
        "100",
        "50 %",
        "25.0",
        "770",
        "10 %",
        "400",
        "100",
        "1.10",
        "1.20",
        "1.30",
    ]
    missing = browser.run("document.querySelector('tr[data-baseline=horovod]').textContent")
    assert "missing" in missing and "it is not installed" in missing
    assert browser.run("document.querySelector('h1').textContent") == "mlp, 32 samples per rank"
    assert "2 emulated hosts, links 250mbit" in browser.run("document.body.textContent")


@needs_browser
def test_bars_are_as_long_as_their_times(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, report())
    widths = browser.run(
        "Object.fromEntries([...document.querySelectorAll('svg.bars g[data-baseline]')].map((bar) =>"
        " [bar.dataset.baseline, [...bar.querySelectorAll('rect')].map((part) =>"
        " part.getBoundingClientRect().width)]))"
    )
    assert set(widths) == {"local", "floor", "ddp", "auto"}
    per_second = widths["local"][0] / 0.5
    assert widths["ddp"] == pytest.approx([0.6 * per_second, 0.0, 0.634 * per_second], abs=0.5)
    assert widths["auto"] == pytest.approx([0.6 * per_second, 0.0, 0.1 * per_second], abs=0.5)
    labels = browser.run(
        "[...document.querySelectorAll('svg.bars .value')].map((label) => label.textContent)"
    )
    assert labels == ["500 ms", "600 ms", "1234 ms", "700 ms"]


@needs_browser
def test_the_timeline_shows_layers_and_communication_and_zooms(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, report())
    actions = "[...document.querySelectorAll('svg.timeline .action')].map((node) => node.dataset.label)"
    assert set(browser.run(actions)) == {
        "F first", "F second </script>", "B first", "B second </script>", "step", "AG1", "RS1", "RS0",
    }  # fmt: skip
    browser.run("document.querySelector('svg.timeline').scrollIntoView({block: 'center'})")
    frame = browser.run("document.querySelector('svg.timeline').getBoundingClientRect().toJSON()")
    for _ in range(12):
        browser.wheel(round(frame["x"] + frame["width"] * 0.12), round(frame["y"] + 40), -100)
    low, high = browser.run(
        "['low', 'high'].map((name) => Number(document.querySelector('svg.timeline').dataset[name]))"
    )
    assert 0 <= low < high < 0.8 * 0.8**11
    assert set(browser.run(actions)) == {"F first", "AG1"}
    browser.run("document.querySelector('svg.timeline').dispatchEvent(new MouseEvent('dblclick'))")
    assert len(browser.run(actions)) == 8
    assert browser.console() == []


@needs_browser
def test_scaling_curves_of_two_reports(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, report(2), report(4))
    assert browser.console() == []
    curves = browser.run(
        "[...document.querySelectorAll('svg.scaling g[data-curve]')].map((curve) =>"
        " [curve.dataset.curve, curve.dataset.simulated, curve.querySelectorAll('circle').length])"
    )
    assert ["ddp", "false", 2] in curves and ["auto", "false", 2] in curves and ["auto", "true", 0] in curves


@needs_browser
def test_several_reports_begin_with_an_overview(browser: Browser, tmp_path: Path) -> None:
    given_up = report(4)
    given_up["baselines"][2]["reason"] = "timed 2 times only, at 1.50 times horovod"
    given_up["place"] |= {"links": ["1gbit"] * 4, "per_host": 2}
    show(browser, tmp_path, report(2), given_up)
    rows = browser.run(
        "[...document.querySelectorAll('table.overview tr')].map((row) =>"
        " [...row.cells].map((cell) => cell.textContent))"
    )
    assert rows[1] == ["mlp", "2 emulated hosts, links 250mbit", "600", "650", "auto 700", "ddp 1234", "1.76"]
    assert rows[2][1] == "4 emulated hosts, links 1gbit, each shared by 2 ranks"
    assert browser.run("document.querySelector('p.note').textContent") == (
        "ddp: timed 2 times only, at 1.50 times horovod"
    )
    curves = browser.run(
        "[...document.querySelectorAll('svg.scaling')].map((chart) =>"
        " [...chart.querySelectorAll('g[data-curve]')].map((curve) => curve.dataset.curve))"
    )
    assert curves == [["auto", "auto"]] * 2  # other links, other curves: a point and a simulation each
    assert browser.console() == []


def test_the_page_needs_nothing_else() -> None:
    text = page.render([report()])
    for external in ("src=", 'href="http', "@import", "url(", "fetch("):
        assert external not in text
    with pytest.raises(ValueError, match="at least one report"):
        page.render([])


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, damaged, other = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    saved.write_text(json.dumps(report()))
    damaged.write_text("{")
    other.write_text("[]")
    target = tmp_path / "out.html"
    assert page.main([str(saved), "--html", str(target)]) == 0 and target.exists()
    for path, message in (
        (damaged, "is not valid JSON"),
        (other, "no report"),
        (tmp_path / "none.json", "No such file"),
    ):
        assert page.main([str(path), "--html", str(target)]) == 2
        assert message in capsys.readouterr().err
