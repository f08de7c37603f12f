"""Ranks with other settings or parameters are told so on every rank; what may differ is not mentioned."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.oracle import batch, release, seeded
from tests.support.reference_run import comparing
from tests.support.small_models import mlp
from tests.support.uneven import GATHERS

PLANNED: dict[str, Any] = {"schedule": "dear", "bucket_mb": 0.002}


def groups_of(model: nn.Module, **last: Any) -> list[dict[str, Any]]:
    """Return a model's parameters in two groups; the second one has these settings."""
    first, *rest = model.children()
    return [{"params": first.parameters()}, {"params": [p for m in rest for p in m.parameters()], **last}]


def wrapped(inner: Any, model: nn.Module, every: int = 1, **options: Any) -> Any:
    """Wrap an optimizer of ranks that are compared so often."""
    with comparing(every):
        return hvd.DistributedOptimizer(inner, model.named_parameters(), **(PLANNED | options))


def train(me: Me, model: nn.Module, optimizer: Any, steps: range, strict: bool = True) -> None:
    for step in steps:
        model(batch(me.rank, step)).square().mean().backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("error" if strict else "always", "the ranks' parameters")
            optimizer.step()
        optimizer.zero_grad()


def told(me: Me, model: nn.Module, optimizer: Any) -> str:
    """Return the error of the next step, which is the same on every rank but for the rank's number."""
    with pytest.raises(hvd.CommError) as error:
        train(me, model, optimizer, range(1))
    text = str(error.value).removeprefix(f"rank {me.rank}: ")
    assert set(me.everybody(text)) == {text}
    return text


@case()
def other_settings_are_named(me: Me) -> None:
    odd = me.rank == 1
    for gather in GATHERS:
        model = seeded(mlp)
        groups = groups_of(model, weight_decay=0.25 if odd else 0.0)
        optimizer = wrapped(torch.optim.SGD(groups, lr=0.125 if odd else 0.1), model, gather=gather)
        text = told(me, model, optimizer)
        others = "rank 0" if me.size == 2 else "ranks 0, 2"
        assert f"lr of group 0 (that of 0.weight) is 0.1 on {others} and 0.125 on rank 1" in text, text
        assert f"weight_decay of group 1 (that of 2.weight) is 0.0 on {others} and 0.25 on rank 1" in text, (
            text
        )
        assert "same arguments on every rank" in text and "COMMSCHED_COMPARE_EVERY=0" in text, text
        for group in optimizer.param_groups:
            group.update(lr=0.1, weight_decay=0.0)
        optimizer.zero_grad()
        train(me, model, optimizer, range(4, 8))  # nothing was updated: a script that sets them equal goes on
        optimizer.param_groups[1]["lr"] = torch.tensor(0.5 + me.rank)
        assert "lr of group 1" in told(me, model, optimizer)
        release(optimizer)


@case()
def another_class_or_other_groups_are_refused(me: Me) -> None:
    odd = me.rank == 1
    model = seeded(mlp)
    others = torch.optim.Adam if odd else torch.optim.SGD
    with pytest.raises(hvd.CommError, match="(?s)rank 0 has optimizer SGD.*rank 1 has optimizer Adam "):
        wrapped(others(model.parameters(), lr=0.1), model)
    with pytest.raises(hvd.CommError, match="(?s)groups of 2, 4 parameters.*groups of 6 parameters"):
        wrapped(torch.optim.SGD(model.parameters() if odd else groups_of(model), lr=0.1), model)
    optimizer = wrapped(others(model.parameters(), lr=0.1 + me.rank), model, every=0)
    train(me, model, optimizer, range(4))
    release(optimizer)


@case()
def other_parameters_at_the_start_are_named(me: Me) -> None:
    for gather in GATHERS:
        model = seeded(mlp)
        with torch.no_grad():
            model[4].weight[-1, -1] += float(me.rank == 1)
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, gather=gather)
        with warnings.catch_warnings(record=True) as seen:
            train(me, model, optimizer, range(4), strict=False)
        texts = [str(one.message) for one in seen if "before the first step" in str(one.message)]
        assert len(texts) == (me.rank == 0), texts
        for text in texts:
            assert "1 of 6 parameters (4.weight) have other values on rank 1 than on rank 0" in text, text
            assert "broadcast_parameters" in text and "COMMSCHED_COMPARE_EVERY=0" in text, text
        release(optimizer)


@case()
def weights_that_were_restored_with_rounding_are_not_said_to_be_drawn_apart(me: Me) -> None:
    """DARTS moves weights by a gradient of the rank's own data, and back, before the first step."""
    model = seeded(mlp)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with torch.no_grad():
        for p in model.parameters():
            moved = torch.full_like(p, 0.3 + me.rank)
            p.add_(moved).sub_(moved)
    with warnings.catch_warnings(record=True) as seen:
        train(me, model, optimizer, range(2), strict=False)
    texts = [str(one.message) for one in seen if "before the first step" in str(one.message)]
    assert len(texts) == (me.rank == 0), texts
    assert all("or code has changed them since" in text for text in texts), texts
    release(optimizer)


@case()
def the_order_of_horovods_scripts(me: Me) -> None:
    """They wrap, then broadcast; rank 0 may have loaded another learning rate before."""
    model = seeded(mlp, seed=me.rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.1 if me.rank else 0.01, momentum=0.9)
    optimizer = wrapped(inner, model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(me, model, optimizer, range(4))
    release(optimizer)


class Legitimate(nn.Module):
    """Has what may differ between ranks: buffers, a frozen parameter, numbers that are none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3).bfloat16()
        self.own = nn.Parameter(torch.full((4,), float(rank)), requires_grad=False)
        with torch.no_grad():
            self.stem.weight.view(torch.int32)[0, 0] = 0x7FC00000 + rank  # NaN, with another payload

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.stem(x).nan_to_num()).bfloat16())


@case()
def what_may_differ_is_not_mentioned(me: Me) -> None:
    """Rank 1 has no data in some steps, and weights are perturbed while gradients are computed."""
    for options in ({}, {"gather": "parameters"}, {"gather": "parameters", "master_weights": True}):
        model = seeded(lambda: Legitimate(me.rank))
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[:2], "lr": 0.5}, {"params": trained[2:], "tag": me.rank}]
        groups.insert(me.rank % 2, {"params": [model.own], "lr": float(me.rank)})
        optimizer = wrapped(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        optimizer.set_backward_passes_per_step(2)
        with comparing(every=1):
            for step in range(6):
                before = [p.detach().clone() for p in trained]
                with torch.no_grad():
                    for p in trained:
                        p.add_(0.01 * me.rank)
                if me.rank != 1 or step % 3:
                    for part in range(2):
                        model(batch(me.rank, 2 * step + part)).float().square().mean().backward()
                with torch.no_grad():
                    for p, value in zip(trained, before, strict=True):
                        p.copy_(value)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # torch wants it after step()
                    scheduler.step()
                optimizer.step()
                optimizer.zero_grad()
        release(optimizer)


@case()
def updates_inside_the_backward_are_compared_before_it(me: Me) -> None:
    model = seeded(mlp)
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    optimizer = wrapped(adam, model, gather="parameters", early_step=True)
    train(me, model, optimizer, range(5))
    optimizer.param_groups[0]["betas"] = (0.5, 0.9 + 0.05 * (me.rank == 1))
    assert "betas of group 0" in told(me, model, optimizer)
    release(optimizer)


@case()
def ranks_that_have_joined_are_not_compared(me: Me) -> None:
    for gather in GATHERS:
        model = seeded(mlp)
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, gather=gather)
        for step in range(3 + 3 * (me.rank != 1)):
            train(me, model, optimizer, range(step, step + 1))
            optimizer.param_groups[0]["lr"] *= 0.5
        hvd.join()
        train(me, model, optimizer, range(6, 9))
        release(optimizer)


@case()
def parameters_that_drift_apart_give_one_warning(me: Me) -> None:
    model = seeded(mlp)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, every=2)
    with warnings.catch_warnings(record=True) as seen:
        train(me, model, optimizer, range(2))
        with torch.no_grad():
            model[2].bias[0] += 0.001 * (me.rank == 1)
        train(me, model, optimizer, range(2, 12), strict=False)
    texts = [str(one.message) for one in seen if "drifted" in str(one.message)]
    assert len(texts) == (me.rank == 0), texts
    for text in texts:
        assert "2.bias" in text and "on rank 1 than on rank 0" in text and "broadcast_parameters" in text, (
            text
        )
    release(optimizer)


main(__name__)
