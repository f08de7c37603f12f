"""Which cells a suite measures, in which order, and what an interruption leaves. Nothing real is measured."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress

from dnn_bench import suite
from dnn_bench.runner.compare import Effort, Watcher
from dnn_bench.suite import Shape, Wanted

LOCAL = {"vgg_tiny": [{"name": "local", "time": 2.0}]}  # what comparisons find, where they find anything
STATUS = {"horovod": "missing", "zero1": "wrong"}


class FakeCluster:
    events: list[str] = []

    def __init__(self, hosts: int, link: str) -> None:
        self.events.append(f"{hosts} hosts")

    def __enter__(self) -> "FakeCluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.events.append("end")

    def set_link(self, link: str) -> None:
        self.events.append(link)


@pytest.fixture
def interrupted_after(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fakes for what takes long; the number in the list says after how many comparisons Ctrl-C comes."""
    count, limit = [0], [1000]

    class FakeComparison:
        def __init__(self, job: Any, place: Any, *rest: Any, crew: Any) -> None:
            self.model, self.hosts, self.per_host = job.model, place.hosts, place.per_host
            self.names, self.batch = [entry.name for entry in rest[0]], job.rank_batch

        def run(self) -> dict[str, Any]:
            count[0] += 1
            place = {"ranks": self.hosts, "links": ["1mbit"], "per_host": self.per_host, "names": self.names}
            job = {"model": self.model, "batch": self.batch}
            rows = [{"name": name, "status": STATUS.get(name, "ok"), "reason": "why"} for name in self.names]
            what = {"job": job, "place": place, "baselines": [*LOCAL.get(self.model, []), *rows]}
            return {**what, "interrupted": count[0] >= limit[0]}

    FakeCluster.events = []
    monkeypatch.setattr(suite, "Cluster", FakeCluster)
    monkeypatch.setattr(suite, "Comparison", FakeComparison)
    monkeypatch.setattr(suite, "Hosts", lambda cluster, per_host: SimpleNamespace(hosts=2, per_host=per_host))
    monkeypatch.setattr(suite, "compute_seconds", lambda job, ranks: ranks / 2)
    monkeypatch.setattr(suite, "estimate", lambda job: SimpleNamespace(parameters=1_000_000))
    return limit


def measure(cells: list[Wanted], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is said of each cell that is measured."""
    suite.measure(cells, [], Effort())
    lines = " ".join(capsys.readouterr().err.split()).split("[")[1:]
    return [line.partition("] ")[2].strip() for line in lines]


def test_one_cluster_per_model_whose_links_change(
    interrupted_after: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [Wanted(name, Shape(2), ratio, tmp_path) for name in ("mlp", "bert_tiny") for ratio in (0.5, 1.0)]
    kept = {"interrupted": False, "baselines": [], "job": {"batch": 2048}}
    cells[0].path.write_text(json.dumps(kept))
    told = measure(cells, capsys)
    assert told == [
        "mlp, 2 hosts, ratio 1: 8mbit",
        "bert_tiny, 2 hosts, ratio 0.5: 16mbit",
        "bert_tiny, 2 hosts, ratio 1: 8mbit",
    ]
    assert FakeCluster.events == ["2 hosts", "8mbit", "end", "2 hosts", "16mbit", "8mbit", "end"]
    assert [cell.missing for cell in cells] == [False] * 4
    assert json.loads(cells[2].path.read_text())["ratio"] == 0.5


def test_the_next_link_fits_the_compute_that_the_comparison_found(
    interrupted_after: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [Wanted(name, Shape(2), ratio, tmp_path) for name in ("vgg_tiny", "mlp") for ratio in (0.5, 1.0)]
    assert measure(cells, capsys) == [
        "vgg_tiny, 2 hosts, ratio 0.5: 16mbit",  # for 1 s, the first look
        "vgg_tiny, 2 hosts, ratio 1: 4mbit",  # for 2 s
        "mlp, 2 hosts, ratio 0.5: 16mbit",
        "mlp, 2 hosts, ratio 1: 8mbit",
    ]


def test_ranks_that_share_a_host_are_measured_while_all_of_them_compute(
    interrupted_after: list[int], tmp_path: Path
) -> None:
    arguments = ["--models", "mlp", "--per-host", "1,4", "--ratios", "1", "--baseline", "ddp,hsdp"]
    assert suite.main([*arguments, "--out", str(tmp_path)]) == 0
    # Eight ranks take four times as long as two, so as many bytes may take four times as long, too.
    assert FakeCluster.events == ["2 hosts", "8mbit", "end", "2 hosts", "2mbit", "end"]
    kept = {path.name: json.loads(path.read_text())["place"] for path in tmp_path.iterdir()}
    assert {name: place["per_host"] for name, place in kept.items()} == {
        "mlp_2hosts_1.json": 1,
        "mlp_2x4hosts_1.json": 4,
    }
    assert [*kept["mlp_2hosts_1.json"]["names"], "hsdp"] == kept["mlp_2x4hosts_1.json"]["names"]


@pytest.mark.parametrize(
    ("arguments", "batch"), [([], 2048), (["--batch", "0.25"], 512), (["--batch", "1e-9"], 1)]
)
def test_a_share_of_the_models_own_batch(
    arguments: list[str], batch: int, interrupted_after: list[int], tmp_path: Path
) -> None:
    what = ["--models", "mlp", "--ratios", "1", "--baseline", "ddp", "--out", str(tmp_path)]
    assert suite.main([*what, *arguments]) == 0
    assert json.loads((tmp_path / "mlp_2hosts_1.json").read_text())["job"]["batch"] == batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline", "ddp", "--batch", "0.25"], "measured with a batch of 2048, and not of 512"),
        (["--baseline", "ddp,fsdp2"], "measured without fsdp2"),
    ],
)
def test_cells_of_other_options_are_not_taken_for_these(
    arguments: list[str],
    message: str,
    interrupted_after: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    what = ["--models", "mlp", "--ratios", "1", "--out", str(tmp_path)]
    assert suite.main([*what, "--baseline", "ddp"]) == 0
    assert suite.main([*what, "--baseline", "ddp"]) == 0
    assert suite.main([*what, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_baseline_is_told_and_changes_the_exit_status(
    interrupted_after: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["--models", "mlp", "--ratios", "0.5,1", "--out", str(tmp_path)]
    assert suite.main([*what, "--baseline", "horovod"]) == 0
    assert "horovod: missing: why (2 cells, first mlp_2hosts_0.5.json)" in capsys.readouterr().out
    what[-1] += "/other"
    assert suite.main([*what, "--baseline", "zero1"]) == 1
    assert "zero1: wrong: why (2 cells, first mlp_2hosts_0.5.json)" in capsys.readouterr().out


@pytest.mark.parametrize("share", ["0", "-1", "inf", "nan"])
def test_no_share_of_a_batch(share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["--baseline", "ddp", "--out", str(tmp_path), "--batch", share]) != 0
    assert f"--batch: needs a share above 0, got {share}" in capsys.readouterr().err


def test_an_interrupted_cell_is_kept_and_measured_again(
    interrupted_after: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted_after[0] = 2
    arguments = ["--models", "mlp", "--ratios", "0.5,1,2", "--baseline", "ddp", "--out", str(tmp_path)]
    assert suite.main(arguments) == 130
    assert "the same command goes on from here" in capsys.readouterr().out
    cells = [Wanted("mlp", Shape(2), ratio, tmp_path) for ratio in (0.5, 1.0, 2.0)]
    assert [cell.path.exists() for cell in cells] == [True, True, False]
    assert [cell.missing for cell in cells] == [False, True, True]
    assert FakeCluster.events[-1] == "end"
    interrupted_after[0] = 1000
    assert suite.main(arguments) == 0
    assert [cell.missing for cell in cells] == [False] * 3
    assert "1 of 3 cells are there already" in capsys.readouterr().err


def test_the_bar_begins_anew_with_every_comparison() -> None:
    bars = Progress(disable=True)
    watcher = Watcher(bars)
    for total in (3, 5):
        watcher.begin(total)
        watcher.step("starting ddp")
        watcher.step("timing ddp")
        assert (bars.tasks[0].total, bars.tasks[0].completed) == (total, 1)
        assert bars.tasks[0].description == "timing ddp"


def test_a_damaged_cell_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mlp_2hosts_1.json"
    path.write_text("{")
    assert suite.main(["--out", str(tmp_path), "--summary"]) == 2
    assert f"{path} is no report of a comparison" in capsys.readouterr().err
