"""Exactness: whatever the policy, the buckets and the run, the bits are those of sums in rank order."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from torch import nn

import commsched as hvd
from scheduler import policies
from scheduler.ir.buckets import fuse_by_bytes
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.policies import plan
from tests.support.cases import Me, case, main
from tests.support.oracle import (
    Oracle,
    assert_close,
    assert_same_bits,
    batch,
    fingerprint,
    release,
    seeded,
    terms_of,
)
from tests.support.small_models import Odd, loss_of, mlp, mlp64, sgd

POLICIES = ("auto", *policies.names())


def loss_at(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return loss_of(step)(model, rank)


def train(
    me: Me, model: nn.Module, optimizer: Any, steps: int, loss: Any = loss_at, shake: bool = True
) -> nn.Module:
    if shake:
        me.shake(model)
    for step in range(steps):
        loss(model, me.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    return model


def oracle_of(me: Me, make: Any, steps: int, build: Any = Odd, loss: Any = loss_at) -> nn.Module:
    model = seeded(build)
    oracle = Oracle(model, make(model), me.size)
    for step in range(steps):
        oracle.step(lambda m, rank, step=step: loss(m, rank, step))
    return model


@case(slow=(4,))
def every_policy_gives_the_bits_of_rank_ordered_sums(me: Me) -> None:
    expected = {steps: oracle_of(me, sgd, steps) for steps in (8, 20)}
    for policy in POLICIES:
        steps = 20 if policy == "auto" else 8  # auto measures and plans twice
        model = seeded(Odd)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), schedule=policy)
        assert_same_bits(train(me, model, optimizer, steps), expected[steps], policy)
        release(optimizer)


@case(slow=(4,))
def every_bucket_size_gives_the_bits_of_rank_ordered_sums(me: Me) -> None:
    expected = oracle_of(me, sgd, 8)
    for policy, size in itertools.product(("wfbp", "dear", "optimal"), (1e-5, 3e-4, 1e-3, 100)):
        model = seeded(Odd)
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), schedule=policy, bucket_mb=size
        )
        assert_same_bits(train(me, model, optimizer, 8), expected, f"{policy} with buckets of {size} MB")
        release(optimizer)


@case(ranks=(2, 3, 4))
def random_cuts_give_the_bits_of_rank_ordered_sums(me: Me) -> None:
    expected = oracle_of(me, sgd, 8)
    dice = random.Random(me.seed)
    for attempt in range(10):
        model = seeded(Odd)
        params = dict(model.named_parameters())
        kinds = list(dict.fromkeys(p.dtype for p in params.values()))
        layers = [Layer("(outside)", 1e-3, 0.0, 0)]
        layers += [
            Layer(name, 1e-3, 2e-3, p.numel() * p.element_size(), group=kinds.index(p.dtype))
            for name, p in params.items()
        ]
        profile = Profile("random", tuple(layers))
        buckets = fuse_by_bytes(
            [la.bytes for la in layers],
            dice.choice([1, 200, 900, 4000]),
            first=dice.choice([None, 100, 1000]),
            part=dice.choice([None, 64, 130, 700]),
            groups=[la.group for la in layers],
        )
        policy = dice.choice(["wfbp", "dear", "pipedap", "bytescheduler"])
        program = plan(profile, Link(alpha=1e-4, beta=1e-7), policy, ranks=me.size, buckets=buckets)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), schedule=program)
        assert_same_bits(train(me, model, optimizer, 8), expected, f"attempt {attempt}: {program.plan}")
        release(optimizer)


@case(ranks=(3,))
def buckets_may_end_up_empty(me: Me) -> None:
    """Three ranks share a bias of 20 elements in one bucket, though the plan cuts it in two.

    The second bucket has no element, and no gradient ever completes it: the others must not wait for it. Nor
    does any parameter wait for it: a step that began before it had arrived failed, once in thousands of runs.
    """

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 8))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(torch.linspace(-1, 1, 24).view(3, 8) * (1 + rank + step)).square().mean()

    sizes = [0, *(4 * p.numel() for p in build().parameters())]
    profile = Profile("small", tuple(Layer(str(n), 1e-3, 2e-3, size) for n, size in enumerate(sizes)))
    expected = oracle_of(me, sgd, 8, build, loss)
    shards = {"gather": "parameters"}
    for options in (
        {},
        shards,
        {**shards, "early_step": True},
        {"transport": "stream"},
        {**shards, "transport": "stream"},
    ):
        gather = options.get("gather", "gradients")
        buckets = fuse_by_bytes(sizes, 1, part=64)
        program = plan(profile, Link(alpha=1e-4, beta=1e-7), "dear", ranks=3, buckets=buckets, gather=gather)
        model = seeded(build)
        optimizer: Any = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), schedule=program, **options
        )
        assert optimizer._session.round._empty
        train(me, model, optimizer, 8, loss=loss)
        # The ends of a shard may be updated by other instructions: a few roundings in each of 8 steps.
        few = 8 * 4 * torch.finfo(torch.float32).eps if gather == "parameters" else 0.0
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=few, atol=few, msg=str(options))
        release(optimizer)


@case(slow=(4,))
def all_ranks_and_runs_have_the_same_bits(me: Me) -> None:
    prints = []
    for _ in range(2):
        model = seeded(Odd)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        prints.append(fingerprint(train(me, model, optimizer, 20)))
        release(optimizer)
    assert len(set(me.everybody(" ".join(prints)))) == 1 and prints[0] == prints[1], prints


@case(ranks=(2, 3))
def other_transports_agree_within_rounding(me: Me) -> None:
    """Ten steps in float64. One step where a layer of bfloat16 would make every later one differ.

    A ring sums each part of a bucket from another rank on, so runs agree only with the same buckets: a bucket
    size that the policy chooses from measured times may differ from run to run.
    """
    for build, steps in ((mlp64, 10), (Odd, 1)):
        expected = oracle_of(me, sgd, steps, build, loss_at)
        terms = terms_of(expected, steps) if build is mlp64 else me.size + 2
        for transport in ("ring",):
            prints = []
            for _ in range(2):
                model = seeded(build)
                options = {"transport": transport, "schedule": "dear", "bucket_mb": 0.002}
                optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
                assert_close(train(me, model, optimizer, steps, loss_at), expected, terms, transport)
                prints.append(fingerprint(train(me, model, optimizer, 9, loss_at, shake=False)))
                release(optimizer)
            assert len(set(me.everybody(" ".join(prints)))) == 1, f"{transport}: ranks differ"
            assert prints[0] == prints[1], f"{transport}: runs differ"


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.3, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.005, momentum=0.9, centered=True, weight_decay=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.005),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


# A small eps would make an update of the rounding of a gradient that is nearly zero.
SMOOTH: dict[str, Any] = {
    "nesterov": OPTIMIZERS["nesterov"],
    "Adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01, eps=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.005, momentum=0.9, weight_decay=0.01, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.01, eps=1e-3),
}


@case(ranks=(2, 3))
def every_optimizer_gives_the_bits_of_the_plain_one(me: Me) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step)).square().mean()

    for name, make in OPTIMIZERS.items():
        expected = oracle_of(me, lambda m, make=make: make(m.parameters()), 7, mlp, loss)
        model = seeded(mlp)
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), schedule="dear", bucket_mb=0.002
        )
        assert_same_bits(train(me, model, optimizer, 7, loss), expected, name)
        release(optimizer)


@case(ranks=(2, 3, 4))
def equals_large_batch_training(me: Me) -> None:
    """One process with all ranks' samples in one batch: float64."""
    for name, make in SMOOTH.items():
        large = seeded(mlp64)
        plain = make(large.parameters())
        for step in range(20):
            samples = torch.cat([batch(rank, step, dtype=torch.float64) for rank in range(me.size)])
            plain.zero_grad()
            large(samples).square().mean().backward()
            plain.step()
        for transport in ("direct", "ring") if name == "nesterov" else ("direct",):
            model = seeded(mlp64)
            optimizer = hvd.DistributedOptimizer(
                make(model.parameters()),
                model.named_parameters(),
                transport=transport,
                bucket_mb=0.003,
            )
            train(me, model, optimizer, 20, loss_at, shake=False)
            assert_close(model, large, terms_of(large, 20), f"{name} {transport}")
            release(optimizer)


main(__name__)
