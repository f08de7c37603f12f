"""The picture of measured steps: what a trace says is what is drawn."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from dnn_bench.report import page
from dnn_bench.runner.measure import Spans, recording

SVG = "{http://www.w3.org/2000/svg}"
TRACE = {
    "forward": [[0.1, 0.2], [0.2, 0.3]],
    "backward": [[0.5, 0.7], [0.3, 0.5]],
    "update": [0.7, 0.75],
    "end": 1.0,
    "operations": [["AG1", -0.2, 0.1, 8], ["RS1", 0.5, 0.7, 8], ["RS0", 0.52, 0.9, 8], ["AG0", 0.9, 1.3, 8]],
}
DDP = {**TRACE, "operations": [["AR0", 0.5, 0.8, 8], ["AR1", 0.7, 1.0, 8]]}


def report() -> dict[str, Any]:
    entries = [("local", None), ("ddp", DDP), ("ddp_4mb", DDP), ("auto", TRACE)]
    return {
        "kind": "compare",
        "job": {"model": "mlp"},
        "place": {"ranks": 2, "links": ["250mbit", "250mbit"]},
        "baselines": [{"name": name, "trace": trace} for name, trace in entries],
    }


def test_operations_share_one_link_and_end_with_the_step() -> None:
    link = [(e.name, e.start, e.end) for e in page.events(TRACE) if e.lane == "link"]
    assert link == [("AG1", 0.0, 0.1), ("RS1", 0.5, 0.7), ("RS0", 0.7, 0.9), ("AG0", 0.9, 1.0)]
    compute = [e.name for e in sorted(page.events(TRACE), key=lambda e: e.start) if e.lane == "compute"]
    assert compute == ["F0", "F1", "B1", "B0", "STEP"]


def test_the_command_draws_steps_on_one_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = tmp_path / "out.json", tmp_path / "step.svg"
    saved.write_text(json.dumps(report()))
    assert page.picture([str(saved), "--out", str(out)]) == 0
    root = ElementTree.fromstring(out.read_text())
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] and texts[0].startswith("One training step of mlp on 2 ranks, link 250mbit, measured on")
    assert texts.index("PyTorch DDP: 1000 ms") < texts.index("commsched: 1000 ms")
    assert {"AR: all-reduce of a bucket", "AG: all-gather of a bucket", "0 ms", "1000"} <= set(texts)
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles.count("B0: 500.000 to 700.000 ms") == 2 and "AR1: 800.000 to 1000.000 ms" in titles
    assert page.picture([str(saved), "--out", str(out), "--baseline", "ddp_4mb"]) == 0
    assert ">PyTorch DDP, 4 MB buckets: 1000 ms<" in out.read_text()
    assert page.picture([str(saved), "--out", str(out), "--baseline", "local"]) == 2
    assert "no timeline of 'local', only of: ddp, ddp_4mb, auto" in capsys.readouterr().err


def test_a_wait_before_a_layer_is_no_compute() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    waits = []

    def wait(module: nn.Module, inputs: Any) -> None:
        waits.append(time.perf_counter())
        time.sleep(0.01)
        waits.append(time.perf_counter())

    model[2].register_forward_pre_hook(wait)
    with recording(model) as recorder:
        loss = model(torch.ones(1, 2)).sum()
        end = time.perf_counter()
        loss.backward()
    (first, second) = Spans.of(recorder, end, 0.0).forward
    assert first[1] <= waits[0] and second[0] >= waits[1]
    recorder.clear()
    assert not (recorder.reached or recorder.began or recorder.ready)


def test_a_tied_weight_is_ready_where_its_first_owner_is() -> None:
    """It was taken for the head's: the head's backward seemed to last as long as all others together."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    with recording(model) as recorder:
        loss = model(torch.tensor([1, 2])).sum()
        end = time.perf_counter()
        loss.backward()
    spans = Spans.of(recorder, end, 0.0)
    assert spans.names == ("0", "1")
    assert spans.backward[1][1] <= spans.backward[0][0] < spans.backward[0][1]
