"""Training over two tiers while ranks are late at random: the bits of sums by host, for every payload, policy
and gather.

`CASES_SEED` chooses the delays, the sizes of buckets, and whether shards are updated in the backward.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import commsched as hvd
from commsched.collectives.private_groups import hosts_of
from scheduler import policies
from tests.support.cases import Me, case, main
from tests.support.masters import CastEachStep
from tests.support.matrix_optimizers import matrices, muon
from tests.support.oracle import Oracle, batch, release
from tests.support.quantised_training import COMPRESSIONS, QuantisedOracle, case_of_each_code
from tests.support.reference_run import Twin, momentum
from tests.support.small_models import Odd, loss_of
from tests.support.tier_training import Table
from tests.support.two_tiers import TierOracle, tier_sum

STEPS = 5
GATHERS = ("gradients", "parameters")
SHAPES = (4, 8)  # ranks: two hosts of two or four, or three ranks and one


class Even(nn.Module):
    """No shard ends within a vector register or a quantised block, so that updates of shards have the bits of
    updates of whole tensors. The matrices are large enough to be quantised.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.relu(self.first(x)))))


def even_loss(step: int, dtype: torch.dtype = torch.float32) -> Callable[[nn.Module, int], torch.Tensor]:
    return lambda model, rank: model(batch(rank, step, (6, 128), dtype)).float().square().mean()


class UngatheredOracle(TierOracle):
    """Parameters are gathered in their own type: only each host's sum is rounded to the wire's."""

    def reduced(self, grads: Any) -> torch.Tensor | None:
        return tier_sum(grads, hosts_of(), self.wire, after=self.scale)


WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def oracle_of(me: Me, twin: Twin, gather: str, compression: str) -> TierOracle:
    plain, inner = twin.plain, twin.oracle.optimizer
    if compression in COMPRESSIONS:
        return QuantisedOracle(plain, inner, me.size, gather == "gradients", compression)
    oracle = (TierOracle if gather == "gradients" else UngatheredOracle)(plain, inner, me.size)
    oracle.wire = WIRES.get(compression)
    return oracle


def check(
    me: Me,
    build: Callable[[], nn.Module],
    loss: Callable[[int], Callable[[nn.Module, int], torch.Tensor]],
    gathers: Sequence[str] = GATHERS,
    make: Any = momentum,
    compression: str = "none",
    measured: Sequence[str] = ("auto",),
    chosen: Sequence[str] = (),
    **options: Any,
) -> None:
    """Train with every policy that knows this gather, or with those chosen, and compare all bits.

    Plans of ``measured`` policies come from times measured in this run, and change.
    """
    dice, pending = random.Random(f"{me.seed} {me.name}"), 0
    options["compression"] = getattr(hvd.Compression, compression)
    for gather in gathers:
        for policy in chosen or ("auto", *policies.names(gather)):
            planned = policy not in measured
            options["schedule"], options["gather"] = policy, gather
            options["bucket_mb"] = dice.choice([0.005, 0.03, None]) if planned else None
            options["early_step"] = gather == "parameters" and dice.random() < 0.5
            what = f"seed {me.seed}: {options}"
            twin = Twin(me, build, make, lag=0.0, planned=planned, **options)
            twin.oracle = oracle_of(me, twin, gather, compression)
            if options.get("master_weights"):
                twin.oracle.optimizer = CastEachStep(twin.plain.parameters(), momentum_of)
            me.shake(twin.model, longest=dice.choice([0.002, 0.02]))
            for step in range(STEPS if planned else 14):
                twin.step(loss(step))
                if step % 2:
                    twin.compare(f"{what}, step {step}")
            twin.compare(what)
            explanation = hvd.explain(twin.optimizer, show=False)
            assert explanation.transport == "tiers", what
            assert bool(explanation.by_rows) == ("row_sparse" in options), what
            pending += twin.seen_pending
            release(twin.optimizer)
    assert sum(map(int, me.everybody(str(pending)))) > 0, "no step() returned before all had arrived"


def momentum_of(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


@case(ranks=SHAPES)
def dense(me: Me) -> None:
    check(me, Odd, loss_of, gathers=GATHERS[:1])
    check(me, Even, even_loss)


@case(ranks=SHAPES)
def bfloat16_between_hosts(me: Me) -> None:
    check(me, Even, even_loss, compression="bf16")


@case(ranks=SHAPES)
def float16_between_hosts(me: Me) -> None:
    check(me, Even, even_loss, compression="fp16")


@case_of_each_code(ranks=SHAPES)
def blocks_between_hosts(me: Me, code: str) -> None:
    check(me, Even, even_loss, compression=code)


@case(ranks=SHAPES)
def touched_rows(me: Me) -> None:
    """Of a table and of a tied one; only gradients travel by rows."""

    def loss(step: int) -> Callable[[nn.Module, int], torch.Tensor]:
        def words_loss(model: nn.Module, rank: int) -> torch.Tensor:
            words = torch.arange(6).remainder(5).add(3 * rank + step)
            return model(words).square().mean()

        return words_loss

    some = {"gathers": GATHERS[:1], "row_sparse": True}
    check(me, lambda: Table(False, tied=False), loss, **some)
    both = ("auto", "optimal")  # which correct the head's part
    check(me, lambda: Table(False, tied=True), loss, measured=both, chosen=both, **some)


@case(ranks=SHAPES)
def whole_matrices(me: Me) -> None:
    check(me, matrices, loss_of, make=muon)


@case(ranks=SHAPES)
def masters(me: Me) -> None:
    dtype = torch.bfloat16
    check(
        me,
        lambda: Even().to(dtype),
        lambda step: even_loss(step, dtype),
        gathers=GATHERS[1:],
        master_weights=True,
    )


@case(ranks=SHAPES)
def another_bit_or_order_of_sums_is_seen(me: Me) -> None:
    """One bit of a rank's gradient in one step. For three ranks and one, both orders are the same."""
    by_host = sorted(hosts_of()) != [0, 0, 0, 1]
    for gather, factor, oracle in (
        ("gradients", 1.0, TierOracle),
        ("gradients", 1 + 2**-20, TierOracle),
        ("gradients", 1.0, Oracle),
        ("parameters", 1 + 2**-20, TierOracle),
    ):
        twin = Twin(me, Even, momentum, lag=0.0, gather=gather)
        twin.oracle = oracle(twin.plain, twin.oracle.optimizer, me.size)
        for step in range(STEPS):
            twin.step(twin.spoiled(even_loss(step), factor if step == 2 else 1.0))
        expected = factor != 1.0 or (oracle is Oracle and by_host)
        try:
            twin.compare()
        except AssertionError as error:
            assert expected and "differs by up to" in str(error), error
        else:
            assert not expected, (gather, factor, oracle)
        release(twin.optimizer)


main(__name__)
