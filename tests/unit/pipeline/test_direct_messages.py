"""Messages from device to device: pipelines on ranks whose hosts wait for every launch to end on both ranks.

So each test here also fails, after the time-out, if ranks launch in an order that can deadlock.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from commsched.backends.nccl import abort_in_turn
from commsched.channels import DeviceMessages
from commsched.devices import Device
from commsched.errors import CommError
from commsched.pipeline import Pipeline, ThreadWorld
from scheduler import pipelines
from scheduler.ir.actions import RECVS, SENDS, Action
from scheduler.ir.launches import can_block, computation, launches
from scheduler.ir.program import COMPUTE_LANE
from tests.support import one_process
from tests.support.direct import DirectFabric, directions_of
from tests.support.pipeline_runs import batches, chain_model, loss_of, momentum, train
from tests.support.thread_ranks import run_threads

MESHES: list[Any] = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (2, (1, 2)), (3, (2, 1, 2))]
DIRECT = ("gpipe", "1f1b", "interleaved", "zero_bubble", "bundle")
PATIENCE = 20.0


def directly(size: int, work: Callable[[DirectFabric], Any]) -> list[Any]:
    world = ThreadWorld(size, PATIENCE)
    return run_threads(size, lambda rank: work(DirectFabric(world, rank)), 10 * PATIENCE, world.abort)


def pipeline_on(fabric: DirectFabric, model: nn.Module | None = None, **options: Any) -> Pipeline:
    options = {"loss": loss_of, "optimizer": momentum, "num_microbatches": 4, **options}
    return Pipeline(copy.deepcopy(model or chain_model()), fabric=fabric, **options)


CASES = [
    (schedule, mesh)
    for schedule in DIRECT
    for mesh in MESHES
    if schedule not in ("interleaved", "bundle")
    or (schedule == "bundle" and mesh[0] == 2)
    or (schedule == "interleaved" and isinstance(mesh[1], int))
]


@pytest.mark.parametrize(("schedule", "mesh"), CASES, ids=str)
def test_each_schedule_has_the_bits_of_messages_through_the_host(schedule: str, mesh: Any) -> None:
    size = mesh[0] * mesh[1] if isinstance(mesh[1], int) else sum(mesh[1])
    micro = 1 if schedule == "bundle" else 4
    options: dict[str, Any] = {"schedule": schedule, "mesh": mesh, "num_microbatches": micro}
    model, data = chain_model(8), batches(3)
    wanted, losses, _ = train(model, data, size, momentum, **options)

    def work(fabric: DirectFabric) -> Any:
        pipeline = pipeline_on(fabric, model, **options)
        found = [pipeline.step(batch) for batch in data]
        weights = pipeline.state_dict()
        pipeline.close()
        return found, weights, len(fabric.made)

    for found, weights, made in directly(size, work):
        assert found == losses and made == 1
        assert all(torch.equal(value, wanted[name]) for name, value in weights.items())


def when_needed(lanes: Any, layout: Any) -> list[list[list[Action]]]:
    """The same messages, but each receive right before the computation that needs it."""
    found = []
    for messages, each in zip(launches(lanes, layout), lanes, strict=True):
        order = [computation(action) for action in each[COMPUTE_LANE]]
        moved = [[action for action in group if action.kind in SENDS] for group in messages]
        for action in (action for group in messages for action in group if action.kind in RECVS):
            moved[order.index(computation(action))].append(action)
        found.append(moved)
    return found


def test_receives_that_are_launched_when_they_are_needed_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sends activation 1 while rank 1 sends gradient 0, and both hosts wait."""
    monkeypatch.setattr("commsched.pipeline.interpreter.launches", when_needed)
    monkeypatch.setitem(globals(), "PATIENCE", 2.0)
    with pytest.raises(
        CommError, match=r"0SENDF1>1 .* rank 0 heard nothing of rank 1|1SENDB0>0 .* rank 1 heard"
    ):
        directly(2, lambda fabric: pipeline_on(fabric, mesh=(2, 1)).step(batches(1)[0]))


def test_other_schedules_go_through_the_host() -> None:
    """Their messages may be in flight between two steps, or wait for sums of replicas."""
    micro = {"ashpipe": 1, "bundle": 1}
    programs = {name: pipelines.generate(name, 2, micro.get(name, 2)) for name in pipelines.names()}
    assert [name for name, program in programs.items() if can_block(program)] == list(DIRECT)
    for options in ({"schedule": "2bw"}, {"placement": "eager"}):
        work = lambda fabric, options=options: (pipeline_on(fabric, **options), fabric.made)[1]  # noqa: E731
        assert directly(2, work) == [[], []]


class Two(nn.Module):
    """Two outputs, of which the next layer uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.inner(pair[0])


def test_a_gradient_that_is_none_stays_none() -> None:
    """Weight decay would change parameters whose gradient is zero."""
    with one_process.seed(3):
        model = nn.Sequential(Two(), First()).double()
    data = batches(2)
    wanted, losses, _ = train(model, data, 2, momentum, mesh=(2, 1), num_microbatches=4, cuts=[0, 1])
    unused = {name: value.clone() for name, value in model.state_dict().items() if "unused" in name}
    assert all(torch.equal(wanted[name], value) for name, value in unused.items())

    def work(fabric: DirectFabric) -> Any:
        pipeline = pipeline_on(fabric, model, mesh=(2, 1), cuts=[0, 1])
        return [pipeline.step(batch) for batch in data], pipeline.state_dict()

    for found, weights in directly(2, work):
        assert found == losses
        assert all(torch.equal(value, wanted[name]) for name, value in weights.items())


def test_evaluations_and_checkpoints_between_steps() -> None:
    model, data = chain_model(), batches(4)
    wanted, losses, _ = train(model, data, 2, momentum, mesh=(2, 1), num_microbatches=4)

    def work(fabric: DirectFabric) -> Any:
        pipeline = pipeline_on(fabric, model, mesh=(2, 1))
        found = [pipeline.step(data[0]), pipeline.evaluate(data[1]), pipeline.step(data[1])]
        state = pipeline.checkpoint()
        pipeline.close()
        other = pipeline_on(fabric, model, mesh=(2, 1))
        other.resume(state)
        found += [other.step(batch) for batch in data[2:]]
        return found, other.state_dict()

    for found, weights in directly(2, work):
        assert found == [losses[0], found[1], *losses[1:]]
        assert all(torch.equal(value, wanted[name]) for name, value in weights.items())


@pytest.mark.parametrize("replicas", [1, 2])
def test_nobody_steps_with_gradients_that_nccl_has_lost(replicas: int) -> None:
    """NCCL's watchdog ends a late message without its bytes. Rank 0 learns that after it has launched the
    last message of the step; a replica whose own messages came must not step with the sum, either.
    """
    data = batches(2)

    def work(fabric: DirectFabric) -> Any:
        pipeline = pipeline_on(fabric, mesh=(2, replicas))
        pipeline.step(data[0])
        pipeline._finish()
        leaves = [leaf for stage in pipeline.stages.values() for leaf in stage.versions.newest.leaves]
        before = [leaf.detach().clone() for leaf in leaves]
        directions = directions_of(fabric.made[0])
        if fabric.rank == 0:
            gradients = directions[-1]
            move, left = gradients.move, iter(range(3, -1, -1))

            def last_is_lost(buffer: torch.Tensor) -> None:
                move(buffer)
                if not next(left):
                    buffer.zero_()
                    gradients.broken = "a message over NCCL is late"

            gradients.move = last_is_lost
        try:
            pipeline.step(data[1])
        except CommError as error:
            told = str(error)
        else:
            told = ""
        stages = pipeline.stages.values()
        now = [leaf.detach() for stage in stages for leaf in stage.versions.newest.leaves]
        same = all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
        return told, 0 in pipeline.stages, same, [each.ended for each in directions]

    results = directly(2 * replicas, work)
    assert "a message over NCCL is late" in results[0][0]
    for told, first, same, ended in results:
        assert told or not first
        assert same or not first
        assert all("has given up its pipeline" in each for each in ended) or not told


def test_a_closed_pipeline_takes_no_step() -> None:
    def work(fabric: DirectFabric) -> Any:
        pipeline = pipeline_on(fabric, mesh=(2, 1))
        pipeline.step(batches(1)[0])
        pipeline.close()
        pipeline.close()
        ended = [each.ended for each in directions_of(fabric.made[0])]
        with pytest.raises(CommError, match="the pipeline is closed"):
            pipeline.step(batches(1)[0])
        return ended

    assert directly(2, work) == [["closed", "closed"], ["closed", "closed"]]


class Bytes:
    """A direction that keeps what is sent; ``answer`` is received."""

    def __init__(self, answer: torch.Tensor | None = None) -> None:
        self.moved: list[torch.Tensor] = []
        self._answer = answer

    def move(self, buffer: torch.Tensor) -> None:
        if self._answer is not None:
            buffer.copy_(self._answer)
        self.moved.append(buffer)

    def failure(self) -> str:
        return ""


@pytest.mark.parametrize("kind", [torch.float32, torch.complex64, torch.bool, torch.int16, torch.bfloat16])
def test_every_type_travels_as_bytes(kind: torch.dtype) -> None:
    whole = torch.arange(12).view(3, 4).to(kind)
    value = whole.t()
    if kind.is_complex:
        value = (value * (1 + 2j)).conj()
    going = Bytes()
    device = Device(torch.device("cpu"))
    DeviceMessages(device, {1: going}, {}, print).send(1, [value, whole[:0]])
    assert [each.dtype for each in going.moved] == [torch.uint8]
    coming = DeviceMessages(device, {}, {0: Bytes(going.moved[0])}, print)
    received, pending = coming.receive(
        0, lambda empty: [empty(value.shape, dtype=kind), empty((0, 4), dtype=kind)]
    )
    pending.wait()
    assert torch.equal(received[0], value) and received[1].shape == (0, 4)


class Kernels:
    """A group whose kernels wait for those of others until these are over."""

    def __init__(self, log: list[str], name: str, others: Sequence[threading.Event]) -> None:
        self.log, self.name, self.others, self.over = log, name, others, threading.Event()

    def abort(self, reason: str) -> None:
        self.log.append(f"{reason}: {self.name}")
        for other in self.others:
            assert other.wait(5)
        self.over.set()


def test_what_was_computed_from_lost_messages_does_not_leave() -> None:
    """torch waits for the kernels of the group that it aborts. What is sent waits for what is received."""
    log: list[str] = []
    coming = [Kernels(log, name, []) for name in ("from 0", "from 2")]
    going = [Kernels(log, name, [each.over for each in coming]) for name in ("to 0", "to 2")]
    abort_in_turn(going, coming, "lost")
    assert log == ["lost: to 0", "lost: to 2", "lost: from 0", "lost: from 2"]
    assert all(each.over.is_set() for each in (*going, *coming))
