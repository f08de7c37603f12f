"""Comparisons with real ranks: right, wrong, missing, failing and interrupted baselines."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dnn_bench import baselines, fork_server
from dnn_bench.baselines import Baseline
from dnn_bench.baselines.trainer import Job
from dnn_bench.launch import ThisMachine
from dnn_bench.runner import results
from dnn_bench.runner.compare import Comparison, Effort
from tests.support.commands import run_module
from tests.support.launch import run_ranks
from tests.support.needs import HAS_HOROVOD, skip_without_horovod

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
JOB = Job("mlp_tiny", batch=32)
WORKER = "dnn_bench.runner.worker"
QUICK = Effort(repetitions=2, iterations=2)
LOCAL = baselines.get("local")


class Watcher:
    """Records the steps."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.further: list[str] = []

    def begin(self, total: int) -> None:
        self.total = total

    def step(self, what: str) -> None:
        self.steps.append(what)

    def more(self, what: str) -> None:
        self.further.append(what)


def compare(
    *entries: Baseline, watcher: Watcher | None = None, effort: Effort = QUICK
) -> dict[str, dict[str, object]]:
    report = Comparison(JOB, ThisMachine(2), entries, effort, watcher or Watcher()).run()
    json.dumps(report)  # everything in it can be written
    assert workers() == []
    return {"": report, **{entry["name"]: entry for entry in report["baselines"]}}


def workers() -> list[int]:
    """Ranks that still run: children of a fork server, or started (and perhaps orphaned) by a launcher."""
    started = [process for process in psutil.process_iter() if WORKER in words_of(process)]
    servers = [child for child in psutil.Process().children() if fork_server.__file__ in words_of(child)]
    forked = [rank.pid for server in servers for rank in server.children() if words_of(rank)]
    return forked + [process.pid for process in started if owned(process)]


def words_of(process: psutil.Process) -> list[str]:
    """The command line; none where the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def owned(process: psutil.Process) -> bool:
    try:
        return process.environ().get("PYTEST_BENCH") == str(os.getpid())
    except psutil.Error:
        return False


@pytest.fixture(autouse=True)
def mark_what_this_test_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_BENCH", str(os.getpid()))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ranks would look into the current folder first")
def test_a_baseline_by_the_code_of_another_checkout(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for package in ("commsched", "comm_core", "scheduler", "dnn_bench"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    (other / "dnn_bench/baselines/peers.py").write_text(
        "raise RuntimeError('the code of the other checkout')"
    )
    found = compare(LOCAL, replace(LOCAL, name="again"), baselines.get(f"local@{other}"))
    assert found["local"]["status"] == found["again"]["status"] == "ok"
    assert found["local@other"]["status"] == "failed"
    assert "the code of the other checkout" in str(found["local@other"]["reason"])


def test_right_wrong_missing_and_failing_baselines_side_by_side() -> None:
    ddp = baselines.get("ddp")
    wrong = replace(LOCAL, name="forgets_to_communicate", kind="peer", exact=True)
    missing = replace(ddp, name="absent", needs="no_such_package")
    failing = replace(ddp, name="failing", options={"no_such_option": 1})
    watcher = Watcher()
    found = compare(LOCAL, ddp, wrong, missing, failing, watcher=watcher)
    assert found["ddp"]["status"] == found["local"]["status"] == "ok"
    assert isinstance(found["ddp"]["error"], float) and found["ddp"]["time"] > 0  # type: ignore[operator]
    assert found["forgets_to_communicate"]["status"] == "wrong"
    assert "off by" in str(found["forgets_to_communicate"]["reason"])
    assert "after 1 steps" in str(found["forgets_to_communicate"]["reason"])
    assert "time" not in found["forgets_to_communicate"]
    assert found["absent"]["status"] == "missing" and "no_such_package" in str(found["absent"]["reason"])
    assert found["failing"]["status"] == "failed" and "TypeError" in str(found["failing"]["reason"])
    timed = [step for step in watcher.steps if step.startswith("timing")]
    assert timed == ["timing local", "timing ddp"] * 2  # A B A B
    assert found["ddp"]["best_peer"] == "ddp"
    trace = found["ddp"]["trace"]
    assert {label[:2] for label, *_ in trace["operations"]} == {"AR"}  # type: ignore[index]
    assert len(trace["layers"]) == 9 and trace["end"] > trace["backward"][0][1] > 0  # type: ignore[index]


@pytest.mark.parametrize("how", [KeyboardInterrupt, pytest.param(SystemExit, marks=pytest.mark.slow)])
def test_an_interruption_keeps_what_was_measured(how: type[BaseException]) -> None:
    class SecondRound(Watcher):
        def step(self, what: str) -> None:
            if what == "timing ddp" and what in self.steps:
                raise how
            super().step(what)

    found = compare(LOCAL, baselines.get("ddp"), watcher=SecondRound())
    assert found[""]["interrupted"] is True
    assert len(found["local"]["times"]) == 2 and len(found["ddp"]["times"]) == 1  # type: ignore[arg-type]


def test_a_machine_that_is_always_disturbed_takes_twice_as_long_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results, "stolen_share", lambda before, after: 0.3)
    watcher = Watcher()
    found = compare(LOCAL, baselines.get("wire"), watcher=watcher)
    # The wire is timed once: no processor decides its time.
    assert watcher.further == ["timing local again: others took 30% of the processors' time"] * 4
    assert len(found["local"]["times"]) == 2 and found["local"]["stolen"] == [0.3, 0.3]  # type: ignore[arg-type]
    doubts = found[""]["doubts"]  # others may concern the link
    assert any("30% of the processors' time while local was timed" in doubt for doubt in doubts)  # type: ignore[attr-defined]


def test_a_rank_that_dies_fails_only_its_baseline() -> None:
    class Killer(Watcher):
        def step(self, what: str) -> None:
            if what == "starting ddp":
                self.others = workers()
            if what == "timing ddp" and what not in self.steps:
                # Looked up while they live: a killed rank's number is free as soon as the kill has been sent.
                ranks = [psutil.Process(pid) for pid in workers() if pid not in self.others]
                assert len(ranks) == 2
                ranks[1].kill()
                # Gone when it is spoken to, which once ended the whole comparison with a broken pipe.
                assert psutil.wait_procs([ranks[1]], timeout=400)[1] == []
            super().step(what)

    found = compare(LOCAL, baselines.get("ddp"), watcher=Killer())
    assert found["ddp"]["status"] == "failed"
    assert found["local"]["status"] == "ok"


def test_horovod_under_its_own_launcher() -> None:
    skip_without_horovod()
    found = compare(LOCAL, baselines.get("horovod"))
    assert found["horovod"]["status"] == "ok", found["horovod"]["reason"]


def train_small_click_model() -> None:
    from dnn_bench import baselines, models
    from dnn_bench.baselines import reference
    from dnn_bench.baselines.trainer import Job

    models._MODELS["dlrm_tiny"] = models._clicks(batch=32, fields=4, vocab=500)
    baseline, job = baselines.get("horovod_sparse"), Job("dlrm_tiny")
    trainer = baselines.start(baseline, job)
    found = reference.check(trainer, reference.train_alone(baseline.adapt(job), trainer.size))
    gradient = trainer.module.table.weight.grad
    assert gradient.is_sparse and gradient._nnz() == trainer.size * 32 * 4
    if trainer.rank == 0:
        assert found is not None and not found[1], found
    trainer.close()


@pytest.mark.slow
def test_horovod_gathers_the_rows_of_sparse_embeddings() -> None:
    run_ranks(train_small_click_model, 2, launcher="horovodrun", check=True)


def test_a_baseline_with_another_optimizer_is_compared_with_a_process_that_has_it_too() -> None:
    ddp = baselines.get("ddp")
    plain = replace(ddp, name="plain", changes={"momentum": 0.0})
    unfit = replace(ddp, name="unfit", changes={"sparse_embeddings": True})
    found = compare(ddp, plain, unfit, effort=Effort(1, 1, trace="none"))
    assert [found[name]["status"] for name in ("ddp", "plain", "unfit")] == ["ok", "ok", "missing"], found
    assert "no trained nn.Embedding" in str(found["unfit"]["reason"])
    assert "plain: trained with momentum=0.0" in results.notes(found[""])


@pytest.mark.parametrize(
    "names",
    [
        ["auto_int8"],
        pytest.param(["auto_fp8", "ddp_bf16", "ddp_powersgd", "horovod_fp16"], marks=pytest.mark.slow),
    ],
)
def test_baselines_in_fewer_bits_run_unchecked_and_predict_themselves(names: list[str]) -> None:
    names = [name for name in ["auto", *names] if HAS_HOROVOD or "horovod" not in name]
    found = compare(*map(baselines.get, names), effort=Effort(1, 1, trace="none"))
    assert [found[name]["status"] for name in names] == ["ok"] * len(names), found
    assert all(
        (found[name]["error"] is None) == name.startswith("auto_")
        for name in names
        if name.startswith("auto")
    )
    assert isinstance(found["auto"]["predicted"], float)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_keep", "zero1", "ddp_1mb", "dear", "auto"])
def test_every_other_baseline_is_exact(name: str) -> None:
    found = compare(baselines.get(name), effort=Effort(1, 1, trace="none"))
    assert found[name]["status"] == "ok", found[name]["reason"]


def command(*arguments: str) -> list[str]:
    quick = ["--model", "mlp_tiny", "--batch-size", "32", "--local", "2", "--reps", "2", "--iters", "2"]
    return [sys.executable, "-m", "dnn_bench", "compare", *quick, *arguments]


def test_command_line_prints_a_table_and_writes_json_and_html(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    done = run_module(*command("--baseline", "ddp", *options)[2:])
    assert done.returncode == 0, done.stderr
    for text in (
        "mlp_tiny, 32 per rank",
        " sent MB ",
        "ddp",
        "lower bound",
        "ddp: Total sample/sec on 2 CPU(s): ",
    ):
        assert text in done.stdout
    report = json.loads(files["json"].read_text())
    assert [entry["name"] for entry in report["baselines"]] == ["local", "floor", "wire", "ddp"]
    assert report["environment"]["packages"]["torch"]
    check_limits(report)
    assert files["html"].read_text().startswith("<!doctype html>")


def check_limits(report: dict[str, Any]) -> None:
    """What the limits are for: a profile, a link, and bounds for the compute alone and beside traffic."""
    layers = report["profile"]["layers"]
    assert sum(layer["bytes"] for layer in layers) == 4 * (8 * (256 * 256 + 256) + 2570)
    assert all(layer["backward"] > 0 for layer in layers)
    # `link.fit` has alpha and beta of at least 0: on a busy machine larger messages may take no longer.
    assert report["link"]["alpha"] + report["link"]["beta"] > 0
    assert report["bound"] >= sum(layer["forward"] + layer["backward"] for layer in layers)
    assert report["bound_beside"] > 0
    assert len(report["bounds"]) == len(report["bounds_beside"]) == report["effort"]["repetitions"]
    assert min(report["bounds"]) <= report["bound"] * 1.5 and max(report["bounds"]) >= report["bound"] / 1.5
    assert next(entry for entry in report["baselines"] if entry["name"] == "floor")["to_floor"] == 1.0


def heed_sigint() -> None:
    """What runs in the background ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_sigint_saves_partial_results_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "partial.json"
    process = subprocess.Popen(
        command("--baseline", "ddp", "--reps", "500", "--json", str(path)),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_sigint,
    )  # fmt: skip
    assert process.stderr is not None
    seen = 0
    for line in process.stderr:
        # Not "timing ddp again: others took 6 % of the processors' time", which was once counted as the next.
        seen += "timing ddp" in line and "again" not in line
        if seen == 2:  # announced when it begins, so the first repetition is complete
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=400)
    assert process.returncode == 130
    report = json.loads(path.read_text())
    assert report["interrupted"] is True
    assert len(report["baselines"][-1]["times"]) >= 1
    deadline = time.monotonic() + 100
    while workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet51"], "unknown model 'resnet51'"),
        (["--baseline", "ddp,nccl"], "unknown baseline 'nccl'"),
        (["--batch-size", "-1"], "--batch-size must be at least 0"),
        (["--batch-size", "2000000000"], "would fit"),
        (["--seq-len", "7"], "mlp_tiny has no seq_len"),
        (["--reps", "0"], "--reps must be at least 1"),
        (["--local", "0"], "at least one rank, not 0"),
        (["--json", "/nowhere/report.json"], "/nowhere/report.json cannot be written"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", command(*arguments)[2:])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("dnn_bench", run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def pairs_end_together() -> None:
    import os
    import time

    import torch.distributed as dist

    from dnn_bench.baselines.peers import Exchange

    os.environ["LOCAL_WORLD_SIZE"] = "2"  # ranks 0 and 1 are one host, 2 and 3 the other
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    exchange = Exchange(1 << 20)
    dist.barrier()
    if rank == 3:
        store.wait([f"rank {other} begins" for other in range(3)])
        time.sleep(0.3)  # ranks 0 and 2, which exchange with each other only, would be through by now
    store.set(f"rank {rank} begins", "")
    exchange()
    print(store.check(["rank 3 begins"]))
    dist.barrier()
    dist.destroy_process_group()


def test_pairs_of_ranks_on_two_hosts_end_an_exchange_together() -> None:
    """Pairs that drifted apart had changing parts of the link, and measured it up to a tenth too slow."""
    for result in run_ranks(pairs_end_together, 4):
        assert result.returncode == 0 and result.stdout.split()[-1] == "True", result.stderr
