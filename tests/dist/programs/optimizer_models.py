"""Parameters that are unused, shared, checkpointed, compiled: each as in plain PyTorch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.oracle import assert_close, assert_same_bits, batch, release, seeded
from tests.support.reference_run import Twin, momentum
from tests.support.small_models import Branches, branches64, using


@case(slow=(4,))
def what_no_rank_uses_is_left_alone(me: Me) -> None:
    """Its gradient stays None; momentum and weight decay do not move it."""
    for measured in (False, True):
        twin = Twin(me, Branches, planned=not measured)
        for step in range(8):
            used = (0, 1, 3) if step % 3 == 1 else (0, 2, 3)
            twin.backward(using(step, *used))
            if step % 2:
                assert twin.model.branch[1 if 2 in used else 2].weight.grad is None
                twin.compare_grads(f"step {step}")
            twin.update()
            twin.zero_grad()
            twin.compare(f"step {step}")
        twin.end(must_have_waited=False)


@case(slow=(4,))
def what_some_ranks_use_gets_the_mean(me: Me) -> None:
    for read in (False, True):
        twin = Twin(me, Branches)
        for step in range(8):

            def loss(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
                return (
                    model(batch(rank, step), tuple(i for i in range(4) if (i + rank + step) % 3))
                    .square()
                    .mean()
                )

            twin.backward(loss)
            if read:
                twin.compare_grads(f"step {step}")
            twin.update()
            twin.zero_grad()
        twin.end(must_have_waited=not read)


@case()
def a_rank_without_a_loss_takes_part(me: Me) -> None:
    """One rank has no data in some steps, so no backward: it calls ``step()`` all the same."""
    twin = Twin(me, Branches)
    for step in range(8):
        twin.step(
            lambda m, rank, step=step: (
                None if (rank + step) % 4 == 0 else m(batch(rank, step)).square().mean()
            )
        )
    twin.end()


@case()
def unused_with_gradients_kept_at_zero(me: Me) -> None:
    """After ``zero_grad(set_to_none=False)`` gradients are zeros, and zeros are stepped with."""
    twin = Twin(me, branches64)
    for step in range(6):
        twin.step(using(step, 0, 1) if step % 2 else using(step, 0, 2), zero=False)
        twin.zero_grad(set_to_none=False)
        twin.compare_grads(f"step {step}")
    twin.compare(exact=False)
    release(twin.optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.mix = nn.Linear(12, 12)
        self.out = nn.Linear(12, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.mix(self.embed(x))))


class Recurrent(nn.Module):
    """One module called several times, and weights used without their module."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(12, 12)
        self.other = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
            x = F.linear(x, self.other.weight)
        return self.head(F.linear(x, self.head.weight.t() @ self.head.weight)) + self.other.bias.sum()


@case()
def tied_weights(me: Me) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        words = torch.randint(20, (7,), generator=torch.Generator().manual_seed(10 * step + rank))
        return F.cross_entropy(model(words), words.roll(1))

    twin = Twin(me, Tied)
    for step in range(6):
        twin.step(lambda m, rank, step=step: loss(m, rank, step))
    assert twin.model.embed.weight is twin.model.out.weight
    twin.end()


@case()
def modules_called_several_times_and_weights_used_elsewhere(me: Me) -> None:
    twin = Twin(me, Recurrent)
    for step in range(6):
        twin.step(lambda m, rank, step=step: m(batch(rank, step)).square().mean())
    twin.end()


@case()
def attention_whose_projection_has_no_forward_of_its_own(me: Me) -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(12, 3, 29, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(12, 2))

    twin = Twin(me, build)
    for step in range(5):
        twin.step(lambda m, rank, step=step: m(batch(rank, step, (3, 4, 12))).square().mean())
        if step == 3:
            twin.both(lambda m: m.eval()(batch(0, 0, (3, 4, 12))))
            twin.both(lambda m: m.train())
    twin.end()


class Checkpointed(Branches):
    reentrant = True

    def forward(self, x: torch.Tensor, use: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        x = self.stem(x)
        for i in use:
            x = x + checkpoint(lambda y, i=i: torch.tanh(self.branch[i](y)), x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedPlainly(Checkpointed):
    reentrant = False


@case()
def activation_checkpointing(me: Me) -> None:
    for build in (Checkpointed, CheckpointedPlainly):
        twin = Twin(me, build)
        for step in range(5):
            twin.step(using(step, 0, 1, 2))
            twin.compare(f"{build.__name__} in step {step}")
        twin.end()


@case()
def checkpointed_modules_used_twice(me: Me) -> None:
    """Reentrant checkpointing accumulates the gradient of such a module twice in one backward."""
    for build in (Checkpointed, CheckpointedPlainly):
        for read in (False, True):
            twin = Twin(me, lambda build=build: build().double())
            for step in range(8):
                use = (0, 1, 0) if step < 3 else (1, 0, 1, 2, 2) if step < 6 else (2, 1, 0)
                twin.backward(
                    lambda m, rank, step=step, use=use: m(batch(rank, step).double(), use).square().mean()
                )
                if read:
                    mine = [p.grad for p in twin.model.parameters() if p.grad is not None]
                    plain = [p.grad for p in twin.plain.parameters() if p.grad is not None]
                    assert_close(mine, plain, twin.terms, f"{build.__name__} in step {step}")
                twin.update()
                twin.zero_grad()
                twin.compare(f"{build.__name__} in step {step}", exact=False)
            release(twin.optimizer)


class Watched(nn.Module):
    """Adds a penalty on what hooks have captured (features for distillation, activations) to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))
        self.captured: list[torch.Tensor] = []
        self.layers[2].register_forward_pre_hook(lambda _, inputs: self.captured.append(inputs[0]))
        self.layers[3].register_forward_hook(lambda _, inputs, output: self.captured.append(inputs[0]))
        self.layers[4].register_forward_hook(lambda _, inputs, output: self.captured.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.captured.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + sum(seen.square().mean() for seen in self.captured)


@case()
def hooks_that_capture_inputs_of_layers(me: Me) -> None:
    """A loss on them lost its gradient with the default options: the hooks were given detached copies."""
    for options in ({"schedule": "auto", "bucket_mb": None}, {}):
        twin = Twin(me, Watched, planned=not options, **options)
        for step in range(12):
            twin.step(lambda m, rank, step=step: m(batch(rank, step)))
            twin.compare(f"step {step}")
        twin.end(must_have_waited=False)


@case()
def hooks_of_the_user_see_what_they_see_without(me: Me) -> None:
    seen: dict[int, list[torch.Tensor]] = {}

    def build() -> nn.Module:
        model: Any = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(12, 12), nn.Tanh())))
        mine = seen[len(seen)] = []
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[2].weight.register_post_accumulate_grad_hook(lambda p: mine.append(torch.ones(1)))
        model[4].register_full_backward_hook(lambda *given: mine.extend(g for g in given[1] if g is not None))
        return model

    twin = Twin(me, build, schedule="auto", bucket_mb=None, planned=False)
    for step in range(10):
        twin.step(lambda m, rank, step=step: m(batch(rank, step)).square().mean())
    twin.end(must_have_waited=False)
    plain, ours = seen[0], seen[1]  # those of the plain model are of each rank in turn, in every step
    each = len(ours) // 10
    for step in range(10):
        of_step = plain[step * me.size * each : (step + 1) * me.size * each]
        mine = of_step[me.rank * each : (me.rank + 1) * each]
        assert_same_bits(ours[step * each : (step + 1) * each], mine, f"what hooks saw in step {step}")


@case()
def graphs_that_are_used_again(me: Me) -> None:
    """Differentiated twice, asked for single gradients, or kept for a second backward."""

    def penalty(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.square().mean()

    def single(model: Any, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step)
        grads = torch.autograd.grad(model(x).square().mean(), [model[2].weight, model[0].weight])
        return model(x + float(grads[0].mean()) + float(grads[1].mean())).square().mean()

    def twice(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        loss = model(batch(rank, step)).square().mean()
        loss.backward(retain_graph=True)
        return loss

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh())

    for loss, passes in ((penalty, 1), (single, 1), (twice, 2)):
        twin = Twin(
            me, build, schedule="auto", bucket_mb=None, planned=False, backward_passes_per_step=passes
        )
        for step in range(10):
            twin.step(lambda m, rank, step=step, loss=loss: loss(m, rank, step))
            twin.compare(f"{loss.__name__} in step {step}")
        twin.end(must_have_waited=False)


@case(ranks=(2,), slow=(3,))
def compiled_models(me: Me) -> None:
    for backend in ("eager", "aot_eager"):
        for planned in (True, False):
            twin = Twin(me, branches64, planned=planned)
            compiled = {id(m): torch.compile(m, backend=backend) for m in (twin.model, twin.plain)}
            for step in range(8):
                twin.step(
                    lambda m, rank, step=step, c=compiled: (
                        c[id(m)](batch(rank, step).double(), (0, 1, 2, 3)).square().mean()
                    )
                )
            twin.compare(f"{backend}", exact=False)
            release(twin.optimizer)
            torch._dynamo.reset()


@case()
def a_forward_order_that_changes(me: Me) -> None:
    for planned in (True, False):
        twin = Twin(me, Branches, planned=planned)
        for step in range(12):
            order = (0, 1, 2, 3) if step < 5 else (3, 2, 1, 0) if step < 9 else (1, 3, 0, 2)
            twin.step(using(step, *order))
            twin.compare(f"step {step}")
        twin.end(must_have_waited=planned)


@case()
def orders_that_differ_between_ranks(me: Me) -> None:
    twin = Twin(me, Branches)
    for step in range(8):
        twin.step(
            lambda m, rank, step=step: (
                m(batch(rank, step), tuple((i + rank + step) % 4 for i in range(4))).square().mean()
            )
        )
    twin.end()


@case()
def broadcasting_a_fresh_optimizer_takes_no_step(me: Me) -> None:
    """It leaves gradients of zero, as Horovod does; once they were None, which Horovod's own test refuses."""
    for make in (momentum, lambda m: torch.optim.Adam(m.parameters(), 0.01, weight_decay=0.1)):
        twin = Twin(me, Branches, make)
        before = copy.deepcopy(twin.model.state_dict())
        hvd.broadcast_optimizer_state(twin.optimizer, 0)
        assert_same_bits(twin.model, before.values(), "parameters after the broadcast")
        assert not twin.optimizer.state_dict()["state"], twin.optimizer.state_dict()["state"]
        assert all(p.grad is not None and not p.grad.any() for p in twin.model.parameters())
        twin.zero_grad()
        for step in range(4):
            twin.step(using(step, 0, 1, 2))
        hvd.broadcast_optimizer_state(twin.optimizer, 0)
        for step in range(4, 6):
            twin.step(using(step, 0, 1, 2))
        twin.end()


@case()
def broadcasting_parameters_after_wrapping(me: Me) -> None:
    twin = Twin(me, Branches)
    with torch.no_grad():
        for p in twin.model.parameters():
            p.add_(me.rank)
    hvd.broadcast_parameters(twin.model.state_dict(), 0)
    twin.compare("after the first broadcast")
    for step in range(4):
        twin.step(using(step, 0, 1, 2))
    hvd.broadcast_parameters(list(twin.model.named_parameters()), 0)
    for step in range(4, 6):
        twin.step(using(step, 0, 1, 2))
    hvd.broadcast_parameters(twin.model.state_dict(), 0)
    twin.end()


@case()
def only_the_model_or_only_the_optimizer_is_told(me: Me) -> None:
    for how in ("model", "neither"):
        plain = Twin(me, Branches)
        model = seeded(Branches)
        options = {"model": model} if how == "model" else {}
        optimizer = hvd.DistributedOptimizer(momentum(model), schedule="dear", bucket_mb=0.002, **options)
        for step in range(8):
            loss = using(step, 0, 1, 2)
            loss(model, me.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            plain.step(loss)
        assert_same_bits(model, plain.plain, how)
        plain.end()
        release(optimizer)


@case()
def a_warning_says_that_the_forward_order_changed(me: Me) -> None:
    """Where a rank would have waited for a bucket, it says so; results are right all the same."""
    twin = Twin(me, Branches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            twin.step(using(step, *((0, 1, 2, 3) if step < 6 else (3, 2, 1, 0))))
    said = any("order" in str(one.message) for one in caught)
    assert "True" in me.everybody(str(said)), "no rank noticed"
    twin.end()


main(__name__)
