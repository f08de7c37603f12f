"""``commsched train`` in one process: plain training, to the bit; real ranks are tests/dist's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from commsched.cli import main
from commsched.errors import CommError
from commsched.pipeline import Job
from commsched.training.images import ClassFolders
from commsched.training.loop import Decay, TrainingSettings, curves
from tests.support import small_data
from tests.support.file_models import convolutions
from tests.support.pipeline_runs import WIDTH, assert_close, chain_model, sgd
from tests.support.rounding import rounding

IGNORED = -100
JOB = "--job images --image-size 16 --model tests.support.file_models:convolutions"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    small_data.shapes(tmp_path / "pictures", train=9, test=4, size=16)
    return tmp_path / "pictures"


def trained(folder: Path, words: str, pictures: Path) -> dict[str, torch.Tensor]:
    """The saved weights; results lie in ``folder``."""
    saved = folder / "model.pt"
    more = ["--data", str(pictures), "--save", str(saved), "--results", str(folder)]
    assert main(["train", *JOB.split(), *words.split(), *more]) == 0
    found: dict[str, torch.Tensor] = torch.load(saved)
    return found


def by_hand(pictures: Path, epochs: int, rows: int, rate: float) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(4)
    model, data = convolutions(3), ClassFolders(pictures / "train", 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(4 + epoch))
        for images, labels in DataLoader(data, batch_sampler=[step.tolist() for step in order.split(rows)]):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return model, losses


def test_one_process_is_plain_training(pictures: Path, tmp_path: Path) -> None:
    """With dropout: the loop draws the same random numbers."""
    words = "--rows 6 --epochs 2 --seed 4 --optimizer sgd --lr 0.05 --eval"
    found = trained(tmp_path, words, pictures)
    model, losses = by_hand(pictures, 2, 6, 0.05)
    assert list(found) == list(model.state_dict())
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    epochs = json.loads((tmp_path / "results.json").read_text())["epochs"]
    assert [epoch["loss"] for epoch in epochs] == [sum(losses[:5]) / 5, sum(losses[5:]) / 5]
    tested = ClassFolders(pictures / "val", 16)
    images, labels = next(iter(DataLoader(tested, batch_size=len(tested))))
    right = (model.eval()(images).argmax(1) == labels).double().mean()
    assert epochs[-1]["test"]["top1"] == pytest.approx(float(right))


def texts() -> Job:
    """The loss is a sum over tokens; texts of four steps, of which every other one has a single token."""
    dice = torch.Generator().manual_seed(3)
    x, y = torch.randn(24, 5, WIDTH, generator=dice).double(), torch.randint(WIDTH, (24, 5), generator=dice)
    y[::2, 1:] = IGNORED

    def batches(rows: int) -> Any:
        return zip(x.split(rows), y.split(rows))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="sum")

    return Job(chain_model(2), loss, batches, sgd, count=lambda targets: (targets != IGNORED).sum())


def test_a_job_may_sum_its_loss_over_tokens(tmp_path: Path, capsys: Any) -> None:
    saved, name = tmp_path / "model.pt", f"{__name__}:texts"
    words = f"--rows 6 --steps 4 --microbatches 4 --schedule gpipe --stages 1 --save {saved}"
    assert main(["train", "--job", name, *words.split()]) == 0
    job, said = texts(), capsys.readouterr().out
    optimizer = sgd(list(job.model.parameters()))
    for number, (x, y) in enumerate(job.batches(6)):
        optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x).transpose(1, 2), y)
        loss.backward()
        optimizer.step()
        assert f"step {number}: loss {loss.item():.6f}" in said
    # Sums over the tokens of a batch and over the width; layers forward and backward, and steps.
    exact = rounding(torch.float64, 6 * 5 * WIDTH, 4 * 4)
    assert_close(torch.load(saved), dict(job.model.state_dict()), exact)


def test_weights_that_fit_are_the_start(pictures: Path, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(1)
    other = convolutions(5)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    words = f"--rows 9 --optimizer sgd --lr 0 --load {tmp_path / 'other.pt'} --decay linear"
    found = trained(tmp_path, words, pictures)
    assert torch.equal(found["first.0.weight"], other.state_dict()["first.0.weight"])
    assert found["head.3.weight"].shape[0] == 3
    assert "of another shape: head.3.weight, head.3.bias" in capsys.readouterr().out
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pt")
    assert main(["train", *JOB.split(), *words.split(), "--data", str(pictures)]) == 2
    assert "none of its tensors fits the model" in capsys.readouterr().err


def test_a_finished_run_only_tells_its_results(pictures: Path, tmp_path: Path) -> None:
    words = f"--rows 6 --epochs 2 --checkpoint {tmp_path / 'kept'} --warmup-steps 2"
    first = trained(tmp_path, words, pictures)
    results = (tmp_path / "results.json").read_text()
    again = trained(tmp_path, words, pictures)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert (tmp_path / "results.json").read_text() == results
    older, newer = sorted((tmp_path / "kept").iterdir())
    (newer / "__0_0.distcp").unlink()
    with pytest.warns(UserWarning, match="__0_0.distcp cannot be read: No such file"):
        again = trained(tmp_path, words, pictures)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for folder in (tmp_path / "kept").iterdir():
        (folder / "__0_0.distcp").unlink()
    with pytest.raises(CommError, match="no generation in .* is whole"):
        trained(tmp_path, words, pictures)


def test_rates_fall_to_nothing() -> None:
    groups = [{"params": nn.Parameter(torch.zeros(1))}, {"params": nn.Parameter(torch.zeros(1)), "lr": 0.04}]
    optimizer = torch.optim.SGD(groups, lr=0.4)
    for kind, half in (("linear", 0.2), ("cosine", 0.4 * (1 - math.cos(math.pi / 2)) / 2)):
        rates = []
        for number in (0, 5, 10, 11):
            Decay(kind, 10)(optimizer, number)
            rates.append([group["lr"] for group in optimizer.param_groups])
            again = torch.optim.SGD(groups, lr=0.4)  # continued from a checkpoint
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
        body, head = zip(*rates, strict=True)
        assert body == pytest.approx([0.4, half, 0.0, 0.0])
        assert head == pytest.approx([0.04, half / 10, 0.0, 0.0])


def test_rates_fall_to_nothing_where_the_last_rows_are_dropped(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step an epoch of 26 of 27 pictures: the last is too few for two micro-batches."""
    seen = []
    monkeypatch.setattr(Decay, "__call__", lambda self, _, number: seen.append((number, self.steps)))
    trained(tmp_path, "--rows 26 --microbatches 2 --epochs 3 --decay linear", pictures)
    assert [number for number, _ in seen] == [0, 1, 2] and {steps for _, steps in seen} == {3}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr 0.1", "--lr needs --optimizer"),
        ("--optimizer adam --momentum 0.5", "--momentum is for --optimizer sgd, not adam"),
        ("--plan plan.json --stages 2", "--stages belongs to --schedule"),
        ("--conf conf.json --microbatches 4", "--microbatches belongs to --schedule"),
        ("--checkpoint-every 3", "--checkpoint-every needs --checkpoint"),
    ],
)
def test_options_that_would_be_ignored(words: str, said: str, pictures: Path, capsys: Any) -> None:
    assert main(["train", *JOB.split(), "--data", str(pictures), "--rows", "9", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_curves_of_losses_and_scores() -> None:
    epochs = [
        {"epoch": n, "loss": 1 / n, "test": {"loss": 2 / n, "top1": n / 4, "top5": 1.0}} for n in (1, 2, 3)
    ]
    drawn = curves(epochs)
    assert drawn.count("<polyline") == 4 and "top1 0.75" in drawn and "training 0.3333" in drawn
    assert curves([{"epoch": 1, "loss": 0.0, "test": {}}]).count("<polyline") == 1


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        TrainingSettings(rows=4, epochs=0)
