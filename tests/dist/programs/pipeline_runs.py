"""Pipelines between processes: the same results as with threads, and failures of real processes."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import commsched
from commsched.pipeline import Pipeline
from dnn_bench.pipeline import worker
from dnn_bench.pipeline.jobs import job_of
from tests.support.cases import Me, case, main
from tests.support.oracle import terms_of
from tests.support.pipeline_runs import (
    ROUNDING,
    WIDTH,
    adam,
    assert_close,
    batches,
    by_delays,
    chain_model,
    loss_of,
    momentum,
    replayed,
    sgd,
)
from tests.support.rounding import rounding

SCHEDULES: dict[int, list[tuple[str, int, tuple[int, Any], int]]] = {
    2: [
        ("gpipe", 3, (2, 1), 2),
        ("1f1b", 4, (2, 1), 2),
        ("1f1b", 2, (1, 2), 1),
        ("interleaved", 4, (2, 1), 4),
        ("zero_bubble", 3, (2, 1), 2),
        ("pipedream", 1, (2, 1), 2),
        ("2bw", 3, (2, 1), 2),
        ("wpipe", 4, (2, 1), 4),
    ],
    4: [
        ("1f1b", 4, (2, 2), 2),
        ("zero_bubble", 4, (4, 1), 4),
        ("interleaved", 4, (2, 2), 4),
        ("ashpipe", 1, (3, [2, 1, 1]), 3),
        ("ashpipe", 1, (2, [1, 3]), 2),
        ("pipedream", 1, (4, 1), 4),
        ("2bw", 4, (2, 2), 2),
        ("wpipe", 4, (2, 2), 4),
        ("bundle", 1, (2, 2), 2),
    ],
}


def finished(pipeline: Pipeline, data: list[Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    losses = [pipeline.step(batch) for batch in data]
    found = [value for value in losses if value is not None] + pipeline.drain()
    state = pipeline.state_dict()
    pipeline.close()
    return state, found


@case(ranks=(2, 4))
def all_schedules(me: Me) -> None:
    for schedule, count, mesh, layers in SCHEDULES[me.size]:
        model, data = chain_model(layers), batches(5)
        pipeline = Pipeline(copy.deepcopy(model), schedule, count, mesh, loss=loss_of, optimizer=momentum)
        state, losses = finished(pipeline, data)
        wanted, expected = replayed(model, data, pipeline.program, momentum)
        assert_close(state, wanted)
        torch.testing.assert_close(losses, expected, rtol=ROUNDING, atol=0)


@case(ranks=(2,))
def losses_are_those_of_torchs_pipelines(me: Me) -> None:
    job = job_of("mlp_tiny")
    job.model.double()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("torch", me.store), rank=me.rank, world_size=me.size
    )
    for schedule in worker.SCHEDULES:
        pipeline = Pipeline(copy.deepcopy(job.model), schedule, 4, loss=job.loss, optimizer=job.optimizer)
        example = next(job.batches(4))[0].double()
        peer = worker.Peer(job, schedule, pipeline.layout.cuts, 4, example, me.rank, me.size)
        for step, (inputs, targets) in zip(range(1, 5), job.batches(16)):
            ours, its = (one.step((inputs.double(), targets)) for one in (pipeline, peer))
            allowed = rounding(torch.float64, terms_of(job.model, step))
            assert its is None or abs(ours - its) <= allowed * abs(its), (schedule, ours, its)
        pipeline.close()
    dist.destroy_process_group()


@case(ranks=(4,))
def placements_give_the_same_bits(me: Me) -> None:
    found = []
    for placement, size in (("eager", 200), ("bubble", 200), ("bubble", 1e9)):
        options: dict[str, Any] = {"placement": placement, "bucket_bytes": size}
        model = chain_model(2)
        pipeline = Pipeline(model, "2bw", 4, (2, 2), loss=loss_of, optimizer=adam, **options)
        me.shake(pipeline.stages[me.rank // 2].module)
        found.append(finished(pipeline, batches(6))[0])
    for state in found[1:]:
        assert all(torch.equal(state[name], value) for name, value in found[0].items())


@case(ranks=(2,))
def large_messages_and_changing_batches(me: Me) -> None:
    """Megabytes between stages, batches of several sizes, evaluation in between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 64)).double()
    data = [(torch.randn(n, 64).double(), torch.randn(n, 64).double()) for n in (96, 96, 40, 96, 7)]
    pipeline = Pipeline(copy.deepcopy(model), "1f1b", 3, loss=loss_of, optimizer=sgd)
    for number, batch in enumerate(data):
        pipeline.step(batch)
        expected = by_delays(model, data[: number + 1], 3, lambda name: 0)[0]
        model_now = copy.deepcopy(model)
        model_now.load_state_dict(expected)
        with torch.no_grad():
            wanted = float(loss_of(model_now(data[0][0]), data[0][1]))
        assert abs(pipeline.evaluate(data[0]) - wanted) < 1e-9 * wanted
    assert_close(pipeline.state_dict(), expected, 1e-9)


class Draws(nn.Module):
    """Keeps what it draws, as a dropout would."""

    def __init__(self, drawn: list[torch.Tensor]) -> None:
        super().__init__()
        self.drawn, self.linear = drawn, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn.append(torch.rand(4).double())
        return self.linear(x)


@case(ranks=(2,))
def ranks_that_are_seeded_alike_draw_other_masks_and_the_same_data(me: Me) -> None:
    for mesh, recompute in (((2, 1), False), ((1, 2), True)):
        runs = []
        for _ in range(2):
            torch.manual_seed(0)
            drawn: list[torch.Tensor] = []
            model = nn.Sequential(Draws(drawn), Draws(drawn)).double()
            pipeline = Pipeline(
                model, mesh=mesh, num_microbatches=2, loss=loss_of, optimizer=sgd, recompute=recompute
            )
            for _ in range(2):
                before = torch.get_rng_state()
                pipeline.step(batches(1)[0])
                assert torch.equal(torch.get_rng_state(), before)
            pipeline.close()
            runs.append(torch.stack(drawn))
        assert torch.equal(*runs)
        everyone = commsched.allgather(runs[0]).tolist()
        assert len(set(map(tuple, everyone))) == len(everyone) // (1 + recompute)


@case(ranks=(2,))
def goes_on_in_mid_run_with_other_random_numbers_drawn_meanwhile(me: Me) -> None:
    """Dropout, and recomputation in one stage: every process has random numbers of its own."""

    def make() -> Pipeline:
        torch.manual_seed(0)
        parts = [nn.Linear(6, 6), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.3)]
        model = nn.Sequential(*parts).double()
        pipeline = Pipeline(model, "2bw", 2, loss=loss_of, optimizer=adam, recompute=[True, False])
        torch.manual_seed(5 + me.rank)
        return pipeline

    data = batches(6)
    whole, losses = finished(make(), data)
    first = make()
    found = [first.step(batch) for batch in data[:3]]
    file = io.BytesIO()
    torch.save(first.checkpoint(), file)
    second = make()
    torch.rand(17)
    file.seek(0)
    second.resume(torch.load(file, weights_only=False))
    state, rest = finished(second, data[3:])
    assert [value for value in found if value is not None] + rest == losses
    assert all(torch.equal(state[name], value) for name, value in whole.items())


class Rows(Dataset[Any]):
    """Rows that are read one by one; ``read`` counts how often each was, in workers too."""

    def __init__(self, count: int) -> None:
        self.rows = batches(1, count)[0]
        self.read = torch.zeros(count, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        return self.rows[0][index], self.rows[1][index]


@case(ranks=(3,))
def loaders_with_workers_read_each_ranks_rows_and_go_on_in_mid_epoch(me: Me) -> None:
    count, size, epochs = 47, 12, 2
    for schedule, parts, mesh in (
        ("1f1b", 2, (2, [2, 1])),
        ("pipedream", 1, (3, 1)),
        ("2bw", 3, (2, [1, 2])),
    ):
        start = chain_model(mesh[0])

        def make(
            start: nn.Module = start, schedule: str = schedule, parts: int = parts, mesh: Any = mesh
        ) -> Pipeline:
            return Pipeline(copy.deepcopy(start), schedule, parts, mesh, loss=loss_of, optimizer=adam)

        def loaded(pipeline: Pipeline, data: Rows) -> DataLoader[Any]:
            sampler = pipeline.sampler(data, size, seed=7)
            return DataLoader(data, batch_sampler=sampler, num_workers=2, prefetch_factor=3)

        order = [torch.randperm(count, generator=torch.Generator().manual_seed(7 + e)) for e in range(epochs)]
        rows = Rows(count).rows
        whole = [(rows[0][chosen], rows[1][chosen]) for epoch in order for chosen in epoch.split(size)]
        wanted, losses = finished(make(), whole)

        data, first = Rows(count), make()
        found = []
        for batch in loaded(first, data):
            found.append(first.step(batch, local=True))
            if len(found) == 2:  # workers have read more
                break
        state = first.checkpoint()
        first.close()
        second, data = make(), Rows(count)
        second.resume(state)
        loader = loaded(second, data)
        while loader.batch_sampler.epoch < epochs:
            found += [second.step(batch, local=True) for batch in loader]
        found += second.drain()
        assert [value for value in found if value is not None] == losses
        state = second.state_dict()
        assert all(torch.equal(state[name], value) for name, value in wanted.items())
        expected = sum(len(second.rows(len(y))) or 1 for _, y in whole[2:])
        assert int(data.read.sum()) == expected
        second.close()


@case(ranks=(2,))
def other_ranks_stages_are_freed_with_the_users_model(me: Me) -> None:
    """Every rank kept the whole model, because the pipeline held a method of the traced one."""
    for schedule, count, layers in (("1f1b", 3, 4), ("wpipe", 2, 4)):
        model, data = chain_model(layers), batches(6)
        reference = copy.deepcopy(model)
        weights = {name: weakref.ref(p) for name, p in model.named_parameters()}
        modules = {name: weakref.ref(part) for name, part in model.named_children()}
        pipeline = Pipeline(model, schedule, count, loss=loss_of, optimizer=momentum)
        del model
        gc.collect()
        mine = {name for stage in pipeline.stages.values() for name in stage.versions.names}
        assert 0 < len(mine) < len(weights)
        assert {name for name, seen in weights.items() if seen() is not None} <= mine
        # Each stage of these models is one layer and its activation, so the modules tell the stages apart.
        kept = {name for name, seen in modules.items() if seen() is not None}
        assert {name.partition(".")[0] for name in mine} <= kept and len(kept) == len(modules) // 2

        # Everything that speaks of the whole model gets it from the ranks.
        state = pipeline.state_dict()
        assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items())
        expected = float(loss_of(reference(data[0][0]), data[0][1]))
        assert abs(pipeline.evaluate(data[0]) - expected) < 1e-12 * expected
        pipeline.load_state_dict(chain_model(layers, seed=5).state_dict())
        pipeline.load_state_dict(state)
        losses = [pipeline.step(batch) for batch in data[:3]]
        again = Pipeline(chain_model(layers), schedule, count, loss=loss_of, optimizer=momentum)
        again.resume(pipeline.checkpoint())
        found, rest = finished(again, data[3:])
        wanted, told = replayed(reference, data, pipeline.program, momentum)
        assert_close(found, wanted, 1e-11)
        torch.testing.assert_close([v for v in losses if v is not None] + rest, told, rtol=1e-11, atol=0)
        pipeline.close()


main(__name__)
