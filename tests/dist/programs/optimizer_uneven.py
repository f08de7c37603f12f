"""Ranks with different numbers of samples and of batches: what one process with all samples learns."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.documented_commands import ROOT, of_page
from tests.support.oracle import assert_close, batch, fingerprint, release, seeded, terms_of, values
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


@case(ranks=(2, 3))
def plans_wait_for_the_slowest_rank_of_each_layer(me: Me) -> None:
    """The last rank is slow in the forward of two layers and in the backward of one, and rank 0 in none."""
    pair = Pair(branches64, planned=False, schedule="auto", bucket_mb=None)

    def pause(*_: Any) -> None:
        time.sleep(0.03)

    if me.rank == me.size - 1:
        pair.model.branch[0].register_forward_hook(pause)
        pair.model.branch[2].register_forward_hook(pause)
        pair.model.branch[1].weight.register_hook(pause)
    for step in range(9):
        pair.backward(rows(me.rank, step), [rows(rank, step) for rank in range(me.size)])
        pair.step()
    layers = pair.optimizer.profile().layers

    def seconds(name: str) -> tuple[float, float]:
        mine = [layer for layer in layers if layer.name.startswith(name)]
        return sum(layer.forward for layer in mine), sum(layer.backward for layer in mine)

    assert seconds("branch.0")[0] > 0.025 and seconds("branch.2")[0] > 0.025, layers
    assert seconds("branch.1")[1] > 0.025, layers
    pair.end("a slow rank")


@case(ranks=(2, 3))
def the_pages_example_runs(me: Me) -> None:
    """As it stands; every rank ends with the same parameters."""
    page = ROOT / "docs" / "optimizer.md"
    (example,) = [block.text for block in of_page(page.name, page.read_text()) if "hvd.join()" in block.text]
    names: dict[str, Any] = {}
    exec(example, names)
    found = me.everybody(fingerprint(names["model"]))
    assert len(set(found)) == 1, found
    release(names["optimizer"])


# -- join() --------------------------------------------------------------------------------------------------


def epoch(me: Me, pair: Pair, first: int, batches: list[int], act: Any = lambda: None) -> int:
    """Rank r has ``batches[r]`` batches from step ``first`` on; everybody replays what active ranks learn."""
    for number in range(max(batches)):
        step = first + number
        active = [rank for rank in range(me.size) if batches[rank] > number]
        everybody = [rows(rank, step) for rank in active]
        if me.rank not in active:
            continue
        pair.backward(rows(me.rank, step), everybody)
        act()
        pair.step()
    last: int = hvd.join()
    for number in range(batches[me.rank], max(batches)):
        step = first + number
        pair.together([rows(rank, step) for rank in range(me.size) if batches[rank] > number])
        pair.alone.step()
        pair.steps += 1
    return last


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)


@case(ranks=(2, 3, 4))
def joined_ranks_wait_for_the_others_batches(me: Me) -> None:
    """Twice, with another rank first; sums of active ranks still work; the results are those of all."""
    for gather in GATHERS:
        pair = Pair(make=adam, gather=gather)
        batches, active = [3 + 2 * rank for rank in range(me.size)], []

        def metric() -> None:
            active.append(int(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="metric")))

        assert epoch(me, pair, 0, batches, metric) == me.size - 1
        wanted = [sum(count > n for count in batches) for n in range(batches[me.rank])]
        assert active == wanted, f"{active}, not {wanted}"
        pair.compare(f"{gather}, first epoch")
        assert epoch(me, pair, 20, batches[::-1]) == 0
        pair.compare(f"{gather}, second epoch")
        everywhere = me.everybody(fingerprint(pair.model))
        assert len(set(everywhere)) == 1, everywhere
        saved = pair.optimizer.state_dict()["state"]
        for i, state in pair.alone.state_dict()["state"].items():
            assert float(saved[i]["step"]) == float(state["step"])
        epoch(me, pair, 40, [2] * me.size)
        pair.end(f"{gather}, a third one without a difference")


@case(ranks=(2, 3))
def plans_change_while_ranks_have_joined(me: Me) -> None:
    """Rank 0 joins before the first plan is made; the others measure, plan, and plan again."""
    for gather in GATHERS:
        pair = Pair(planned=False, schedule="auto", bucket_mb=None, gather=gather)
        session = pair.optimizer._session
        before = session.plan.program.hash
        batches = [2] + [16] * (me.size - 1)
        epoch(me, pair, 0, batches)
        assert session.plan.program.hash != before and session.profile is not None
        assert session.profile.source.startswith("measured"), session.profile.source
        pair.compare(f"{gather}, planned")
        hashes = me.everybody(session.plan.program.hash)
        assert len(set(hashes)) == 1, hashes
        session._start_measuring()
        epoch(me, pair, 50, [3 + 9 * (rank == 0) for rank in range(me.size)])
        pair.end(f"{gather}, planned anew")


@case(ranks=(2, 3))
def votes_for_a_new_plan_work_while_ranks_have_joined(me: Me) -> None:
    pair = Pair(planned=False, schedule="auto", bucket_mb=None)
    epoch(me, pair, 0, [10] * me.size)
    session = pair.optimizer._session
    session.times.has_drifted = lambda: True
    patience = session.times.patience
    epoch(me, pair, 20, [2] + [12] * (me.size - 1))
    assert session.times.patience > patience, "no new plan"
    pair.end("voted")


@case(ranks=(2, 3))
def clipping_and_schedules_while_ranks_have_joined(me: Me) -> None:
    for gather in GATHERS:
        pair = Pair(make=adam, gather=gather)

        def clip() -> None:
            norm = pair.optimizer.clip_grad_norm_(0.05)
            plain = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            assert torch.allclose(norm, plain, rtol=1e-12), f"{norm} {plain}"
            for optimizer in (pair.optimizer, pair.alone):
                optimizer.param_groups[0]["lr"] *= 0.9

        batches = [2 + 2 * rank for rank in range(me.size)]
        for step in range(max(batches)):
            active = [rank for rank in range(me.size) if batches[rank] > step]
            pair.together([rows(rank, step) for rank in active])
            if me.rank in active:
                mine = rows(me.rank, step)
                pair.optimizer.weighted(mean_loss(pair.model, mine), len(mine)).backward()
                clip()
                pair.step()
                continue
            # This rank has joined for the whole rest: one process goes on alone.
            nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            pair.alone.param_groups[0]["lr"] *= 0.9
            pair.alone.step()
            pair.steps += 1
        hvd.join()
        assert pair.optimizer.param_groups[0]["lr"] == pair.alone.param_groups[0]["lr"]
        pair.end(gather)


@case(ranks=(2, 3))
def averages_divide_by_all_ranks(me: Me) -> None:
    """Without ``weighted()``, as in Horovod: the gradients of joined ranks are zeros."""
    for gather in GATHERS:
        pair = Pair(gather=gather)
        batches = [1 + rank for rank in range(me.size)]
        for step in range(batches[me.rank]):
            mean_loss(pair.model, rows(me.rank, step)).backward()
            pair.optimizer.step()
            pair.optimizer.zero_grad()
        hvd.join()
        for step in range(max(batches)):
            pair.alone.zero_grad()
            for rank in range(me.size):
                if batches[rank] > step:
                    (mean_loss(pair.plain, rows(rank, step)) / me.size).backward()
            pair.alone.step()
            pair.steps += 1
        pair.end(gather)


@case(ranks=(2,))
def two_optimizers_join_together(me: Me) -> None:
    """Also where one of them takes more steps than the other."""
    pairs = [Pair(gather=gather) for gather in GATHERS]
    counts = ((2, 3), (4, 9))[me.rank]
    for step in range(max(counts)):
        for pair, count in zip(pairs, counts, strict=True):
            if step < count:
                pair.backward(rows(me.rank, step), [rows(r, step) for r in (0, 1)])
                pair.step()
    hvd.join()
    for number, pair in enumerate(pairs):
        plain = seeded(mlp64)
        alone = momentum(plain)
        for step in range((4, 9)[number]):
            active = (0, 1) if step < (2, 3)[number] else (1,)
            alone.zero_grad()
            mean_loss(plain, torch.cat([rows(rank, step) for rank in active])).backward()
            alone.step()
        assert_close(pair.model, plain, terms_of(plain, 10), f"optimizer {number}")
        release(pair.optimizer)


@case(ranks=(2,))
def wrong_use_of_join_says_so(me: Me) -> None:
    def said(text: str, act: Any) -> None:
        try:
            act()
        except (ValueError, hvd.CommError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")

    pair = Pair()
    pair.backward(rows(0, 0), [rows(0, 0)])
    said("call step() first", hvd.join)
    release(pair.optimizer)
    pair = Pair(gather="parameters", early_step=True)
    said("early_step", hvd.join)
    release(pair.optimizer)
    # A backward without step() after a rank has joined: an error on both ranks.
    pair = Pair()
    if me.rank == 0:
        said("did not call step()", hvd.join)
    else:
        for step in range(2):
            mean_loss(pair.model, rows(1, step)).backward()
        said("did not call step()", lambda: values(p.grad for p in pair.model.parameters()))
    release(pair.optimizer)


main(__name__)
