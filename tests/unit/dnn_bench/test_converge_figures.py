"""Convergence runs: equal batches for any number of workers, and what counts as equal training."""

import pytest
import torch

from dnn_bench import converge
from dnn_bench.converge import GLOBAL_BATCH, TASKS, Run, TaskJob, deviation, digest, mean_losses, problems


def run(losses: tuple[float, ...], accuracy: float = 0.9) -> Run:
    return Run("digits", "x", 2, losses, accuracy, "")


@pytest.mark.parametrize("task", list(TASKS))
def test_any_number_of_workers_sees_the_same_global_batch(task: str) -> None:
    if task == "digits":
        pytest.importorskip("sklearn")
    whole = TaskJob.make(task, 1).global_batch(17, 1)
    assert len(whole) == 1 and len(whole[0][0]) == GLOBAL_BATCH
    for workers in (2, 3, 4):
        shards = TaskJob.make(task, workers).global_batch(17, workers)
        assert [len(inputs) for inputs, _ in shards] == [GLOBAL_BATCH // workers] * workers
        for part in (0, 1):
            assert torch.equal(torch.cat([shard[part] for shard in shards]), whole[0][part])


def test_an_epoch_sees_every_sample_once_and_the_next_in_another_order() -> None:
    job = TaskJob.make("text", 1)
    steps = len(job.data[0][0]) // GLOBAL_BATCH
    first = torch.cat([job.global_batch(step, 1)[0][0] for step in range(steps)])
    known = sorted(job.data[0][0].tolist())
    seen = sorted(first.tolist())
    assert len(known) - GLOBAL_BATCH < len(seen) == steps * GLOBAL_BATCH
    remaining = iter(known)
    assert all(line in remaining for line in seen)  # a part of what is known, nothing twice
    assert not torch.equal(job.global_batch(0, 1)[0][0], job.global_batch(steps, 1)[0][0])


def test_text_targets_are_the_next_characters() -> None:
    inputs, targets = TaskJob.make("text", 1).data[0]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.min()) >= 0 and int(inputs.max()) < 128


def test_losses_are_means_over_shards() -> None:
    assert mean_losses([{"losses": [1.0, 2.0]}, {"losses": [3.0, 2.0]}]) == (2.0, 2.0)


def test_rounding_is_equal_and_other_training_is_not() -> None:
    plain = run((2.0, 1.0, 0.5))
    assert problems(run((2.0, 1.0, 0.5000001)), plain) == []
    assert deviation(run((2.0, 1.0, 0.4)), plain) == pytest.approx(0.2)
    assert "loss differs by 2.0e-01" in problems(run((2.0, 1.0, 0.4)), plain)[0]
    assert "accuracy is 0.8000" in problems(run((2.0, 1.0, 0.5), accuracy=0.8), plain)[0]


def test_a_digest_names_the_bits() -> None:
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0).view(1)}
    same = {name: weights[name].clone() for name in ("b", "a")}
    assert digest(weights) == digest(same)
    same["a"][0] = torch.nextafter(same["a"][0], torch.tensor(2.0))
    assert digest(weights) != digest(same)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "poems"], "unknown task 'poems'"),
        (["--baseline", "magic"], "unknown baseline 'magic'"),
        (["--steps", "0"], "--steps must be at least 1"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert converge.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="96 cannot be shared equally by 5 workers"):
        TaskJob.make("digits", 5)
