"""States that are read while parameters are pending: late values are taken right after their update."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from commsched.optimizer.round import Round
from commsched.optimizer.snapshots import Arrivals, state_so_far
from commsched.optimizer.whole_step import WholeStep, deferred_update
from tests.support.local_backend import Channels, local_backend, round_of, run_threads
from tests.support.one_process import seed


def stepped(rank: int, channels: Channels) -> tuple[Round, nn.Module]:
    """A round after a step, of which everything is pending."""
    with seed(3):
        model = nn.Sequential(nn.Linear(9, 31), nn.BatchNorm1d(31), nn.Linear(31, 2))
    now, _ = round_of(model, local_backend(channels, rank), bucket_bytes=300)
    now.backend.puts_off = True
    model(torch.ones(4, 9) * torch.arange(4.0)[:, None] + rank).square().sum().backward()
    params = list(model.parameters())
    assert isinstance(now.mode, WholeStep)
    now.mode.defer(deferred_update(torch.optim.SGD(params, 0.1), torch.optim.SGD, params))
    return now, model


def taken(model: nn.Module) -> tuple[dict[str, Any], Arrivals]:
    """The model's state, into which late values come; what else is in it are clones."""
    state, every = state_so_far(model)
    copy = {name: None if value is None else value.clone() for name, value in state.items()}
    arrivals = Arrivals()
    for late in every:
        assert late.place is state
        arrivals.take(
            late, partial(lambda keys, value: copy.update({key: value.clone() for key in keys}), late.keys)
        )
    return copy, arrivals


def test_late_values_are_taken_right_after_their_update() -> None:
    def rank_body(rank: int, channels: Channels) -> None:
        now, model = stepped(rank, channels)
        ends: list[int] = []
        copy, arrivals = taken(model)
        arrivals.when_whole(lambda: ends.append(now.pending))
        late = [name for name, value in copy.items() if value is None]
        assert late == [name for name, _ in model.named_parameters()], (
            "a buffer, or a parameter that was here"
        )
        now.needed((0,))
        assert copy["0.weight"] is not None and not arrivals.is_whole and not ends
        with torch.no_grad():
            model[0].weight.zero_()
        now.settle()
        assert arrivals.is_whole and ends == [0]
        expected = model.state_dict()
        assert copy["0.weight"].any() and not expected.pop("0.weight").any()
        assert all(torch.equal(copy[name], value) for name, value in expected.items())
        whole: list[int] = []
        again, at_once = taken(model)
        at_once.when_whole(lambda: whole.append(1))
        assert None not in again.values() and whole == [1]
        now.backend.close()

    run_threads(2, rank_body)


def test_what_is_lost_never_comes() -> None:
    def rank_body(rank: int, channels: Channels) -> None:
        now, model = stepped(rank, channels)
        copy, arrivals = taken(model)
        arrivals.when_whole(lambda: pytest.fail("it is not whole"))
        now.needed((0,))
        now.close()
        arrivals.complete()
        assert not arrivals.is_whole and copy["2.weight"] is None
        now.backend.close()

    run_threads(2, rank_body)


def test_a_copy_that_fails_is_told_later() -> None:
    """Where the parameter is completed, somebody needs it, and knows nothing of copies."""

    def rank_body(rank: int, channels: Channels) -> None:
        now, model = stepped(rank, channels)
        arrivals = Arrivals()

        def put(value: torch.Tensor) -> None:
            raise MemoryError("no room")

        for late in state_so_far(model)[1]:
            arrivals.take(late, put)
        now.settle()
        assert now.failed is None and not arrivals.is_whole
        with pytest.raises(MemoryError, match="no room"):
            arrivals.complete()
        now.backend.close()

    run_threads(2, rank_body)


def test_a_dropped_copy_takes_nothing_more() -> None:
    def rank_body(rank: int, channels: Channels) -> None:
        now, model = stepped(rank, channels)
        copy, arrivals = taken(model)
        arrivals.drop()
        now.settle()
        assert copy["0.weight"] is None and not arrivals.is_whole
        now.backend.close()

    run_threads(2, rank_body)
