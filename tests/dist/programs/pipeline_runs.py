"""Pipelines between processes: the same results as with threads, and failures of real processes."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commsched.pipeline import Pipeline
from dnn_bench.pipeline import peers
from dnn_bench.pipeline.jobs import job_of
from tests.support.cases import Me, case, main
from tests.support.oracle import terms_of
from tests.support.pipeline_runs import (
    ROUNDING,
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
    for schedule in peers.SCHEDULES:
        pipeline = Pipeline(copy.deepcopy(job.model), schedule, 4, loss=job.loss, optimizer=job.optimizer)
        peer = peers.Peer(job, schedule, pipeline.layout.cuts, 4, me.rank, me.size)
        for step, (inputs, targets) in zip(range(1, 5), job.batches(16)):
            ours, its = (one.step((inputs.double(), targets)) for one in (pipeline, peer))
            allowed = rounding(torch.float64, terms_of(job.model, step))
            assert its is None or abs(ours - its) <= allowed * abs(its), (schedule, ours, its)
        pipeline.close()
    dist.destroy_process_group()


@case(ranks=(4,))
def placements_give_the_same_bits(me: Me) -> None:
    found = []
    for placement, size in (("eager", 200), ("bubble", 200), ("bubble", 1e9), ("aligned", 200)):
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


main(__name__)
