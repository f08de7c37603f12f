"""Data sets of files, what an evaluation counts of them, and the options that name them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from commsched.cli import main
from commsched.cli.options import add_job, cuts_of, job_of
from commsched.training import data_jobs, images
from tests.support import small_data

MODELS = "tests.support.file_models"


# -- images --------------------------------------------------------------------------------------------------


def test_folders_are_classes(tmp_path: Path) -> None:
    small_data.shapes(tmp_path, train=2, test=1)
    train = images.ClassFolders(tmp_path / "train", 16)
    test = images.ClassFolders(tmp_path / "val", 16, train.names)
    assert train.names == list(small_data.SHAPES) and (len(train), len(test)) == (6, 3)
    picture, label = test[2]
    assert picture.shape == (3, 16, 16) and label == 2
    (tmp_path / "val" / "star").mkdir()
    with pytest.raises(ValueError, match="classes without training images: star"):
        images.ClassFolders(tmp_path / "val", 16, train.names)
    with pytest.raises(ValueError, match="has no images"):
        images.ClassFolders(tmp_path / "nothing", 16)


def test_masks_are_numbers_of_classes(tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (4, 2), (255, 0, 0)).save(tmp_path / "images" / "a.jpg")
    palette = Image.new("P", (4, 2))
    palette.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0, *[50] * 759])
    palette.putdata([0, 1, 2, 1, 0, 2, 255, 1])
    palette.save(tmp_path / "masks" / "a.png")
    found = images.ImagesWithMasks(tmp_path, 2)
    assert found.classes() == 3
    assert found[0][1].tolist() == [[1, 2], [2, 255]]  # the middle square, by numbers and not by colours
    bits = Image.new("1", (4, 2))
    bits.putdata([0, 1, 0, 1, 1, 0, 1, 1])
    bits.save(tmp_path / "masks" / "a.png")  # their white was the number of what is not to be learned
    assert found.classes() == 2 and found[0][1].tolist() == [[1, 0], [0, 1]]
    Image.new("RGB", (4, 2)).save(tmp_path / "masks" / "a.png")
    with pytest.raises(ValueError, match="mode RGB; write the class numbers as grey values"):
        found[0]
    (tmp_path / "masks" / "a.png").unlink()
    with pytest.raises(ValueError, match="has no mask for a.jpg"):
        images.ImagesWithMasks(tmp_path, 2)


def test_images_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match="pip install pillow"):
        images.ClassFolders(tmp_path, 8)


# -- sentences -----------------------------------------------------------------------------------------------


def test_tables_as_glue_has_them(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text(
        'index\tsentence1\tsentence2\tgold_label\n0\tOne "quote\tTwo\tneutral\n1\tA\tB\t-\n2\tC\n'
    )
    assert data_jobs.read_table(path, ()) == [data_jobs.LabelledText(('One "quote', "Two"), "neutral")]
    path = tmp_path / "train.csv"
    path.write_text('words,kind\n"a, b",x\n,y\nc,z\n')
    rows = data_jobs.read_table(path, ("words", "kind"))
    assert rows == [data_jobs.LabelledText(("a, b",), "x"), data_jobs.LabelledText(("c",), "z")]
    with pytest.raises(ValueError, match=r"its header has \['words', 'kind'\]; name them with --columns"):
        data_jobs.read_table(path, ())


def test_frequent_words_have_numbers_and_halves_are_texts() -> None:
    rows = [data_jobs.LabelledText(("b a b", "a c"), "yes"), data_jobs.LabelledText(("b", "d."), "no")]
    words = data_jobs.Vocabulary(rows, 6)
    assert words.numbers == {"b": 4, "a": 5} and len(words) == 6
    found = data_jobs.Sentences(rows, words, ["no", "yes"], 8)
    tokens, label = found[0]
    assert (
        tokens.tolist()
        == [data_jobs.START, 4, 5, data_jobs.END, data_jobs.START, 5, data_jobs.UNKNOWN, data_jobs.END]
        and label == 1
    )
    assert found[1][0].tolist()[:4] == [data_jobs.START, 4, data_jobs.END, data_jobs.PAD]
    with pytest.raises(ValueError, match="labels yes of the test data"):
        data_jobs.Sentences(rows, words, ["no"], 8)
    with pytest.raises(ValueError, match="leaves 2 places for each of 2 texts"):
        data_jobs.Sentences(rows, words, ["no", "yes"], 4)


# -- scores --------------------------------------------------------------------------------------------------


def test_counts_of_parts_add_up_to_scores() -> None:
    dice = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(40, 8, generator=dice), torch.randint(8, (40,), generator=dice)
    measure = data_jobs.classes(F.cross_entropy)
    parts = [measure.count(outputs[part], targets[part]) for part in (slice(0, 7), slice(7, 40))]
    scores = measure.scores(sum(parts).double())  # type: ignore[union-attr]
    ranked = outputs.argsort(1, descending=True)
    assert scores["top1"] == pytest.approx(float((ranked[:, 0] == targets).float().mean()))
    assert scores["top5"] == pytest.approx(float((ranked[:, :5] == targets[:, None]).any(1).float().mean()))
    assert scores["loss"] == pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-5)
    assert "top5" not in measure.scores(measure.count(outputs[:, :3], targets % 3))


def test_intersection_over_union_by_hand() -> None:
    outputs = F.one_hot(torch.tensor([[[0, 1, 1], [0, 0, 1]]]), 4).permute(0, 3, 1, 2).float()
    targets = torch.tensor([[[0, 0, 1], [255, 0, 1]]])
    measure = data_jobs.masks(lambda outputs, targets: torch.tensor(0.5), 4, 255)
    # Class 0: 2 of 3; class 1: 2 of 3; classes 2 and 3 occur nowhere and do not count.
    scores = measure.scores(measure.count(outputs, targets))
    assert scores == {"loss": 0.5, "iou": pytest.approx(2 / 3), "pixels": pytest.approx(4 / 5)}


# -- options -------------------------------------------------------------------------------------------------


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_job(parser)
    return parser.parse_args(words)


def test_ready_jobs_divide_what_comes_in_one_part(tmp_path: Path) -> None:
    small_data.masks(tmp_path / "masks", 20)
    job: Any = job_of(
        options(
            "--job",
            "masks",
            "--data",
            f"{tmp_path}/masks",
            "--model",
            f"{MODELS}:pixels",
            "--image-size",
            "8",
        )
    )
    assert (len(job.data.train), len(job.data.test)) == (18, 2)
    x, y = next(job.batches(3))
    assert job.model(x).shape == (3, 4, 8, 8) and float(job.loss(job.model(x), y).detach()) > 0
    small_data.topics(tmp_path / "text", 40, 8)
    table = tmp_path / "text" / "train.tsv"
    words = ["--job", "text", "--data", str(table), "--model", f"{MODELS}:words", "--model-args", "dim=6"]
    job = job_of(options(*words))
    assert (len(job.data.train), len(job.data.test)) == (36, 4)
    assert job.model[0].vectors.weight.shape[1] == 6 and job.model[-1].out_features == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--job text --rows 4", "--job text needs --data PATH and --model"),
        ("--job a:b --data x --rows 4", "--data and --model belong to the jobs images, text, masks"),
        ("--job images --data x --model nothing --rows 4", "--model must look like package.module:function"),
        (f"--job images --data x --model {MODELS}:none --rows 4", "--model tests.support.file_models:none"),
        (f"--job images --data x --model {MODELS}:pixels --model-args a --rows 4", "--model-args must look"),
        (f"--job images --data x --model {MODELS}:pixels --rows 4", "x/train has no images"),
        ("--job dnn_bench.pipeline.jobs:mlp_tiny --rows 4 --eval", "need a job with data sets"),
        ("--job dnn_bench.pipeline.jobs:mlp_tiny --rows 4 --cuts 2", "one stage has no cuts"),
        ("--job dnn_bench.pipeline.jobs:mlp_tiny --rows 4 --replicas a", "--replicas is a number, or"),
        ("--job dnn_bench.pipeline.jobs:mlp_tiny --rows 4 --rank 0", "--rank needs the number of ranks"),
        (
            "--job dnn_bench.pipeline.jobs:mlp_tiny --rows 4 --rank 3 --stages 2",
            "--rank must be 0 to 1, got 3",
        ),
    ],
)
def test_what_cannot_be_trained(words: str, said: str, capsys: Any) -> None:
    assert main(["train", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_cuts_are_numbers_or_names() -> None:
    assert cuts_of("3,6") == [0, 3, 6] and cuts_of("0,4") == [0, 4] and cuts_of(None) is None
    assert cuts_of("second, head.3") == ["second", "head.3"]


def test_threads_and_device_are_those_that_the_options_name(monkeypatch: pytest.MonkeyPatch) -> None:
    job, before = ("--job", "dnn_bench.pipeline.jobs:mlp_tiny"), torch.get_num_threads()
    launch = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        job_of(options(*job))
        assert torch.get_num_threads() == before
        job_of(options(*job, "--threads", "3"))
        assert torch.get_num_threads() == 3
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
        job_of(options(*job))
        assert torch.get_num_threads() == 4  # of eight cores, for one of two ranks
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="--threads must be at least 1, got 0"):
        job_of(options(*job, "--threads", "0"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch .* sees no GPU here"):
        job_of(options(*job, "--device", "cuda"))
