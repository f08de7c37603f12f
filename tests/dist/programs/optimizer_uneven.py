"""Ranks with different numbers of samples: what one process with all samples learns."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.documented_commands import ROOT, of_page
from tests.support.oracle import assert_close, fingerprint, release, terms_of, values
from tests.support.small_models import Words, branches64, mlp64
from tests.support.uneven import GATHERS, Pair, mean_loss, rows


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


@case(ranks=(1, 2))
def weighted_losses_add_to_nothing_that_was_not_counted(me: Me) -> None:
    """Or it would be divided by their samples as well."""

    mine, everybody = rows(me.rank, 0), [rows(rank, 0) for rank in range(me.size)]

    def weighted(pair: Pair) -> None:
        pair.optimizer.weighted(mean_loss(pair.model, mine), len(mine)).backward()

    def refused(act: Any) -> None:
        with pytest.raises((ValueError, hvd.CommError), match=r"zero_grad\(\)|pass every loss"):
            act()

    for gather in GATHERS:
        pair = Pair(gather=gather)
        pair.backward(mine, everybody)
        pair.optimizer.step()
        refused(partial(weighted, pair))
        pair.optimizer.close()
        pair = Pair(gather=gather)
        with pair.optimizer.no_sync():
            mean_loss(pair.model, mine).backward()
        refused(partial(weighted, pair))
        pair.optimizer.zero_grad()
        if me.size > 1:  # a rank alone does not see backwards
            with pair.optimizer.no_sync():
                weighted(pair)
            refused(mean_loss(pair.model, mine).backward)
            pair.optimizer.zero_grad()
        release(pair.optimizer)


@case(ranks=(1, 2, 3))
def samples_of_cleared_gradients_do_not_count(me: Me) -> None:
    """In whatever way they were cleared; and gradients of zero are none."""
    for gather in GATHERS:
        pair = Pair(gather=gather)
        for step in range(4):
            with pair.optimizer.no_sync():
                mine = rows(me.rank, step, 1)
                pair.optimizer.weighted(mean_loss(pair.model, mine), len(mine)).backward()
            if step % 2:
                pair.model.zero_grad()
            else:
                for p in pair.model.parameters():
                    p.grad = torch.zeros_like(p)
            pair.backward(rows(me.rank, step), [rows(rank, step) for rank in range(me.size)])
            pair.step()
            pair.optimizer.zero_grad(set_to_none=False)
        with pair.optimizer.no_sync():
            pair.optimizer.weighted(mean_loss(pair.model, mine), len(mine)).backward()
        pair.model.zero_grad()
        if me.size > 1:  # a rank alone does not see backwards
            mean_loss(pair.model, rows(0, 9)).backward()  # the same on all ranks
            pair.together([rows(0, 9)])
            pair.step()
        pair.end(gather)


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

    def seconds(last: str, backward: bool = False) -> float:
        """Until all ranks have come through the layer; alone, it has less where another one came late."""
        until = max(i for i, layer in enumerate(layers) if layer.name.startswith(last))
        forward = sum(layer.forward for layer in (layers if backward else layers[: until + 1]))
        return forward + (sum(layer.backward for layer in layers[until:]) if backward else 0.0)

    assert seconds("branch.0") >= 0.03 and seconds("branch.2") >= 0.06, layers
    assert seconds("branch.1.weight", backward=True) >= 0.09, layers
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


main(__name__)
