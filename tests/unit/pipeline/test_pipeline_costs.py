"""What a pipeline costs beside its computation: memory given back to the system, traffic on the processor."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from comm_core.engine import OPS
from commsched import Compression
from commsched.pipeline import Pipeline
from commsched.pipeline.exchange import Exchange
from commsched.pipeline.profiling import profile, traffic_cost
from commsched.pipeline.update import Stepped
from scheduler.ir.actions import COLLECTIVE, Action, Kind
from scheduler.ir.link import Cluster, Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import LINK_LANE
from scheduler.pipelines import generate
from scheduler.simulate.costs import Durations, stages_of
from scheduler.simulate.lowering import lower_pipeline
from scheduler.simulate.simulator import run
from tests.support.pipeline_runs import batches, chain_model, loss_of, on_threads, sgd, train

FREED = """
import ctypes, sys
from commsched.pipeline.factory import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

asked = keep_freed_memory() if sys.argv[1] == "keep" else False
libc, count, size = ctypes.CDLL(None), int(sys.argv[2]), int(sys.argv[3])
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = (ctypes.c_void_p * count)()
before = resident()
for number in range(count):
    blocks[number] = libc.malloc(size)
    ctypes.memset(blocks[number], 1, size)
for number in range(count):
    libc.free(blocks[number])
print(int(asked), resident() - before)
"""
ALL = 192 << 20  # bytes, more than glibc ever keeps by itself


def asked_and_kept(what: str, blocks: int = 3072, **variables: str) -> tuple[int, int]:
    """Whether the process was told to keep its memory, and how much of what it freed it still has."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC"))}
    command = [sys.executable, "-c", FREED, what, str(blocks), str(ALL // blocks)]
    said = subprocess.run(command, env={**plain, **variables}, capture_output=True, text=True, check=True)
    asked, kept = map(int, said.stdout.split())
    return asked, kept


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
@pytest.mark.parametrize("blocks", [3072, pytest.param(2, marks=pytest.mark.thorough)])
def test_freed_memory_stays(blocks: int) -> None:
    # resnet_tiny had 11,000 page faults in every step (all of a micro-batch's activations), alexnet 147,000
    # (each gradient of its largest layer).
    asked, kept = asked_and_kept("keep", blocks)
    assert asked and kept > 0.9 * ALL
    assert asked_and_kept("leave", blocks)[1] < 0.5 * ALL


@pytest.mark.thorough
def test_the_users_own_setting_of_malloc_stays() -> None:
    assert asked_and_kept("keep", MALLOC_TRIM_THRESHOLD_="1000000")[0] == 0


def test_traffic_that_costs_the_processor_lengthens_a_replicas_step() -> None:
    one = Profile("one", (Layer("a", 1.0, 2.0, 12),), traffic_per_byte=0.5)

    def period(profile: Profile, replicas: int) -> float:
        program = generate("1f1b", 1, 2, replicas=(replicas,), profile=profile)
        return run(lower_pipeline(program, profile, Cluster.flat(replicas, Link(0.0, 0.0)))).period

    assert period(one, 1) == pytest.approx(6.0)
    # Each of three replicas sends two thirds of the bytes twice.
    assert period(one, 3) == pytest.approx(2.0 + 0.5 * 2 * 8)
    assert period(replace(one, traffic_per_byte=0.0), 3) == pytest.approx(2.0)


class Counted(nn.Sequential):
    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(64, 64) for _ in range(4)))
        self.to(dtype)


FLOAT, HALF = torch.float32, torch.bfloat16
MASTERS = {"master_weights": True}


@pytest.mark.few
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize(
    ("dtype", "options", "reduced"),
    [
        (FLOAT, {}, 4),
        (HALF, {}, 2),
        (HALF, MASTERS, 4),
        (HALF, {**MASTERS, "compression": Compression.bf16}, 2),
        (FLOAT, {"compression": Compression.bf16}, 2),
        (FLOAT, {"compression": Compression.int8}, 260 / 256),
    ],
)
def test_counted_bytes_are_those_that_replicas_send(
    dtype: torch.dtype, options: dict[str, Any], reduced: float, schedule: str
) -> None:
    """The sums of masters were counted in half precision, and travel in float32."""
    model, dice = Counted(dtype), torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(8, 64, generator=dice).to(dtype) for _ in range(2))
    measured = profile(model, loss_of, batch, repeat=1, **options)
    slow = replace(measured, traffic_per_byte=1.0, update_per_byte=0.0)

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(model), schedule, 2, (2, 2), loss=loss_of, optimizer=sgd, fabric=fabric,
            bucket_bytes=8192, **options,
        )  # fmt: skip
        pipeline.step(batch)
        pipeline.drain()
        ((number, update),) = pipeline._updates.items()
        assert update.buckets is not None
        events = update.buckets.backend.events()
        last = len(update.buckets.layout.slices)
        assert (events["bucket"] == last).sum() == 1  # the counts of replicas that have used each parameter
        kinds = [Kind(OPS[op]) for op in events["op"]]
        sent: Counter[Kind] = Counter()
        for kind, event in zip(kinds, events, strict=True):
            sent[kind] += int(event["bytes"]) if event["bucket"] < last else 0
        durations = Durations(pipeline.program, measured, Link(0.0, 1.0))
        counted: dict[Kind, float] = {Kind.RS: 0.0, Kind.AG: 0.0}
        for action in pipeline.program.kernel[fabric.rank][LINK_LANE]:
            if action.kind in COLLECTIVE:
                counted[action.kind] += durations.seconds(fabric.rank, action) / 2
        stage = stages_of(slow, pipeline.program.layout)[number]
        pipeline.close()
        return sent, counted, stage.step(2, sharded=True)

    weights, biases = 2 * 64 * 64, 2 * 64
    for sent, counted, taken in on_threads(4, work):
        assert counted == pytest.approx(sent) and taken == pytest.approx(sent.total())
        rest = 4 if options == {"compression": Compression.int8} else reduced
        assert sent[Kind.RS] == (weights * reduced + biases * rest) / 2
        assert sent[Kind.AG] == (weights + biases) * dtype.itemsize / 2


def test_every_rank_measures_what_traffic_costs() -> None:
    found = on_threads(2, lambda fabric: traffic_cost(fabric, Link(1e-5, 1e-9)))
    assert all(0.0 <= cost < 1e-5 for cost in found)


@pytest.mark.parametrize(("placement", "sums_first"), [("eager", True), ("bubble", False)])
def test_the_link_keeps_the_programs_order_of_sums_and_messages(
    placement: str, sums_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[int, str]] = []
    wait, send = Stepped.wait_reduced, Exchange.send_backward

    def waited(update: Stepped) -> None:
        wait(update)
        assert update.buckets is not None
        happened.append((update.buckets.ranks.rank, "sums"))

    def sent(exchange: Exchange, action: Action) -> bool:
        replica = exchange.layout.ranks[1].index(exchange.rank)
        happened.append((replica, f"message {action.index}"))
        return send(exchange, action)

    monkeypatch.setattr(Stepped, "wait_reduced", waited)
    monkeypatch.setattr(Exchange, "send_backward", sent)
    train(
        chain_model(2), batches(1), 4, schedule="1f1b", num_microbatches=2, mesh=(2, 2), placement=placement
    )
    for replica in range(2):
        # Of the last stage alone: the first one sends no gradients, and waits for its sums later.
        mine = [what for place, what in happened if place == replica]
        assert (mine.index("sums") < mine.index("message 1")) == sums_first
        assert mine.index("message 0") < mine.index("sums")


def test_messages_are_freed_when_they_are_answered() -> None:
    def work(fabric: Any) -> list[int]:
        pipeline = Pipeline(chain_model(3), "1f1b", 4, (3, 1), loss=loss_of, optimizer=sgd, fabric=fabric)
        held = []
        for batch in batches(2):
            pipeline.step(batch)
            held.append(pipeline._interpreter.exchange.outbox.held)
        return held

    # The first stage's activations have all been answered; the others' gradients are answered by nothing.
    assert on_threads(3, work) == [[0, 0], [4, 4], [4, 4]]
