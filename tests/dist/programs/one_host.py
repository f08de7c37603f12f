"""Ranks of one host exchange over shared memory by default, with the bits of the direct exchange."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import commsched as hvd
from comm_core import boards
from commsched.collectives.private_groups import hosts_of
from scheduler.ir.link import TwoTierLink
from tests.support import tier_training
from tests.support.cases import Me, case, main
from tests.support.oracle import assert_same_bits, fingerprint, seeded
from tests.support.small_models import loss_of, mlp, sgd, wide
from tests.support.tier_training import expected, of_replicas, rows_of, trained, transport
from tests.support.two_tiers import is_shared


@contextmanager
def another_container(me: Me) -> Iterator[list[str]]:
    """The last rank cannot open the boards of the others. Yields what is warned of on this rank."""
    honest, warned = boards._open_neighbour, list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commsched").addHandler(handler)
    if me.rank == me.size - 1:
        boards._open_neighbour = lambda *_: f"rank {me.rank} runs in another container"
    try:
        yield warned
    finally:
        boards._open_neighbour = honest
        logging.getLogger("commsched").removeHandler(handler)


@case(ranks=(2, 4))
def shared_memory_is_one_link(me: Me) -> None:
    assert hosts_of() == [0] * me.size
    model = seeded(mlp)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), schedule="dear")
    assert not isinstance(optimizer._session.plan.link, TwoTierLink)
    text = str(hvd.explain(optimizer, show=False))
    assert "over transport tiers (memory that the ranks of this host share)" in text, text
    assert "inside hosts" not in text and "between" not in text, text
    optimizer.close()


@case(ranks=(2, 4))
def gradients_lie_in_memory_that_neighbours_read(me: Me) -> None:
    """Those that the user has kept read as before while the next ones are made."""
    model = seeded(mlp)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), schedule="dear")
    kept, copies = [], []
    for step in range(4):
        loss_of(step)(model, me.rank).backward()
        optimizer.synchronize()
        grads = [param.grad for param in model.parameters()]
        assert all(grad is not None and is_shared(grad) for grad in grads)
        copies += [grad.clone() for grad in grads]
        kept += grads
        optimizer.step()
        optimizer.zero_grad()
    del grads
    optimizer.close()
    for grad, copy in zip(kept, copies, strict=True):
        assert_same_bits([grad], [copy], "kept")


@case(ranks=(2, 4))
def every_schedule_gives_the_bits_of_rank_order(me: Me) -> None:
    tier_training.check_schedules(me)


@case(ranks=(2, 4))
def every_bucket_size_gives_the_bits_of_rank_order(me: Me) -> None:
    tier_training.check_bucket_sizes(me)


@case(ranks=(2, 4))
def compressed_gradients_have_the_bits_of_the_direct_exchange(me: Me) -> None:
    """Of 16 bits, as the oracle rounds them too, and of blocks."""
    exact = fingerprint(expected(me, wide, 6))
    for name in ("bf16", "fp16", "int8", "fp8"):
        options: dict[str, Any] = {"schedule": "dear", "compression": getattr(hvd.Compression, name)}
        shared = trained(me, wide, 6, "tiers", **options)
        assert fingerprint(shared) != exact, name
        for named in ("direct", "tiers"):
            assert_same_bits(shared, trained(me, wide, 6, named, transport=named, **options), name)
        if wire := {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name):
            assert_same_bits(shared, expected(me, wide, 6, wire), name)


@case(ranks=(2, 4))
def gathered_parameters_are_equal_everywhere(me: Me) -> None:
    tier_training.check_gathered_parameters(me)


@case(ranks=(2, 4))
def touched_rows_have_the_bits_of_rank_order(me: Me) -> None:
    tier_training.check_touched_rows(me)


@case(ranks=(4,))
def process_sets_share_memory(me: Me) -> None:
    """Two optimizers at once, over boards of their own."""
    pairs = [hvd.add_process_set(ranks) for ranks in ([0, 2], [1, 3])]
    for pair in pairs:
        if me.rank not in (pair.ranks or ()):
            continue
        model, truth = seeded(mlp), seeded(mlp)
        optimizer: Any = hvd.DistributedOptimizer(sgd(model), process_set=pair, schedule="dear")
        assert hvd.explain(optimizer, show=False).transport == "tiers"
        plain = sgd(truth)
        for step in range(4):
            loss_of(step)(model, me.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            first, second = (
                torch.autograd.grad(loss_of(step)(truth, rank), list(truth.parameters()))
                for rank in pair.ranks or ()
            )
            for parameter, one, other in zip(truth.parameters(), first, second, strict=True):
                parameter.grad = (one + other) * 0.5
            plain.step()
        optimizer.state_dict()
        optimizer.close()
        assert_same_bits(model, truth)


@case(ranks=(2, 4))
def replicas_of_a_stage_add_in_rank_order(me: Me) -> None:
    tier_training.check_replicas(me)
    data = rows_of(me.size)
    blocks = of_replicas(me, data, wide, compression=hvd.Compression.int8)
    assert fingerprint(blocks) != fingerprint(of_replicas(me, data, wide))
    for named in ("direct", "tiers"):
        with transport(named):
            assert_same_bits(of_replicas(me, data, wide, compression=hvd.Compression.int8), blocks)


@case(ranks=(2, 4))
def where_memory_cannot_be_shared_the_loopback_gives_the_same_bits(me: Me) -> None:
    options: dict[str, Any] = {"schedule": "dear", "compression": hvd.Compression.bf16}
    data = rows_of(me.size)
    with another_container(me) as warned:
        over_loopback = trained(me, mlp, 4, "direct", **options)
        quantised = trained(me, wide, 4, "direct", schedule="dear", compression=hvd.Compression.fp8)
        replicas = of_replicas(me, data)
        try:
            hvd.DistributedOptimizer(sgd(mlp()), transport="tiers")
        except hvd.CommError as error:
            assert "transport='tiers' is not possible: the ranks of a host cannot share memory" in str(error)
        else:
            raise AssertionError("tiers without shared memory were not refused")
    assert len(warned) == (3 if me.rank == 0 else 0), warned
    for text in warned:
        assert f"rank {me.size - 1} runs in another container" in text, text
        assert "so the ranks of this host exchange over its loopback" in text and "between" not in text, text
    assert_same_bits(trained(me, mlp, 4, "tiers", **options), over_loopback)
    assert_same_bits(
        trained(me, wide, 4, "tiers", schedule="dear", compression=hvd.Compression.fp8), quantised
    )
    assert_same_bits(of_replicas(me, data), replicas)


main(__name__)
