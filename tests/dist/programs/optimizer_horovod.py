"""Horovod's options: what is summed, scaled, compressed, sparse, grouped or kept within a process set."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import commsched as hvd
from commsched.integrations import UnscalesReduced, reduce_before_step
from tests.support.cases import Me, case, main
from tests.support.oracle import Oracle, assert_close, assert_same_bits, batch, release, seeded, terms_of
from tests.support.reference_run import Twin, momentum, some_profile
from tests.support.small_models import loss_of, mlp, mlp64, plain_sgd, words64, words_loss


@case()
def predivided(me: Me) -> None:
    for factor in (4.0, 3.0):
        twin = Twin(me, mlp64, gradient_predivide_factor=factor)
        for step in range(5):
            twin.step(loss_of(step))
        twin.compare(exact=False)
        release(twin.optimizer)


def rounded(grads: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Each rank's gradient in few bits, summed in fp32, the mean again in few bits."""
    total = grads[0].to(dtype).float()
    for grad in grads[1:]:
        total = total + grad.to(dtype).float()
    return (total / len(grads)).to(dtype).float()


@case()
def compressed(me: Me) -> None:
    for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        twin = Twin(me, mlp, compression=getattr(hvd.Compression, kind), lag=0.0)
        for step in range(6):
            loss = loss_of(step)
            expected = [[g.clone() for g in twin.oracle._local(rank, [loss])] for rank in range(me.size)]
            loss(twin.model, me.rank).backward()
            for p, q, grads in zip(
                twin.model.parameters(), twin.plain.parameters(), zip(*expected, strict=True), strict=True
            ):
                q.grad = rounded(list(grads), dtype)
                assert p.grad.dtype == torch.float32
                assert_close([p.grad.to(dtype)], [q.grad.to(dtype)], 2, kind)
                q.grad = p.grad.clone()
            twin.update()
            twin.zero_grad()
        prints = me.everybody(str([float(p.double().sum()) for p in twin.model.parameters()]))
        assert len(set(prints)) == 1, prints
        twin.compare(kind)
        release(twin.optimizer)


@case()
def sparse_gradients(me: Me) -> None:
    for as_dense in (False, True):
        for sums in (False, True):
            twin = Twin(me, words64, plain_sgd, sparse_as_dense=as_dense, sums=sums)
            for step in range(6):
                twin.step(lambda m, rank, step=step: words_loss(m, rank, step))
                twin.compare(f"step {step}, as_dense={as_dense}", exact=False)
            release(twin.optimizer)


@case()
def sparse_gradients_on_some_ranks(me: Me) -> None:
    """In some steps, some ranks' gradient is sparse and others' dense or absent."""

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        if (rank + step) % 3 == 0:
            return model.out(batch(rank, step, (4, 8), torch.float64)).square().mean()
        if (rank + step) % 3 == 1:
            return words_loss(model, rank, step) + model.embed.weight.square().sum() * 0.1
        return words_loss(model, rank, step)

    twin = Twin(me, words64, plain_sgd)
    for step in range(6):
        twin.backward()
        mine = loss(twin.model, me.rank, step)
        mine.backward()
        by_rank = [
            twin.oracle._local(rank, [lambda m, r, step=step: loss(m, r, step)]) for rank in range(me.size)
        ]
        for p, grads in zip(twin.plain.parameters(), zip(*by_rank, strict=True), strict=True):
            dense = [torch.zeros_like(p) if g is None else g.to_dense() for g in grads]
            p.grad = None if all(g is None for g in grads) else torch.stack(dense).sum(0) / me.size
        twin.update()
        twin.zero_grad()
        twin.compare(f"step {step}", exact=False)
    release(twin.optimizer)


@case()
def sparse_adam(me: Me) -> None:
    """Also with sparse_as_dense=True, which used to leave the gradient dense: SparseAdam refuses that."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam([model.embed.weight], lr=0.01, eps=1e-3)

    for as_dense in (False, True):
        plain, model = seeded(words64), seeded(words64)
        oracle = adam(plain)
        optimizer = hvd.DistributedOptimizer(
            adam(model), [("embed", model.embed.weight)], sparse_as_dense=as_dense
        )
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert model.embed.weight.grad.is_sparse and not model.embed.weight.grad.coalesce().values().any()
        for step in range(5):
            words_loss(model, me.rank, step).backward()
            assert model.embed.weight.grad.sparse_dim() == 1
            optimizer.step()
            optimizer.zero_grad()
            grads = []
            for rank in range(me.size):
                plain.embed.weight.grad = None
                words_loss(plain, rank, step).backward()
                grads.append(plain.embed.weight.grad)
            total = grads[0]
            for grad in grads[1:]:
                total = total + grad
            plain.embed.weight.grad = (total / me.size).coalesce()
            oracle.step()
            terms = terms_of(plain, step + 1)
            assert_close([model.embed.weight], [plain.embed.weight], terms, f"step {step}, {as_dense=}")
        release(optimizer)


@case()
def sparse_gradients_come_back_as_they_came(me: Me) -> None:
    """Two backward passes add up before the step, as in plain PyTorch; with sums, nothing is summed twice."""
    for as_dense in (False, True):
        for sums in (False, True):
            twin = Twin(me, words64, plain_sgd, sparse_as_dense=as_dense, sums=sums)
            for step in range(3):
                twin.backward(lambda m, rank, step=step: words_loss(m, rank, 2 * step))
                assert twin.model.embed.weight.grad.is_sparse
                twin.backward(lambda m, rank, step=step: words_loss(m, rank, 2 * step + 1))
                assert twin.model.embed.weight.grad.is_sparse
                twin.update()
                twin.zero_grad()
                twin.compare(f"step {step}, {as_dense=}, {sums=}", exact=False)
            release(twin.optimizer)


@case()
def groups_of_tensors(me: Me) -> None:
    params = 6
    for how in ("number", "lists"):
        twin_model = seeded(mlp)
        chosen: Any = (
            2 if how == "number" else [[p for i, p in enumerate(twin_model.parameters()) if i % 2 == 0]]
        )
        optimizer: Any = hvd.DistributedOptimizer(
            momentum(twin_model), twin_model.named_parameters(), groups=chosen, schedule="dear"
        )
        assert len(list(twin_model.parameters())) == params
        plain = seeded(mlp)
        oracle = Oracle(plain, momentum(plain), me.size)
        for step in range(8):
            loss_of(step)(twin_model, me.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            oracle.step(loss_of(step))
        assert_same_bits(twin_model, plain, how)
        release(optimizer)


@case(ranks=(3, 4))
def process_sets_train_their_own_models(me: Me) -> None:
    first = hvd.add_process_set([0, me.size - 1])
    if first.included():
        members = [0, me.size - 1]
        model, plain = seeded(mlp), seeded(mlp)
        optimizer: Any = hvd.DistributedOptimizer(
            momentum(model),
            model.named_parameters(),
            process_set=first,
            profile=some_profile(model),
            schedule="dear",
            bucket_mb=0.002,
        )
        oracle = Oracle(plain, momentum(plain), 2)
        for step in range(6):
            loss_of(step)(model, me.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            oracle.step(lambda m, place, step=step: loss_of(step)(m, members[place]))
        assert_same_bits(model, plain)
        release(optimizer)
    else:
        model, plain = seeded(mlp), seeded(mlp)
        alone: Any = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), process_set=first)
        optimizer = momentum(plain)
        for step in range(3):
            for net, opt in ((model, alone), (plain, optimizer)):
                loss_of(step)(net, me.rank).backward()
                opt.step()
                opt.zero_grad()
        assert_same_bits(model, plain, "a rank outside the set trains alone")
    me.everybody()
    hvd.remove_process_set(first)


class Doubled:
    """A compressor of one's own, which a plan cannot carry."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor * 2, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor / 2


@case()
def what_is_reduced_one_by_one_is_clipped_after_it(me: Me) -> None:
    """As a trainer clips: ``step()`` comes later, by itself, and reduces nothing again."""
    for options in ({"transport": "plain"}, {"compression": Doubled}, {"transport": "plain", "op": hvd.Sum}):
        plain, model = seeded(mlp64), seeded(mlp64)
        oracle = Oracle(plain, momentum(plain), me.size, sums="op" in options)
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), **options)
        assert optimizer._unplanned is not None
        for step in range(8):
            oracle.optimizer.zero_grad()
            optimizer.zero_grad()
            if step % 4 == 3:  # a step that a script leaves out after clipping
                loss_of(9)(model, me.rank).backward()
                optimizer.clip_grad_norm_(1e-4)
                model.zero_grad(set_to_none=step == 3)
            loss_of(step)(model, me.rank).backward()
            oracle.backward(loss_of(step))
            norms = [
                optimizer.clip_grad_norm_(0.05),
                nn.utils.clip_grad_norm_(plain.parameters(), 0.05),
            ]
            assert norms[1] > 0.05 and torch.allclose(*norms), (options, step, norms)
            if step % 2:
                reduce_before_step([optimizer], model.parameters())
                for net in (model, plain):
                    nn.utils.clip_grad_value_(net.parameters(), 0.001)
            optimizer.step()
            oracle.optimizer.step()
            assert_close(
                model.parameters(), plain.parameters(), terms_of(plain, step + 1), f"{options} {step}"
            )


@case(ranks=(2,))
def what_is_not_reduced_before_a_step_is_in_the_step(me: Me) -> None:
    """Adasum's updates, and gradients that user code has assigned since."""
    models = [seeded(mlp64), seeded(mlp64)]
    optimizers = [hvd.DistributedOptimizer(momentum(model), op=hvd.Adasum) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(step)(model, me.rank).backward()
        optimizers[1].reduce_before_step()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(models[0].parameters(), models[1].parameters())
    own = [
        hvd.allgather_object([p.detach().clone() for p in models[0].parameters()])[rank] for rank in (0, 1)
    ]
    assert_same_bits(own[0], own[1])

    model = seeded(mlp64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), transport="plain")
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(0)(model, me.rank).backward()
    optimizer.clip_grad_norm_(1.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, float(me.rank))
    optimizer.step()
    assert_close(model.parameters(), [p - 0.5 for p in before], terms_of(model, 1))


@case()
def what_is_reduced_one_by_one_goes_on_alone(me: Me) -> None:
    """After ``release()`` one rank alone trained until the time-out: it waited for the others."""
    model, alone = seeded(mlp64), seeded(mlp64)
    optimizer = hvd.DistributedOptimizer(momentum(model), transport="plain")
    own = momentum(alone)
    optimizer.release()
    for step in range(3 if me.rank == 0 else 0):
        for net, one in ((model, optimizer), (alone, own)):
            one.zero_grad()
            loss_of(step)(net, 0).backward()
            one.step()
    assert_same_bits(model.parameters(), alone.parameters())
    optimizer.resume()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.zero_grad()
    loss_of(me.rank)(model, me.rank).backward()
    optimizer.synchronize()
    mine = [p.grad for p in model.parameters()]
    assert_same_bits(mine, [hvd.broadcast(grad, root_rank=0) for grad in mine])


@case()
def a_scaler_of_what_is_reduced_one_by_one(me: Me) -> None:
    """Infinite gradients on one rank: all leave out the step, where the others waited for this rank."""

    class Scaler(UnscalesReduced, torch.amp.GradScaler):
        pass

    plain, model = seeded(mlp64), seeded(mlp64)
    oracle = Oracle(plain, momentum(plain), me.size)
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), transport="plain")
    ours, theirs = Scaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        factor = float("inf") if step == 2 else 1.0

        def loss(net: nn.Module, rank: int, step: int = step, factor: float = factor) -> torch.Tensor:
            scaler = ours if net is model else theirs
            return scaler.scale(loss_of(step)(net, rank) * (factor if rank == 0 else 1.0))

        loss(model, me.rank).backward()
        oracle.backward(loss)
        for scaler, opt, net in ((ours, optimizer, model), (theirs, oracle.optimizer, plain)):
            if step % 2:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert ours.get_scale() == theirs.get_scale(), step
        assert_close(model.parameters(), plain.parameters(), terms_of(plain, step + 1), f"step {step}")


@case()
def lbfgs_with_a_closure(me: Me) -> None:
    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, line_search_fn="strong_wolfe")

    plain, model = seeded(mlp64), seeded(mlp64)
    oracle = Oracle(plain, lbfgs(plain), me.size)
    optimizer = hvd.DistributedOptimizer(lbfgs(model), model.named_parameters())
    data = [batch(rank, 0).double() for rank in range(me.size)]

    def whole_loss(net: nn.Module) -> torch.Tensor:
        """The line search compares losses: every rank must see the same one."""
        with torch.no_grad():
            return torch.stack([net(part).square().mean() for part in data]).mean()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        model(data[me.rank]).square().mean().backward()
        return whole_loss(model)

    def whole() -> torch.Tensor:
        oracle.optimizer.zero_grad()
        oracle.backward(lambda net, rank: net(data[rank]).square().mean())
        return whole_loss(plain)

    for step in range(4):
        optimizer.step(closure)
        oracle.optimizer.step(whole)
        assert_same_bits(model, plain, f"step {step}")
    release(optimizer)


@case()
def closures_with_ordinary_optimizers(me: Me) -> None:
    """They run once, before the update, which then waits for its gradients (Lightning passes closures)."""
    twin = Twin(me, mlp)
    for step in range(5):
        seen = []

        def closure(step: int = step, seen: list = seen) -> torch.Tensor:
            twin.optimizer.zero_grad()
            loss = loss_of(step)(twin.model, me.rank)
            loss.backward()
            seen.append(loss)
            return loss

        twin.oracle.optimizer.zero_grad()
        twin.oracle.backward(loss_of(step))
        result = twin.update(closure)
        assert result is seen[0] and len(seen) == 1
        if step % 2:
            twin.compare(f"step {step}")
    twin.end()


@case()
def state_travels_to_the_plain_optimizer_and_back(me: Me) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), 0.01)

    twin = Twin(me, mlp, adam)
    for step in range(3):
        twin.step(loss_of(step))
    saved = copy.deepcopy(twin.optimizer.state_dict())
    weights = copy.deepcopy(twin.model.state_dict())
    alone = seeded(mlp)
    alone.load_state_dict(weights)
    plain = Oracle(alone, adam(alone), me.size)
    plain.optimizer.load_state_dict(saved)
    for step in range(3, 5):
        plain.step(loss_of(step))
        twin.step(loss_of(step))
    assert_same_bits(alone, twin.model, "training on from the state of the distributed one")
    other = Twin(me, mlp, adam)
    other.model.load_state_dict(alone.state_dict())
    other.plain.load_state_dict(alone.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    other.oracle.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    for step in range(5, 8):
        other.step(loss_of(step))
    other.end()
    release(twin.optimizer)


@case()
def wrong_arguments_are_value_errors(me: Me) -> None:
    model = mlp()
    named = list(model.named_parameters())
    wrong: list[dict[str, Any]] = [
        {"named_parameters": named[1:]},
        {"named_parameters": [("same", p) for _, p in named]},
        {"named_parameters": [p for _, p in named]},
        {"op": hvd.Min},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"schedule": "no such policy"},
        {"transport": "pigeon"},
        {"bucket_mb": -1.0},
        {"gather": "nothing"},
        {"early_step": True},
        {"backward_passes_per_step": 0},
    ]
    for options in wrong:
        try:
            optimizer = hvd.DistributedOptimizer(momentum(model), **options)
        except ValueError as error:
            assert len(str(error)) > 20, error
        else:
            raise AssertionError(f"{options} was accepted: {optimizer}")
    once = hvd.DistributedOptimizer(momentum(model))
    try:
        hvd.DistributedOptimizer(once)
    except ValueError as error:
        assert "already" in str(error)
    else:
        raise AssertionError("wrapped twice")
    release(once)


main(__name__)
