"""Sparse gradients: their slots hold zeros, and nothing that somebody has written into them is added."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.oracle import Oracle, assert_same_bits, fingerprint, release, seeded
from tests.support.quantised_training import Ledger, case_of_each_code
from tests.support.reference_run import Loss, Twin, some_profile


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@case(ranks=(2, 3))
def no_zeros_travel_beside_sparse_gradients(me: Me) -> None:
    """The slot of a table of 4 MB is zero where the gradient is sparse; it was sent whole in every step."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(16000, 64, sparse=True), nn.Linear(64, 2)))
    plain = seeded(lambda: nn.Sequential(nn.Embedding(16000, 64), nn.Linear(64, 2)))
    inner = torch.optim.SGD(plain.parameters(), 0.1)
    base = torch.optim.SGD(model.parameters(), 0.1)
    optimizer: Any = hvd.DistributedOptimizer(base, model=model, profile=some_profile(model))
    for step in range(12):
        inner.zero_grad()
        for rank in range(me.size):
            ids = torch.randint(16000, (32,), generator=torch.Generator().manual_seed(100 * step + rank))
            (plain(ids).square().mean() / me.size).backward()
            if rank == me.rank:
                model(ids).square().mean().backward()
        inner.step()
        optimizer.step()
        if step == 2:
            optimizer._session.times.restart()
        assert model[0].weight.grad.is_sparse
        optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    measured = hvd.metrics(optimizer)
    assert measured is not None and measured.bytes is not None and measured.bytes < 10_000
    release(optimizer)


@case(ranks=(2, 3))
def their_mean_has_the_bits_of_a_dense_one(me: Me) -> None:
    """Rows that a rank uses twice and that all ranks use; a third of each rank's values was rounded."""

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        ids = torch.randint(9, (16,), generator=torch.Generator().manual_seed(100 * step + rank))
        return model(ids).square().mean()

    model = seeded(lambda: nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 2)))
    plain = seeded(lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 2)))
    oracle = Oracle(plain, sgd(plain), me.size)
    optimizer: Any = hvd.DistributedOptimizer(sgd(model), model=model)
    for step in range(4):
        oracle.backward(lambda m, rank, step=step: loss(m, rank, step))
        loss(model, me.rank, step).backward()
        optimizer.synchronize()
        assert model[0].weight.grad.is_sparse
        grads = [p.grad.to_dense() for p in model.parameters()]
        assert_same_bits(grads, [p.grad for p in plain.parameters()], f"step {step}")
        oracle.optimizer.zero_grad()
        optimizer.zero_grad()
    release(optimizer)


@case(ranks=(2,))
def two_optimizers_are_waited_for_in_one_order(me: Me) -> None:
    """Rank 1 finds in its first step() what rank 0 does not wait for before it needs the second model."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2))

    models = [seeded(build), seeded(build)]
    optimizers: list[Any] = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), model=m, profile=some_profile(m))
        for m in models
    ]
    ids = torch.randint(50, (16,), generator=torch.Generator().manual_seed(me.rank))
    for _ in range(3):
        time.sleep(0.3 * me.rank)
        for words, model in enumerate(models):
            model((ids + words) % 50).square().mean().backward()
        time.sleep(0.1 * me.rank)
        for optimizer in optimizers:
            optimizer.step()
        models[1](ids)
        for optimizer in optimizers:
            optimizer.zero_grad()
    everywhere = me.everybody(fingerprint(models[0]) + fingerprint(models[1]))
    assert len(set(everywhere)) == 1, everywhere
    for optimizer in optimizers:
        release(optimizer)


@case(ranks=(2, 3))
def slots_of_sparse_gradients_stay_zero(me: Me) -> None:
    """They are not filled with zeros again; gradients are dense now and then, on some ranks."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(300, 8, sparse=True), nn.Linear(8, 2))

    model, plain = seeded(build), seeded(build)
    inner = torch.optim.SGD(plain.parameters(), 0.1)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model)
    for step in range(24):
        inner.zero_grad()
        for rank in range(me.size):
            ids = torch.randint(300, (16,), generator=torch.Generator().manual_seed(100 * step + rank))
            kind = (step * 5 + rank * step) % 7  # 0: dense, 1: none
            for one, share in ((plain, me.size), *([(model, 1)] if rank == me.rank else [])):
                one[0].sparse = kind > 0
                words = one[0](ids) if kind != 1 else torch.ones(16, 8)
                (one[1](words).square().mean() / share).backward()
                if one is plain:
                    for p in one.parameters():
                        if p.grad is not None and p.grad.is_sparse:
                            p.grad = p.grad.to_dense()
        inner.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    release(optimizer)


@case(ranks=(2, 3))
def old_dense_gradients_may_be_written_between_steps(me: Me) -> None:
    """A dense gradient is a view of its slot. Slots of sparse gradients were taken to hold zeros still, and
    what had been written into one by then was added when another rank's gradient was dense again.
    """
    kinds = ["dense", "sparse", "mixed", "sparse", "absent"]  # on rank 0; dense on the others if not sparse

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 2)).double()

    def loss_of(step: int, kind: str) -> Loss:
        def loss(model: Any, rank: int) -> torch.Tensor:
            ids = torch.randint(300, (16,), generator=torch.Generator().manual_seed(100 * step + rank))
            model[0].sparse = model is twin.model and (kind == "sparse" or (kind == "mixed" and rank == 0))
            absent = kind == "absent" and rank == 0
            words = torch.ones(16, 8, dtype=torch.float64) if absent else model[0](ids)
            loss: torch.Tensor = model[1](words).square().mean()
            return loss

        return loss

    twin = Twin(me, build, sgd, lag=0.0)
    table: Any = twin.model[0]
    old = torch.zeros(1)
    for step, kind in enumerate(2 * kinds):
        twin.backward(loss_of(step, kind))
        twin.compare_grads(f"step {step}, {kind}", exact=False)
        assert table.weight.grad.is_sparse == (kind == "sparse")
        old = old if kind == "sparse" else table.weight.grad
        twin.update()
        twin.zero_grad()
        old.fill_(7)
    release(twin.optimizer)


class Checkpointed(nn.Module):
    """One table has two gradients in a backward; ``kinds``: which of them are sparse."""

    def __init__(self, kinds: tuple[bool, bool]) -> None:
        super().__init__()
        self.kinds = kinds
        self.first, self.table, self.last = nn.Linear(2, 8), nn.Embedding(300, 8), nn.Linear(8, 2)

    def looked_up(self, x: torch.Tensor, ids: torch.Tensor, sparse: bool) -> torch.Tensor:
        self.table.sparse = sparse
        return torch.tanh(x + self.table(ids))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(torch.ones(16, 2, dtype=torch.float64))
        for number, sparse in enumerate(self.kinds):
            x = checkpoint(self.looked_up, x, ids + number, sparse, use_reentrant=True)
        return self.last(x)


@case(ranks=(2, 3))
def second_sparse_gradients_of_a_backward_count(me: Me) -> None:
    """One was added to the slot, which nobody reads where no rank's gradient is dense."""
    for kinds in ((True, True), (True, False), (False, True)):
        twin = Twin(me, lambda kinds=kinds: Checkpointed(kinds).double(), sgd, lag=0.0)
        twin.plain.kinds = (False, False)
        for step in range(4):

            def loss(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
                ids = torch.randint(299, (16,), generator=torch.Generator().manual_seed(100 * step + rank))
                value: torch.Tensor = model(ids).square().mean()
                return value

            twin.backward(loss)
            twin.compare_grads(f"{kinds}, step {step}", exact=False)
            twin.update()
            twin.zero_grad()
        release(twin.optimizer)


@case_of_each_code(ranks=(2, 3))
def nothing_is_lost_beside_sparse_gradients(me: Me, code: str) -> None:
    """The slot of a sparse gradient delivers what earlier ones have lost, though its sum is not looked at.

    The owner keeps it. It was lost, and sent again as this slot's value when a gradient was dense again.
    """
    ledger = Ledger(me, code)
    for kind in ("dense", "sparse", "sparse", "mixed", "dense", "sparse", "mixed"):
        if kind == "dense":
            ledger.step()
        else:
            sparse_step(ledger, kind == "sparse" or me.rank == 0)
        ledger.check(kind)
    release(ledger.optimizer)


def sparse_step(ledger: Ledger, sparse: bool) -> None:
    """Give one row of the first parameter a gradient, of whole numbers, and the second one none."""
    table, row = ledger.params[0], torch.tensor([ledger.steps])
    scales = [float(1 + rank) for rank in range(ledger.me.size)]
    (F.embedding(row, table, sparse=sparse).sum() * scales[ledger.me.rank]).backward()
    ledger.summed[0][row] += sum(scales)
    ledger.steps += 1
    ledger.optimizer.step()
    assert table.grad is not None
    ledger.optimizer.zero_grad()


main(__name__)
