"""Old gradients learn as well: digits, by asynchronous schedules and by a synchronous one.

Plain SGD: momentum makes old gradients older still, whichever program applies them, as a process shows that
knows no pipeline. A point is less than four of the test digits, so means over several seeds are compared.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from commsched.pipeline import Pipeline
from dnn_bench.converge import digits
from tests.support.pipeline_runs import on_threads

BATCH, EPOCHS, RATE, SEEDS = 96, 30, 0.1, 3
CUTS = (0, 2, 4, 6)
SCHEDULES = {"1f1b": (4, 4), "pipedream": (1, 4), "2bw": (4, 4), "wpipe": (4, 2)}
DELAYS = {"1f1b": (0, 0, 0, 0), "pipedream": (3, 2, 1, 0), "2bw": (1, 1, 1, 1), "wpipe": (1, 1, 0, 0)}
"""Of the stages, as the papers have them."""


@cache
def data() -> Any:
    return digits()


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    hidden = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


def training(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    (images, labels), _ = data()
    dice = torch.Generator().manual_seed(seed + 1)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels), generator=dice).split(BATCH):
            yield images[rows], labels[rows]


def falling(optimizer: torch.optim.Optimizer, number: int) -> None:
    steps = EPOCHS * -(-len(data()[0][1]) // BATCH)
    optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * max(0.02, 1 - number / steps)


def accuracy(trained: nn.Module) -> float:
    images, labels = data()[1]
    with torch.no_grad():
        return float((trained(images).argmax(1) == labels).double().mean())


def by_pipeline(schedule: str, seed: int) -> float:
    count, positions = SCHEDULES[schedule]
    # Made once: ranks that are threads share the random numbers.
    start = model(seed)

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(start),
            schedule,
            count,
            (positions, 1),
            cuts=CUTS,
            loss=F.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=RATE),
            on_step=falling,
            fabric=fabric,
        )
        for batch in training(seed):
            pipeline.step(batch)
        pipeline.drain()
        return pipeline.state_dict()

    trained = model(seed)
    trained.load_state_dict(on_threads(positions, work)[0])
    return accuracy(trained)


def by_hand(schedule: str, seed: int, rate: float, momentum: float) -> float:
    """One process: the gradient is taken with weights as old as the papers say."""
    trained = model(seed)
    weights = dict(trained.named_parameters())
    layers = sorted({int(name.split(".")[0]) for name in weights})
    delay = {name: DELAYS[schedule][layers.index(int(name.split(".")[0])) // 2] for name in weights}
    optimizer = torch.optim.SGD(weights.values(), lr=rate, momentum=momentum)
    history = [{name: p.detach().clone() for name, p in weights.items()}]
    for number, (images, labels) in enumerate(training(seed)):
        used = {n: history[-1 - min(delay[n], len(history) - 1)][n].clone().requires_grad_() for n in weights}
        loss = F.cross_entropy(functional_call(trained, used, (images,)), labels)
        for p, grad in zip(weights.values(), torch.autograd.grad(loss, list(used.values())), strict=True):
            p.grad = grad
        falling(optimizer, number)
        optimizer.step()
        history = [*history[-3:], {name: p.detach().clone() for name, p in weights.items()}]
    return accuracy(trained)


def means(what: str, run: Any) -> dict[str, float]:
    found = {
        schedule: statistics.mean(run(schedule, seed) for seed in range(SEEDS)) for schedule in SCHEDULES
    }
    print(f"{what}:", ", ".join(f"{schedule} {value:.2%}" for schedule, value in found.items()))
    return found


@pytest.mark.slow
def test_asynchronous_schedules_come_close_to_the_accuracy_of_synchronous_training() -> None:
    pytest.importorskip("sklearn")
    found = means("executor, plain SGD", by_pipeline)
    assert found["1f1b"] > 0.96
    assert all(value > found["1f1b"] - 0.01 for value in found.values()), found


@pytest.mark.slow
def test_what_old_gradients_lose_is_the_methods() -> None:
    pytest.importorskip("sklearn")
    plain = means("one process, plain SGD", lambda schedule, seed: by_hand(schedule, seed, RATE, 0.0))
    moving = means("one process, momentum", lambda schedule, seed: by_hand(schedule, seed, 0.02, 0.9))
    assert all(value > plain["1f1b"] - 0.01 for value in plain.values()), plain
    assert moving["pipedream"] < moving["1f1b"] - 0.01
