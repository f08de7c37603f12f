"""Training loops - accumulating, clipping, scaling, skipping, alternating - do what plain PyTorch does."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.oracle import Oracle, assert_close, assert_same_bits, batch, release, seeded
from tests.support.reference_run import Twin, momentum, some_profile
from tests.support.small_models import loss_of, mlp, mlp64


@case(slow=(4,))
def gradients_are_there_after_backward(me: Me) -> None:
    for measured in (False, True):
        twin = Twin(me, mlp, planned=not measured)
        for step in range(7):
            twin.backward(loss_of(step))
            twin.compare_grads(f"step {step}")
            twin.update()
            twin.zero_grad()
        twin.end(must_have_waited=False)


@case()
def a_hook_that_fires_in_backward_sees_its_local_gradient(me: Me) -> None:
    """A tensor hook runs before reduction, as in plain PyTorch, and what it returns is what is reduced."""
    twin = Twin(me, mlp)
    for model in (twin.model, twin.plain):
        model[2].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    for step in range(5):
        twin.step(loss_of(step))
    twin.end()


@case()
def backward_passes_per_step_accumulate(me: Me) -> None:
    for read in (False, True):
        twin = Twin(me, mlp, backward_passes_per_step=3)
        for step in range(6):
            twin.backward(*(loss_of(10 * step + k, 1 / 3) for k in range(3)))
            if read:
                twin.compare_grads(f"step {step}")
            twin.update()
            twin.zero_grad()
            twin.compare(f"step {step}")
        twin.end(must_have_waited=not read)


@case()
def the_number_of_passes_may_change(me: Me) -> None:
    twin = Twin(me, mlp)
    for step, passes in enumerate((1, 1, 3, 3, 2, 1, 1, 4)):
        twin.optimizer.set_backward_passes_per_step(passes)
        twin.step(*(loss_of(10 * step + k) for k in range(passes)))
    twin.end()


@case()
def fewer_passes_than_announced_are_reduced_by_step(me: Me) -> None:
    twin = Twin(me, mlp, backward_passes_per_step=4)
    for step, passes in enumerate((4, 2, 4, 1, 4)):
        twin.step(*(loss_of(10 * step + k) for k in range(passes)))
    twin.end(must_have_waited=False)


@case()
def no_sync_accumulates_locally(me: Me) -> None:
    twin = Twin(me, mlp)
    for step in range(6):
        losses = [loss_of(10 * step + k, 0.5) for k in range(1 + step % 3)]
        with twin.optimizer.no_sync():
            for loss in losses[:-1]:
                loss(twin.model, me.rank).backward()
        losses[-1](twin.model, me.rank).backward()
        twin.oracle.backward(*losses)
        if step % 2:
            twin.compare_grads(f"step {step}")
        twin.update()
        twin.zero_grad()
    twin.end()


@case()
def gradients_in_no_sync_are_local(me: Me) -> None:
    twin = Twin(me, mlp)
    for step in range(3):
        twin.step(loss_of(step))
    alone = copy.deepcopy(twin.plain)
    for p in alone.parameters():
        p.grad = None
    loss_of(50)(alone, me.rank).backward()
    with twin.optimizer.no_sync():
        loss_of(50)(twin.model, me.rank).backward()
        assert_same_bits([p.grad for p in twin.model.parameters()], [p.grad for p in alone.parameters()])
    twin.optimizer.zero_grad()
    twin.step(loss_of(3))
    twin.end()


@case()
def a_second_backward_adds_to_the_first(me: Me) -> None:
    """Without a step between them each is reduced, and rounded once more than in plain PyTorch."""
    for read in (False, True):
        twin = Twin(me, mlp64)
        for step in range(5):
            for k in range(3):
                twin.backward(loss_of(10 * step + k))
                if read:
                    twin.compare_grads(exact=False)
            twin.update()
            if step % 2:
                twin.zero_grad()
        twin.compare(exact=False)
        release(twin.optimizer)


@case()
def zero_grad_in_every_form(me: Me) -> None:
    for how in (True, False):
        twin = Twin(me, mlp)
        for step in range(6):
            twin.backward(loss_of(step))
            twin.update()
            if step % 2:
                twin.both(lambda model, how=how: model.zero_grad(set_to_none=how))
            else:
                twin.zero_grad(set_to_none=how)
            twin.compare_grads(f"after zero_grad({how}) in step {step}")
        twin.end()


@case()
def zero_grad_between_backwards_forgets_the_first(me: Me) -> None:
    for how in (True, False):
        twin = Twin(me, mlp)
        for step in range(5):
            twin.backward(loss_of(100 + step))
            twin.zero_grad(set_to_none=how)
            twin.step(loss_of(step))
            twin.compare(f"step {step}")
        twin.end()


@case()
def clipping_is_as_in_torch(me: Me) -> None:
    for own in (False, True):
        twin = Twin(me, mlp64)
        for step in range(5):
            twin.backward(loss_of(step, 10.0))
            theirs = nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.1)
            if own:
                mine = twin.optimizer.clip_grad_norm_(0.1)
            else:
                mine = nn.utils.clip_grad_norm_(twin.model.parameters(), 0.1)
            assert_close([mine], [theirs], twin.terms, "norm")
            twin.update()
            twin.zero_grad()
        twin.compare(exact=False)
        release(twin.optimizer)


@case()
def synchronize_clip_and_step_without_synchronizing(me: Me) -> None:
    twin = Twin(me, mlp)
    for step in range(5):
        twin.backward(loss_of(step, 10.0))
        twin.optimizer.synchronize()
        twin.both(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))
        with twin.optimizer.skip_synchronize():
            twin.update()
        twin.zero_grad()
    twin.end(must_have_waited=False)


@case()
def stepping_after_synchronize_warns_as_horovod_does(me: Me) -> None:
    twin = Twin(me, mlp)
    assert twin.optimizer.backward_passes_per_step == 1
    names = {name: p for name, p in twin.model.named_parameters()}
    assert {name: p for p, name in twin.optimizer._parameter_names.items()} == names
    for step, (asked, skipped) in enumerate(((True, False), (True, True), (False, False))):
        twin.backward(loss_of(step))
        if asked:
            twin.optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with twin.optimizer.skip_synchronize() if skipped else nullcontext():
                twin.update()
        said = [
            "optimizer.step() called without optimizer.skip_synchronize()" in str(w.message) for w in caught
        ]
        assert said == [True] * (asked and not skipped), (asked, skipped, said)
        assert all(w.filename.endswith("reference_run.py") for w in caught), "the caller's line is told"
        twin.zero_grad()
    twin.end(must_have_waited=False)


@case()
def grad_scaler_skips_on_all_ranks_alike(me: Me) -> None:
    """An inf on one rank: no rank steps, and every rank's scale goes down."""
    twin = Twin(me, mlp)
    mine = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    plain = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step in range(10):
        bad = step in (2, 6)

        def loss(model: nn.Module, rank: int, step: int = step, bad: bool = bad) -> torch.Tensor:
            return model(batch(rank, step)).square().mean() * (float("inf") if bad and rank == 1 else 1.0)

        twin.backward(lambda m, rank, loss=loss: (mine if m is twin.model else plain).scale(loss(m, rank)))
        unscale = step % 3 == 0
        pairs = ((mine, twin.optimizer, twin.model), (plain, twin.oracle.optimizer, twin.plain))
        for scaler, optimizer, model in pairs:
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert mine.get_scale() == plain.get_scale(), f"step {step}: {mine.get_scale()} {plain.get_scale()}"
        twin.zero_grad()
        twin.compare(f"step {step}")
    assert mine.get_scale() < 1024.0 * 8
    twin.end(must_have_waited=False)


@case()
def a_step_may_be_left_out(me: Me) -> None:
    """Gradients that nobody steps on: dropped by zero_grad, or added to by the next backward."""
    twin = Twin(me, mlp64)
    for step in range(9):
        twin.backward(loss_of(step))
        if step % 3 == 1:
            continue
        if step % 3 == 0:
            twin.update()
        twin.zero_grad()
    twin.compare(exact=False)
    release(twin.optimizer)


@case()
def a_step_without_a_backward(me: Me) -> None:
    """Gradients none: nothing moves. Gradients kept: they are applied again."""
    twin = Twin(me, mlp64)
    twin.update()
    twin.step(loss_of(0))
    twin.update()
    twin.compare("after a step without gradients")
    twin.step(loss_of(1), zero=False)
    twin.update()
    twin.compare("after a second step with the same gradients", exact=False)
    release(twin.optimizer)


@case()
def gradients_made_by_hand_are_reduced(me: Me) -> None:
    twin = Twin(me, mlp)
    for step in range(4):
        twin.step(loss_of(step))
        by_rank = [
            [batch(rank, 70 + step, p.shape) for p in twin.plain.parameters()] for rank in range(me.size)
        ]
        for p, grad in zip(twin.model.parameters(), by_rank[me.rank], strict=True):
            p.grad = grad.clone()
        for p, grads in zip(twin.plain.parameters(), zip(*by_rank, strict=True), strict=True):
            p.grad = twin.oracle.reduced(grads)
        twin.update()
        twin.zero_grad()
    twin.end(must_have_waited=False)


@case()
def two_optimizers_in_turn(me: Me) -> None:
    """A generator and a discriminator: the backward of either fills gradients of both."""

    def generator() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 19), nn.Tanh(), nn.Linear(19, 12))

    def discriminator() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 17), nn.LeakyReLU(), nn.Linear(17, 1))

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), 0.01, betas=(0.5, 0.9))

    mine = [seeded(generator, 1), seeded(discriminator, 2)]
    plain = copy.deepcopy(mine)
    optimizers = [
        hvd.DistributedOptimizer(
            adam(m), m.named_parameters(), profile=some_profile(m), schedule="dear", bucket_mb=0.0005
        )
        for m in mine
    ]
    oracles = [Oracle(m, adam(m), me.size) for m in plain]
    for step in range(8):
        noise = [batch(rank, 200 + step, (6, 5)) for rank in range(me.size)]
        data = [batch(rank, step) for rank in range(me.size)]

        def judge(g: Any, d: Any, rank: int, noise: Any = noise, data: Any = data) -> torch.Tensor:
            return d(data[rank]).sigmoid().mean() - d(g(noise[rank])).sigmoid().mean()

        optimizers[1].zero_grad()
        judge(*mine, me.rank).backward()
        optimizers[1].step()
        oracles[1].optimizer.zero_grad()
        oracles[1].backward(lambda d, rank, judge=judge: judge(plain[0], d, rank))
        oracles[1].optimizer.step()
        optimizers[0].zero_grad()
        mine[1](mine[0](noise[me.rank])).mean().backward()
        optimizers[0].step()
        oracles[0].optimizer.zero_grad()
        oracles[0].backward(lambda g, rank, noise=noise: plain[1](g(noise[rank])).mean())
        oracles[0].optimizer.step()
        for kind in range(2):
            assert_same_bits(mine[kind], plain[kind], f"{'GD'[kind]} in step {step}")
    for optimizer in optimizers:
        release(optimizer)


@case()
def learning_rates_are_those_of_the_step(me: Me) -> None:
    """Schedulers move the rate right after ``step()``, when updates may still be waiting."""
    for make in (momentum, lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01))):
        twin = Twin(me, mlp, make)
        mine = torch.optim.lr_scheduler.ExponentialLR(twin.optimizer, 0.7)
        plain = torch.optim.lr_scheduler.ExponentialLR(twin.oracle.optimizer, 0.7)
        for step in range(6):
            twin.step(loss_of(step))
            mine.step()
            plain.step()
        twin.end()


@case()
def a_scheduler_made_before_the_wrapping_works(me: Me) -> None:
    schedulers = []

    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = momentum(model)
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        return optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = Twin(me, mlp, scheduled)
        for step in range(6):
            twin.step(loss_of(step))
            for scheduler in schedulers:
                scheduler.step()
        twin.end()


@case()
def parameter_groups_keep_their_own_options(me: Me) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": [model[2].bias, model[4].weight], "weight_decay": 0.1, "nesterov": True},
            {"params": [model[2].weight, model[4].bias], "momentum": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.03, momentum=0.9)

    for bucket_mb in (0.001, 1):
        twin = Twin(me, mlp, grouped, bucket_mb=bucket_mb)
        for step in range(6):
            twin.step(loss_of(step))
            if step == 3:
                twin.optimizer.param_groups[1]["lr"] = twin.oracle.optimizer.param_groups[1]["lr"] = 0.001
        twin.end()


@case()
def step_hooks_of_torch_run_once(me: Me) -> None:
    twin = Twin(me, mlp)
    calls: list[str] = []
    twin.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    twin.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(4):
        twin.step(loss_of(step))
    assert calls == ["pre", "post"] * 4, calls
    twin.end()


main(__name__)
