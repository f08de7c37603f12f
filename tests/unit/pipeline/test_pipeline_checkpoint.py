"""Stopping in the middle of a run, and state of the whole model."""

from __future__ import annotations

import copy
import io
import threading
import time
from typing import Any

import pytest
import torch

from commsched.pipeline import Pipeline
from tests.support.pipeline_runs import (
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
