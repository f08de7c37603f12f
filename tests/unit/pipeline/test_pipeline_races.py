"""Pipelines and tiles whose messages are staged between a device and the host, or go from device to device,
under torch's race detector.

Every schedule is free of races and has the bits of the CPU; without the wait of any one line of ``Staging``
or ``DeviceMessages`` there is a race.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from commsched import spatial
from commsched.spatial.mesh import current_mesh
from scheduler import pipelines as programs
from tests.support import one_process, spatial_models, watched_ranks
from tests.support.pipeline_runs import batches, chain_model, loss_of, momentum, replayed, train, trained
from tests.support.races import Forgetful
from tests.support.spatial_cases import on_threads
from tests.support.watched_ranks import races_of

MESHES = [(1, 2), (2, 1), (2, 2)]
ALONE = {"bundle": [(2, 1)], "pipedream": [(2, 1), (2, 2)]}
DIRECT = ("gpipe", "1f1b", "interleaved", "zero_bubble", "bundle")  # the synchronous schedules


def options_of(schedule: str, mesh: tuple[int, int]) -> dict[str, Any]:
    micro = {"pipedream": 1, "ashpipe": 1, "bundle": 1}.get(schedule, 4)
    return {"schedule": schedule, "mesh": mesh, "num_microbatches": micro}


def watched(
    options: dict[str, Any], left_out: str = "", steps: int = 3, direct: bool = False
) -> tuple[list[tuple[Any, list[float]]], list[Forgetful]]:
    """Train on devices on paper; return weights and losses of every rank, and the devices."""
    model, data = chain_model(), batches(steps)
    stages_, replicas = options["mesh"]

    def work(fabric: Any) -> Any:
        return trained(fabric, model, data, loss=loss_of, optimizer=momentum, **options)[:2]

    return watched_ranks.pipelines(stages_ * replicas, work, left_out, direct)


@pytest.mark.parametrize(
    ("schedule", "mesh", "direct"),
    [
        (name, mesh, direct)
        for name in programs.names()
        for mesh in ALONE.get(name, MESHES)
        for direct in (False, True)
        if not direct or (mesh[0] > 1 and name in DIRECT)
    ],
)
def test_no_schedule_has_a_race_and_each_has_the_bits_of_the_cpu(
    schedule: str, mesh: tuple[int, int], direct: bool
) -> None:
    options = options_of(schedule, mesh)
    weights, losses, pipeline = train(chain_model(), batches(3), mesh[0] * mesh[1], momentum, **options)
    everyone, devices = watched(options, direct=direct)
    assert not races_of(devices), "\n".join(races_of(devices))
    for mine, found in everyone:
        assert found == losses
        assert all(torch.equal(value, weights[name]) for name, value in mine.items())
    if mesh[1] == 1:  # sums over replicas have another order than those of one process
        wanted, _ = replayed(chain_model(), batches(3), pipeline.program, momentum)
        assert all(torch.equal(value, wanted[name]) for name, value in weights.items())


def small() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model, images and classes: the detector watches each line of memory."""
    with one_process.seed(0):
        layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1)]
        model = nn.Sequential(*layers).double()
        return model, torch.randn(1, 2, 10, 8).double(), torch.randint(0, 2, (1, 10, 8))


def tiled(left_out: str = "", overlap: str = "on") -> tuple[list[list[torch.Tensor]], list[Forgetful]]:
    """Train a model on tiles."""
    given = small()
    return watched_ranks.tiles(2, lambda channel: on_tiles(*given, channel, overlap), left_out)


def on_tiles(model: Any, images: Any, target: Any, channel: Any, overlap: str) -> list[torch.Tensor]:
    sharded = spatial.shard(copy.deepcopy(model), (1, 2), channel=channel, overlap=overlap)
    return spatial_models.train(sharded, spatial.scatter(images), spatial.scatter(target), 2, current_mesh())


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_tiles_have_no_race_and_the_bits_of_the_cpu(overlap: str) -> None:
    given = small()
    wanted = on_threads(2, lambda channel: on_tiles(*given, channel, overlap))
    found, devices = tiled(overlap=overlap)
    assert not races_of(devices), "\n".join(races_of(devices))
    for mine, right in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


STORIES: list[Callable[[str], tuple[Any, Sequence[Forgetful]]]] = [
    lambda left_out: watched(options_of("1f1b", (2, 1)), left_out, 2),
    lambda left_out: watched(options_of("1f1b", (1, 2)), left_out, 2),
    lambda left_out: tiled(left_out),
    lambda left_out: watched(options_of("1f1b", (2, 1)), left_out, 2, direct=True),
]
WAITS = [
    ("synchronize in ReplicaBuckets._wait_handed", "sums are read while gradients are still copied"),
    ("synchronize in Staging._hand_over", "a message leaves before its copy is there"),
    ("synchronize in Staging.copy_out.<locals>.hand_over", "gradients leave before their copy is there"),
    ("uses in DeviceMessages.send", "an output's memory is given on while it is sent"),
    ("uses in Staging._copy_out", "an output's memory is given on while it is copied"),
    ("uses in Staging.bring", "the memory of what has arrived is given on while it is read"),
    ("uses in _OnStream.wait", "the memory of what has arrived directly is given on while it is read"),
    ("wait in DeviceMessages.send", "an output is sent before it is computed"),
    ("wait in Staging._copied_out", "an output is copied before it is computed"),
    ("wait in Staging.bring", "what has arrived is read before it is there"),
    ("wait in Staging.copy_out", "gradients are copied before they are computed"),
    ("wait in Staging.exchange", "a halo is written into memory that earlier operations still use"),
    ("wait in Staging.take_in", "a halo is read before it is there"),
    ("wait in _OnStream.wait", "what arrives directly is read before it is there"),
]
"""Every line that orders streams, and what happens without it."""
CONFIRMS = "synchronize in DeviceMessages.confirm"  # orders nothing: the host looks for failures after it


def test_a_race_is_found_where_a_line_does_not_wait() -> None:
    of_place: dict[str, list[int]] = {}
    for number, story in enumerate(STORIES):
        for place in {place for device in story("")[1] for place in device.places}:
            if not place.startswith(CONFIRMS):
                of_place.setdefault(place, []).append(number)
    assert sorted(place.rpartition(",")[0] for place in of_place) == [place for place, _ in WAITS]
    unnoticed = [
        place
        for place, numbers in of_place.items()
        if not any(races_of(STORIES[number](place)[1]) for number in numbers)
    ]
    assert not unnoticed, "\n".join(unnoticed)
