"""MPI4DL's options: what they mean, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from commsched.training import images
from dnn_bench.spatial.cli import build
from dnn_bench.spatial.models import MODELS, cifar, cut_stages, even_balance
from dnn_bench.spatial.options import read
from scheduler.ir.inputs import InputError


def test_the_command_of_the_manual() -> None:
    text = "--model amoebanet --image-size 512 --num-spatial-parts 4 --slice-method vertical"
    plan = read([*text.split(), "--split-size", "2", "--spatial-size", "1"])
    assert (plan.grids, plan.ranks, plan.mirrored) == (((1, 4),), 5, False)


@pytest.mark.parametrize(
    ("text", "ranks", "microbatches", "images"),
    [
        ("--mode lp --split-size 3", 3, 1, 2),
        ("--mode sp --split-size 3 --spatial-size 2 --num-spatial-parts 4,1", 6, 1, 2),
        ("--mode sp --local-DP 2 --replicas 2 --batch-size 4 --parts 2", 12, 2, 8),
        ("--mode gems --split-size 2 --times 3", 2, 3, 12),
        ("--mode gems+sp --num-spatial-parts 2 --slice-method horizontal --parts 2", 3, 2, 4),
    ],
)
def test_modes(text: str, ranks: int, microbatches: int, images: int) -> None:
    plan = read(text.split())
    assert (plan.ranks, plan.microbatches, plan.images) == (ranks, microbatches, images)
    assert plan.mirrored == text.startswith("--mode gems")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--spatial-size 3", "--spatial-size must be 1 to --split-size, which is 2, got 3"),
        ("--mode lp --spatial-size 1", "--mode lp has no stages on tiles"),
        ("--num-spatial-parts 2", "are for stages on tiles; give --spatial-size, too, or --mode sp"),
        ("--mode gems --slice-method vertical", "are for stages on tiles; give --spatial-size, too"),
        ("--spatial-size 1 --num-spatial-parts 3", "a square number of parts"),
        ("--mode lp --enable-master-comm-opt", "--enable-master-comm-opt is for --mode gems"),
        ("--mode lp --checkpoint kept", "need data: --app 1 or 2"),
        ("--spatial-size 1 --num-spatial-parts 4,4", "one for each of the 1 stages on tiles"),
        (
            "--spatial-size 1 --num-spatial-parts many",
            "--num-spatial-parts takes whole numbers of at least 1",
        ),
        ("--parts 3", "--parts 3 must divide --batch-size 2"),
        ("--local-DP 3", "--local-DP 3 must divide the 2 samples"),
        ("--balance 3", "--balance needs a number for each of the 2 stages"),
        ("--times 2", "--times is for --mode gems"),
        ("--image-size 0", "--image-size must be at least 1, got 0"),
    ],
)
def test_bad_options(text: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        read(text.split())
    assert said in str(error.value)


def test_stages() -> None:
    cells: list[nn.Module] = [nn.Identity() for _ in range(7)]
    assert [len(stage) for stage in cut_stages(cells, even_balance(7, 3))] == [2, 2, 3]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"--balance 3,3 must share out the 7 cells"):
        cut_stages(cells, [3, 3])
    with pytest.raises(ValueError, match="1 to 7 stages, not 8"):
        even_balance(7, 8)
    with pytest.raises(ValueError, match="18, 34, 50, 101, 152 layers, not 19"):
        MODELS["resnet"](19, 4, 2)


def test_balance_counts_cells() -> None:
    cells = len(MODELS["unet"](4, 4, 2))
    words = "--mode lp --model unet --num-filters 4 --image-size 32 --split-size 3 --balance".split()
    stages, _, _ = build(read([*words, f"2,3,{cells - 5}"]))
    assert [len(list(stage)) for stage in stages] == [2, 3, cells - 5]


def test_cifars_files(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, rows in (("data_batch_1", 3), ("data_batch_2", 2), ("test_batch", 2)):
        pixels = np.full((rows, 3072), 255, dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": list(range(rows))}))
    train, test = (cifar(tmp_path, part, 16) for part in ("train", "test"))
    assert (len(train), len(test)) == (5, 2) and train[3][1] == 0 and train[0][0].shape == (3, 16, 16)
    assert float(train[0][0][0, 0, 0]) == pytest.approx((1 - images.MEAN[0]) / images.DEVIATION[0])
    with pytest.raises(ValueError, match="has no data_batch"):
        cifar(tmp_path / "nothing", "train", 16)


def test_a_crafted_file_runs_nothing(tmp_path: Path) -> None:
    class Crafted:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    for content, message in (
        (pickle.dumps({b"data": Crafted()}), "it names "),
        (b"not a pickle", "is no batch of CIFAR-10"),
        (b"", "is no batch of CIFAR-10"),
        (pickle.dumps({b"data": 3}), "is no batch of CIFAR-10"),
        (pickle.dumps([]), "TypeError"),
    ):
        (tmp_path / "test_batch").write_bytes(content)
        with pytest.raises(InputError, match=f"test_batch: .*({message})"):
            cifar(tmp_path, "test", 16)
    assert not (tmp_path / "ran").exists()
