"""Ranks with different numbers of samples and of batches: what one process with all samples learns."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.oracle import assert_close, batch, release, seeded, terms_of, values
from tests.support.reference_run import momentum, some_profile
from tests.support.small_models import Words, branches64, mlp64


def rows(rank: int, step: int, part: int = 0) -> torch.Tensor:
    """This rank's samples: from 1 to 7 of them."""
    count = 1 + (3 * rank + 2 * step + part) % 7
    return batch(rank, 10 * step + part, (count, 12), torch.float64)


def mean_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Pair:
    """A model on all ranks beside the one that a single process trains with all samples."""

    def __init__(self, build: Any = mlp64, make: Any = momentum, planned: bool = True, **options: Any) -> None:
        self.model, self.plain = seeded(build), seeded(build)
        self.alone = make(self.plain)
        if planned:
            options["profile"] = some_profile(self.model)
        options = {"schedule": "dear", "bucket_mb": 0.002, **options}
        self.optimizer: Any = hvd.DistributedOptimizer(
            make(self.model), self.model.named_parameters(), **options
        )
        self.steps = 0

    def backward(self, mine: torch.Tensor, everybody: list[torch.Tensor]) -> None:
        self.optimizer.weighted(mean_loss(self.model, mine), len(mine)).backward()
        self.together(everybody)

    def together(self, everybody: list[torch.Tensor]) -> None:
        self.alone.zero_grad()
        mean_loss(self.plain, torch.cat(everybody)).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.alone.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def compare(self, what: str) -> None:
        assert_close(self.model, self.plain, terms_of(self.plain, self.steps + 1), what)

    def end(self, what: str) -> None:
        self.compare(what)
        release(self.optimizer)


GATHERS = ("gradients", "parameters")


@case(ranks=(1, 2, 3, 4))
def different_batch_sizes_are_weighted_exactly(me: Me) -> None:
    for gather in GATHERS:
        for build in (mlp64, branches64):
            pair = Pair(build, gather=gather)
            for step in range(6):
                pair.backward(rows(me.rank, step), [rows(rank, step) for rank in range(me.size)])
                pair.step()
            pair.end(f"{gather} {build.__name__}")


@case(ranks=(1, 2, 3))
def accumulated_passes_of_different_sizes(me: Me) -> None:
    for gather in GATHERS:
        for passes in (2, 3):
            pair = Pair(gather=gather)
            pair.optimizer.set_backward_passes_per_step(passes)
            for step in range(4):
                for part in range(passes):
                    mine = rows(me.rank, step, part)
                    pair.optimizer.weighted(mean_loss(pair.model, mine), len(mine)).backward()
                pair.together([rows(r, step, part) for r in range(me.size) for part in range(passes)])
                pair.step()
            pair.end(f"{gather}, {passes} passes")


@case(ranks=(1, 2, 3))
def clipping_and_reading_gradients(me: Me) -> None:
    for gather in GATHERS:
        pair = Pair(gather=gather)
        for step in range(4):
            pair.backward(rows(me.rank, step), [rows(rank, step) for rank in range(me.size)])
            if step % 2:
                norm = pair.optimizer.clip_grad_norm_(0.05)
                plain = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
                assert torch.allclose(norm, plain, rtol=1e-12), f"{norm} {plain}"
                pair.step()
                continue
            pair.optimizer.synchronize()
            grads = [[p.grad for p in model.parameters()] for model in (pair.model, pair.plain)]
            assert_close(*grads, terms_of(pair.plain, 1), "gradients")
            with pair.optimizer.skip_synchronize():
                pair.step()
        pair.end(gather)


@case(ranks=(2, 3))
def a_rank_without_samples_only_steps(me: Me) -> None:
    for gather in GATHERS:
        pair = Pair(gather=gather)
        for step in range(6):
            idle = step % me.size
            everybody = [rows(rank, step) for rank in range(me.size) if rank != idle]
            if me.rank == idle:
                pair.together(everybody)
            else:
                pair.backward(rows(me.rank, step), everybody)
            pair.step()
        pair.end(gather)


@case(ranks=(2,))
def tokens_of_sparse_embeddings(me: Me) -> None:
    """Sparse gradients travel outside of the buckets; they are weighted, too."""

    def words(rank: int, step: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(100 * step + rank)
        return torch.randint(0, 30, (2 + 3 * rank,), generator=dice)

    for dense in (False, True):
        pair = Pair(
            lambda: Words(True).double(),
            lambda m: torch.optim.SGD(m.parameters(), 0.1),
            sparse_as_dense=dense,
        )
        for step in range(4):
            pair.backward(words(me.rank, step), [words(rank, step) for rank in range(me.size)])
            pair.step()
        pair.end(f"sparse_as_dense={dense}")


@case(ranks=(2,))
def what_cannot_be_weighted_is_refused(me: Me) -> None:
    def refused(said: str, act: Any) -> None:
        try:
            act()
        except (ValueError, hvd.CommError) as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"not refused: {said}")

    pair = Pair()
    loss = mean_loss(pair.model, rows(0, 0))
    refused("at least 1", lambda: pair.optimizer.weighted(loss, 0))
    pair.backward(rows(0, 0), [rows(0, 0)])
    refused("reduced already", lambda: pair.backward(rows(0, 1), [rows(0, 1)]))
    release(pair.optimizer)
    pair = Pair(op=hvd.Sum)
    refused("op=Average", lambda: pair.optimizer.weighted(mean_loss(pair.model, rows(0, 0)), 1))
    release(pair.optimizer)
    pair = Pair(gather="parameters", early_step=True)
    refused("early_step", lambda: pair.optimizer.weighted(mean_loss(pair.model, rows(0, 0)), 1))
    release(pair.optimizer)
    pair = Pair()
    loss = mean_loss(pair.model, rows(0, 0))
    (pair.optimizer.weighted(loss, 3) if me.rank else loss).backward()

    def read() -> None:
        pair.optimizer.step()
        values(pair.model)

    refused("on all ranks or on none", read)


main(__name__)
