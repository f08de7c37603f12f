"""What ``commsched advise`` makes of a measured script, and how it measures one."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from commsched.advise.forecast import Measurement, Times, forecast, page, picture, slowdown_of, text_rows
from commsched.advise.measuring import ALONE, WARM_UP, Enough, Observation, observe
from commsched.cli import main
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile

MIB = 1 << 20
PROFILE = Profile(
    "script",
    (
        Layer("(between iterations)", 0.01, 0.0, 0),
        *(Layer(f"layer {i}", 0.02, 0.04, 4 * MIB) for i in range(4)),
        Layer("half", 0.02, 0.04, MIB),
    ),
)
MEASURED = Measurement(
    "<train>.py", 2, 10, PROFILE, (1, 4, 4, 4, 4, 2), Link(1e-3, 1.5e-8), 0.0, Times(0.9, 0.5)
)


def test_bytes_on_the_wire_by_type() -> None:
    assert MEASURED.on_the_wire(2).sizes == (0, *[2 * MIB] * 4, MIB), "half precision stays as it is"
    assert MEASURED.on_the_wire(1).sizes == (0, *[MIB] * 4, MIB // 2)


@pytest.mark.thorough
def test_rows_are_ordered_as_physics_wants() -> None:
    rows = {row.setting: row for row in forecast(MEASURED).rows}
    here, bf16, int8, double, ten = rows.values()
    assert all(row.commsched.step <= row.ddp.step + 1e-9 for row in rows.values())
    assert here.commsched.step > bf16.commsched.step > int8.commsched.step >= PROFILE.compute
    assert here.ddp.step > double.ddp.step > ten.ddp.step > PROFILE.compute
    assert here.ddp.exposed == pytest.approx(here.ddp.step - PROFILE.compute)
    slowed = forecast(replace(MEASURED, slowdown=0.3)).rows[0]
    assert slowed.commsched.step > here.commsched.step


def test_slowdown_of_shared_cores() -> None:
    assert slowdown_of([0.2, 0.4], free_cores=True) == 0.0
    assert slowdown_of([0.1, 0.3], free_cores=False) == pytest.approx(0.25)


def test_table_page_and_json() -> None:
    found = forecast(MEASURED)
    rows = text_rows(found)
    assert rows[0][:4] == ["now: DDP, measured", "900.0 ms", "500.0 ms", "100%"]
    assert rows[0][4].count("#") == 13 and rows[0][4].count(".") == 17
    html = page(found)
    assert "&lt;train&gt;.py" in html and "<train>" not in html and html.count("<tr>") == 12
    assert "commsched, bf16 on the wire" in html and picture(found) in html
    told = json.loads(json.dumps(found.to_dict()))
    assert told["rows"][0]["commsched"]["step"] == found.rows[0].commsched.step and told["now"]["step"] == 0.9


# -- observation ---------------------------------------------------------------------------------------------


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(x)


@pytest.fixture
def sleeps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that sleeping moves, and every look at it by a microsecond; other work takes no time."""
    now = 0.0

    def move(seconds: float) -> float:
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr(time, "sleep", move)
    monkeypatch.setattr(time, "monotonic", lambda: move(1e-6))


@pytest.mark.usefixtures("sleeps_count")
def test_layers_are_timed_while_the_script_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Slow(4, 4), nn.Linear(4, 4))
    ddp: Any = SimpleNamespace(module=model, require_backward_grad_sync=True)
    seen = Observation(ddp, steps=3)
    optimizer, other = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD([torch.ones(1)], 0.1)
    synced = []
    with pytest.raises(Enough):
        while True:
            synced.append(ddp.require_backward_grad_sync)
            other.step()  # of something else: no step of this model
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert synced == [True] * (WARM_UP + 3) + [False] * ALONE
    step, exposed, (forward, backward, outside) = seen.figures()
    little = pytest.approx(0.0, abs=1e-4)
    assert seen.order == list(range(6)) and exposed == little and step == pytest.approx(0.02, abs=1e-4)
    assert forward[3] == pytest.approx(0.02, abs=1e-4), "the slow module's last parameter"
    assert sum(forward) - forward[3] == little and sum(backward) == little and outside == little
    assert min(*forward, *backward) >= 0 and exposed > 0 and outside > 0


def test_a_script_that_ends_early_is_an_error() -> None:
    model = nn.Linear(2, 2)
    ddp: Any = SimpleNamespace(module=model, require_backward_grad_sync=True)
    seen, optimizer = Observation(ddp, steps=3), torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="ended after 1 optimizer steps .* at least 5"):
        seen.figures()


def test_a_script_without_ddp_is_an_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import sys\nassert __name__ == '__main__' and sys.argv[1:] == ['a']\nsys.exit(0)\n")
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setattr("sys.path", ["/nothing"])
    with pytest.raises(ValueError, match="made no torch.nn.parallel.DistributedDataParallel"):
        observe(str(script), ["a"], 3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--steps", "1", __file__], "--steps must be at least 3"),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--output", "a.png", __file__], "must end in .html or .svg"),
        (["--nproc-per-node", "1", __file__], "must be at least 2"),
    ],
)
def test_wrong_options(words: list[str], text: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["advise", *words]) == 2
    assert text in capsys.readouterr().err
