"""Copies of a model on all ranks: equal at first, then rank 0's buffers when DDP would send them.

Gradients that no optimizer reduces are those of DDP, too.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commsched as hvd
from commsched import integrations as replicas
from commsched.integrations import Replica, UnclaimedGradients, accumulating
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


_groups: list[object] = []
"""Groups that are over. If DDP's reducer held the last reference to one, Python would free the reducer with
its lock (GIL) held, and the group would wait for its thread: that may want the lock, to free the tensors of
the last broadcast.
"""


@contextmanager
def process_group(me: Me) -> Iterator[None]:
    store, patience = dist.PrefixStore(me.name, me.store), timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size, timeout=patience)
    _groups.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


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
    """Training, accumulation, evaluation in inference mode, training in evaluation mode, in random order."""
    with process_group(me):
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
def two_forwards_before_a_backward(me: Me) -> None:
    """The second one overwrites buffers that the first has saved."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    replica = Replica(model, True, in_evaluation=True)
    replica.attach()
    torch.manual_seed(me.rank)
    first, second = model(torch.randn(4, 3)), model(torch.randn(4, 3))
    (first * second).sum().backward()
    assert model[0].weight.grad is not None
    replica.close()


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


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def replicated(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Replica:
    unclaimed = UnclaimedGradients(model, lambda: optimizers, {})
    replica = Replica(model, unclaimed=unclaimed)
    replica.attach()
    return replica


def batch(me: Me, number: int, rank: int | None = None) -> torch.Tensor:
    dice = torch.Generator().manual_seed(10 * number + (me.rank if rank is None else rank))
    return torch.randn(4, 3, generator=dice, dtype=torch.float64)


def check_gradients(model: nn.Module, expected: nn.Module, what: object) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), (what, name, mine.grad, theirs.grad)
        if theirs.grad is not None:
            assert torch.allclose(mine.grad, theirs.grad), (what, name, mine.grad, theirs.grad)
        assert torch.allclose(mine, theirs), (what, name, mine, theirs)


@contextmanager
def reducing(ddp: DistributedDataParallel) -> Iterator[None]:
    """What ``Accelerator.trigger_sync_in_backward`` does."""
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
    ddp.reducer.prepare_for_backward([])
    yield


@case()
def gradients_without_an_optimizer_are_those_of_ddp(me: Me) -> None:
    """Backwards, accumulation, ways to clear gradients and an optimizer of the user, in random order."""
    clears = ("optimizer", "model", "None", "zeros")
    actions = ("backward", "accumulated", "forwards first", "evaluation", "step", *clears)
    with process_group(me):
        for program in range(4):
            dice, model, ddp = (
                random.Random(f"{me.seed} {program}"),
                layers(),
                DistributedDataParallel(layers()),
            )
            replica, done = replicated(model, []), list[str]()
            sides = (
                (model, replica.pause, replica.reducing),
                (ddp, ddp.no_sync, lambda ddp=ddp: reducing(ddp)),
            )
            optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.5) for one, *_ in sides]
            equal = True  # whether the ranks have the same gradients
            for number in range(25):
                action = dice.choice([a for a in actions if equal or a != "step"])
                done.append(action)
                equal = action != "accumulated" and (
                    equal or action in ("backward", "forwards first", *clears)
                )
                xs = [batch(me, 2 * number + i) for i in range(2)]
                for (one, pause, reduce), optimizer in zip(sides, optimizers, strict=True):
                    if action == "backward":
                        one(xs[0]).square().sum().backward()
                    elif action == "accumulated":
                        with pause():
                            one(xs[0]).square().sum().backward()
                    elif action == "forwards first":
                        with pause():
                            losses = [one(x).square().sum() for x in xs]
                        losses[0].backward()
                        with reduce():
                            losses[1].backward()
                    elif action == "evaluation":
                        with torch.no_grad():
                            one(xs[0])
                    elif action == "step":
                        optimizer.step()
                    elif action == "optimizer":
                        optimizer.zero_grad()
                    elif action == "model":
                        one.zero_grad()
                    else:
                        for p in one.parameters():
                            if action == "None":
                                p.grad = None
                            elif p.grad is not None:
                                p.grad.zero_()
                check_gradients(model, ddp.module, (program, done))
            replica.close()


@case()
def optimizers_claim_gradients_at_any_time(me: Me) -> None:
    """They are wrapped later, get more parameters, and others are frozen: all are averaged once."""
    model, expected, optimizers = layers(), layers(), list[torch.optim.Optimizer]()
    replica = replicated(model, optimizers)
    unclaimed = replica._unclaimed
    assert unclaimed is not None

    def reduces(number: int, params: int) -> None:
        model(batch(me, number)).square().sum().backward()
        for rank in range(me.size):
            (expected(batch(me, number, rank)).square().sum() / me.size).backward()
        for one in optimizers:
            one.synchronize()
        check_gradients(model, expected, number)
        assert len(unclaimed._params) == params, (number, unclaimed._params)

    reduces(0, 6)
    of_last = torch.optim.SGD(model[4].parameters(), 0.0)
    optimizers.append(hvd.DistributedOptimizer(of_last, model=model))
    reduces(1, 4)
    for one in (model, expected):
        one[0].requires_grad_(False)
    reduces(2, 2)
    optimizers[0].add_param_group({"params": list(model[2].parameters())})
    reduces(3, 0)
    for one in (model, expected):
        one[0].requires_grad_(True)
    reduces(4, 2)
    optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), 0.0), model=model))
    reduces(5, 0)
    assert unclaimed._reducer is None
    replica.close()
    for one in optimizers:
        one.close()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = layers(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = checkpoint(self.layers[1:4], self.layers[0](x), use_reentrant=self.reentrant)
        return self.layers[4](middle)


@case()
def inner_backwards_and_those_that_raise(me: Me) -> None:
    """The reduction ends with the outermost backward. After one that raised, cleared gradients start anew."""

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("this backward fails")

    for reentrant in (False, True):
        model, expected = Checkpointed(reentrant), Checkpointed(reentrant)
        replica = replicated(model, [])
        for step in range(6):
            if step in (2, 4):
                hook = model.layers[0].weight.register_hook(fail)
                with suppress(RuntimeError):
                    model(batch(me, step)).square().sum().backward()
                hook.remove()
                model.zero_grad()
            model(batch(me, step)).square().sum().backward()
            for rank in range(me.size):
                (expected(batch(me, step, rank)).square().sum() / me.size).backward()
            check_gradients(model, expected, (reentrant, step))
            if step % 2:
                for one in (model, expected):
                    one.zero_grad()
        replica.close()


class Branches(nn.ModuleList):
    def forward(self, x: torch.Tensor, used: tuple[bool, ...]) -> torch.Tensor:
        return torch.cat([part(x) for part, use in zip(self, used, strict=True) if use]).sum()


@case()
def ranks_without_a_gradient_count_as_zero(me: Me) -> None:
    """Also where no parameter of the branch has one on a rank: its next gradients meet the others' next."""
    model = Branches(nn.Linear(3, 1, bias=False) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), 0.0), model=model)
    replica = replicated(model, [optimizer])
    for step in range(4):
        branch = me.rank == step % me.size
        model(torch.full((1, 3), step + 1.0), (True, branch, False)).backward()
        optimizer.step()
        grads = [part.weight.grad for part in model]
        assert grads[2] is None
        assert torch.allclose(grads[1], torch.full((1, 3), (step + 1.0) / me.size)), (step, grads)
        model.zero_grad()
    replica.close()
    optimizer.close()


@case(ranks=(2,))
def copies_of_a_model_are_ordinary(me: Me) -> None:
    """A rank alone trains and evaluates them."""
    model = Counting(me.rank)
    replica = replicated(model, [])
    model(torch.ones(2, 3)).sum().backward()
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert Replica.of(one) is None and Replica.of(model) is replica
        if me.rank == 0:
            with counted() as sent:
                one(torch.ones(2, 3)).sum().backward()
                one.eval()(torch.ones(2, 3))
            assert not sent
    replica.close()


main(__name__)
