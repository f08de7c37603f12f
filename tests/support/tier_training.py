"""Training over ``tiers``, by optimizers and by pipelines, and the same in one process with sums by host."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import commsched as hvd
from commsched.collectives.private_groups import hosts_of
from commsched.env import settings
from commsched.optimizer.planner import travels_quantised
from commsched.pipeline import Pipeline
from tests.support.cases import Me
from tests.support.oracle import assert_close, assert_same_bits, batch, fingerprint, seeded, terms_of
from tests.support.pipeline_runs import loss_of as stage_loss
from tests.support.quantised import exchanged
from tests.support.small_models import Odd, loss_of, mlp, mlp64, sgd
from tests.support.two_tiers import TierOracle, tier_sum


@contextmanager
def transport(name: str) -> Iterator[None]:
    os.environ["COMMSCHED_TRANSPORT"] = name
    settings.cache_clear()
    try:
        yield
    finally:
        del os.environ["COMMSCHED_TRANSPORT"]
        settings.cache_clear()


def expected(
    me: Me, build: Callable[[], nn.Module], steps: int, wire: torch.dtype | None = None
) -> nn.Module:
    model = seeded(build)
    oracle = TierOracle(model, sgd(model), me.size)
    oracle.wire = wire
    for step in range(steps):
        oracle.step(loss_of(step))
    return model


def trained(me: Me, build: Callable[[], nn.Module], steps: int, carrier: str, **options: Any) -> nn.Module:
    model = seeded(build)
    me.shake(model)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    assert hvd.explain(optimizer, show=False).transport == carrier
    for step in range(steps):
        loss_of(step)(model, me.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    optimizer.close()
    return model


# -- what holds on one host as between hosts -----------------------------------------------------------------


def check_schedules(me: Me) -> None:
    for schedule, steps in (("auto", 14), ("dear", 6), ("wfbp", 6), ("optimal", 6)):
        truth = expected(me, Odd, steps)
        assert_same_bits(trained(me, Odd, steps, "tiers", schedule=schedule), truth, schedule)


def check_bucket_sizes(me: Me, **options: Any) -> None:
    truth = expected(me, Odd, 6)
    for size in (1e-5, 1e-3, 100):
        model = trained(me, Odd, 6, "tiers", schedule="dear", bucket_mb=size, **options)
        assert_same_bits(model, truth, f"buckets of {size} MB")


def check_gathered_parameters(me: Me) -> None:
    truth = expected(me, mlp64, 8)
    for early in (False, True):
        model = trained(me, mlp64, 8, "tiers", schedule="dear", gather="parameters", early_step=early)
        assert_close(model, truth, terms_of(truth, 8))
        assert len(set(me.everybody(fingerprint(model)))) == 1


class Table(nn.Module):
    """An embedding, and either a layer of its own or one that is tied to it."""

    def __init__(self, sparse: bool, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(501, 8, sparse=sparse)
        self.out = nn.Linear(8, 501 if tied else 2, bias=False)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(words))


def check_touched_rows(me: Me) -> None:
    """Of plain, sparse and tied tables, by rows and whole; ranks of a host touch some rows together."""
    steps = 14

    def table_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        words = torch.arange(6).remainder(5).add(3 * rank + step)
        return model(words).square().mean()

    for sparse, tied, dtype in (
        (False, False, torch.float32),
        (True, False, torch.float64),
        (False, True, torch.float32),
    ):

        def build(sparse: bool = sparse, tied: bool = tied, dtype: torch.dtype = dtype) -> nn.Module:
            return Table(sparse, tied).to(dtype)

        truth = seeded(lambda: build(sparse=False))
        oracle = TierOracle(truth, torch.optim.SGD(truth.parameters(), lr=0.1), me.size)
        for step in range(steps):
            oracle.step(lambda m, rank, step=step: table_loss(m, rank, step))
        for choice in (True, "auto", False):
            model = seeded(build)
            me.shake(model)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer: Any = hvd.DistributedOptimizer(inner, model=model, schedule="auto", row_sparse=choice)
            for step in range(steps):
                table_loss(model, me.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.state_dict()
            explanation = hvd.explain(optimizer, show=False)
            assert explanation.transport == "tiers"
            if choice != "auto":
                assert list(explanation.by_rows) == (["words.weight"] if choice else [])
                assert explanation.tied == (("words.weight",) if choice and tied else ())
            optimizer.close()
            assert_same_bits(model, truth, f"sparse={sparse}, tied={tied}, row_sparse={choice}")


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


Rows = list[tuple[torch.Tensor, torch.Tensor]]


def rows_of(size: int) -> Rows:
    """Batches of three rows for each rank."""
    return [(batch(0, step, (3 * size, 12)), batch(1, step, (3 * size, 3))) for step in range(4)]


def of_replicas(me: Me, data: Rows, build: Callable[[], nn.Module] = mlp, **options: Any) -> nn.Module:
    """A model after these steps as one stage with a replica on every rank."""
    model = seeded(build)
    options = {"loss": stage_loss, "optimizer": adam, "bucket_bytes": 2000, **options}
    pipeline = Pipeline(copy.deepcopy(model), "1f1b", 1, (1, me.size), **options)
    for each in data:
        pipeline.step(each)
    model.load_state_dict(pipeline.state_dict())
    pipeline.close()
    return model


def in_one_process(
    data: Rows,
    hosts: Sequence[int],
    wire: torch.dtype | None = None,
    build: Callable[[], nn.Module] = mlp,
    code: str = "",
) -> nn.Module:
    """The same with the gradients of each rank's rows added by these hosts, and the sums of hosts rounded to
    a wire type; of large matrices, with a ``code``, quantised.
    """
    model = seeded(build)
    optimizer = adam(model.parameters())
    quantised = [p for p in model.parameters() if code and travels_quantised(p)]
    lost = {p: [torch.zeros(p.numel()).numpy() for _ in set(hosts)] for p in quantised}
    for inputs, targets in data:
        parts = []
        for x, y in zip(inputs.chunk(len(hosts)), targets.chunk(len(hosts)), strict=True):
            optimizer.zero_grad()
            (stage_loss(model(x), y) * (len(x) / len(inputs))).backward()
            parts.append([parameter.grad for parameter in model.parameters()])
        for parameter, *grads in zip(model.parameters(), *parts, strict=True):
            if parameter in lost:
                flat, ends = [grad.flatten().numpy() for grad in grads], [parameter.numel()]
                total = exchanged(flat, lost[parameter], None, ends, 1.0, code=code, hosts=hosts)
                parameter.grad = torch.from_numpy(total).view_as(parameter)
                continue
            parameter.grad = tier_sum([grad for grad in grads if grad is not None], hosts, wire)
        optimizer.step()
    return model


def check_replicas(me: Me) -> None:
    data = rows_of(me.size)
    for compression, wire in ((hvd.Compression.none, None), (hvd.Compression.bf16, torch.bfloat16)):
        truth = in_one_process(data, hosts_of(), wire)
        assert_same_bits(of_replicas(me, data, compression=compression), truth, f"{wire}")
