"""Tied weights: the head's part is sent first, rows correct it, and the bits are those of whole gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.oracle import release, seeded
from tests.support.reference_run import assert_same_steps, bits, bits_of_steps, momentum, searching

STEPS, ORDINARY = 16, 8
Train = Callable[[Me, nn.Module, Any, int], None]


class Words(nn.Module):
    """A language model whose output matrix is its embedding's."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(211, 12)
        self.body = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))
        self.head = nn.Linear(12, 211, bias=bias)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, embed: bool = True, head: bool = True) -> torch.Tensor:
        x = self.body(self.words(ids) if embed else torch.ones(*ids.shape, 12) / (1 + ids[..., None]))
        return self.head(x) if head else x


def ids_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(211, (3, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int, embed: bool = True, head: bool = True) -> torch.Tensor:
    ids = ids_of(step, rank)
    out = model(ids, embed, head)
    if not head:
        return out.square().mean()
    loss: torch.Tensor = nn.functional.cross_entropy(out.flatten(0, 1), ids.roll(1, 1).flatten())
    return loss


def once(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
    loss_of(model, step, me.rank).backward()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def figures(
    me: Me, make: Any, train: Train, steps: int = STEPS, backend: str = "", **options: Any
) -> list[dict[str, torch.Tensor]]:
    """The bits of all gradients before, and of all parameters after each step.

    The first steps are ordinary: in these the optimizer finds out whether the head's part comes early.
    """
    model = seeded(Words)
    optimizer: Any = hvd.DistributedOptimizer(make(model), model=model, **options)
    run: Any = torch.compile(model, backend=backend) if backend else model
    corrects = options["row_sparse"] is True
    tied = optimizer._session.round

    def trained(step: int) -> None:
        if step >= ORDINARY:
            return train(me, run, optimizer, step)
        once(me, run, optimizer, step)
        assert tied.early_parts() == [0] * corrects, step

    found = bits_of_steps(model, optimizer, trained, steps)
    if train is once:
        assert hvd.explain(optimizer, show=False).tied == (("words.weight",) if corrects else ())
    release(optimizer)
    return found


def compare(me: Me, make: Any, train: Train, what: str, **options: Any) -> None:
    """With the head's part early and with whole gradients: equal bits of all gradients and parameters."""
    ours, plain = (figures(me, make, train, row_sparse=choice, **options) for choice in (True, False))
    assert_same_steps(ours, plain, what)


@case(ranks=(2, 3), slow=(4,))
def corrected_gradients_have_the_bits_of_whole_ones(me: Me) -> None:
    for make in (momentum, adamw):
        compare(me, make, once, make.__name__)
    compare(me, momentum, once, "small buckets", bucket_mb=0.002)
    with searching(1000.0):
        compare(me, momentum, once, "while a plan is searched")


@case(ranks=(2, 3), slow=(4,))
def on_any_wire(me: Me) -> None:
    compare(me, momentum, once, "bf16", compression=hvd.Compression.bf16)
    compare(me, momentum, once, "sums", op=hvd.Sum)
    compare(me, momentum, once, "predivided", gradient_predivide_factor=3.0)


@case(ranks=(2, 3))
def in_compiled_graphs(me: Me) -> None:
    """The head's part is there when its piece's backward ends, in the first steps as in all others."""

    def accumulate(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.set_backward_passes_per_step(2)
        for k in range(2):
            loss_of(model, 10 * step + k, me.rank).backward()

    for train in (once, accumulate):
        torch._dynamo.reset()
        compare(me, momentum, train, train.__name__, backend="aot_eager", bucket_mb=0.002)
    torch._dynamo.reset()


@case(ranks=(2, 3))
def whatever_a_step_uses(me: Me) -> None:
    """The embedding alone, the head alone, neither, on all ranks or on some."""

    def some(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        kind = (step + (me.rank if step % 5 > 1 else 0)) % 4
        loss_of(model, step, me.rank, embed=kind % 2 == 0, head=kind < 2).backward()

    compare(me, momentum, some, "some", steps=30)


@case(ranks=(2, 3))
def several_passes(me: Me) -> None:
    def accumulate(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.set_backward_passes_per_step(3)
        for k in range(3):
            loss_of(model, 10 * step + k, me.rank).backward()

    def apart(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        with optimizer.no_sync():
            once(me, model, optimizer, 3 * step)
        once(me, model, optimizer, 3 * step + 1)

    def twice(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        """Two rounds before a step: the second gradient is added to the first sum."""
        once(me, model, optimizer, 3 * step)
        once(me, model, optimizer, 3 * step + 1)

    def zeroed(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        once(me, model, optimizer, step)

    compare(me, momentum, accumulate, "3 passes")
    compare(me, momentum, apart, "no_sync")
    compare(me, momentum, twice, "2 rounds")
    compare(me, momentum, twice, "2 rounds of sums", op=hvd.Sum)
    compare(me, momentum, zeroed, "zeros")


@case(ranks=(2, 3))
def other_ways_to_differentiate(me: Me) -> None:
    def penalty(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        """Gradients that nobody accumulates come first."""
        loss = loss_of(model, step, me.rank)
        (grad,) = torch.autograd.grad(loss, [model.words.weight], retain_graph=True)
        (loss * (1 + grad.square().mean().item())).backward()

    def differentiable(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        loss_of(model, step, me.rank).backward(create_graph=step % 2 == 0)

    def partial(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        loss_of(model, step, me.rank).backward(inputs=[model.words.weight, model.head.bias])

    def hooked(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        if step == 0:
            model.words.weight.register_hook(lambda grad: -2 * grad)
        once(me, model, optimizer, step)

    def reused(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        """Two heads in one graph."""
        (loss_of(model, step, me.rank) + loss_of(model, step + 1, me.rank, embed=False)).backward()

    def recomputed(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        out = checkpoint(model, ids_of(step, me.rank), use_reentrant=step % 2 == 0)
        out = model(ids_of(step, me.rank)) if step % 2 == 0 else out
        out.square().mean().backward()

    def in_half_precision(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step, me.rank)
        loss.backward()

    def failing(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        """The first backward ends in an error behind the head, on all ranks."""
        out = model.head(Fails.apply(model.body(model.words(ids_of(step, me.rank)))))
        try:
            out.square().mean().backward()
        except ZeroDivisionError:
            optimizer.zero_grad()
        once(me, model, optimizer, step)

    for train in (penalty, differentiable, partial, hooked, reused, recomputed, in_half_precision, failing):
        compare(me, momentum, train, train.__name__)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


@case(ranks=(2, 3))
def clipped_weighted_and_given(me: Me) -> None:
    def clip(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        once(me, model, optimizer, step)
        optimizer.clip_grad_norm_(0.05)

    def weigh(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.weighted(loss_of(model, step, me.rank), samples=3 + me.rank).backward()

    def by_hand(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        if step % 2:
            once(me, model, optimizer, step)
        for number, p in enumerate(model.parameters()):
            grad = torch.zeros_like(p)
            grad[number % len(p)] = float(me.rank)
            p.grad = grad if step % 2 == 0 and (number + me.rank) % 2 else p.grad

    compare(me, momentum, clip, "clipping")
    compare(me, adamw, weigh, "weighted")
    compare(me, adamw, by_hand, "by hand")


@case(ranks=(2, 3), slow=(4,))
def however_late_a_rank_is(me: Me) -> None:
    """Ranks wait for random times between the head's part and the rest, and between steps."""

    def late(me: Me, model: nn.Module, optimizer: Any, step: int) -> None:
        wait = torch.rand(2, generator=torch.Generator().manual_seed(1000 * me.seed + 10 * step + me.rank))
        x = model.body(model.words(ids_of(step, me.rank)))
        x.register_hook(lambda grad: time.sleep(0.02 * float(wait[0])))
        model.head(x).square().mean().backward()
        time.sleep(0.02 * float(wait[1]))

    compare(me, momentum, late, "late", steps=30)


@case(ranks=(2, 3))
def ranks_with_fewer_batches(me: Me) -> None:
    found = {}
    for choice in (True, False):
        model = seeded(Words)
        optimizer: Any = hvd.DistributedOptimizer(momentum(model), model=model, row_sparse=choice)
        for step in range(12 + 3 * me.rank):
            loss_of(model, step, me.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        hvd.join()
        found[choice] = {n: bits(p) for n, p in model.named_parameters()}
        release(optimizer)
    for name, mine in found[True].items():
        assert torch.equal(mine, found[False][name]), name


@case(ranks=(2,))
def a_saved_profile_has_whole_gradients(me: Me) -> None:
    model = seeded(Words)
    optimizer: Any = hvd.DistributedOptimizer(momentum(model), model=model, row_sparse=True)
    for step in range(10):
        once(me, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    text = str(hvd.explain(optimizer, show=False))
    assert "words.weight (head)" in text and ", rows that correct the head's 0.01 MiB" in text, text
    profile = optimizer.profile()
    assert {layer.bytes for layer in profile.layers if "words.weight" in layer.name} == {211 * 12 * 4, 0}
    release(optimizer)
    again: Any = hvd.DistributedOptimizer(momentum(model), model=model, profile=profile)
    once(me, model, again, 11)
    again.step()
    assert not hvd.explain(again, show=False).tied
    release(again)


@case(ranks=(2,))
def nothing_is_sent_early_where_it_gains_nothing(me: Me) -> None:
    """A model that fits into one message: with row_sparse="auto", the gradient is sent whole."""
    model = seeded(Words)
    optimizer: Any = hvd.DistributedOptimizer(momentum(model), model=model)
    for step in range(10):
        once(me, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    assert not hvd.explain(optimizer, show=False).tied
    release(optimizer)


main(__name__)
