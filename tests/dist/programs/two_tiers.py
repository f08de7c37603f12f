"""The optimizer over two tiers: the launcher tells of two hosts, which are both this machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import commsched as hvd
from commsched.collectives.private_groups import hosts_of
from scheduler.bounds import lower_bound
from scheduler.ir.actions import Kind
from scheduler.ir.link import Link, TwoTierLink
from tests.support import quantised_training, tier_training
from tests.support.cases import Me, case, main
from tests.support.oracle import assert_close, assert_same_bits, fingerprint, seeded, terms_of
from tests.support.quantised_training import COMPRESSIONS, case_of_each_code
from tests.support.reference_run import some_profile
from tests.support.small_models import loss_of, mlp, mlp64, sgd, wide
from tests.support.tier_training import expected, in_one_process, of_replicas, rows_of, trained, transport


@case(ranks=(4,), slow=(3,))
def the_launcher_tells_the_hosts(me: Me) -> None:
    assert hosts_of() == ([0, 0, 1, 1] if me.size == 4 else [0, 0, 1])
    pair = hvd.add_process_set([1, me.size - 1])
    if me.rank in (1, me.size - 1):
        assert hosts_of(pair) == [0, 1]


@case(ranks=(4,), slow=(3,))
def every_schedule_gives_the_bits_of_sums_by_host(me: Me) -> None:
    tier_training.check_schedules(me)


@case(ranks=(4,))
def every_bucket_size_gives_the_bits_of_sums_by_host(me: Me) -> None:
    tier_training.check_bucket_sizes(me, transport="tiers")


@case(ranks=(4,), slow=(3,))
def a_wire_type_rounds_each_hosts_sum(me: Me) -> None:
    for compression, wire in ((hvd.Compression.bf16, torch.bfloat16), (hvd.Compression.fp16, torch.float16)):
        truth = expected(me, mlp, 6, wire)
        assert_same_bits(trained(me, mlp, 6, "tiers", schedule="dear", compression=compression), truth)


@case(ranks=(4,), slow=(3,))
def gathered_parameters_are_equal_everywhere(me: Me) -> None:
    tier_training.check_gathered_parameters(me)


@case(ranks=(3,))
def a_host_of_more_ranks_owns_no_more_of_a_bucket(me: Me) -> None:
    """On shards, its ranks update a part each."""
    truth = expected(me, mlp, 6)
    for gather, ends in (("gradients", (0.25, 0.5, 1.0)), ("parameters", (1 / 3, 2 / 3, 1.0))):
        model = seeded(mlp)
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), schedule="dear", gather=gather
        )
        for step in range(6):
            loss_of(step)(model, me.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        for piece in optimizer._session.round.buffers.layout.slices:
            shards = [piece.shard(rank, me.size)[1] - piece.start for rank in range(me.size)]
            assert all(abs(at - end * piece.numel) < 16 for at, end in zip(shards, ends, strict=True)), piece
        optimizer.state_dict()
        optimizer.close()
        if gather == "gradients":
            assert_same_bits(model, truth)


@case(ranks=(4, 3))
def both_links_are_timed_alone_and_together(me: Me) -> None:
    """Where hosts have different numbers of ranks, only together."""
    model = seeded(mlp)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), schedule="dear")
    session = optimizer._session
    link = session.plan.link
    if me.size == 3:
        assert not isinstance(link, TwoTierLink)
        optimizer.close()
        return
    assert isinstance(link, TwoTierLink) and not link.overlaps
    assert (link.inside.name, link.between.name) == ("inside hosts, measured", "between hosts, measured")
    parts = link.inside, link.between, Link(link.alpha, link.beta)
    assert all(part.cost(Kind.RS, 1 << 20) > 0 for part in parts), link
    assert len(set(me.everybody(str(link)))) == 1
    explanation = hvd.explain(optimizer, show=False)
    assert link.members == (2, 2) and explanation.hosts == (0, 0, 1, 1)
    assert "ranks: host 0 [0 1], host 1 [2 3]\n" in str(explanation)
    assert "inside hosts alpha=" in explanation.link and "one bucket after the other" in explanation.link
    assert explanation.bound <= explanation.metrics.predicted_step
    # The bound knows the slower of both links alone.
    slower = max(link.inside.beta, link.between.beta)
    one = Link(0.0, min(slower, link.beta))
    assert explanation.bound == lower_bound(session.plan.profile, one)
    optimizer.close()


@case(ranks=(4,))
def named_transports_are_taken(me: Me) -> None:
    trained(me, mlp, 4, "ring", schedule="dear", transport="ring")
    for code in COMPRESSIONS.values():
        tiers = trained(me, wide, 4, "tiers", schedule="dear", compression=code)
        with transport("tiers"):
            assert_same_bits(trained(me, wide, 4, "tiers", schedule="dear", compression=code), tiers)
        flat = trained(me, wide, 4, "direct", schedule="dear", compression=code, transport="direct")
        assert fingerprint(flat) != fingerprint(tiers)


@case_of_each_code(ranks=(4, 3))
def sums_of_hosts_are_quantised_alike_in_every_plan(me: Me, code: str) -> None:
    quantised_training.check_plans(me, code)


@case_of_each_code(ranks=(4, 3))
def hosts_keep_their_residuals_when_plans_change(me: Me, code: str) -> None:
    """In buckets of other sizes, other ranks of a host send its sums."""
    twin = quantised_training.quantised(me, code, lag=0.0)
    session = twin.optimizer._session
    for step, size in enumerate((0.01, 0.02, 10, 0.03, 0.01)):
        session.planner.options["bucket_bytes"] = round(size * 2**20)
        session._install_next(session.planner.first(session.order))
        for more in range(2):
            twin.step(quantised_training.loss_of(2 * step + more))
            twin.compare(f"buckets of {size} MB")
    twin.end(must_have_waited=False)


@case_of_each_code(ranks=(4,), slow=(3,))
def the_state_holds_what_hosts_lack(me: Me, code: str) -> None:
    quantised_training.check_state(me, code)


@case_of_each_code(ranks=(4,), slow=(3,))
def a_saved_residual_is_delivered_over_hosts(me: Me, code: str) -> None:
    quantised_training.check_saved_residual(me, code)


@case_of_each_code(ranks=(4,), slow=(3,))
def nothing_is_lost_between_hosts_when_the_optimizer_changes(me: Me, code: str) -> None:
    quantised_training.check_changes(me, code)


@case_of_each_code(ranks=(4,))
def a_host_sends_a_quarter_of_the_bytes_of_one_rank_a_host(me: Me, code: str) -> None:
    """The two hosts send half of the gradients in RS and half in AG, with some small ones as they are."""
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 512), nn.Tanh(), nn.Linear(512, 512)))
    options = {"schedule": "dear", "profile": some_profile(model), "compression": COMPRESSIONS[code]}
    optimizer: Any = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    for step in range(4):
        loss_of(step)(model, me.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    measured = hvd.metrics(optimizer)
    assert measured is not None and measured.bytes is not None
    of_all = sum(float(text) for text in me.everybody(str(measured.bytes)))
    whole = sum(4 * p.numel() for p in model.parameters()) * 2
    assert 0.25 < of_all / whole < 0.27, of_all / whole
    optimizer.close()


@case(ranks=(4,), slow=(3,))
def touched_rows_have_the_bits_of_sums_by_host(me: Me) -> None:
    tier_training.check_touched_rows(me)


@case(ranks=(4,))
def a_row_leaves_its_host_once(me: Me) -> None:
    """All ranks touch the same 16 of 501 rows: the two hosts send each of them once in RS and once in AG."""
    model = seeded(lambda: nn.Embedding(501, 64))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, row_sparse=True
    )
    for step in range(60):
        known = hvd.metrics(optimizer) if step >= 12 else None
        if all(me.everybody("known" if known is not None and known.bytes is not None else "")):
            break  # measurements that were disturbed are made again, and plans
        model(torch.arange(16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    measured = hvd.metrics(optimizer)
    assert measured is not None and measured.bytes is not None
    sent = sum(int(text) for text in me.everybody(str(int(measured.bytes))))
    rows = 2 * 16 * (64 * 4 + 4)
    assert rows <= sent <= rows + 1500, sent  # and counts, and flags of the step
    optimizer.close()


@case(ranks=(4,), slow=(3,))
def replicas_of_a_stage_add_by_host(me: Me) -> None:
    tier_training.check_replicas(me)
    data = rows_of(me.size)  # rank order would not pass, but with three ranks
    flat, by_host = (fingerprint(in_one_process(data, hosts)) for hosts in ([0] * me.size, hosts_of()))
    assert (flat == by_host) == (me.size == 3)


@case_of_each_code(ranks=(4,), slow=(3,))
def replicas_quantise_sums_of_hosts(me: Me, code: str) -> None:
    data = rows_of(me.size)
    truth = in_one_process(data, hosts_of(), build=wide, code=code)
    assert_same_bits(of_replicas(me, data, wide, compression=COMPRESSIONS[code]), truth)


@case(ranks=(4,))
def where_memory_cannot_be_shared_all_ranks_are_flat(me: Me) -> None:
    """Only one rank cannot open its neighbour's board."""
    from comm_core import boards

    honest = boards._open_neighbour
    if me.rank == 1:
        boards._open_neighbour = lambda *_: "rank 1 runs in another container"
    try:
        truth = trained(me, mlp64, 4, "direct", schedule="dear")
        model = mlp64()
        try:
            hvd.DistributedOptimizer(sgd(model), transport="tiers")
        except hvd.CommError as error:
            assert "transport='tiers' is not possible: the ranks of a host cannot share memory" in str(error)
            assert "rank 1 runs in another container" in str(error)
        else:
            raise AssertionError("tiers without shared memory were not refused")
    finally:
        boards._open_neighbour = honest
    assert_close(trained(me, mlp64, 4, "tiers", schedule="dear"), truth, terms_of(truth, 4))


@case(ranks=(4,))
def replicas_that_cannot_share_memory_add_in_rank_order(me: Me) -> None:
    """Only one rank cannot open its neighbour's board."""
    from comm_core import boards

    honest, data = boards._open_neighbour, rows_of(me.size)
    if me.rank == 1:
        boards._open_neighbour = lambda *_: "rank 1 runs in another container"
    try:
        model = of_replicas(me, data)
    finally:
        boards._open_neighbour = honest
    assert_same_bits(model, in_one_process(data, [0] * me.size))


main(__name__)
