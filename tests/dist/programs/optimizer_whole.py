"""``gather="parameters"`` for optimizers of whole matrices: the bits of plain PyTorch on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import commsched as hvd
from commsched.optimizer.whole_step import plain_step
from tests.support.cases import Me, case, main
from tests.support.matrix_optimizers import Soapy, adafactor, matrices, muon, soapy, two_groups
from tests.support.oracle import assert_same_bits, release, seeded, values
from tests.support.reference_run import Twin
from tests.support.small_models import loss_of, mlp, mlp64


def matrices64() -> nn.Module:
    return matrices().double()


OPTIMIZERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "Muon": (matrices, muon),
    "Muon, float64": (matrices64, muon),
    "SOAP-like": (mlp, soapy),
    "two groups": (mlp, two_groups),
    "Adafactor": (mlp, adafactor),
}


def whole(me: Me, name: str = "Muon", **options: Any) -> Twin:
    build, make = OPTIMIZERS[name]
    return Twin(me, build, make, **{"gather": "parameters", "lag": 0.0, **options})


def same_state(mine: Any, plain: Any, what: str) -> None:
    """Both state dicts hold equal bits."""
    if isinstance(plain, torch.Tensor):
        assert_same_bits([mine], [plain], what)
    elif isinstance(plain, dict):
        assert mine.keys() == plain.keys(), f"{what}: {sorted(map(str, mine))}, not {sorted(map(str, plain))}"
        for key in plain:
            same_state(mine[key], plain[key], f"{what}, {key}")
    elif isinstance(plain, list):
        for number, pair in enumerate(zip(mine, plain, strict=True)):
            same_state(*pair, f"{what}, {number}")
    else:
        assert mine == plain, f"{what}: {mine}, not {plain}"


@case(ranks=(2, 3, 4))
def every_optimizer_has_the_bits_of_plain_torch(me: Me) -> None:
    for name in OPTIMIZERS:
        for how in (
            {},
            {"early_step": True},
            {"transport": "ring"} if me.size == 2 else {"schedule": "optimal"},
        ):
            twin = whole(me, name, **how)
            for step in range(6):
                twin.step(loss_of(step))
            twin.compare(f"{name} {how}")
            same_state(twin.optimizer.state_dict(), twin.oracle.optimizer.state_dict(), f"{name} {how}")
            release(twin.optimizer)


@case(ranks=(2, 3))
def both_gathers_agree_when_measured_and_planned(me: Me) -> None:
    for gather in ("parameters", "gradients"):
        twin = whole(me, gather=gather, schedule="auto", bucket_mb=None, planned=False)
        for step in range(14):
            twin.step(loss_of(step))
        twin.compare(gather)
        release(twin.optimizer)


@case(ranks=(2, 3))
def state_goes_to_and_from_plain_torch(me: Me) -> None:
    """A state dict is that of plain PyTorch, hence of any number of ranks."""
    for name in OPTIMIZERS:
        twin = whole(me, name)
        for step in range(3):
            twin.step(loss_of(step))
        saved, model = twin.oracle.optimizer.state_dict(), twin.plain.state_dict()
        other = whole(me, name, bucket_mb=0.02)
        for loaded in (other.model, other.plain):
            loaded.load_state_dict(model)
        for optimizer in (other.optimizer, other.oracle.optimizer):
            optimizer.load_state_dict(saved)
        for step in range(3, 6):
            other.step(loss_of(step))
        other.compare(name)
        same_state(other.optimizer.state_dict(), other.oracle.optimizer.state_dict(), name)
        release(twin.optimizer)
        release(other.optimizer)


@case(ranks=(2, 3))
def accumulation_clipping_and_reading(me: Me) -> None:
    twin = whole(me, "SOAP-like")
    twin.optimizer.set_backward_passes_per_step(2)
    for step in range(3):
        twin.step(loss_of(2 * step), loss_of(2 * step + 1))
    twin.compare("two passes")
    twin.optimizer.set_backward_passes_per_step(1)
    for step in range(3):
        twin.backward(loss_of(step))
        twin.optimizer.synchronize()
        twin.compare_grads(f"step {step}")
        twin.update()
        twin.zero_grad()
    twin.compare("gathered gradients")
    release(twin.optimizer)
    # The norm is a sum in another order: float64, within rounding.
    twin = Twin(me, mlp64, adafactor, gather="parameters", lag=0.0)
    for step in range(4):
        twin.backward(loss_of(step))
        norm = twin.optimizer.clip_grad_norm_(0.01)
        plain = nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.01)
        assert torch.allclose(norm, plain, rtol=1e-13), f"{norm} {plain}"
        twin.update()
        twin.zero_grad()
    twin.compare("clipped", exact=False)
    release(twin.optimizer)


@case(ranks=(2,))
def two_optimizers_over_one_model(me: Me) -> None:
    mine, plain = seeded(mlp), seeded(mlp)
    updates: list[list[torch.optim.Optimizer]] = []
    for model in (mine, plain):
        params = list(model.parameters())
        updates.append(
            [
                torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02),
                torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01, eps=1e-3),
            ]
        )
    named = dict(mine.named_parameters())
    wrapped = [
        hvd.DistributedOptimizer(inner, named.items(), gather=gather, schedule="dear")
        for inner, gather in zip(updates[0], ("parameters", "gradients"), strict=True)
    ]
    for step in range(6):
        total = [torch.zeros_like(p) for p in plain.parameters()]
        for rank in range(me.size):
            plain.zero_grad()
            loss_of(step)(plain, rank).backward()
            for t, p in zip(total, plain.parameters(), strict=True):
                t.add_(p.grad)
        for t, p in zip(total, plain.parameters(), strict=True):
            p.grad = t * (1.0 / me.size)
        loss_of(step)(mine, me.rank).backward()
        for optimizer in (*wrapped, *updates[1]):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(mine, plain)
    for optimizer in wrapped:
        release(optimizer)


@case(ranks=(2, 4))
def the_ranks_share_the_work_and_send_the_same_bytes(me: Me) -> None:
    """Arithmetic of the update against that of the whole one, and bytes against ``gather="gradients"``."""
    # Muon computes in bfloat16: without instructions for it, that takes a hundred times as long.
    sizes, done, sent = (96,) * 17, {}, {}
    for gather in ("parameters", "gradients"):
        model = seeded(lambda: matrices(sizes))
        optimizer: Any = hvd.DistributedOptimizer(
            muon(model), model.named_parameters(), gather=gather, schedule="dear", bucket_mb=0.15
        )
        inner, counts = plain_step(optimizer._base), [0]

        def counted(self: Any, inner: Any = inner, counts: list[int] = counts) -> Any:
            with FlopCounterMode(display=False) as counter:
                try:
                    return inner(self)
                finally:
                    counts[-1] += counter.get_total_flops()

        optimizer._base = type("Muon", (optimizer._base,), {"step": counted})
        if gather == "parameters":
            optimizer._session.mode.shards._base = optimizer._base
        for step in range(6):
            counts.append(0)
            model(
                torch.randn(4, 96, generator=torch.Generator().manual_seed(step))
            ).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        values(model)  # completes the last update
        done[gather] = sum(counts)
        operations = [op for op in hvd.operations(optimizer) if op.step == 6]
        flags = max(op.bucket for op in operations)
        sent[gather] = sum(op.bytes for op in operations if op.bucket < flags)
        release(optimizer)
    work = [int(text) for text in me.everybody(str(done["parameters"]))]
    assert done["gradients"] and work == [done["gradients"] // me.size] * me.size, (work, done)
    whole_bytes = 2 * 4 * sum(96 * 96 for _ in sizes[1:])  # RS and AG of float32
    everywhere = [[int(t) for t in me.everybody(str(sent[gather]))] for gather in sent]
    for ranks in everywhere:
        assert sum(ranks) == whole_bytes * (me.size - 1), everywhere


@case(ranks=(2,))
def refusals_say_what_to_do(me: Me) -> None:
    """An undeclared optimizer, a transport of equal parts, and costs that differ between ranks."""
    model = mlp()

    class Undeclared(Soapy):
        pass

    class Uneven(Soapy):
        pass

    hvd.register_whole_matrix(Uneven, cost=lambda shape: shape[0] * (-1.0) ** me.rank)
    for optimizer, options, said in (
        (Undeclared(model.parameters()), {}, "register_whole_matrix"),
        (Soapy(model.parameters()), {"transport": "stream"}, "parts of equal length only"),
        (Uneven(model.parameters()), {}, "the owners of the parameters must be the same on all ranks"),
    ):
        try:
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), gather="parameters", **options)
        except (ValueError, hvd.CommError) as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"not refused: {said}")


main(__name__)
