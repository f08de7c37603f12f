"""The state of the whole training: other ranks go on with it in other stages, with what one process has."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commsched as hvd
from commsched import Compression
from commsched.optimizer.gradient import RESIDUAL
from commsched.pipeline import Pipeline
from tests.support.pipeline_runs import (
    adam,
    assert_close,
    batches,
    chain_model,
    loss_of,
    momentum,
    on_threads,
)
from tests.unit.pipeline.test_pipeline_checkpoint import Averaging, through_a_file
from tests.unit.pipeline.test_pipeline_compression import rows, wide_model
from tests.unit.pipeline.test_pipeline_optimizer import Normed, by_dim, plain
from tests.unit.pipeline.test_pipeline_training import TiedEnds

Mesh = tuple[int, int]


def size_of(mesh: Mesh) -> int:
    return mesh[0] * mesh[1]


def equal(one: Any, other: Any) -> bool:
    """Whether two nested states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def without_cuts(state: dict[str, Any]) -> dict[str, Any]:
    """Without the groups of the stages' optimizers, and what quantising has lost on several ranks."""
    entries = {
        name: {key: value for key, value in kept.items() if key != RESIDUAL}
        for name, kept in state["optimizer"]["state"].items()
    }
    return state | {"optimizer": entries}


def moved(model: nn.Module, data: Any, meshes: Sequence[Mesh], **options: Any) -> tuple[Any, list[Any]]:
    """The weights, and all states: each mesh takes two steps, from the state that the one before has left."""
    options = {"loss": loss_of, "num_microbatches": 2, "bucket_bytes": 200} | options

    def work(state: Any, mesh: Mesh, data: Any, fabric: Any) -> Any:
        pipeline = Pipeline(copy.deepcopy(model), mesh=mesh, fabric=fabric, **options)
        if state is not None:
            pipeline.load_training_state(state)
            assert equal(without_cuts(pipeline.training_state()), without_cuts(state))
        for batch in data:
            pipeline.step(batch)
        pipeline.drain()
        left = pipeline.training_state(), pipeline.state_dict()
        pipeline.close()
        return left

    state: Any = None
    states = []
    for number, mesh in enumerate(meshes):
        two = data[2 * number : 2 * number + 2]
        everyone = on_threads(size_of(mesh), partial(work, state, mesh, two))
        assert all(equal(left, everyone[0]) for left in everyone)
        state, weights = through_a_file(everyone[0])
        assert equal(state["model"], weights)
        states.append(state)
    return weights, states


@pytest.mark.few
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("optimizer", [adam, momentum])
def test_other_stages_go_on_with_the_same_bits(optimizer: Any, schedule: str) -> None:
    model, data = chain_model(6), batches(8)
    wanted, _ = moved(model, data, [(1, 1)] * 4, optimizer=optimizer, schedule=schedule)
    meshes = [(3, 1), (2, 1), (1, 1), (4, 1)]
    found, states = moved(model, data, meshes, optimizer=optimizer, schedule=schedule)
    assert equal(found, wanted)
    assert [state["steps"] for state in states] == [2, 4, 6, 8]


@pytest.mark.few
@pytest.mark.parametrize("factory", [lambda named: adam([p for _, p in named]), by_dim])
@pytest.mark.parametrize("make", [Normed, TiedEnds])
def test_replicas_come_and_go(make: Any, factory: Any) -> None:
    """Replicas have shards of the optimizer's state, and stages have copies of a tied parameter."""
    torch.manual_seed(0)
    model, data = make().double(), batches(10)

    def named(named_parameters: Any) -> torch.optim.Optimizer:
        return factory(named_parameters)  # type: ignore[no-any-return]

    found, _ = moved(model, data, [(1, 3), (2, 1), (2, 2), (1, 1), (1, 2)], optimizer=named)
    assert_close(found, plain(model, data, factory))


def test_an_asynchronous_pipeline_is_drained_first() -> None:
    model, data = chain_model(4), batches(4)

    def work(fabric: Any) -> None:
        pipeline = Pipeline(copy.deepcopy(model), "2bw", 2, loss=loss_of, optimizer=adam, fabric=fabric)
        losses = [pipeline.step(batch) for batch in data]
        with pytest.raises(ValueError, match="has micro-batches in flight.*call drain"):
            pipeline.training_state()
        losses += pipeline.drain()
        assert len([loss for loss in losses if loss is not None]) == 4
        state = pipeline.training_state()
        assert state["steps"] == 4 and equal(state["model"], dict(pipeline.state_dict()))
        pipeline.close()

    on_threads(2, work)
    weights, _ = moved(model, data, [(2, 1), (1, 2)], optimizer=adam, schedule="2bw")
    assert all(value.isfinite().all() for value in weights.values())


def test_steps_of_the_caller_are_refused() -> None:
    def work(fabric: Any) -> None:
        pipeline = Pipeline(chain_model(2), num_microbatches=2, loss=loss_of, optimizer=None, fabric=fabric)
        pipeline.step(batches(1)[0])
        with pytest.raises(ValueError, match="with optimizer=None the caller takes the steps"):
            pipeline.training_state()
        pipeline.step(batches(1)[0])  # it goes on
        pipeline.close()

    on_threads(2, work)


def test_buffers_outside_of_the_state_dict_go_along() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, data = nn.Sequential(*(Averaging() for _ in range(3))).double(), batches(6)
    wanted, _ = moved(model, data, [(1, 1)] * 3, optimizer=adam)
    found, states = moved(model, data, [(3, 1), (1, 1), (2, 1)], optimizer=adam)
    assert equal(found, wanted) and set(states[0]["unsaved"]) == {"0.mean", "1.mean", "2.mean"}


def rated(params: Any) -> torch.optim.Optimizer:
    """NAdam's products would be rounded to bfloat16 where a state is loaded."""
    return torch.optim.NAdam(params, lr=0.01)


@pytest.mark.parametrize(("masters", "make"), [(True, adam), (False, rated)])
def test_half_precision_keeps_its_bits(masters: bool, make: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).bfloat16()
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(6)]
    options = {"optimizer": make, "master_weights": masters}
    wanted, _ = moved(model, data, [(1, 1)] * 3, **options)
    found, states = moved(model, data, [(3, 1), (2, 1), (1, 1)], **options)
    assert equal(found, wanted)
    kinds = {key: value.dtype for key, value in states[0]["optimizer"]["state"]["0.weight"].items()}
    assert kinds.get("master_weight" if masters else "mu_product") is torch.float32
    replicated, _ = moved(model, data, [(1, 2), (2, 1), (1, 3)], **options)
    assert all(value.isfinite().all() for value in replicated.values())


def test_options_of_groups_go_with_their_parameters() -> None:
    """What a script has set stays; a rate that differed with the stages is as the function makes it."""

    def by_stage(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1 * len(params), momentum=0.5)

    def work(mesh: Mesh, state: Any = None) -> Any:
        def on_rank(fabric: Any) -> Any:
            numbers: list[int] = []
            options = {"loss": loss_of, "optimizer": by_stage, "fabric": fabric, "num_microbatches": 2}
            options["on_step"] = lambda optimizer, number: numbers.append(number)
            pipeline = Pipeline(chain_model(3), mesh=mesh, **options)
            if state is not None:
                pipeline.load_training_state(state)
            groups = [group for optimizer in pipeline.optimizers for group in optimizer.param_groups]
            found = [(group["lr"], group["momentum"]) for group in groups]
            for group in groups:
                group["momentum"] = 0.25
            for batch in batches(2):
                pipeline.step(batch)
            left = pipeline.training_state(), found, numbers
            pipeline.close()
            return left

        return on_threads(size_of(mesh), on_rank)

    (state, made, numbers), *_ = work((2, 1))
    assert made == [(0.2, 0.5)] and numbers == [0, 1]
    for mesh, rates in (((1, 1), [0.1 * 6]), ((3, 1), [0.2, 0.4, 0.4]), ((1, 2), [0.1 * 6] * 2)):
        everyone = work(mesh, state)
        assert [found for _, found, _ in everyone] == [[(pytest.approx(rate), 0.25)] for rate in rates]
        assert all(numbers == [2, 3] for *_, numbers in everyone)


def test_what_quantising_has_lost_is_not_sent_twice() -> None:
    """One rank alone sends nothing: a kept residual would be added after many steps."""
    data = rows(6)
    options = {"optimizer": momentum, "compression": Compression.int8, "bucket_bytes": 1 << 20}
    _, states = moved(wide_model(), data, [(1, 2), (1, 1), (1, 2)], **options)
    kept = [any(RESIDUAL in each for each in state["optimizer"]["state"].values()) for state in states]
    assert kept == [True, False, True]


def test_a_sampler_goes_on_in_other_stages() -> None:
    data = TensorDataset(torch.arange(48).view(24, 2).double())

    def work(state: Any, mesh: Mesh, fabric: Any) -> Any:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))).double()
        options: Any = {"loss": loss_of, "optimizer": adam, "num_microbatches": 2, "fabric": fabric}
        pipeline = Pipeline(model, mesh=mesh, **options)
        if state is not None:
            pipeline.load_training_state(state)
        loader = DataLoader(data, batch_sampler=pipeline.sampler(data, 4, seed=3))
        rows = []
        for _, (batch,) in zip(range(2), loader):
            pipeline.step((batch, batch), local=True)
            rows += batch[:, 0].tolist() if fabric.rank in pipeline.layout.ranks[0] else []
        left = pipeline.training_state(), rows
        pipeline.close()
        return left

    seen: list[Any] = []
    state: Any = None
    for mesh in ((3, 1), (1, 2), (2, 1)):
        everyone = on_threads(size_of(mesh), partial(work, state, mesh))
        state = everyone[0][0]
        seen += [row for _, rows in everyone for row in rows]
    assert sorted(seen) == [2 * row for row in range(24)]


def test_a_checkpoint_for_other_stages(tmp_path: Path) -> None:
    """As docs/checkpoints.md has it: a value, which rank 0 writes."""
    data = batches(4)

    def alone() -> Pipeline:
        return Pipeline(chain_model(3), num_microbatches=2, loss=loss_of, optimizer=adam)

    hvd.init()
    try:
        first, second = alone(), alone()
        for batch in data[:2]:
            first.step(batch)
        hvd.save({"training": first.training_state()}, tmp_path).wait()
        state = (hvd.load({}, tmp_path) or {})["training"]
        second.load_training_state(state)
        assert [first.step(batch) for batch in data[2:]] == [second.step(batch) for batch in data[2:]]
        assert equal(first.training_state(), second.training_state())
        first.close()
        second.close()
    finally:
        hvd.shutdown()


class Counting(torch.optim.SGD):
    """Has a state of no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload]


def test_a_state_of_no_parameter_is_refused() -> None:
    def work(fabric: Any) -> None:
        made: Any = lambda params: Counting(params, lr=0.1)  # noqa: E731
        pipeline = Pipeline(chain_model(2), num_microbatches=2, loss=loss_of, optimizer=made, fabric=fabric)
        pipeline.step(batches(1)[0])
        with pytest.raises(ValueError, match=r"Counting keeps a state of no parameter \(\['steps'\]\)"):
            pipeline.training_state()

    on_threads(1, work)
