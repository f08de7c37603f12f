"""State dicts of a pipeline's optimizers: of whole parameters, as in one process, wherever the state lies."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from commsched.pipeline import Pipeline
from tests.support.pipeline_runs import ROUNDING, assert_close, batches, loss_of, on_threads
from tests.unit.pipeline.test_pipeline_checkpoint import through_a_file
from tests.unit.pipeline.test_pipeline_optimizer import Halved, Normed, Whole, Words, by_dim, plain, words

MESHES = [(1, 2), (2, 2), (2, 1)]
State = dict[str, Any]


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01, eps=1e-3)


def adagrad(named: Any) -> torch.optim.Optimizer:
    """Has a state before the first step."""
    return torch.optim.Adagrad([p for _, p in named], lr=0.01, eps=1e-3)


def whole(named: Any) -> torch.optim.Optimizer:
    return Whole([p for _, p in named], lr=0.05, momentum=0.9)


def made(model: nn.Module, mesh: tuple[int, int], factory: Any, fabric: Any, **options: Any) -> Pipeline:
    def make(named_parameters: Any) -> torch.optim.Optimizer:
        return factory(named_parameters)  # type: ignore[no-any-return]

    given = {"loss": loss_of, "optimizer": make, "num_microbatches": 2, "bucket_bytes": 200} | options
    return Pipeline(copy.deepcopy(model), mesh=mesh, fabric=fabric, **given)


def names_of(pipeline: Pipeline) -> list[tuple[str, ...]]:
    """The parameters of this rank's stages."""
    return [stage.versions.names for stage in pipeline.stages.values()]


def stages_of(model: nn.Module, mesh: tuple[int, int]) -> list[tuple[str, ...]]:
    """The parameters of every stage."""

    def work(fabric: Any) -> Any:
        pipeline = made(model, mesh, adamw, fabric)
        pipeline.close()
        return names_of(pipeline)

    everyone = on_threads(mesh[0] * mesh[1], work)
    return list(dict.fromkeys(names for mine in everyone for names in mine))


def alone(
    model: nn.Module, data: Any, factory: Any, stages: Sequence[Sequence[str]], before: Sequence[State] = ()
) -> tuple[nn.Module, list[State]]:
    """One process with an optimizer for each stage. ``before``: the states with which they begin."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    steppers = [factory([(name, parameters[name]) for name in names]) for names in stages]
    for stepper, state in zip(steppers, before):
        stepper.load_state_dict(state)
    for inputs, targets in data:
        model.zero_grad()
        loss_of(model(inputs), targets).backward()
        for stepper in steppers:
            stepper.step()
    return model, [stepper.state_dict() for stepper in steppers]


def assert_same(found: State, wanted: State, tolerance: float) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for number, entries in wanted["state"].items():
        assert found["state"][number].keys() == entries.keys()
        for key, value in entries.items():
            mine = found["state"][number][key]
            torch.testing.assert_close(mine, value, rtol=tolerance, atol=tolerance, msg=f"{number} {key}")


@pytest.mark.few
@pytest.mark.parametrize("factory", [by_dim, adamw, adagrad, whole])
@pytest.mark.parametrize("mesh", MESHES)
def test_they_are_those_of_one_process_and_go_on_there(mesh: tuple[int, int], factory: Any) -> None:
    """With replicas they were empty."""
    model, data = Normed(), batches(5)

    def work(fabric: Any) -> Any:
        pipeline = made(model, mesh, factory, fabric)
        for batch in data[:3]:
            pipeline.step(batch)
        states = through_a_file([optimizer.state_dict() for optimizer in pipeline.optimizers])
        weights = pipeline.state_dict()
        for batch in data[3:]:  # it goes on as if nobody had looked
            pipeline.step(batch)
        result = names_of(pipeline), states, weights, pipeline.state_dict()
        pipeline.close()
        return result

    stages, wanted, by_stage = stages_of(model, mesh), plain(model, data, factory), {}
    expected = dict(zip(stages, alone(model, data[:3], factory, stages)[1], strict=True))
    for mine, states, weights, after in on_threads(mesh[0] * mesh[1], work):
        for names, state in zip(mine, states, strict=True):
            assert_same(state, expected[names], ROUNDING)
        assert_close(after, wanted)
        by_stage |= dict(zip(mine, states, strict=True))
        middle = weights
    assert by_stage.keys() == expected.keys()
    rest = copy.deepcopy(model)
    rest.load_state_dict(middle)
    ended, _ = alone(rest, data[3:], factory, list(by_stage), list(by_stage.values()))
    assert_close(ended.state_dict(), wanted)


@pytest.mark.few
@pytest.mark.parametrize("factory", [by_dim, adamw, whole])
@pytest.mark.parametrize("mesh", MESHES)
def test_they_take_those_of_one_process(mesh: tuple[int, int], factory: Any) -> None:
    model, data = Normed(), batches(5)
    stages = stages_of(model, mesh)
    middle, states = alone(model, data[:3], factory, stages)
    by_stage = dict(zip(stages, states, strict=True))

    def work(fabric: Any) -> Any:
        pipeline = made(Normed(), mesh, factory, fabric)
        pipeline.step(data[0])  # what it has learnt is replaced
        pipeline.load_state_dict(middle.state_dict())
        for names, optimizer in zip(names_of(pipeline), pipeline.optimizers, strict=True):
            optimizer.load_state_dict(copy.deepcopy(by_stage[names]))  # torch keeps the tensors
        for batch in data[3:]:
            pipeline.step(batch)
        found = pipeline.state_dict()
        pipeline.close()
        return found

    wanted = plain(model, data, factory)
    for found in on_threads(mesh[0] * mesh[1], work):
        assert_close(found, wanted)


CASES = [
    ("halves", (1, 2), {"master_weights": True}),
    ("halves", (2, 2), {"master_weights": True}),
    ("halves", (2, 1), {"master_weights": True}),
    ("sparse", (1, 2), {}),
    ("normed", (2, 2), {"schedule": "2bw", "num_microbatches": 2}),
    ("normed", (2, 2), {"schedule": "wpipe", "num_microbatches": 2, "layers": 4}),
]


@pytest.mark.few
@pytest.mark.parametrize(("kind", "mesh", "options"), CASES, ids=str)
@pytest.mark.parametrize("seen", [True, False])
def test_a_pipeline_goes_on_with_them_to_the_bit(
    kind: str, mesh: tuple[int, int], options: dict[str, Any], seen: bool
) -> None:
    """Also with masters, whose state torch rounds to the parameters' type when it loads it. ``seen``: the
    state is only looked at, in mid-run where the schedule is asynchronous, and changes nothing.
    """
    options = dict(options)
    torch.manual_seed(0)
    model: nn.Module = {
        "halves": lambda: nn.Sequential(Halved(), Halved()),
        "sparse": lambda: nn.Sequential(Words(), *Normed(1)).double(),
        "normed": lambda: Normed(options.pop("layers", 2)),
    }[kind]()
    factory = adagrad if kind == "sparse" else adamw
    data = words(5) if kind == "sparse" else batches(5)

    def work(fabric: Any) -> Any:
        straight = made(model, mesh, factory, fabric, **options)
        pipeline = made(model, mesh, factory, fabric, **options)
        for each in (straight, pipeline):
            for batch in data[:3]:
                each.step(batch)
                if seen and each is pipeline:
                    assert all(optimizer.state_dict() for optimizer in each.optimizers)
        if not seen:
            for each in (straight, pipeline):
                each.drain()
            weights = pipeline.state_dict()
            states = through_a_file([optimizer.state_dict() for optimizer in pipeline.optimizers])
            pipeline.close()
            pipeline = made(model, mesh, factory, fabric, **options)
            pipeline.load_state_dict(weights)
            for optimizer, state in zip(pipeline.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        found = []
        for each in (straight, pipeline):
            for batch in data[3:]:
                each.step(batch)
            each.drain()
            found.append((each.state_dict(), [optimizer.state_dict() for optimizer in each.optimizers]))
            each.close()
        return found

    for (wanted, wanted_states), (weights, states) in on_threads(mesh[0] * mesh[1], work):
        assert all(torch.equal(weights[name], value) for name, value in wanted.items())
        for state, other in zip(states, wanted_states, strict=True):
            assert_same(state, other, 0.0)
