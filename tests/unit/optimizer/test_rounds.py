"""Rounds of several ranks in one process, on a thread each: states, flags, guards, and who waits when."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from commsched.errors import CommError
from commsched.optimizer.pending import PendingGradient, PendingParameter, raw_grad
from commsched.optimizer.round import Round, State
from commsched.optimizer.whole_step import WholeStep, deferred_update
from tests.support.local_backend import Channels, local_backend, mean_of, round_of, run_threads


def _new() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 31), nn.Tanh(), nn.Linear(31, 2))


STATE = _new().state_dict()


def mlp() -> nn.Module:
    """The same on every rank: threads share torch's generator, so it cannot be seeded in each."""
    model = _new()
    model.load_state_dict(STATE)
    return model


def mode_of(now: Round) -> WholeStep:
    assert isinstance(now.mode, WholeStep)
    return now.mode


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * step + rank))


def local_gradients(rank: int, model: nn.Module | None = None) -> list[torch.Tensor]:
    model = model or mlp()
    model(batch(rank)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("policy", ["sequential", "wfbp", "dear", "pipedap"])
def test_gradients_are_means_in_rank_order(size: int, policy: str) -> None:
    expected = [mean_of(grads) for grads in zip(*map(local_gradients, range(size)), strict=True)]

    def rank_body(rank: int, channels: Channels) -> list[torch.Tensor]:
        model = mlp()
        now, hooks = round_of(model, local_backend(channels, rank), policy)
        assert len(now.buffers.layout.slices) > 1
        model(batch(rank)).square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        hooks.remove()
        now.backend.close()
        return grads

    for grads in run_threads(size, rank_body):
        assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True))


def test_a_wait_that_ctrl_c_ends_can_be_made_again() -> None:
    """Each bucket but the first ends its first wait so. Buckets that had come before were never shown."""
    expected = [mean_of(grads) for grads in zip(*map(local_gradients, range(2)), strict=True)]

    def rank_body(rank: int, channels: Channels) -> list[torch.Tensor]:
        model = mlp()
        now, hooks = round_of(model, local_backend(channels, rank), "dear")
        buckets, ended = range(len(now.buffers.layout.slices)), set[int]()
        wait = now.backend.wait_gathered

        def wait_gathered(bucket: int) -> None:
            if bucket in buckets[1:] and bucket not in ended:
                ended.add(bucket)
                raise KeyboardInterrupt
            wait(bucket)

        now.backend.is_gathered = lambda bucket: False  # type: ignore[method-assign]
        now.backend.wait_gathered = wait_gathered  # type: ignore[method-assign]
        model(batch(rank)).square().mean().backward()
        while len(ended) < len(buckets) - 1:
            with pytest.raises(KeyboardInterrupt):
                now.complete_buckets(buckets)
        grads = [p.grad.clone() for p in model.parameters()]
        hooks.remove()
        now.backend.close()
        return grads

    for grads in run_threads(2, rank_body):
        assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True))


def test_states_and_classes_along_a_step() -> None:
    def rank_body(rank: int, channels: Channels) -> None:
        model = mlp()
        now, _ = round_of(model, local_backend(channels, rank))
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, 0.1)
        assert now.state is State.IDLE and now.pending == 0
        model(batch(rank)).square().mean().backward()
        assert now.state is State.SENT and now.pending == 6
        assert all(type(p) is PendingGradient for p in params)
        mode_of(now).defer(deferred_update(optimizer, torch.optim.SGD, params))
        assert now.state is State.IDLE
        assert {type(p) for p in params} <= {PendingParameter, nn.Parameter}
        model(batch(rank))
        assert now.pending == 0 and all(type(p) is nn.Parameter for p in params)
        now.backend.close()

    run_threads(2, rank_body)


def test_a_step_inside_of_its_backward_is_told_where_it_belongs() -> None:
    """One optimizer for each parameter, stepped in the parameter's hook, was advised to use that hook."""

    def rank_body(rank: int, channels: Channels) -> None:
        model = mlp()
        now, _ = round_of(model, local_backend(channels, rank))
        acts = [now.require_sent, lambda: now.clear_grads(True)]
        for act in acts:
            handle = model[2].weight.register_post_accumulate_grad_hook(lambda _, act=act: act())
            with pytest.raises(ValueError, match="after the backward.* early_step=True") as error:
                model(batch(rank)).square().mean().backward()
            assert "register_post_accumulate_grad_hook" not in str(error.value)
            handle.remove()
            now.clear_grads(True)
        now.backend.close()

    run_threads(2, rank_body)


def test_step_does_not_wait_for_a_slow_rank_but_the_forward_does() -> None:
    stepped, order = threading.Event(), list[str]()

    def rank_body(rank: int, channels: Channels) -> None:
        model = mlp()
        now, _ = round_of(model, local_backend(channels, rank))
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, 0.1)
        loss = model(batch(rank)).square().mean()
        if rank == 1:
            assert stepped.wait(100), "step() waited for this rank's backward"
            time.sleep(0.1)  # in which a forward that does not wait would end
            order.append("the backward of rank 1")
        loss.backward()
        mode_of(now).defer(deferred_update(optimizer, torch.optim.SGD, params))
        if rank == 0:
            stepped.set()
        model(batch(rank))
        if rank == 0:
            order.append("the next forward of rank 0")
        now.backend.close()

    run_threads(2, rank_body)
    assert order == ["the backward of rank 1", "the next forward of rank 0"]


def test_forward_waits_only_for_what_it_needs() -> None:
    """With the last layer's bucket held back, the first layers' parameters can be used."""

    def rank_body(rank: int, channels: Channels) -> list[bool]:
        model = mlp()
        now, _ = round_of(model, local_backend(channels, rank), "dear", bucket_bytes=1)
        params = list(model.parameters())
        model(batch(rank)).square().mean().backward()
        mode_of(now).defer(deferred_update(torch.optim.SGD(params, 0.1), torch.optim.SGD, params))
        now.needed((0, 1))
        exposed = [gradient.exposed for gradient in now.gradients]
        now.settle()
        now.backend.close()
        return exposed

    for exposed in run_threads(2, rank_body):
        assert exposed[0] and exposed[1]


def test_what_no_rank_used_stays_none_and_what_one_used_is_the_mean() -> None:
    def rank_body(rank: int, channels: Channels) -> list[torch.Tensor | None]:
        model = mlp()
        now, _ = round_of(model, local_backend(channels, rank))
        first, middle = model[0], model[2]
        loss = first(batch(rank)).square().mean()
        if rank == 1:
            loss = loss + middle(torch.ones(1, 31)).sum()
        loss.backward()
        grads = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
        now.backend.close()
        return grads

    for grads in run_threads(3, rank_body):
        assert grads[4] is None and grads[5] is None
        assert grads[3] is not None and torch.allclose(grads[3], torch.full((31,), 1 / 3))


def test_a_rank_without_a_backward_joins_at_its_step() -> None:
    def rank_body(rank: int, channels: Channels) -> list[torch.Tensor]:
        model = mlp()
        now, _ = round_of(model, local_backend(channels, rank))
        if rank == 0:
            model(batch(0)).square().mean().backward()
        now.require_sent()
        now.complete_all()
        grads = [raw_grad(p).clone() for p in model.parameters()]
        now.backend.close()
        return grads

    expected = [grad / 2 for grad in local_gradients(0)]
    for grads in run_threads(2, rank_body):
        assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True))


def test_a_step_on_some_ranks_only_is_an_error_that_names_them() -> None:
    def rank_body(rank: int, channels: Channels) -> str:
        model = mlp()
        now, _ = round_of(model, local_backend(channels, rank))
        params = list(model.parameters())
        model(batch(rank)).square().mean().backward()
        if rank != 2:
            mode_of(now).defer(deferred_update(torch.optim.SGD(params, 0.1), torch.optim.SGD, params))
        now.clear_grads(set_to_none=True)
        model(batch(rank, 1)).square().mean().backward()
        with pytest.raises(CommError) as caught:
            now.complete_all()
        now.backend.close()
        return str(caught.value)

    for rank, message in enumerate(run_threads(3, rank_body)):
        assert (
            message.startswith(f"rank {rank}:") and "ranks 0, 1 called step() and rank 2 did not" in message
        )


def test_a_rank_that_never_comes_is_a_timeout_that_names_it() -> None:
    told = threading.Event()

    def rank_body(rank: int, channels: Channels) -> str:
        model = mlp()
        now, _ = round_of(model, local_backend(channels, rank, timeout=0.5))
        if rank == 1:
            told.wait()
            return ""
        model(batch(rank)).square().mean().backward()
        with pytest.raises(CommError) as caught:
            now.complete_all()
        told.set()
        now.backend.close()
        return str(caught.value)

    message = run_threads(2, rank_body)[0]
    assert "rank 1" in message and "bucket" in message
