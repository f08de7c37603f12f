"""``Compression.int8`` and ``fp8``: an oracle's bits, residuals that lose nothing, bytes, what is refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import commsched as hvd
from comm_core.cuda.tables import BLOCK
from commsched.optimizer.gradient import RESIDUAL
from tests.support import quantised_training
from tests.support.cases import Me, main
from tests.support.oracle import batch, fingerprint, release, seeded
from tests.support.quantised_training import (
    COMPRESSIONS,
    GATHERS,
    Ledger,
    Wide,
    case_of_each_code,
    loss_of,
    quantised,
)
from tests.support.reference_run import momentum


@case_of_each_code(ranks=(2, 3), slow=(4,))
def every_plan_gives_the_bits_of_the_oracle(me: Me, code: str) -> None:
    quantised_training.check_plans(me, code)


@case_of_each_code(ranks=(2, 3))
def new_plans_move_residuals_without_changing_a_bit(me: Me, code: str) -> None:
    twin = quantised(me, code, schedule="auto", planned=False, lag=0.0, bucket_mb=None)
    seen = set()
    for step in range(14):
        twin.step(loss_of(step))
        seen.add(twin.optimizer._session.plan.program.hash)
        twin.compare(f"step {step}")
    assert len(seen) > 1, "the plan never changed, so nothing was moved"
    release(twin.optimizer)


@case_of_each_code(ranks=(2,))
def two_optimizers_with_a_rank_without_data(me: Me, code: str) -> None:
    """To move residuals is collective. Where a round begins, one rank meets optimizers in another order."""
    first, second = seeded(Wide), seeded(Wide)
    optimizers: list[Any] = [
        hvd.DistributedOptimizer(momentum(model), compression=COMPRESSIONS[code]) for model in (first, second)
    ]
    for step in range(14):
        if me.rank == 0 or step < 1:
            (
                loss_of(step)(first, me.rank) + loss_of(step)(second, me.rank)
            ).backward()  # the second comes first
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(set(me.everybody(fingerprint(first) + fingerprint(second)))) == 1
    for optimizer in optimizers:
        release(optimizer)


@case_of_each_code(ranks=(2, 3))
def shards_are_updated_with_sums_of_rounded_gradients(me: Me, code: str) -> None:
    for early in (False, True):
        twin = quantised(me, code, gather="parameters", early_step=early)
        for step in range(6):
            twin.step(loss_of(step))
            twin.compare_update(f"early_step={early}, step {step}")
        release(twin.optimizer)


@case_of_each_code(ranks=(2,))
def whole_matrices_are_quantised_too(me: Me, code: str) -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon(model.parameters(), lr=2e-3)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 200, bias=False), nn.Tanh(), nn.Linear(200, 70, bias=False))

    twin = quantised(me, code, build, muon, gather="parameters")
    for step in range(4):
        twin.step(loss_of(step))
    twin.compare()
    release(twin.optimizer)


@case_of_each_code(ranks=(2, 3))
def the_state_holds_what_is_lacking(me: Me, code: str) -> None:
    quantised_training.check_state(me, code)


@case_of_each_code(ranks=(2, 3), slow=(4,))
def a_saved_residual_is_delivered_at_any_number_of_ranks(me: Me, code: str) -> None:
    quantised_training.check_saved_residual(me, code)


@case_of_each_code(ranks=(2, 3))
def nothing_is_lost_where_no_rank_uses_a_parameter(me: Me, code: str) -> None:
    for gather in GATHERS:
        ledger = Ledger(me, code, gather=gather)
        for used in ((), (0,), (0,), (1,), (), (0,)):
            ledger.step(*used)
            ledger.check(f"{gather}, used {used}")
        release(ledger.optimizer)


@case_of_each_code(ranks=(2, 3))
def nothing_is_lost_where_backwards_add_up_before_a_step(me: Me, code: str) -> None:
    """With op=Sum, all ranks but one send the difference to what the first backward has delivered."""
    for gather in GATHERS:
        ledger = Ledger(me, code, gather=gather)
        for backwards in (1, 3, 2, 1):
            ledger.step(backwards=backwards)
            ledger.check(f"{gather}, {backwards} backwards")
        release(ledger.optimizer)


@case_of_each_code(ranks=(2, 3))
def nothing_is_lost_when_the_optimizer_changes(me: Me, code: str) -> None:
    quantised_training.check_changes(me, code)


@case_of_each_code(ranks=(2,))
def ranks_with_fewer_batches_keep_their_residuals(me: Me, code: str) -> None:
    for gather in GATHERS:
        model = seeded(Wide)
        optimizer: Any = hvd.DistributedOptimizer(
            momentum(model), model.named_parameters(), compression=COMPRESSIONS[code], gather=gather
        )
        for step in range(3 + 2 * me.rank):
            model(batch(me.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if me.rank == 1 and step == 4:
                try:
                    optimizer.state_dict()
                    raise AssertionError("one rank alone has no whole state")
                except ValueError as error:
                    assert "needs all ranks" in str(error), error
        hvd.join()
        assert len(set(me.everybody(fingerprint(model)))) == 1
        assert any(RESIDUAL in entries for entries in optimizer.state_dict()["state"].values())
        release(optimizer)


@case_of_each_code(ranks=(2,))
def an_overflow_is_seen_on_all_ranks_and_leaves_no_trace(me: Me, code: str) -> None:
    model = seeded(Wide)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression=COMPRESSIONS[code]
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        factor = float("inf") if step == 1 and me.rank == 1 else 1.0
        scale = scaler.get_scale()
        scaler.scale(model(batch(me.rank, step)).square().mean() * factor).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (scaler.get_scale() < scale) == (step == 1), f"step {step}: {scale} to {scaler.get_scale()}"
    assert all(p.isfinite().all() for p in model.parameters())
    state = optimizer.state_dict()["state"]
    assert all(entries[RESIDUAL].isfinite().all() for entries in state.values() if RESIDUAL in entries)
    release(optimizer)


@case_of_each_code(ranks=(2, 3))
def messages_have_a_quarter_of_the_bytes(me: Me, code: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(12, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 40)
        )

    twin = quantised(me, code, build, bucket_mb=0.5, lag=0.0)
    for step in range(8):
        twin.step(loss_of(step))
    whole = sum(4 * p.numel() for p in twin.model.parameters()) * 2 * (me.size - 1) / me.size
    found = hvd.metrics(twin.optimizer)
    assert found is not None and found.bytes is not None
    assert 0.25 < found.bytes / whole < 0.27, found.bytes / whole
    told = str(hvd.explain(twin.optimizer, show=False)).splitlines()
    (wide,) = (line for line in told if line.startswith("  bucket") and "2.weight" in line)
    assert f", gradients as {code} " in wide and "bias" not in wide, told
    assert any("bias" in line and code not in line for line in told), told
    release(twin.optimizer)


@case_of_each_code(ranks=(2,))
def what_is_refused(me: Me, code: str) -> None:
    def refused(model: nn.Module | None = None, **options: Any) -> str:
        model = model or Wide()
        try:
            hvd.DistributedOptimizer(
                momentum(model), model.named_parameters(), **{"compression": COMPRESSIONS[code], **options}
            )
        except (ValueError, hvd.CommError) as error:
            return str(error)
        raise AssertionError("accepted")

    assert f"Compression.{code} is not possible over transport 'ring'" in refused(transport="ring")
    assert "not possible over transport 'horovod'" in refused(transport="horovod")
    assert "without buckets" in refused(transport="plain")
    assert "without buckets" in refused(op=hvd.Adasum)
    assert "on CPUs and GPUs only" in refused(Wide().to("meta"))
    text = refused(compression=COMPRESSIONS[code] if me.rank else hvd.Compression.none)
    assert "the arguments of DistributedOptimizer must be the same on all ranks" in text, text
    try:
        hvd.allreduce(torch.ones(3), compression=COMPRESSIONS[code])
        raise AssertionError("accepted")
    except ValueError as error:
        assert f"Compression.{code} is for the buckets of DistributedOptimizer" in str(error)


@case_of_each_code(ranks=(), slow=(2,))
def digits_are_learned_as_well(me: Me, code: str) -> None:
    """Rounding that is made up for changes the loss no more than random errors of the same size, 16 times."""
    from dnn_bench.converge import digits

    (images, labels), _ = digits()

    def network() -> nn.Module:
        torch.manual_seed(0)
        hidden = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 10))

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(step)
        here = torch.randint(len(labels), (96,), generator=dice).chunk(me.size)[rank]
        return F.cross_entropy(model(images[here]), labels[here])

    def reached(model: nn.Module) -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(images), labels))

    def learned(compression: Any) -> float:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            model.named_parameters(),
            compression=compression,
        )
        for step in range(100):
            loss(model, step, me.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        release(optimizer)
        return reached(model)

    def in_error(grad: torch.Tensor, dice: torch.Generator) -> torch.Tensor:
        """Add errors as large as rounding's in blocks, of which none is made up for in a later step."""
        blocks = F.pad(grad.flatten(), (0, -grad.numel() % BLOCK)).view(-1, BLOCK).abs()
        half = blocks.amax(1, keepdim=True) / 254 if code == "int8" else blocks / 16  # of a code's distance
        errors = half * (2 * torch.rand(blocks.shape, generator=dice) - 1)
        return grad + errors.flatten()[: grad.numel()].view_as(grad)

    def learned_in_error(seed: int) -> float:
        model, dice = network(), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(100):
            grads = [
                torch.autograd.grad(loss(model, step, rank), list(model.parameters()))
                for rank in range(me.size)
            ]
            for param, *each in zip(model.parameters(), *grads, strict=True):
                param.grad = in_error(sum(in_error(grad, dice) for grad in each) / me.size, dice)
            optimizer.step()
        return reached(model)

    plain, rounded = learned(hvd.Compression.none), learned(COMPRESSIONS[code])
    here = max(abs(learned_in_error(seed) - plain) for seed in range(me.rank, 16, me.size))
    at_random = max(map(float, me.everybody(str(here))))
    print(plain, rounded, at_random)
    assert plain < 0.3 and abs(rounded - plain) <= at_random, (plain, rounded, at_random)


main(__name__)
