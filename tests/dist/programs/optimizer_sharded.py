"""``gather="parameters"``: updates on shards give what plain PyTorch gives, and nothing stale is seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.oracle import assert_close, assert_same_bits, batch, release, seeded, values
from tests.support.reference_run import Twin, momentum
from tests.support.small_models import Odd, branches64, loss_of, mlp, mlp64, samples, using


def sharded(me: Me, build: Callable[[], nn.Module] = mlp64, make: Any = momentum, **options: Any) -> Twin:
    """Vectorised loops end at other places in a shard than in a whole tensor, so last bits differ."""
    return Twin(me, build, make, **{"gather": "parameters", **options})


def finish(twin: Twin, must_have_waited: bool = True) -> None:
    twin.compare("at the end", exact=False)
    release(twin.optimizer)
    waited = [int(text) for text in twin.me.everybody(str(twin.seen_pending))]
    if must_have_waited:
        assert sum(waited) > 0, "no step() returned with parameters on their way; nothing was tested"


# A small eps would make an update of the rounding of a gradient that is nearly zero.
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.05),
    "nesterov": lambda m: torch.optim.SGD(
        m.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.01, weight_decay=0.01, eps=1e-3),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 0.01, amsgrad=True, eps=1e-3),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.005, momentum=0.9, centered=True, eps=1e-3),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.05, lr_decay=0.01, eps=1e-3),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), eps=1e-3),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), 0.01),
}


@case(slow=(4,))
def every_optimizer_on_shards(me: Me) -> None:
    for name, make in OPTIMIZERS.items():
        for early in (False, True):
            twin = sharded(me, make=make, early_step=early)
            for step in range(8):
                twin.step(loss_of(step))
            twin.compare(f"{name}, early_step={early}", exact=False)
            release(twin.optimizer)


@case(ranks=(2, 3))
def rounding_hides_no_fault(me: Me) -> None:
    """One rank's gradient lost or off by a ten-thousandth, in one step of six; or one step left out."""
    for factor, skipped in ((1.0, -1), (0.0, -1), (1.0001, -1), (1.0, 3)):
        twin = sharded(me)
        for step in range(6):
            twin.backward(twin.spoiled(loss_of(step), factor if step == 3 else 1.0))
            if step == skipped:
                twin.optimizer.step()
            else:
                twin.update()
            twin.zero_grad()
        try:
            twin.compare("a fault", exact=False)
        except AssertionError as error:
            assert "rounding explains" in str(error) and (factor, skipped) != (1.0, -1), error
        else:
            assert (factor, skipped) == (1.0, -1), f"not found: {factor}, {skipped}"
        release(twin.optimizer)


@case()
def zero_grad_of_the_model_is_enough(me: Me) -> None:
    """It waits for nothing. Where it clears one module of several, the next backward is refused."""
    twin = sharded(me)
    for step in range(6):
        twin.backward(loss_of(step))
        twin.update()
        before = twin.optimizer._session.round.pending
        assert before == len(list(twin.model.parameters())), f"step() waited for all but {before}"
        twin.both(lambda model: model.zero_grad())
        assert twin.optimizer._session.round.pending == before
    twin.compare("zero_grad() of the model", exact=False)
    twin.backward(loss_of(6))
    twin.optimizer.step()
    twin.model[2].zero_grad()
    try:
        loss_of(7)(twin.model, me.rank).backward()
    except ValueError as error:
        assert "zero_grad() between step() and the next backward" in str(error)
    else:
        raise AssertionError("a gradient that no longer exists was not missed")
    release(twin.optimizer)


@case()
def a_released_optimizer_has_the_whole_state(me: Me) -> None:
    twin = sharded(me)
    for _ in range(2):
        for step in range(4):
            twin.step(loss_of(step))
        twin.optimizer.release()
        twin.compare("released", exact=False)
        if me.rank == 0:  # alone: nothing is gathered any more
            states = twin.optimizer.state_dict()["state"], twin.oracle.optimizer.state_dict()["state"]
            shapes = [
                {
                    (i, key): getattr(value, "shape", None)
                    for i, own in s.items()
                    for key, value in own.items()
                }
                for s in states
            ]
            assert shapes[0] == shapes[1], shapes
        twin.optimizer.resume()
    release(twin.optimizer)


@case()
def a_fused_optimizer_unscales_by_itself(me: Me) -> None:
    """The update once saw the optimizer as it was when the plan was installed: without GradScaler's scale."""
    twin = sharded(me, make=lambda m: torch.optim.Adam(m.parameters(), 0.01, fused=True, eps=1e-3))
    mine, plain = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    for step in range(6):
        loss = loss_of(step, float("inf") if step == 3 and me.rank == 1 else 1.0)
        spoiled = loss_of(step, float("inf") if step == 3 else 1.0)
        twin.backward(
            lambda m, rank, loss=loss, spoiled=spoiled: (
                mine.scale(loss(m, rank)) if m is twin.model else plain.scale(spoiled(m, rank))
            )
        )
        twin.optimizer.synchronize()
        for scaler, optimizer in ((mine, twin.optimizer), (plain, twin.oracle.optimizer)):
            scaler.step(optimizer)
            scaler.update()
        assert mine.get_scale() == plain.get_scale(), f"step {step}: {mine.get_scale()} {plain.get_scale()}"
        twin.zero_grad()
    twin.compare("with GradScaler", exact=False)
    release(twin.optimizer)


@case(ranks=(2, 3, 4))
def equal_buckets_give_equal_bits(me: Me) -> None:
    """The same plan again, and other policies over the same buckets: bit for bit, on all ranks."""
    finals = []
    for policy, size in (("dear", 0.002), ("dear", 0.002), ("sequential", 0.002)):
        twin = sharded(me, schedule=policy, bucket_mb=size)
        for step in range(20):
            twin.step(loss_of(step))
        finals.append(values(twin.model))
        finish(twin, must_have_waited=False)
    assert_same_bits(finals[1], finals[0], "the same plan again")
    everywhere = me.everybody(str([float(t.double().sum()) for t in finals[0]]))
    assert len(set(everywhere)) == 1, everywhere


@case()
def every_policy_on_shards(me: Me) -> None:
    for policy in ("sequential", "dear", "pipedap", "optimal", "auto"):
        for size in (0.0005, 0.003, None):
            for planned in (True, False) if size == 0.003 else (True,):
                twin = sharded(me, schedule=policy, bucket_mb=size, planned=planned)
                for step in range(8):
                    twin.step(loss_of(step))
                twin.compare(f"{policy} with buckets of {size} MB", exact=False)
                release(twin.optimizer)


class Turned(Odd):
    """A transposed weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(37, 37).mul(0.1).t())

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return super().hidden(x) @ self.turned


@case(ranks=(2, 3, 4))
def odd_models_on_shards(me: Me) -> None:
    for early in (False, True):
        twin = sharded(me, Turned, early_step=early)
        for step in range(6):
            twin.step(loss_of(step))
            twin.compare_update(f"step {step}, early_step={early}")
        release(twin.optimizer)


@case()
def nobody_sees_a_stale_parameter(me: Me) -> None:
    looks: list[Callable[[nn.Module], Any]] = [
        lambda m: values(m.state_dict().values()),
        lambda m: list(copy.deepcopy(m).parameters()),
        lambda m: [m.eval()(samples(m, 9, 9)).detach()],
        lambda m: [p.data.clone() for p in m.parameters()],
        lambda m: [torch.nn.utils.parameters_to_vector(m.parameters()).detach()],
        lambda m: [torch.func.functional_call(m, dict(m.named_parameters()), samples(m, 3, 3)).detach()],
    ]
    for look in looks:
        twin = sharded(me)
        for step in range(4):
            twin.step(loss_of(step))
            assert_close(*twin.both(look), twin.terms, f"step {step}")
        finish(twin)


@case()
def older_aliases_see_new_parameters(me: Me) -> None:
    twin = sharded(me)
    mine, plain = twin.both(lambda m: [p.detach() for p in m.parameters()])
    for step in range(4):
        twin.step(loss_of(step))
        assert_close(mine, plain, twin.terms, f"aliases in step {step}")
    finish(twin, must_have_waited=False)


@case()
def averages_edits_and_loads(me: Me) -> None:
    twin = sharded(me)
    averages = twin.both(AveragedModel)
    first = copy.deepcopy(twin.plain.state_dict())
    for step in range(8):
        twin.step(loss_of(step))
        for average, model in zip(averages, (twin.model, twin.plain), strict=True):
            average.update_parameters(model)
        assert_close(*averages, twin.terms, f"average in step {step}")
        if step == 3:
            with torch.no_grad():
                twin.both(lambda m: [p.mul_(0.9) for p in m.parameters()])
        if step == 5:
            twin.both(lambda m: m.load_state_dict(first))
    finish(twin)


@case()
def gradients_are_refused_until_gathered(me: Me) -> None:
    twin = sharded(me)
    for step in range(4):
        loss_of(step)(twin.model, me.rank).backward()
        twin.oracle.backward(loss_of(step))
        try:
            shown = twin.model[0].weight.grad
        except hvd.CommError as error:
            assert "synchronize()" in str(error)
        else:
            raise AssertionError(f"a gradient that nobody holds was shown: {shown}")
        twin.optimizer.synchronize()
        for p, q in zip(twin.model.parameters(), twin.plain.parameters(), strict=True):
            assert_close([p.grad], [q.grad], twin.terms, f"gradient in step {step}")
        twin.update()
        twin.zero_grad()
    finish(twin, must_have_waited=False)


@case()
def clipping_from_shards(me: Me) -> None:
    for norm in (2.0, 1.0, float("inf")):
        twin = sharded(me)
        for step in range(4):
            twin.backward(loss_of(step, 10.0))
            theirs = nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.1, norm)
            mine = twin.optimizer.clip_grad_norm_(0.1, norm)
            assert_close([mine], [theirs], twin.terms, "norm")
            twin.update()
            twin.zero_grad()
            twin.compare(f"step {step}", exact=False)
        release(twin.optimizer)


@case(ranks=(2,))
def gathered_gradients_may_be_replaced(me: Me) -> None:
    """Other tensors put into ``p.grad``, and None, once changed nothing."""

    def change(model: nn.Module) -> None:
        model[0].weight.grad = model[0].weight.grad * 0.5
        model[2].bias.grad = None

    twin = sharded(me)
    for step in range(4):
        twin.backward(loss_of(step))
        twin.optimizer.synchronize()
        twin.both(change)
        twin.update()
        twin.zero_grad()
        twin.compare(f"step {step}", exact=False)
    release(twin.optimizer)


@case()
def accumulation_on_shards(me: Me) -> None:
    twin = sharded(me, backward_passes_per_step=2)
    for step in range(5):
        twin.step(loss_of(2 * step), loss_of(2 * step + 1))
    finish(twin)
    twin = sharded(me)
    for step in range(5):
        with twin.optimizer.no_sync():
            loss_of(2 * step)(twin.model, me.rank).backward()
        loss_of(2 * step + 1)(twin.model, me.rank).backward()
        twin.oracle.backward(loss_of(2 * step), loss_of(2 * step + 1))
        twin.update()
        twin.zero_grad()
    finish(twin)


@case()
def two_backwards_and_one_step(me: Me) -> None:
    twin = sharded(me)
    for step in range(5):
        for k in range(2):
            twin.backward(loss_of(2 * step + k))
        twin.update()
        twin.zero_grad()
    twin.compare(exact=False)
    release(twin.optimizer)


@case()
def unused_parameters_on_shards(me: Me) -> None:
    for early in (False, True):
        twin = sharded(me, branches64, early_step=early)
        for step in range(8):
            twin.step(
                lambda m, rank, step=step: using(step, *((0,) if step % 2 else ((rank + step) % 3,)))(m, rank)
            )
            twin.compare(f"step {step}, early_step={early}", exact=False)
        release(twin.optimizer)


@case()
def a_round_that_is_dropped(me: Me) -> None:
    twin = sharded(me)
    for step in range(6):
        if step % 2:
            loss_of(100 + step)(twin.model, me.rank).backward()
            twin.optimizer.zero_grad()
        twin.step(loss_of(step))
        twin.compare(f"step {step}", exact=False)
    release(twin.optimizer)


@case()
def state_of_shards_is_gathered_and_scattered(me: Me) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)

    twin = sharded(me, make=adam)
    for step in range(4):
        twin.step(loss_of(step))
    mine, plain = twin.optimizer.state_dict(), twin.oracle.optimizer.state_dict()
    assert mine["param_groups"] == plain["param_groups"]
    assert mine["state"].keys() == plain["state"].keys()
    for i, entry in plain["state"].items():
        assert mine["state"][i].keys() == entry.keys()
        for key, value in entry.items():
            assert_close([mine["state"][i][key]], [value], twin.terms, f"{key} of {i}")
    other = sharded(me, make=adam)
    other.model.load_state_dict(twin.plain.state_dict())
    other.plain.load_state_dict(twin.plain.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(plain))
    other.oracle.optimizer.load_state_dict(copy.deepcopy(plain))
    for step in range(4, 8):
        other.step(loss_of(step))
    finish(other)
    release(twin.optimizer)


@case(ranks=(2,))
def state_of_shards_is_broadcast(me: Me) -> None:
    """Only the root once asked for its state, which takes all ranks."""
    twin = sharded(me, make=lambda m: torch.optim.Adam(m.parameters(), 0.01, eps=1e-3))
    for step in range(4):
        if step in (0, 2):
            hvd.broadcast_optimizer_state(twin.optimizer, 0)
        twin.step(loss_of(step))
    finish(twin)


@case()
def each_rank_keeps_its_part_of_the_state(me: Me) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters(), gather="parameters"
    )
    for step in range(8):
        model(batch(me.rank, step, (4, 256))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = 2 * sum(p.numel() for p in model.parameters())
    here = sum(
        t.numel()
        for state in optimizer._session.mode.shards.state.values()
        for t in state.values()
        if t.dim()
    )
    assert here < whole / me.size * 1.1, f"{here} of {whole} elements of state are on rank {me.rank}"
    release(optimizer)


@case()
def frozen_and_added_parameters_on_shards(me: Me) -> None:
    def every(model: nn.Module) -> torch.optim.Optimizer:
        model.branch[1].requires_grad_(False)
        return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)

    twin = sharded(me, branches64, every, planned=False)
    for step in range(12):  # what was frozen once came back without its state
        if step in (3, 6, 9):
            twin.both(lambda m, step=step: m.branch[1].requires_grad_(step != 6))
        twin.step(using(step, 0, 1, 2))
        twin.compare(f"step {step}", exact=False)
    release(twin.optimizer)


@case()
def closures_clip_and_step(me: Me) -> None:
    """A closure runs before the shards are updated, with and without ``early_step``."""
    for early in (False, True):
        twin = sharded(me, early_step=early)
        for step in range(5):

            def closure(step: int = step, twin: Twin = twin, early: bool = early) -> torch.Tensor:
                twin.zero_grad()
                loss = loss_of(step)(twin.model, me.rank)
                loss.backward()
                twin.oracle.backward(loss_of(step))
                if not early:
                    twin.optimizer.clip_grad_norm_(0.1)
                    nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.1)
                return loss

            assert twin.update(closure).item() > 0
        finish(twin, must_have_waited=False)


@case()
def what_shards_cannot_do_is_refused(me: Me) -> None:
    def tried(make: Any, **options: Any) -> str:
        model = mlp()
        try:
            hvd.DistributedOptimizer(make(model), model.named_parameters(), gather="parameters", **options)
        except ValueError as error:
            return str(error)
        raise AssertionError("accepted")

    assert "element" in tried(lambda m: torch.optim.SparseAdam(list(m.parameters())))
    assert "element" in tried(lambda m: torch.optim.LBFGS(m.parameters()))
    twin = sharded(me, early_step=True)
    twin.backward(loss_of(0))
    for what in (twin.optimizer.synchronize, lambda: twin.optimizer.clip_grad_norm_(1.0)):
        try:
            what()
        except ValueError as error:
            assert "early_step" in str(error)
        else:
            raise AssertionError("early_step let it pass")
    twin.update()
    release(twin.optimizer)


main(__name__)
