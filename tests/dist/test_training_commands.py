"""The workflows of the command line on small files: to a score, and on after a kill, to the bit."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commsched.process.network import HeldPort
from dnn_bench.launch import end, spawn_rank
from scheduler.formats.pipedream import Graph
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.pipelines.convert import write_files
from tests.support import small_data
from tests.support.cases import PROGRAMS
from tests.support.commands import run_module
from tests.support.launch import PATIENCE, clean_environment, start_ranks

pytestmark = pytest.mark.dist
PROGRAM = PROGRAMS / "train_files.py"
Starter = Callable[[int, list[str], dict[str, str]], list[int]]
"""Ranks, a command's words, variables of the environment -> the ranks' exit statuses."""
MODELS = "tests.support.file_models"
ADAM = "--optimizer adam --lr 0.01"
IMAGES = f"--job images --data data --model {MODELS}:convolutions --image-size 8 --rows 48 {ADAM}"
PAIRS = f"--job text --data data --model {MODELS}:pairs --length 24 --rows 40 {ADAM}"
MASKS = (
    f"--job masks --data data --model {MODELS}:pixels --image-size 32 --rows 9 --optimizer adam --lr 0.003"
)


@dataclass(frozen=True)
class Workflow:
    """A command on ``ranks`` ranks, its data, and the score of the test data that it must reach."""

    ranks: int
    data: str
    words: str
    score: str
    floor: float


WPIPE = "--schedule wpipe --stages 4 --replicas 2 --microbatches 4 --cuts 1,2,3,4,5,6,7"
BUNDLE = "--schedule bundle --stages 2 --replicas 2 --cuts third"
UNEQUAL = "--schedule pipedream --stages 3 --replicas 2,1,1 --workers 1 --cuts second,head"
WORKFLOWS = {
    "pairs_wpipe": Workflow(
        2, "sentences", f"{PAIRS} --epochs 3 --schedule wpipe --microbatches 2", "top1", 0.9
    ),
    "pairs_wpipe_replicas": Workflow(
        8, "sentences", f"{PAIRS} --epochs 3 --model-args depth=8 {WPIPE}", "top1", 0.9
    ),
    "images_alone": Workflow(1, "digits", f"{IMAGES} --epochs 3", "top1", 0.9),
    "images_bundle": Workflow(4, "digits", f"{IMAGES} --epochs 3 {BUNDLE}", "top1", 0.9),
    "images_unequal": Workflow(4, "digits", f"{IMAGES} --lr 0.005 --epochs 6 {UNEQUAL}", "top1", 0.85),
    "masks_replicas": Workflow(
        3, "masks", f"{MASKS} --epochs 12 --stages 2 --replicas 2,1 --microbatches 2", "iou", 0.8
    ),
}
FAST = ("pairs_wpipe",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in WORKFLOWS]
)
def test_trains_to_a_score_and_goes_on_after_a_kill(name: str, tmp_path: Path) -> None:
    flow = WORKFLOWS[name]
    small_data.KINDS[flow.data](tmp_path / "data")
    words = flow.words.replace("--data data", f"--data {tmp_path / 'data'}").split()
    scored_and_continued(flow, words, tmp_path, by_launcher)


def test_sigterm_writes_a_checkpoint_and_leaves(tmp_path: Path) -> None:
    """SIGTERM on one rank ends both after the same step, and the next run goes on there to the same bits."""
    small_data.sentences(tmp_path / "data")
    flow, kept = WORKFLOWS["pairs_wpipe"], ["--checkpoint", str(tmp_path / "kept")]
    words = flow.words.replace("--data data", f"--data {tmp_path / 'data'}").split()
    whole = trained(flow.ranks, words, tmp_path, "whole", by_launcher)
    with start_ranks(PROGRAM, flow.ranks, ["train", *words, *kept], {"KILLED": "1:3:15"}) as started:
        results = started.wait(PATIENCE)
    assert [rank.returncode for rank in results] == [143, 143], [rank.stderr for rank in results]
    assert re.search(r"SIGTERM: step [45] is saved in \S+kept", results[0].stdout), results[0].stdout
    again = trained(flow.ranks, [*words, *kept], tmp_path, "again", by_launcher)
    assert equal(whole, again)


@pytest.mark.slow
def test_ashpipes_files_started_rank_by_rank(tmp_path: Path) -> None:
    """Profile, partition, convert, train from hybrid_conf.json; the number of ranks stands there."""
    small_data.digits(tmp_path / "data")
    job = IMAGES.replace("--data data", f"--data {tmp_path / 'data'}")
    source, _, training = job.partition(" --rows")
    graph, planned, made = (str(tmp_path / name) for name in ("graph.txt", "plan.json", "converted"))
    run(f"profile {source} --rows 48 --repeat 1 --graph {graph}")
    run(f"partition --profile {graph} --devices 3 --link 1gbit --schedule ashpipe -o {planned}")
    run(f"convert --plan {planned} --profile {graph} -o {made}")
    # How the partition cuts depends on the times of the machine: two stages, the first replicated.
    plan = PipelinePlan.load(planned)
    stages: dict[str, Any] = {"cuts": (0, 4), "replicas": (2, 1), "recompute": (False, False)}
    ranks: dict[str, Any] = {"devices": (0, 1, 2), "memory": (0, 0, 0), "rank_map": ()}
    several = replace(plan, **stages, **ranks, period=0.0, bottleneck=0.0)
    write_files(several, Graph.load(graph), made)
    files = f"--conf {made}/hybrid_conf.json --graph {made}/gpus=3.txt"
    words = f"{source} --rows{training} {files} --epochs 3".split()
    scored_and_continued(Workflow(3, "digits", "", "top1", 0.9), words, tmp_path, by_hand)


TILES = "--num-spatial-parts 2 --slice-method vertical --split-size 2 --spatial-size 1 --image-size 32"
UNET = "--model unet --num-layers 2 --num-filters 4 --num-classes 4 --app 1 --learning-rate 0.05"


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--batch-size 6", "--mode gems+sp --batch-size 3 --enable-master-comm-opt"])
def test_tiles_of_images_with_masks(more: str, tmp_path: Path) -> None:
    """MPI4DL's options; two tiles and a stage, also with mirrored replicas."""
    small_data.masks(tmp_path / "data" / "train", 48)
    small_data.masks(tmp_path / "data" / "val", 12, seed=1)
    words = f"spatial {TILES} {UNET} {more} --datapath {tmp_path}/data --num-epochs 8".split()

    def run_all(name: str, extra: list[str], variables: dict[str, str]) -> list[int]:
        files = ["--json", str(tmp_path / f"{name}.json"), "--save", str(tmp_path / f"{name}.pt")]
        return by_launcher(3, [*words, *files, "--enable-evaluation", *extra], variables)

    assert not any(run_all("whole", [], {}))
    results = json.loads((tmp_path / "whole.json").read_text())
    assert results["epochs"][-1]["test"]["iou"] > 0.5
    kept = ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "3"]
    killed, step = random.randrange(3), random.randrange(1, 64)
    codes = run_all("stopped", kept, {"KILLED": f"{killed}:{step}"})
    assert codes[killed] in (-9, 137) and all(codes), codes
    assert not any(run_all("again", kept, {}))
    whole, again = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "again"))
    assert equal(whole, again), f"differs after rank {killed} was killed at step {step}"


def scored_and_continued(flow: Workflow, words: list[str], folder: Path, started: Starter) -> None:
    """A whole run reaches the score; one that is killed at a random step goes on to the same bits."""
    whole = trained(flow.ranks, [*words, "--eval"], folder, "whole", started)
    results = json.loads((folder / "whole" / "results.json").read_text())
    assert results["epochs"][-1]["test"][flow.score] >= flow.floor, results["epochs"][-1]
    assert results["ranks"] == flow.ranks and "<polyline" in (folder / "whole" / "curves.svg").read_text()

    steps = sum(epoch["steps"] for epoch in results["epochs"])
    killed, step = random.randrange(flow.ranks), random.randrange(1, steps)
    kept = ["--eval", "--checkpoint", str(folder / "kept"), "--checkpoint-every", "4"]
    codes = started(flow.ranks, ["train", *words, *kept], {"KILLED": f"{killed}:{step}"})
    assert codes[killed] in (-9, 137) and all(codes), codes
    again = trained(flow.ranks, [*words, *kept], folder, "again", started)
    assert equal(whole, again), f"differs after rank {killed} was killed at step {step}"
    after = json.loads((folder / "again" / "results.json").read_text())
    for name in ("test", "loss"):
        assert [each[name] for each in after["epochs"]] == [each[name] for each in results["epochs"]]


def trained(
    ranks: int, words: list[str], folder: Path, name: str, started: Starter
) -> dict[str, torch.Tensor]:
    """The weights that a run to its end leaves."""
    saved = folder / f"{name}.pt"
    more = ["--results", str(folder / name), "--save", str(saved)]
    assert not any(started(ranks, ["train", *words, *more], {}))
    found: dict[str, torch.Tensor] = torch.load(saved)
    return found


def by_launcher(ranks: int, words: list[str], variables: dict[str, str]) -> list[int]:
    """The ranks' exit statuses."""
    with start_ranks(PROGRAM, ranks, words, variables) as started:
        codes = [rank.returncode for rank in started.wait(PATIENCE)]
        if any(codes) and not variables:
            print(started.report())
        return codes


def by_hand(ranks: int, words: list[str], variables: dict[str, str]) -> list[int]:
    """The same with ranks that no launcher has started."""
    environment, held = clean_environment(variables), HeldPort()
    here = ["--master-addr", "127.0.0.1", "--master-port", str(held.number)]
    with closing(held), tempfile.TemporaryFile() as output:
        processes = [
            spawn_rank(
                rank,
                [str(PROGRAM), *words, *here, "--rank", str(rank), "--local-rank", str(rank)],
                environment,
                clean_environment(),
                output=output,
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(PATIENCE) for process in processes]
        finally:
            end(processes)
        output.seek(0)
        print(output.read().decode())
    return codes


def run(words: str) -> None:
    done = run_module("commsched", *words.split())
    assert done.returncode == 0, done.stdout + done.stderr


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
