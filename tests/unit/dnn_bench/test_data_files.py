"""Real images and text in the place of synthetic data."""

from pathlib import Path

import pytest
import torch

from commsched.training.images import DEVIATION, MEAN
from dnn_bench import models
from dnn_bench.baselines.trainer import Job
from dnn_bench.models import data


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    """Two classes: wide red images and tall blue ones."""
    image = pytest.importorskip("PIL.Image")
    for name, size, color in (("red", (80, 40), (255, 0, 0)), ("blue", (30, 90), (0, 0, 255))):
        (tmp_path / name).mkdir()
        for index in range(3):
            image.new("RGB", size, color).save(tmp_path / name / f"{index}.png")
    (tmp_path / "red" / "notes.txt").write_text("no image")
    data.class_folders.cache_clear()
    return str(tmp_path)


def test_images_come_with_their_folders_as_classes(pictures: str) -> None:
    inputs, targets = models.sample_batch("resnet_tiny", 16, data_dir=pictures)
    assert inputs.shape == (16, 3, 64, 64)
    assert set(targets.tolist()) == {0, 1}  # sorted: blue, red
    brightest = inputs.mean(dim=(2, 3)).argmax(dim=1)
    assert torch.equal(brightest, torch.where(targets == 0, 2, 0))
    red = inputs[targets == 1][0]
    assert red[0].min() == pytest.approx((1 - MEAN[0]) / DEVIATION[0])


def test_text_tokens_are_bytes_and_targets_follow(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("0123456789" * 20)
    inputs, targets = models.sample_batch("gpt2_tiny", 5, data_dir=str(tmp_path), seq_len=12)
    assert inputs.shape == targets.shape == (5, 12)
    assert torch.equal((inputs - ord("0") + 1) % 10, targets - ord("0"))
    tokens, labels = models.sample_batch("bert_tiny", 5, data_dir=str(tmp_path / "b.txt"), seq_len=12)
    hidden = labels[:, :-1] != data.IGNORED
    assert hidden.any(dim=1).all() and (tokens[hidden] == data.MASK_TOKEN).all()
    restored = torch.where(hidden, labels[:, :-1], tokens) - ord("0")
    assert torch.equal((restored[:, :-1] + 1) % 10, restored[:, 1:])


def test_a_job_draws_the_same_global_batch_from_files_everywhere(pictures: str) -> None:
    job = Job("resnet_tiny", batch=2, data_dir=pictures)
    first, second = job.global_batch(1, 2), job.global_batch(1, 2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("model", "content", "message"),
    [
        ("resnet_tiny", None, "has no images; it needs a folder for each class"),
        ("gpt2_tiny", None, "has no text"),
        ("gpt2_tiny", "short", "gives 5 tokens .* the model needs at least 65"),
        ("mlp_tiny", "text", "takes inputs that no folder holds"),
    ],
)
def test_unusable_folders(tmp_path: Path, model: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        models.sample_batch(model, 2, data_dir=str(tmp_path))


def test_more_classes_than_the_model_has(pictures: str) -> None:
    with pytest.raises(ValueError, match="has 2 classes, the model 1"):
        models.sample_batch("resnet_tiny", 2, data_dir=pictures, num_classes=1)
