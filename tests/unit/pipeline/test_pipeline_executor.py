"""The executor against one process that replays the program's versions, and against the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from torch import Tensor

from commsched.channels import Pending
from commsched.pipeline.messages import ThreadLane
from tests.support.pipeline_runs import (
    ROUNDING,
    assert_close,
    batches,
    by_delays,
    chain_model,
    differ,
    replayed,
    stage_of_tensors,
    train,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "pipedream", "2bw", "wpipe", "ashpipe")


def layers_for(schedule: str, stages: int) -> int:
    return stages * (2 if schedule in ("interleaved", "wpipe") else 1)


# Stages, micro-batches and replicas; fewer, as many and more micro-batches than stages. The slow run takes
# the others.
OFTEN = {(1, 2, 2), (2, 1, 1), (2, 4, 2), (4, 4, 1), (4, 6, 1)}
SIZES = [
    pytest.param(*size, marks=[] if size in OFTEN else pytest.mark.slow)
    for size in product([1, 2, 4], [1, 2, 4, 6], [1, 2])
]


@pytest.mark.few
@pytest.mark.parametrize(("stages", "count", "replicas"), SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_the_replayed_versions(schedule: str, stages: int, count: int, replicas: int) -> None:
    if schedule == "ashpipe":
        count = 1
    model, data = chain_model(layers_for(schedule, stages)), batches(6)
    options = {"schedule": schedule, "num_microbatches": count, "mesh": (stages, replicas)}
    weights, losses, pipeline = train(model, data, stages * replicas, **options)
    wanted, expected = replayed(model, data, pipeline.program)
    assert_close(weights, wanted)
    assert losses == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("schedule", ["pipedream", "ashpipe"])
def test_pipedream_is_its_formula(schedule: str) -> None:
    model, data = chain_model(4), batches(8)
    weights, _, pipeline = train(model, data, 4, schedule=schedule)
    stage = stage_of_tensors((0, 1, 2, 3), model)
    assert_close(weights, by_delays(model, data, 1, lambda name: 3 - stage[name])[0])
    assert pipeline.delays == (3, 2, 1, 0)


def test_2bw_and_wpipe_are_their_formulas_and_differ() -> None:
    model, data = chain_model(4), batches(8)
    two, _, _ = train(model, data, 2, schedule="2bw", num_microbatches=4, mesh=(2, 1))
    assert_close(two, by_delays(model, data, 4, lambda name: 1)[0])
    groups, _, pipeline = train(model, data, 2, schedule="wpipe", num_microbatches=4, mesh=(2, 1))
    stage = stage_of_tensors((0, 1, 2, 3), model)
    assert_close(groups, by_delays(model, data, 4, lambda name: 1 if stage[name] < 2 else 0)[0])
    assert pipeline.delays == (1, 1, 0, 0)
    assert differ(two, groups)


def test_the_last_gradient_leaves_before_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    # The loss was sent between the last forward and its backward, whose gradient other ranks wait for.
    sent, send = [], ThreadLane.send

    def noted(lane: ThreadLane, peer: int, buffers: Sequence[Tensor]) -> Pending:
        sent.append((lane.channel.rank, lane.name))
        return send(lane, peer, buffers)

    monkeypatch.setattr(ThreadLane, "send", noted)
    train(chain_model(2), batches(2), 2, schedule="1f1b", num_microbatches=4, mesh=(2, 1))
    of_a_step = ["stages"] * 4 + ["losses"]
    assert [name for rank, name in sent if rank == 1 and name in of_a_step] == 2 * of_a_step
