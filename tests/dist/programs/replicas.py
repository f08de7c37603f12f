"""Copies of a model on all ranks: equal at first, then rank 0's buffers when DDP would send them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commsched as hvd
from commsched.integrations import replica as replicas
from commsched.integrations.optimizers import accumulating
from commsched.integrations.replica import Replica
from tests.support.cases import Me, case, main


class Counting(nn.Module):
    """Has normalisation and buffers of many types, which each rank changes in its own way."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("small", torch.full((3,), rank, dtype=torch.int8))
        self.register_buffer("halves", torch.full((2, 2), float(rank), dtype=torch.bfloat16).t())
        self.register_buffer("turns", torch.full((2,), 1j * rank))
        self.register_buffer("nothing", torch.empty(0, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(rank))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.steps += 1 + self.rank
        return self.norm(x) + self.steps


def values(model: nn.Module) -> dict[str, list[object]]:
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def are_equal(me: Me, model: nn.Module, *without: str) -> bool:
    mine = {name: value for name, value in values(model).items() if name not in without}
    return len(set(me.everybody(str(mine)))) == 1


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each broadcast within."""
    sent: list[int] = []
    original = replicas.broadcast_

    def broadcast(flat: torch.Tensor, *arguments: object, **options: object) -> object:
        sent.append(flat.nbytes)
        return original(flat, *arguments, **options)

    replicas.broadcast_ = broadcast
    try:
        yield sent
    finally:
        replicas.broadcast_ = original


@case()
def all_types_become_rank_0s(me: Me) -> None:
    model, expected = Counting(me.rank), Counting(0)
    expected.turns, kept = model.turns.clone(), model.turns.clone()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["turns"])
    with counted() as sent:
        Replica(model)
    assert values(model) == values(expected) and torch.equal(model.turns, kept), values(model)
    assert len(sent) == 1, sent
    del model._ddp_params_and_buffers_to_ignore
    before, replicas._BYTES_AT_ONCE = replicas._BYTES_AT_ONCE, 30
    try:
        with counted() as sent:
            Replica(model)
    finally:
        replicas._BYTES_AT_ONCE = before
    assert values(model) == values(Counting(0)) and len(sent) > 1 and max(sent) <= 30, sent


@case()
def buffers_are_those_of_ddp(me: Me) -> None:
    """Training, accumulation, evaluation in inference mode and training in evaluation mode, in random order."""
    store = dist.PrefixStore("ddp", me.store)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size)
    for only_written in (False, True):
        ddp = DistributedDataParallel(Counting(me.rank))
        model = Counting(me.rank)
        replica = Replica(model, only_written=only_written)
        replica.attach()
        dice = random.Random(me.seed)
        for step in range(30):
            kind = dice.choice(("training", "accumulating", "evaluation", "frozen statistics"))
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + me.rank))
            for one, pause in ((ddp, ddp.no_sync), (model, replica.pause)):
                one.train(kind in ("training", "accumulating"))
                with ExitStack() as stack:
                    if kind == "accumulating":
                        stack.enter_context(pause())
                    stack.enter_context(torch.inference_mode(kind == "evaluation"))
                    one(x)
            assert values(model) == values(ddp.module), (step, kind)
        replica.close()
        with counted() as sent:
            model(x)
        assert not sent
    dist.destroy_process_group()


@case(ranks=(2,))
def statistics_wait_for_an_evaluation(me: Me) -> None:
    model = Counting(me.rank)
    replica = Replica(model, hold_statistics=True)
    replica.attach()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(me.rank))
    statistics = ("norm.running_mean", "norm.running_var")
    model(x)
    with counted() as sent, replica.pause():
        model(x)  # sends what the first forward made due, except for the statistics
        model(x)
    assert len(sent) == 1 and not are_equal(me, model) and not are_equal(me, model, "steps")
    expected = [me.everybody(str(values(model)[name]))[0] for name in statistics]
    with counted() as sent, torch.inference_mode():
        model.eval()
        model(x)
        model(x)
    assert len(sent) == 1 and are_equal(me, model, "steps") and not are_equal(me, model), sent
    assert [str(values(model)[name]) for name in statistics] == expected


@case(ranks=(2,))
def constant_buffers_are_sent_once(me: Me) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_buffer("mask", torch.full((3,), float(me.rank)))
    replica = Replica(model, only_written=True, in_evaluation=False)
    replica.attach()
    with counted() as sent:
        for _ in range(3):
            model(torch.randn(2, 3))
        assert not sent
        model.mask = torch.full((3,), 2.0 + me.rank)
        with torch.no_grad():
            model(torch.randn(2, 3))
        assert not sent
        model(torch.randn(2, 3))
        model(torch.randn(2, 3))
    assert sent == [12] and model.mask.tolist() == [2.0] * 3


@case(ranks=(3,))
def another_model_is_an_error_on_every_rank(me: Me) -> None:
    for odd, told in (
        (nn.Linear(3, 4), "0 is weight [3, 3] float32 on rank 0 and weight [4, 3] float32 on rank 1"),
        (nn.Linear(3, 3, bias=False), "1 is bias [3] float32 on rank 0 and missing on rank 1"),
    ):
        try:
            Replica(odd if me.rank == 1 else nn.Linear(3, 3))
        except hvd.CommError as error:
            assert told in str(error), error
        else:
            raise AssertionError("no error")


@case(ranks=(2,))
def only_the_models_optimizers_accumulate(me: Me) -> None:
    models = [nn.Linear(3, 1) for _ in range(2)]
    replicas_ = [Replica(model) for model in models]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model) for model in models
    ]
    with accumulating(models[0], [*optimizers, torch.optim.SGD(models[0].parameters())], replicas_[0]):
        assert [replica._paused for replica in replicas_] == [True, False]
        for model in models:
            model(torch.full((1, 3), float(me.rank))).sum().backward()
    optimizers[1].synchronize()
    assert models[0].weight.grad.tolist() == [[float(me.rank)] * 3]
    assert models[1].weight.grad.tolist() == [[0.5] * 3]
    assert not replicas_[0]._paused


main(__name__)
