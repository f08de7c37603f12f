"""The summary over many comparisons, on numbers that can be checked by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from dnn_bench import suite
from dnn_bench.suite import Shape, Wanted, accuracy, cell_of, link_for, means, slowest

KINDS = {"local": "limit", "floor": "limit", "wire": "limit", "auto": "commsched", "dear": "commsched"}
KINDS |= {"pipedap": "commsched", "wfbp": "commsched"}


def report(
    model: str = "mlp", ratio: float = 1.0, hosts: int = 2, per_host: int = 1, **times: list[float]
) -> dict[str, Any]:
    """As a comparison writes it, with the figures that the summary reads; predictions are 10 % short.

    All send 9 MB and one for each letter of their names.
    """
    times = {"local": [0.5], "floor": [0.8], "wire": [0.5 * ratio], **times}
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": KINDS.get(name, "peer"),
            "status": "ok",
            "time": sorted(values)[len(values) // 2],
            "times": values,
            "sent": (9 + len(name)) * 1e6,
            "predicted": values[0] * 0.9 if KINDS.get(name) == "commsched" else None,
        }
        for name, values in times.items()
    ]
    rows.append({"name": "fsdp2", "kind": "peer", "status": "missing", "reason": "no torch\n2"})
    place = {"ranks": hosts * per_host, "hosts": hosts, "per_host": per_host, "links": ["1gbit"] * hosts}
    whole = {"job": {"model": model}, "place": place, "baselines": rows, "interrupted": False}
    bounds = {"bounds": [0.7, 7.0, 0.7], "bounds_beside": [0.9, 9.0, 0.9]}
    return {**whole, "ratio": ratio, "bound": 0.7, "bound_beside": 0.9, **bounds}


def cells(*reports: dict[str, Any]) -> list[Any]:
    return [cell for cell in (cell_of(one, "auto") for one in reports) if cell]


def test_the_link_that_makes_communication_as_long_as_compute() -> None:
    """8 MB of gradients on 2 hosts: each sends 8 MB, in 0.5 s with 128 Mbit/s. On 4 hosts it sends 12 MB."""
    assert link_for(1.0, 0.5, 8_000_000, 2) == "128mbit"
    assert link_for(2.0, 0.5, 8_000_000, 2) == "64mbit"
    assert link_for(1.0, 0.5, 8_000_000, 4) == "192mbit"


def test_a_cell_compares_within_repetitions() -> None:
    drifting: dict[str, list[float]] = {"floor": [0.8, 8.0, 0.8], "auto": [1.0, 10.0, 1.1]}
    (cell,) = cells(report(ddp=[2.0, 20.0, 2.2], ddp_4mb=[1.5, 15.0], **drifting))
    assert cell.over("ddp") == pytest.approx(2.0)
    assert cell.over("ddp_4mb") == pytest.approx(1.5)  # it was given up after two
    assert cell.over("fsdp2") is None and cell.over(None) is None
    assert cell.best_peer == "ddp_4mb"  # its median over two repetitions, of which one was slow, is larger
    assert cell.to_limit("bounds") == pytest.approx(1.0 / 0.8)
    assert cell.to_limit("bounds_beside") == pytest.approx(1.0 / 0.9)
    assert cell.to_limit("nothing") is None
    assert cells(report(ddp=[2.0])) == []


def test_the_means_are_geometric_and_per_hosts_and_ratio() -> None:
    found = means(
        cells(
            report("mlp", ddp=[4.0], auto=[1.0]),
            report("vgg_tiny", ddp=[1.0], auto=[1.0]),
            report("mlp", ratio=2.0, ddp=[3.0], auto=[1.0]),
        )
    )
    assert [row[:3] for row in found] == [((2, 1), 1.0, 2), ((2, 1), 2.0, 1)]
    assert found[0][3] == {"best peer": 2.0, "horovod": None, "ddp": 2.0, "fsdp2": None}


def test_the_worst_prediction_and_the_least_gain() -> None:
    found = cells(
        report("mlp", ddp=[2.0], auto=[1.0]), report("vgg_tiny", ddp=[1.1], auto=[1.0, 1.2, 1.2], hosts=4)
    )
    assert accuracy(found) == [
        "auto: measured / predicted is off by 33.3% at worst (vgg_tiny, 4 hosts, ratio 1), 22.2% usually"
    ]
    assert slowest(found) == "least gain over the best peer: 1.10 (vgg_tiny, 4 hosts, ratio 1, ddp)"


def test_the_summary_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = report(ddp=[2.0], ddp_4mb=[1.5], horovod=[1.8], dear=[1.2], auto=[1.0])
    measured["doubts"] = ["the link's times scatter"]
    (tmp_path / "mlp_2hosts_1.json").write_text(json.dumps(measured))
    (tmp_path / "mlp_2hosts_2.json").write_text(json.dumps({**measured, "interrupted": True}))
    assert suite.main(["--out", str(tmp_path), "--summary"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cell = "| mlp | 2 | 1 | 1gbit "
    assert (
        cell + "| 500 | 800 | 700 | 900 | 1000 (900) | 1200 (1080) |  |  | 1500 `ddp_4mb` | 1800 | 2000 |  |"
        in lines
    )
    assert cell + "| 1.00 | 1.25 | 1.11 | 1.50 | 1.80 | 2.00 |  |" in lines
    assert cell + "| 13.0 | 13.0 | 16.0 | 16.0 | 12.0 |  |" in lines  # bytes
    assert "| 2 | 1 | 1 | 1.50 | 1.80 | 2.00 |  |" in lines
    assert "- mlp, 2 hosts, ratio 1: the link's times scatter" in lines
    assert "mlp_2hosts_2.json: interrupted, left out" in lines
    assert "fsdp2: missing: no torch (2 cells, first mlp_2hosts_1.json)" in lines
    assert not Wanted("mlp", Shape(2), 1, tmp_path).missing
    others = [Wanted("mlp", *other, tmp_path) for other in ((Shape(2), 2), (Shape(4), 1), (Shape(2, 4), 1))]
    assert all(other.missing for other in others)


def test_hosts_of_several_ranks_are_cells_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were taken for as many hosts as there are ranks."""
    for per_host, seconds in ((1, 1.0), (4, 1.6)):
        measured = report(per_host=per_host, ddp=[2.0], auto=[seconds])
        Wanted("mlp", Shape(2, per_host), 1, tmp_path).path.write_text(json.dumps(measured))
    assert suite.main(["--out", str(tmp_path), "--summary"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| 2 | 1 | 1 | 2.00 |  | 2.00 |  |" in lines and "| 2x4 | 1 | 1 | 1.25 |  | 1.25 |  |" in lines
    assert "- least gain over the best peer: 1.25 (mlp, 2 hosts of 4 ranks, ratio 1, ddp)" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline", "nobody"], "unknown baseline 'nobody'"),
        (["--models", "mlp,nothing"], "unknown model 'nothing'"),
        (["--hosts", "1"], "--hosts takes whole numbers of at least 2"),
        (["--per-host", "0"], "--per-host takes whole numbers of at least 1"),
        (["--ratios", "0.5;1"], "--ratios takes numbers above 0"),
    ],
)
def test_bad_names_are_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite.main([*arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
