"""Stopping in the middle of a run, and state of the whole model."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commsched.pipeline import Pipeline
from tests.support.pipeline_runs import (
    WIDTH,
    adam,
    assert_close,
    batches,
    chain_model,
    loss_of,
    momentum,
    on_threads,
    replayed,
    train,
)

CASES = [
    ("1f1b", 4, (2, 1), 4),
    ("pipedream", 1, (4, 1), 4),
    ("pipedream", 2, (3, 1), 3),
    ("ashpipe", 1, (3, [2, 1, 1]), 3),
    ("2bw", 3, (2, 2), 2),
    ("2bw", 2, (4, 1), 4),
    ("wpipe", 3, (2, 1), 4),
    ("wpipe", 2, (2, 2), 4),
]
ALLOWING = threading.Lock()


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    # Ranks are threads here, and the classes that are allowed are one list for all of them.
    with ALLOWING, torch.serialization.safe_globals(Pipeline.checkpoint_classes):
        return torch.load(file, weights_only=True)


def slow_backward(module: Any, inputs: Any, output: Any) -> None:
    output[0].register_hook(lambda grad: time.sleep(0.05))


@pytest.mark.few
@pytest.mark.parametrize("stop", [1, 4])
@pytest.mark.parametrize(("schedule", "count", "mesh", "layers"), CASES)
def test_goes_on_with_the_same_bits(schedule: str, count: int, mesh: Any, layers: int, stop: int) -> None:
    model, data = chain_model(layers), batches(8)
    size = mesh[0] * mesh[1] if isinstance(mesh[1], int) else sum(mesh[1])
    options: dict[str, Any] = {"schedule": schedule, "num_microbatches": count, "mesh": mesh}
    wanted, losses, _ = train(model, data, size, optimizer=adam, **options)

    def work(fabric: Any) -> Any:
        def make() -> Pipeline:
            return Pipeline(copy.deepcopy(model), loss=loss_of, optimizer=adam, fabric=fabric, **options)

        first = make()
        if fabric.rank == 0:
            # Its replicas are done, and would close, while it still computes gradients that they sum.
            first.stages[0].modules[0].register_forward_hook(slow_backward)
        found = [first.step(batch) for batch in data[:stop]]
        state = through_a_file(first.checkpoint())
        first.close()
        second = make()
        second.resume(state)
        found += [second.step(batch) for batch in data[stop:]]
        found += second.drain()
        weights = second.state_dict()
        second.close()
        return weights, [value for value in found if value is not None]

    for weights, values in on_threads(size, work):
        assert values == losses
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def interrupted(
    model: nn.Module,
    data: Any,
    stop: int,
    schedule: str,
    count: int,
    recompute: bool = False,
    script: Callable[[Any, int], None] = lambda model, number: None,
) -> Any:
    """Losses, weights and an evaluation where a new pipeline goes on after batch ``stop`` (-1: none does).

    ``script`` changes the model after each batch.
    """

    def work(fabric: Any) -> Any:
        options: Any = {"loss": loss_of, "optimizer": adam, "fabric": fabric, "recompute": recompute}
        mine = copy.deepcopy(model)
        pipeline, losses = Pipeline(mine, schedule, count, (2, 1), **options), []
        for number, batch in enumerate(data):
            losses.append(pipeline.step(batch))
            script(mine, number)
            if number == stop:
                state = through_a_file(pipeline.checkpoint())
                pipeline.close()
                mine = copy.deepcopy(model)
                script(mine, number)
                pipeline = Pipeline(mine, schedule, count, (2, 1), **options)
                pipeline.resume(state)
        losses += pipeline.drain()
        weights = {name: value.tolist() for name, value in pipeline.state_dict().items()}
        return losses, weights, pipeline.evaluate(data[0])

    return on_threads(2, work)[0]


class Averaging(nn.Module):
    """Its running mean is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.training:
            self.mean.mul_(0.5).add_(y.detach().abs().mean(0), alpha=0.5)
        return y / (1 + self.mean.clone())


@pytest.mark.parametrize(("schedule", "count", "recompute"), [("1f1b", 2, False), ("2bw", 2, True)])
def test_buffers_that_are_not_in_the_state_dict_go_on(schedule: str, count: int, recompute: bool) -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(Averaging(), Averaging()).double(), batches(5)
    runs = [interrupted(model, data, stop, schedule, count, recompute) for stop in (-1, 2)]
    assert runs[0] == runs[1]


class Late(nn.Module):
    """Forwards make its buffers: one is longer after longer inputs, the other one is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.register_buffer("first", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if len(self.table) < len(x):
            self.table = torch.linspace(1, 2, len(x), dtype=x.dtype)
        if self.first is None:
            self.first = y.detach().abs().mean(0)
        return y * self.table[: len(x), None] / (1 + self.first)


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 2), ("2bw", 2)])
def test_buffers_that_forwards_have_made_go_on(schedule: str, count: int) -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(Late(), Late()).double(), batches(5)
    runs = [interrupted(model, data, stop, schedule, count) for stop in (-1, 2)]
    assert runs[0] == runs[1]


class Factor(nn.Module):
    """Its output depends on a number and on its mode, which scripts change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.factor
        return torch.tanh(y) if self.training else y


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("schedule", "count"), [("pipedream", 1), ("2bw", 2)])
def test_forwards_in_flight_have_their_numbers_after_a_checkpoint(
    schedule: str, count: int, recompute: bool
) -> None:
    """They were repeated with those that the script had set since."""
    torch.manual_seed(0)
    model, data = nn.Sequential(Factor(), Factor()).double(), batches(6)

    def script(model: Any, number: int) -> None:
        for block in model:
            block.factor = 1.0 + number
            block.train(number != 1)

    runs = [interrupted(model, data, stop, schedule, count, recompute, script) for stop in (-1, 1, 3)]
    assert runs[0] == runs[1] == runs[2]


def test_a_checkpoint_changes_nothing() -> None:
    model, data = chain_model(4), batches(8)
    wanted, _, _ = train(model, data, 4, optimizer=momentum, schedule="pipedream")

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(model), "pipedream", loss=loss_of, optimizer=momentum, fabric=fabric
        )
        for batch in data:
            pipeline.step(batch)
            pipeline.checkpoint()
        pipeline.drain()
        return pipeline.state_dict()

    for weights in on_threads(4, work):
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_another_ranks_checkpoint_is_refused() -> None:
    def work(fabric: Any) -> None:
        pipeline = Pipeline(chain_model(2), loss=loss_of, optimizer=adam, fabric=fabric)
        state = pipeline.checkpoint()
        state["rank"] = 1 - state["rank"]
        pipeline.resume(state)

    with pytest.raises(ValueError, match="the checkpoint is of rank"):
        on_threads(2, work)


def test_state_of_the_whole_model_goes_back_and_forth() -> None:
    model, data = chain_model(4), batches(4)
    other = chain_model(4, seed=5)

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(model), "2bw", 2, (2, 2), loss=loss_of, optimizer=momentum, fabric=fabric
        )
        state = pipeline.state_dict()
        assert list(state) == list(model.state_dict())
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
        pipeline.step(data[0])
        with pytest.raises(ValueError, match="drain"):
            pipeline.load_state_dict(other.state_dict())
        pipeline.drain()
        with pytest.raises(ValueError, match="the state has no 0.weight"):
            pipeline.load_state_dict({})
        with pytest.raises(ValueError, match="the state has 9.weight, which the model has not"):
            pipeline.load_state_dict({**other.state_dict(), "9.weight": torch.zeros(1)})
        pipeline.load_state_dict(other.state_dict())
        value = pipeline.evaluate(data[1])
        for batch in data:
            pipeline.step(batch)
        pipeline.drain()
        result = pipeline.state_dict()
        pipeline.close()
        return value, result, pipeline.program

    for value, weights, program in on_threads(4, work):
        assert value == pytest.approx(float(loss_of(other(data[1][0]), data[1][1]).detach()))
        # One step was taken before: the momentum of that is still there, so plain replay must differ.
        fresh, _ = replayed(other, data, program, optimizer=momentum)
        with pytest.raises(AssertionError):
            assert_close(weights, fresh)


def test_drained_pipelines_fill_again() -> None:
    model, data = chain_model(3), batches(6)

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(copy.deepcopy(model), "pipedream", loss=loss_of, optimizer=adam, fabric=fabric)
        losses = []
        for part in (data[:3], data[3:]):
            losses += [pipeline.step(batch) for batch in part] + pipeline.drain()
        return pipeline.state_dict(), losses

    weights, losses = on_threads(3, work)[0]
    assert [value is None for value in losses] == 2 * [True, True, False, False, False]
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


@pytest.mark.few
@pytest.mark.parametrize(("schedule", "count", "mesh"), [("pipedream", 1, (2, 1)), ("2bw", 2, (2, 2))])
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_a_script_changes_while_others_are_in_flight(
    schedule: str, count: int, mesh: Any, recompute: bool
) -> None:
    """What is in flight ends with the weights of its forward, also after a checkpoint."""
    model, data = chain_model(4), batches(6)

    def run(change: str, again: bool = recompute, stop: int = -1) -> Any:
        def work(fabric: Any) -> Any:
            options: Any = {"loss": loss_of, "optimizer": adam, "fabric": fabric, "recompute": again}
            pipeline, losses = Pipeline(copy.deepcopy(model), schedule, count, mesh, **options), []
            for number, batch in enumerate(data):
                losses.append(pipeline.step(batch))
                with torch.no_grad():
                    if change == "swap":
                        before = [p.clone() for p in pipeline.parameters()]
                        for p in pipeline.parameters():
                            p.zero_()
                        pipeline.evaluate(batch)
                        for p, value in zip(pipeline.parameters(), before, strict=True):
                            p.copy_(value)
                    elif change:
                        for p in pipeline.parameters():
                            (p.data if change == "data" else p).mul_(0.8)
                if number == stop:
                    state = through_a_file(pipeline.checkpoint())
                    pipeline.close()
                    pipeline = Pipeline(copy.deepcopy(model), schedule, count, mesh, **options)
                    pipeline.resume(state)
            losses += pipeline.drain()
            return losses, list(pipeline.state_dict().values())

        losses, weights = on_threads(mesh[0] * mesh[1], work)[0]
        return losses, [value.tolist() for value in weights]

    assert run("swap") == run("")
    changed = run("write")
    assert changed == run("data") == run("write", not recompute) == run("write", stop=3)
