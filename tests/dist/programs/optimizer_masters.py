"""``master_weights=True``: half-precision parameters learn what a float32 copy of them learns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import commsched as hvd
from commsched.optimizer.sharded_step import KEY, take_written
from tests.support.cases import Me, case, main
from tests.support.masters import CastEachStep
from tests.support.oracle import assert_close, assert_same_bits, batch, release, seeded, values
from tests.support.reference_run import Twin

Make = Callable[[Sequence[nn.Parameter]], Any]


class Even(nn.Module):
    """Sizes at which no shard ends within a vector register: whole tensors and shards have the same bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(64, n, bias=False) for n in (64, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.relu(self.first(x)))))


class Odd(nn.Module):
    """Odd sizes, a float32 norm between bfloat16 layers, a transposed weight, a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 37)
        self.norm = nn.LayerNorm(37)
        self.turned = nn.Parameter(torch.randn(37, 37).mul(0.1).t())
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(37, 5)
        for part in (self.first, self.last, self.never):
            part.bfloat16()
        self.turned.data = self.turned.data.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x).float()).bfloat16()
        return self.last(torch.relu(x @ self.turned))


def even(dtype: torch.dtype = torch.bfloat16) -> Callable[[], nn.Module]:
    return lambda: Even().to(dtype)


def loss(step: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[nn.Module, int], torch.Tensor]:
    return lambda model, rank: model(batch(rank, step, (6, 64), dtype)).float().square().mean()


def adam(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-4, eps=1e-4)


def momentum(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2e-3, momentum=0.9, weight_decay=0.01)


class MasterTwin(Twin):
    """Beside the half-precision model, the oracle trains a float32 copy."""

    def __init__(self, me: Me, build: Callable[[], nn.Module], make: Make, **options: Any) -> None:
        given = {"gather": "parameters", "master_weights": True, "lag": 0.0, **options}
        super().__init__(me, build, lambda model: make(list(model.parameters())), **given)
        self.cast = self.oracle.optimizer = CastEachStep(self.plain.parameters(), make)

    def masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every master, from the state dict, beside the float32 copy's weight."""
        saved = self.optimizer.state_dict()["state"]
        kept = [i for i in range(len(self.cast.weights)) if KEY in saved.get(i, {})]
        assert all(self.cast.weights[i].dtype != torch.float32 for i in kept)
        return [(saved[i][KEY], self.cast.copies[i].data) for i in kept]

    def finish(self) -> None:
        self.compare("at the end")
        for found, wanted in self.masters():
            assert_same_bits([found], [wanted], "masters")
        release(self.optimizer)

    def compare_update(self, what: str, terms: int = 4) -> None:
        """A master whose last bit is another may round to the neighbouring half-precision number."""
        for found, wanted in self.masters():
            assert_close([found], [wanted], terms, f"{what}: masters")
            wanted.copy_(found)
        super().compare_update(what, terms)
        for weight, copied in zip(self.cast.weights, self.cast.copies, strict=True):
            if weight.dtype == torch.float32:
                copied.data.copy_(weight)


def masters_of(twin: Twin) -> list[torch.Tensor]:
    return [state[KEY] for state in twin.optimizer.state_dict()["state"].values() if KEY in state]


@case(ranks=(2, 4))
def a_float32_copy_learns_the_same(me: Me) -> None:
    ways: list[dict[str, Any]] = [{}, {"early_step": True}, {"transport": "stream"}]
    for dtype in (torch.bfloat16, torch.float16):
        for make in (adam, momentum):
            for way in ways:
                twin = MasterTwin(me, even(dtype), make, bucket_mb=0.01, **way)
                for step in range(6):
                    twin.step(loss(step, dtype))
                masters = masters_of(twin)
                assert len(masters) == 3
                rounded = [(m != m.to(dtype).float()).float().mean() for m in masters]
                assert min(rounded) > 0.5, f"masters say no more than the parameters: {rounded}"
                twin.finish()


@case(ranks=(2, 3))
def masters_of_whole_matrices(me: Me) -> None:
    def muon(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(params, lr=2e-3)

    for early in (False, True):
        twin = MasterTwin(me, even(), muon, bucket_mb=0.01, early_step=early)
        for step in range(4):
            twin.step(loss(step))
        assert len(masters_of(twin)) == 3
        twin.finish()


@case(ranks=(2,))
def without_masters_small_updates_are_lost(me: Me) -> None:
    """What the option is for: the tests here would notice if nothing were kept."""
    twin = MasterTwin(me, even(), adam, master_weights=False)
    for step in range(6):
        twin.step(loss(step))
    pairs = zip(twin.model.parameters(), twin.plain.parameters(), strict=True)
    assert any(not torch.equal(p, q) for p, q in pairs)
    release(twin.optimizer)


@case(ranks=(2,))
def rounding_hides_no_fault_in_masters(me: Me) -> None:
    """One rank's gradient off by a hundredth once: the masters tell, whose weights have few bits."""
    for factor in (1.0, 0.99):
        twin = MasterTwin(me, even(), momentum)
        twin.step(twin.spoiled(loss(0), factor))
        try:
            twin.compare_update("a fault")
        except AssertionError as error:
            assert "rounding explains" in str(error) and factor != 1.0, error
        else:
            assert factor == 1.0, "not found"
        release(twin.optimizer)


@case(ranks=(2, 3))
def odd_sizes_and_mixed_types(me: Me) -> None:
    for way in ({}, {"transport": "stream"}, {"planned": False, "schedule": "auto"}):
        twin = MasterTwin(me, Odd, adam, **way)
        for step in range(8):
            twin.step(loss(step))
            twin.compare_update(f"step {step}")
        state = twin.optimizer.state_dict()["state"]
        kept = {name for i, (name, _) in enumerate(twin.model.named_parameters()) if KEY in state.get(i, {})}
        assert kept == {"turned", "first.weight", "first.bias", "last.weight", "last.bias"}, kept
        release(twin.optimizer)


@case(ranks=(2,))
def fused_updates_keep_masters(me: Me) -> None:
    for make in (fused_adam, lambda params: torch.optim.SGD(params, lr=2e-3, fused=True)):
        twin = MasterTwin(me, even(), make, transport="stream")
        for step in range(4):
            twin.step(loss(step))
            twin.compare_update(f"step {step}")
        assert len(masters_of(twin)) == 3
        release(twin.optimizer)


@case(ranks=(2,))
def clipping_is_that_of_float32_gradients(me: Me) -> None:
    twin = MasterTwin(me, even(), adam)
    elements = sum(p.numel() for p in twin.plain.parameters())
    for step in range(4):
        twin.backward(loss(step))
        mine = twin.optimizer.clip_grad_norm_(0.01)
        assert_close([mine], [twin.cast.norm().float()], elements, "norm")
        twin.cast.clip(0.01, mine)
        twin.update()
        twin.zero_grad()
        twin.compare_update(f"step {step}")
    release(twin.optimizer)


def fused_adam(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-4, eps=1e-3, fused=True)


@case(ranks=(2,))
def a_scaler_of_float16_gradients(me: Me) -> None:
    """Unscaled in float32 by the fused optimizer; a step with an infinite gradient leaves masters alone."""
    twin = MasterTwin(me, even(torch.float16), fused_adam)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(5):
        scale = scaler.get_scale()
        spoiled = float("inf") if step == 2 else 1.0

        def scaled(model: nn.Module, rank: int, step: int = step, factor: float = spoiled) -> Any:
            return scaler.scale(loss(step, torch.float16)(model, rank) * factor)

        twin.backward(scaled)
        twin.optimizer.synchronize()
        scaler.step(twin.optimizer)
        scaler.update()
        twin.cast.factor = torch.tensor(1.0 / scale)
        if step != 2:
            twin.oracle.optimizer.step()
        twin.zero_grad()
        assert (scaler.get_scale() < scale) == (step == 2)
        twin.compare_update(f"step {step}")
    release(twin.optimizer)


@case(ranks=(2, 3))
def what_is_written_counts(me: Me) -> None:
    """A broadcast, a loaded model or an edit once would have been undone by the masters."""
    twin = MasterTwin(me, even(), momentum)
    for step in range(6):
        if step == 0:
            twin.both(lambda m: [p.data.mul_(0.5) for p in m.parameters()])  # as a broadcast does
        if step == 2:
            with torch.no_grad():
                twin.both(lambda m: m.second.weight.fill_(0.01))
        if step == 4:
            first = seeded(even(), 3).state_dict()
            twin.both(lambda m, first=first: m.load_state_dict(first))
        if step in (0, 2, 4):
            for weight, copied in zip(twin.cast.weights, twin.cast.copies, strict=True):
                take_written(copied.data, weight.data)
        twin.step(loss(step))
        twin.compare_update(f"step {step}")
    release(twin.optimizer)


@case(ranks=(1, 2, 3))
def one_rank_and_many_load_each_others_state(me: Me) -> None:
    """Each number of ranks goes on from the same saved state, made in one process."""
    source = seeded(even())
    alone = CastEachStep(source.parameters(), adam)
    for step in range(3):
        loss(step)(source, 0).backward()
        alone.step()
        alone.zero_grad()
    saved = copy.deepcopy(alone.inner.state_dict())
    for i, weight in enumerate(alone.copies):
        saved["state"][i][KEY] = weight.detach().clone()
    twin = MasterTwin(me, even(), adam)
    for own, theirs in zip(twin.cast.copies, alone.copies, strict=True):
        own.data.copy_(theirs)
    twin.cast.inner.load_state_dict(copy.deepcopy(alone.inner.state_dict()))
    twin.cast.cast()
    twin.model.load_state_dict(source.state_dict())
    twin.optimizer.load_state_dict(saved)
    again = twin.optimizer.state_dict()["state"]
    for i, entries in saved["state"].items():
        assert again[i].keys() == entries.keys()
        for key, value in entries.items():
            assert torch.equal(again[i][key], value) and again[i][key].dtype == value.dtype, f"{key} of {i}"
    for step in range(3, 6):
        twin.step(loss(step))
        twin.compare_update(f"step {step}")
    release(twin.optimizer)


@case(ranks=(2,))
def plain_pytorch_goes_on_from_the_state(me: Me) -> None:
    twin = MasterTwin(me, even(), adam)
    for step in range(3):
        twin.step(loss(step))
    saved, weights = twin.optimizer.state_dict(), values(twin.model)
    plain = seeded(even())
    plain.load_state_dict(twin.model.state_dict())
    optimizer = adam(list(plain.parameters()))
    optimizer.load_state_dict(copy.deepcopy(saved))
    loss(3)(plain, 0).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in plain.parameters())
    # And back: what plain PyTorch has rounded to bfloat16 serves as well as it can.
    other = MasterTwin(me, even(), adam)
    other.model.load_state_dict(plain.state_dict())
    without = optimizer.state_dict()
    for entries in without["state"].values():
        entries.pop(KEY)
    other.optimizer.load_state_dict(without)
    loss(4)(other.model, me.rank).backward()
    other.optimizer.step()
    saved_again = other.optimizer.state_dict()["state"]
    assert all(t.dtype == torch.float32 for s in saved_again.values() for t in s.values()), saved_again
    assert len(weights) == len(masters_of(other))
    release(other.optimizer)
    release(twin.optimizer)


@case(ranks=(2,))
def new_plans_and_other_parameters_keep_masters(me: Me) -> None:
    twin = MasterTwin(me, even(), momentum, planned=False, schedule="auto")
    for step in range(9):
        if step == 3:
            twin.both(lambda m: m.second.weight.requires_grad_(False))
        if step == 6:
            twin.both(lambda m: m.second.weight.requires_grad_(True))
        twin.step(loss(step))
        twin.compare_update(f"step {step}")
    release(twin.optimizer)


@case(ranks=(2,))
def a_master_begins_with_the_first_update(me: Me) -> None:
    """Layers that were frozen when they were wrapped made their first update in half precision."""

    def frozen() -> nn.Module:
        model = even()()
        model.second.weight.requires_grad_(False)
        return model

    for make in (adam, momentum):
        twin = MasterTwin(me, frozen, make)
        for step in range(5):
            if step == 2:
                twin.both(lambda m: m.second.weight.requires_grad_(True))
            twin.step(loss(step))
            assert len(masters_of(twin)) == 2 + (step >= 2), step
            twin.compare_update(f"step {step}")
        release(twin.optimizer)


@case(ranks=(2,))
def state_with_masters_is_broadcast(me: Me) -> None:
    twin = MasterTwin(me, even(), adam)
    for step in range(4):
        if step == 2:
            hvd.broadcast_optimizer_state(twin.optimizer, 0)
        twin.step(loss(step))
    twin.finish()


@case(ranks=(2,))
def each_rank_keeps_the_masters_of_its_shards(me: Me) -> None:
    twin = MasterTwin(me, even(), momentum)
    for step in range(2):
        twin.step(loss(step))
    shards = twin.optimizer._session.mode.shards
    here = sum(part.master.numel() for parts in shards.parts for part in parts)
    assert here == sum(p.numel() for p in twin.model.parameters()) / me.size, here
    release(twin.optimizer)


@case(ranks=(2,))
def where_masters_mean_nothing_they_are_refused(me: Me) -> None:
    def tried(build: Callable[[], nn.Module], make: Make = adam, **options: Any) -> str:
        model = build()
        given = {"gather": "parameters", "master_weights": True, **options}
        try:
            hvd.DistributedOptimizer(make(list(model.parameters())), model.named_parameters(), **given)
        except (ValueError, hvd.CommError) as error:
            return str(error)
        raise AssertionError("accepted")

    assert "use gather='parameters'" in tried(even(), gather="gradients")
    assert "these are all torch.float32" in tried(Even)
    assert "transport='plain'" in tried(even(), transport="plain")
    assert "element" in tried(even(), lambda params: torch.optim.SparseAdam(params))
    text = tried(even(), master_weights=me.rank == 0)
    assert "master_weights must be the same on all ranks" in text, text


main(__name__)
