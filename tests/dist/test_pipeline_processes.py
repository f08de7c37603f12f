"""Runs the cases of programs/pipeline_*.py; and processes that end or hang."""

import json
import re
from pathlib import Path

import pytest
import torch

from dnn_bench.models import build
from dnn_bench.pipeline import cli
from tests.support.cases import PROGRAMS, check, parameters
from tests.support.commands import run_module
from tests.support.launch import PATIENCE, run_ranks, start_ranks
from tests.support.rounding import rounding

pytestmark = pytest.mark.dist
PIPELINES = ("pipeline_runs", "pipeline_unused", "pipeline_language", "pipeline_quantised")


@pytest.mark.parametrize("program, ranks, name", parameters(*PIPELINES))
def test_pipelines(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)


# A rank that died or gave up is noticed without the time-out, which no test reaches.
@pytest.mark.parametrize(
    ("schedule", "how", "patience"),
    [("1f1b", "dies", 900), ("2bw", "fails", 900), ("pipedream", "hangs", 20)],
)
def test_a_stage_that_ends_is_named(schedule: str, how: str, patience: int) -> None:
    patient = {"COMMSCHED_TIMEOUT": str(patience)}
    with start_ranks(PROGRAMS / "pipeline_death.py", 3, [schedule, how], patient) as ranks:
        outputs = []
        for rank in (0, 2):
            ranks.processes[rank].wait(PATIENCE)
            outputs.append(ranks.output(rank))
    for output in outputs:
        said = re.search(r"SAID: (.*)", output)
        assert said, output
        assert "rank 1" in said[1] and "micro-batch" in said[1]


def one_rank_cannot_make_its_part() -> None:
    import sys
    import time

    import commsched as hvd
    from commsched.pipeline import Pipeline
    from tests.support.pipeline_runs import chain_model, loss_of, sgd

    hvd.init()

    def made(part, make):
        if hvd.rank() == 1 and part == sys.argv[1]:
            raise MemoryError(f"no room for the {part}")
        return make()

    mesh = (1, 3) if sys.argv[1] == "optimizer" else (3, 1)
    try:
        Pipeline(
            lambda: made("model", lambda: chain_model(3)),
            mesh=mesh,
            loss=loss_of,
            optimizer=lambda params: made("optimizer", lambda: sgd(params)),
        )
    except MemoryError:
        time.sleep(600)  # its process lives on, as a notebook's would
    except hvd.CommError as error:
        print(f"SAID: {error}", flush=True)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_rank_that_cannot_make_its_part_is_named(part: str) -> None:
    """The others waited for the time-out, which no test reaches, and did not hear of the error."""
    with start_ranks(one_rank_cannot_make_its_part, 3, [part], {"COMMSCHED_TIMEOUT": "900"}) as ranks:
        for rank in (0, 2):
            ranks.processes[rank].wait(PATIENCE)
            said = f"rank 1 has given up pipeline 0: MemoryError: no room for the {part}"
            assert said in ranks.output(rank), ranks.report()


def run(*words: str) -> str:
    done = run_module(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_profile_partition_train(tmp_path: Path) -> None:
    """The planner's chain as AshPipe has it, end to end, on two ranks: the graph and the conf say it all."""
    profile, plan, saved = (str(tmp_path / name) for name in ("graph.txt", "plan.json", "model.pt"))
    job = "dnn_bench.pipeline.jobs:mlp_tiny"
    run("commsched", "profile", "--job", job, "--rows", "8", "--repeat", "1", "--graph", profile)
    schedule = ["--schedule", "2bw", "--microbatches", "2", "-o", plan]
    run("commsched", "partition", "--profile", profile, "--devices", "2", "--link", "10gbit", *schedule)
    run("commsched", "convert", "--plan", plan, "--profile", profile, "-o", str(tmp_path))
    (graph,) = tmp_path.glob("gpus=*.txt")
    files = ["--graph", str(graph), "--conf", str(tmp_path / "hybrid_conf.json")]
    words = ["train", "--job", job, *files, "--rows", "16", "--steps", "6", "--warmup-steps", "2"]
    program = tmp_path / "train.py"
    program.write_text("import sys\nfrom commsched.cli import main\nsys.exit(main())\n")
    ranks = run_ranks(program, 2, [*words, "--save", saved], check=True)
    said = ranks[0].stdout
    assert said.count("data parallel step") == 2 and said.count("2bw step") == 6
    assert "the plan expects" in said
    state = torch.load(saved)
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in build("mlp_tiny").state_dict().items()
    }


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_answers_are_whole_though_outputs_of_ranks_mix(
    schedule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers were lines in one log for all ranks, and a line of two ranks at once could not be read."""
    monkeypatch.setattr(cli, "WORKER", "tests.support.pipeline_answers")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    status = cli.main(["--model", "mlp_tiny", "--schedule", schedule, "--json"])
    said = capsys.readouterr()
    if schedule == "gpipe":
        assert (status, said.err) == (2, "dnn_bench pipeline: rank 0 refuses\n")
    else:
        assert status == 0 and json.loads(said.out)["losses"] == [1.0, 0.5]


def test_a_measurement_beside_torchs_pipelines() -> None:
    common = ["--model", "mlp_tiny", "--steps", "3", "--warmup", "1", "--peer", "--json"]
    result = json.loads(run("dnn_bench", "pipeline", *common))
    # In float32; `losses_are_those_of_torchs_pipelines` compares closely.
    assert result["difference"] < rounding(torch.float32, terms=256, depth=2 * 9 * 4)
    assert len(result["losses"]) == 4 and result["peer"] > 0
    median, low, high = result["ratio"]
    assert 0 < low <= median <= high
    assert 0 < result["reached"] <= 1 and 0 <= result["bubble"] < 1


def test_what_the_ranks_refuse_is_told_in_one_line() -> None:
    """Every rank's traceback used to be printed."""
    done = run_module("dnn_bench", "pipeline", "--model", "gpt2_tiny", "--schedule", "2bw")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "embedding.words.weight is used by stages [0, 1]" in done.stderr
    assert "give the model an output layer of its own" in done.stderr
