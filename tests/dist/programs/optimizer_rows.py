"""``row_sparse``: touched rows of embeddings give the bits of whole gradients, in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.oracle import release, seeded
from tests.support.reference_run import Twin, assert_same_steps, bits_of_steps, momentum, some_profile

STEPS = 20
Train = Callable[[Me, nn.Module, Any, int], None]


class Shop(nn.Module):
    """Tables with and without padding, a bag of words, and a table that some steps and ranks do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(203, 16, padding_idx=0)
        self.words = nn.EmbeddingBag(151, 12, mode="mean", padding_idx=2)
        self.shops = nn.Embedding(40, 5)
        self.head = nn.Sequential(nn.Linear(33, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, ids: torch.Tensor, with_shops: bool) -> torch.Tensor:
        shops = self.shops(ids % 40) if with_shops else torch.zeros(len(ids), 5)
        words = self.words(torch.stack([ids % 151, ids % 7, ids % 3], 1))
        return self.head(torch.cat([self.items(ids), words, shops], 1))


def loss_of(step: int) -> Callable[[nn.Module, int], torch.Tensor]:
    """Some steps use no shop, others on the last ranks only."""

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        ids = torch.randint(203, (9,), generator=torch.Generator().manual_seed(100 * step + rank))
        return model(ids, step % 3 == 0 or (step % 3 == 1 and rank > 0)).square().mean()

    return loss


def figures(
    me: Me, make: Any, train: Train, steps: int = STEPS, build: Any = Shop, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """The bits of all gradients before, and of all parameters after each step."""
    model = seeded(build)
    if "profile" in options:
        options["profile"] = some_profile(model)
    optimizer: Any = hvd.DistributedOptimizer(make(model), model.named_parameters(), **options)
    by_rows = options["row_sparse"] is True
    assert bool(optimizer._session.planner.model.rows) == by_rows
    found = bits_of_steps(model, optimizer, lambda step: train(me, model, optimizer, step), steps)
    assert bool(optimizer._session.planner.model.rows) == by_rows
    release(optimizer)
    return found


def compare(me: Me, make: Any, train: Train, what: str, **options: Any) -> None:
    """By rows and whole: equal bits of every gradient and parameter in every step."""
    ours, plain = (figures(me, make, train, row_sparse=choice, **options) for choice in (True, False))
    assert_same_steps(ours, plain, what)


def once(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
    loss_of(step)(model, me.rank).backward()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


@case(ranks=(2, 3), slow=(4,))
def rows_give_the_bits_of_plain_training(me: Me) -> None:
    """Momentum and weight decay move rows that nobody touched."""
    for make in (momentum, adamw):
        twin = Twin(me, Shop, make, row_sparse=True)
        for step in range(STEPS):
            twin.step(loss_of(step))
            twin.compare(f"step {step}")
        twin.end()


@case(ranks=(2, 3), slow=(4,))
def rows_give_the_bits_of_whole_gradients(me: Me) -> None:
    """With a plan from measured times, and with compression, sums and predivided averages."""
    for make in (momentum, adamw):
        compare(me, make, once, make.__name__)
    planned = {"schedule": "dear", "profile": True, "steps": 6}
    compare(me, momentum, once, "fp16", compression=hvd.Compression.fp16, **planned)
    compare(me, momentum, once, "bf16", compression=hvd.Compression.bf16, **planned)
    compare(me, momentum, once, "sums", op=hvd.Sum, **planned)
    compare(me, momentum, once, "predivided", gradient_predivide_factor=3.0, **planned)
    compare(me, momentum, once, "groups", num_groups=2, **planned)


@case(ranks=(2, 3))
def rows_of_several_passes(me: Me) -> None:
    def accumulate(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        for k in range(3):
            loss_of(10 * step + k)(model, me.rank).backward()

    def reduce_each(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        accumulate(me, model, optimizer, step)
        if step % 2:
            optimizer.synchronize()

    planned = {"schedule": "dear", "profile": True, "steps": 8}
    compare(me, momentum, accumulate, "3 passes", backward_passes_per_step=3, **planned)
    compare(me, adamw, reduce_each, "3 rounds", op=hvd.Sum, **planned)


@case(ranks=(2, 3))
def rows_are_clipped_and_weighted(me: Me) -> None:
    def clip(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        once(me, model, optimizer, step)
        optimizer.clip_grad_norm_(0.05)

    def weigh(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.weighted(loss_of(step)(model, me.rank), samples=3 + me.rank).backward()

    compare(me, momentum, clip, "clipping", steps=8)
    compare(me, adamw, weigh, "weighted", steps=8)


@case(ranks=(2, 3))
def gradients_that_no_id_explains(me: Me) -> None:
    """Hooks, tied uses and gradients set by hand touch other rows than the forward's ids; signs of zeros."""

    def hooked(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        if step == 0:
            model.items.weight.register_hook(lambda grad: -grad)
            model.words.weight.register_hook(lambda grad: grad + 0.01)
        once(me, model, optimizer, step)

    def tied(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        loss = loss_of(step)(model, me.rank)
        if step % 2 == me.rank % 2:
            loss = loss + F.linear(torch.ones(1, 16) * me.rank, model.items.weight).square().mean()
        loss.backward()

    def by_hand(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        if step % 2:
            once(me, model, optimizer, step)
        for number, p in enumerate(model.parameters()):
            grad = torch.zeros_like(p)
            grad[number % len(p)] = float(me.rank)
            p.grad = grad if step % 2 == 0 and (number + me.rank) % 2 else p.grad

    planned = {"schedule": "dear", "profile": True, "steps": 6}
    compare(me, momentum, hooked, "hooks", **planned)
    compare(me, momentum, tied, "tied", **planned)
    compare(me, adamw, by_hand, "by hand", **planned)


@case(ranks=(2, 3))
def fewer_bytes_are_sent_and_explained(me: Me) -> None:
    """A table of 4 MB, of which each rank touches 32 of 16000 rows."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(16000, 64), nn.Linear(64, 2))

    sent = {}
    for choice in (True, False):
        model = seeded(build)
        optimizer: Any = hvd.DistributedOptimizer(momentum(model), model=model, row_sparse=choice)
        for step in range(60):
            known = hvd.metrics(optimizer) if step >= 12 else None
            if all(me.everybody("known" if known is not None and known.bytes is not None else "")):
                break  # measurements that were disturbed are made again, and plans
            ids = torch.randint(16000, (32,), generator=torch.Generator().manual_seed(100 * step + me.rank))
            model(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.state_dict()
        measured, report = hvd.metrics(optimizer), hvd.explain(optimizer, show=False)
        assert measured is not None and measured.bytes is not None and report is not None
        sent[choice] = measured.bytes
        (size,) = [size for size, names in report.buckets if "0.weight" in names and len(names) == 1] or [0]
        if choice:
            # A message has 256 bytes and a number for each row; the union has nearly size * 32 rows.
            rows = 32 * (1 + me.size) / 2
            assert 0.7 * rows * 256 < size < 1.5 * rows * 268 and dict(report.by_rows) == {
                "0.weight": 16000 * 256
            }
            assert ", touched rows of 3.91 MiB" in str(report)
        else:
            assert not report.by_rows and "touched rows" not in str(report)
        release(optimizer)
    assert sent[True] < 0.02 * sent[False], sent


@case(ranks=(2,))
def auto_decides_alike_on_all_ranks_and_a_saved_profile_keeps_the_choice(me: Me) -> None:
    """Measured times decide."""

    def build() -> nn.Module:
        return nn.ModuleDict({"large": nn.Embedding(60000, 64), "small": nn.Linear(64, 10)})

    def step(model: Any, optimizer: Any, number: int) -> None:
        ids = torch.randint(60000, (16,), generator=torch.Generator().manual_seed(100 * number + me.rank))
        model["small"](model["large"](ids)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = seeded(build)
    optimizer: Any = hvd.DistributedOptimizer(momentum(model), model=model)
    assert list(hvd.explain(optimizer, show=False).by_rows) == ["large.weight"]
    for number in range(10):
        step(model, optimizer, number)
    chosen = list(hvd.explain(optimizer, show=False).by_rows)
    assert len(set(me.everybody(str(chosen)))) == 1
    profile = optimizer.profile()
    release(optimizer)
    again: Any = hvd.DistributedOptimizer(momentum(model), model=model, profile=profile)
    assert list(hvd.explain(again, show=False).by_rows) == chosen
    step(model, again, 11)
    release(again)


@case(ranks=(2,))
def what_cannot_travel_by_rows_is_refused_or_sent_whole(me: Me) -> None:
    model = seeded(Shop)
    program = hvd.explain(first := wrapped(model), show=False).program
    release(first)
    for options, words in (
        ({"gather": "parameters"}, "needs gather='gradients'"),
        ({"transport": "ring"}, "transport is 'ring'"),
        ({"schedule": program}, "is a Program"),
        ({"transport": "plain"}, "one by one"),
        ({"model": nn.Embedding(9, 4, max_norm=1.0)}, "max_norm=1.0"),
    ):
        asked: dict[str, Any] = dict(options)
        with pytest.raises(ValueError, match=words):
            wrapped(asked.pop("model", model), row_sparse=True, **asked)
    with pytest.raises(ValueError, match="'auto', True or False, got 'always'"):
        wrapped(model, row_sparse="always")
    tied = nn.ModuleDict({"words": nn.Embedding(9, 4), "out": nn.Linear(4, 9, bias=False)})
    tied["out"].weight = tied["words"].weight
    with pytest.warns(UserWarning, match="row_sparse=True without effect"):
        optimizer = wrapped(tied, row_sparse=True, schedule="dear")
    assert not hvd.explain(optimizer, show=False).by_rows
    release(optimizer)


def wrapped(model: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model, **options)


main(__name__)
