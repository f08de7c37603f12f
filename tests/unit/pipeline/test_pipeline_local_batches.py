"""Each rank reads its own rows: all schedules train as with whole batches, and samplers yield those rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from commsched.pipeline import Pipeline
from commsched.pipeline.rows import cut
from commsched.pipeline.shares import rows_to_pass
from scheduler.ir.layout import Samples, Tiles
from scheduler.pipelines.build import generate
from tests.support.pipeline_runs import (
    batches,
    chain_model,
    loss_of,
    momentum,
    on_threads,
    train,
)

SCHEDULES = [
    ("gpipe", 2, (3, [4, 3, 1]), 3),
    ("1f1b", 2, (3, [4, 3, 1]), 3),
    ("1f1b", 2, (3, [1, 2, 3]), 3),
    ("zero_bubble", 3, (3, [2, 1, 2]), 3),
    ("interleaved", 2, (2, 2), 4),
    ("bundle", 1, (2, 2), 2),
    ("pipedream", 1, (3, [4, 3, 1]), 3),
    ("pipedream", 2, (3, [1, 2, 2]), 3),
    ("ashpipe", 1, (3, [2, 2, 1]), 3),
    ("2bw", 2, (3, [4, 3, 1]), 3),
    ("wpipe", 2, (2, 2), 4),
]


def size_of(mesh: Any) -> int:
    return sum(mesh[1]) if isinstance(mesh[1], list) else mesh[0] * mesh[1]


def mine(pipeline: Pipeline, batch: Any) -> Any:
    """What a rank passes: its rows of the inputs on the first stage, of the targets on the last."""
    inputs, targets = (x[pipeline.rows(len(x))] for x in batch)
    held = set(pipeline.stages)
    if not held & {0, pipeline.layout.stages - 1}:
        return None
    return inputs if 0 in held else None, targets if pipeline.layout.stages - 1 in held else None


def train_locally(
    model: torch.nn.Module, data: Any, fabric: Any, loss: Any, **options: Any
) -> tuple[Pipeline, list[float], float]:
    """The pipeline after a local step with each batch, its losses, and that of an evaluation."""
    pipeline = Pipeline(copy.deepcopy(model), loss=loss, optimizer=momentum, fabric=fabric, **options)
    losses = [pipeline.step(mine(pipeline, batch), local=True) for batch in data]
    losses += pipeline.drain()
    score = pipeline.evaluate(mine(pipeline, data[0]), local=True)
    assert score == pipeline.evaluate(data[0])
    return pipeline, [value for value in losses if value is not None], score


def rows_and_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.tensor(len(targets)), len(targets) * loss_of(outputs, targets)])


@pytest.mark.few
@pytest.mark.parametrize(("schedule", "count", "mesh", "layers"), SCHEDULES)
def test_local_batches_train_as_whole_ones(schedule: str, count: int, mesh: Any, layers: int) -> None:
    model = chain_model(layers)
    data = [batch for rows in (11, 11, 8, 13) for batch in batches(2, rows, seed=rows)]
    options: dict[str, Any] = {"schedule": schedule, "num_microbatches": count, "mesh": mesh}
    wanted, expected, _ = train(model, data, size_of(mesh), momentum, **options)

    def work(fabric: Any) -> Any:
        pipeline, losses, score = train_locally(model, data, fabric, loss_of, **options)
        counted = pipeline.evaluate(mine(pipeline, data[0]), rows_and_loss, local=True)
        assert counted.tolist() == [11, pytest.approx(11 * score)]
        result = pipeline.state_dict()
        pipeline.close()
        return result, losses

    for weights, losses in on_threads(size_of(mesh), work):
        assert losses == expected
        assert all(torch.equal(weights[name], value) for name, value in wanted.items())


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    parts=st.integers(1, 4),
    extra=st.integers(0, 9),
)
def test_the_ends_hold_every_row_once(replicas: list[int], parts: int, extra: int) -> None:
    layout = generate("gpipe", len(replicas), parts, replicas=replicas).pipeline
    assert layout is not None
    rows = parts * max(replicas) + extra
    for stage in (0, len(replicas) - 1):
        found = [rows_to_pass(layout, rank, rows) for rank in layout.ranks[stage]]
        assert sorted(sum(found, [])) == list(range(rows))
        assert all(each == sorted(each) and len(each) >= parts for each in found)
    between = {rank for ranks in layout.ranks[1:-1] for rank in ranks}
    assert all(rows_to_pass(layout, rank, rows) == [] for rank in between)


def test_tiles_of_a_replica_pass_the_same_rows() -> None:
    program = generate("1f1b", 2, 2, replicas=2, placements=[Tiles((2, 1)), Samples(1)])
    layout = program.pipeline
    assert layout is not None
    tiles, wholes = ([rows_to_pass(layout, rank, 10) for rank in ranks] for ranks in layout.ranks)
    assert tiles == [wholes[0], wholes[0], wholes[1], wholes[1]]
    assert sorted(wholes[0] + wholes[1]) == list(range(10))


# -- refused -------------------------------------------------------------------------------------------------


def test_wrong_rows_are_refused_with_what_is_right() -> None:
    x, y = batches(1, rows=10)[0]

    def work(fabric: Any) -> None:
        pipeline = Pipeline(
            chain_model(2), "1f1b", 2, (2, [2, 1]), loss=loss_of, optimizer=momentum, fabric=fabric
        )
        rows = slice(0, 6) if fabric.rank == 0 else slice(6, 10)
        pipeline.step((x[rows], y), local=True)

    said = r"rank [01] passed [46] rows .* ranks passed \[6, 4\], together 10.* must pass (4|6)"
    with pytest.raises(ValueError, match=said):
        on_threads(3, work)


def test_other_rows_of_the_last_stage_are_refused() -> None:
    x, y = batches(1, rows=10)[0]

    def work(fabric: Any) -> None:
        pipeline = Pipeline(
            chain_model(2), "1f1b", 2, (2, 1), loss=loss_of, optimizer=momentum, fabric=fabric
        )
        pipeline.step((x, y[:8]), local=True)

    with pytest.raises(ValueError, match=r"rank 1 passed 8 rows to a local step of stage 1.* must pass 10"):
        on_threads(2, work)


def test_mirrored_replicas_need_whole_batches() -> None:
    def work(fabric: Any) -> None:
        options: dict[str, Any] = {"mirrored": True, "placements": [Samples(1), Samples(1)]}
        pipeline = Pipeline(
            chain_model(2), "1f1b", 1, (2, 1), loss=loss_of, optimizer=None, fabric=fabric, **options
        )
        pipeline.step(batches(1)[0], local=True)

    with pytest.raises(ValueError, match="mirrored replicas take the inputs of some rows"):
        on_threads(2, work)


# -- samplers ------------------------------------------------------------------------------------------------


def dataset(rows: int = 43) -> TensorDataset:
    return TensorDataset(*batches(1, rows)[0])


OPTIONS: dict[str, Any] = {"schedule": "2bw", "num_microbatches": 2, "mesh": (3, [3, 1, 2])}
MODEL = chain_model(3)  # made once: ranks that are threads share the random numbers


def made(fabric: Any) -> Pipeline:
    return Pipeline(copy.deepcopy(MODEL), loss=loss_of, optimizer=momentum, fabric=fabric, **OPTIONS)


def sampled(fabric: Any) -> tuple[Pipeline, Any]:
    pipeline = made(fabric)
    return pipeline, pipeline.sampler(dataset(), 10, seed=3, drop_last=True)


def trained(pipeline: Pipeline, sampler: Any, until: int) -> list[float | None]:
    """As many epochs, by a loader that is asked anew for each."""
    losses = []
    for epoch in range(sampler.epoch, until):
        sampler.set_epoch(epoch)
        for batch in DataLoader(dataset(), batch_sampler=sampler):
            losses.append(pipeline.step(batch, local=True))
    return losses


def test_samplers_yield_what_whole_batches_hold() -> None:
    order = [torch.randperm(43, generator=torch.Generator().manual_seed(3 + epoch)) for epoch in range(2)]
    x, y = dataset().tensors
    data = [(x[rows], y[rows]) for epoch in order for rows in epoch[:40].split(10)]
    wanted, expected, _ = train(MODEL, data, 6, momentum, **OPTIONS)

    def work(fabric: Any) -> Any:
        pipeline, sampler = sampled(fabric)
        assert len(sampler) == 4
        if 1 in pipeline.stages:
            assert all(len(indices) == 1 for indices in sampler)
        losses = trained(pipeline, sampler, 2) + pipeline.drain()
        return pipeline.state_dict(), [value for value in losses if value is not None]

    for weights, losses in on_threads(6, work):
        assert losses == expected
        assert all(torch.equal(weights[name], value) for name, value in wanted.items())


@pytest.mark.few
@pytest.mark.parametrize("stop", [1, 4, 6])
@pytest.mark.parametrize("late", [False, True])
def test_a_sampler_goes_on_where_the_pipeline_was(stop: int, late: bool) -> None:
    def whole(fabric: Any) -> Any:
        pipeline, sampler = sampled(fabric)
        trained(pipeline, sampler, 3)
        pipeline.drain()
        return pipeline.state_dict()

    def stopped(fabric: Any) -> Any:
        first, sampler = sampled(fabric)
        taken = 0
        while taken < stop:
            batches_ahead = list(DataLoader(dataset(), batch_sampler=sampler))  # fetched and never trained
            for batch in batches_ahead[: stop - taken]:
                first.step(batch, local=True)
                taken += 1
        state = first.checkpoint()
        first.close()
        if late:
            second = made(fabric)
            second.resume(state)
            sampler = second.sampler(dataset(), 10, seed=3, drop_last=True)
        else:
            second, sampler = sampled(fabric)
            second.resume(state)
        assert (sampler.epoch, sampler.position) == divmod(stop, 4)
        trained(second, sampler, 3)
        second.drain()
        return second.state_dict()

    wanted = on_threads(6, whole)[0]
    for weights in on_threads(6, stopped):
        assert all(torch.equal(weights[name], value) for name, value in wanted.items())


def test_epochs_without_set_epoch_differ_and_a_new_epoch_begins_at_its_start() -> None:
    def work(fabric: Any) -> None:
        pipeline = Pipeline(chain_model(1), loss=loss_of, optimizer=momentum, fabric=fabric)
        sampler = pipeline.sampler(dataset(12), 5)
        assert [len(step) for step in sampler] == [5, 5, 2] and sampler.epoch_rows == 12
        # A second sampler took the place of the first, which then gave the same order in every epoch.
        with pytest.raises(
            ValueError, match="advance a sampler of .*; pass trains=False for one that evaluates"
        ):
            pipeline.sampler(dataset(12), 5, drop_last=True)
        assert pipeline.sampler(dataset(12), 5, drop_last=True, trains=False).epoch_rows == 10
        first = sum(sampler, [])
        assert sorted(first) == list(range(12)) and first == sum(sampler, [])
        for _ in range(3):
            pipeline.step(cut(dataset(12).tensors, (0, 5)), local=True)
        second = sum(sampler, [])
        assert sampler.epoch == 1 and second != first and sorted(second) == list(range(12))
        pipeline.step(cut(dataset(12).tensors, (0, 5)), local=True)
        sampler.set_epoch(1)
        assert sum(sampler, []) == second[5:]
        sampler.set_epoch(0)
        assert sum(sampler, []) == first
        plain = pipeline.sampler(dataset(12), 5, shuffle=False, trains=True)
        assert sum(plain, []) == list(range(12))

    on_threads(1, work)


def test_samplers_that_cannot_be() -> None:
    def work(fabric: Any, rows: int, batch_size: int, **options: Any) -> Pipeline:
        pipeline = Pipeline(chain_model(2), "1f1b", 4, loss=loss_of, optimizer=momentum, fabric=fabric)
        pipeline.sampler(dataset(rows), batch_size, **options)
        return pipeline

    with pytest.raises(ValueError, match="3 rows in 4 micro-batches"):
        on_threads(2, lambda fabric: work(fabric, 11, 8))
    with pytest.raises(ValueError, match="at most the data set's 5 rows; got 8"):
        on_threads(2, lambda fabric: work(fabric, 5, 8, drop_last=True))
    with pytest.raises(ValueError, match="made with local=True, so call"):
        on_threads(2, lambda fabric: work(fabric, 8, 8).step(batches(1)[0]))
    with pytest.raises(ValueError, match="the checkpoint's sampler has .*'seed': 0.*, this one .*'seed': 1"):
        on_threads(2, lambda fabric: work(fabric, 8, 8, seed=1).resume(work(fabric, 8, 8).checkpoint()))


@pytest.mark.parametrize("rows", [1, 3, 4, 5])
@pytest.mark.parametrize("mesh", [(2, 1), (3, [2, 1, 2])])
def test_evaluations_of_few_rows_leave_micro_batches_out(rows: int, mesh: Any) -> None:
    """A later evaluation took the messages that an earlier one had expected and never got."""
    model, (x, y) = chain_model(3), batches(1, 12)[0]

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(model), "1f1b", 4, mesh, loss=loss_of, optimizer=momentum, fabric=fabric
        )
        few = [pipeline.evaluate((x[:rows], y[:rows])) for _ in range(2)]
        return few, pipeline.evaluate((x, y))

    for few, all_of_them in on_threads(size_of(mesh), work):
        wanted = float(loss_of(model(x[:rows]), y[:rows]).detach())
        assert few == [pytest.approx(wanted)] * 2
        assert all_of_them == pytest.approx(float(loss_of(model(x), y).detach()))
