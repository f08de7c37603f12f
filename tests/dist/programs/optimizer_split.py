"""Weight gradients at random places in the backward: the same bits as an unsplit backward, whatever is in it."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import commsched as hvd
from scheduler import policies
from scheduler.ir.actions import Action, Kind
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program, data_parallel_program
from tests.support.cases import Me, case, main
from tests.support.oracle import assert_same_bits, release, seeded
from tests.support.reference_run import momentum

STEPS = 8
LINK = Link(alpha=1e-5, beta=1e-8)
Train = Callable[[nn.Module, Any, int], None]
"""One step of a model with its optimizer; the number of the step."""


def profile_of(model: nn.Module) -> Profile:
    layers = [Layer("(outside)", 1e-4, 0.0, 0)]
    for number, p in enumerate(p for p in model.parameters() if p.requires_grad):
        layers.append(Layer(str(number), 1e-4, 2e-4, p.numel() * 4, 8, 1e-4 if p.dim() > 1 else 0.0))
    return Profile("random", tuple(layers))


def latest_program(model: nn.Module, size: int) -> Program:
    """Every weight gradient behind all input gradients."""
    profile = profile_of(model)
    plain = policies.plan(profile, LINK, "dear", ranks=size)
    numbers = range(len(profile.layers) - 1, -1, -1)
    order = [Action(Kind.B, n) for n in numbers]
    order += [Action(Kind.W, n) for n in numbers if profile.layers[n].weight_backward]
    return data_parallel_program(
        "latest", plain.buckets, plain.link, len(numbers), size, "gradients", False, backward=order
    )


def random_program(model: nn.Module, size: int, seed: int, gather: str, early_step: bool) -> Program:
    """Every weight gradient anywhere behind the input gradient of the layer above."""
    dice = random.Random(seed)
    profile = profile_of(model)
    layers = profile.layers
    step: dict[str, Any] = {"gather": gather, "early_step": early_step, "ranks": size}
    plain = policies.plan(profile, LINK, "dear", bucket_bytes=dice.choice([400, 4000, 40000]), **step)
    order: list[Action] = []
    for layer in reversed(range(len(layers))):
        if layers[layer].weight_backward:
            above = order.index(Action(Kind.B, layer + 1)) if layer + 1 < len(layers) else -1
            order.insert(dice.randint(above + 1, len(order)), Action(Kind.W, layer))
        order.append(Action(Kind.B, layer))
    for layer in range(len(layers)):  # late ones too: behind all input gradients
        action = Action(Kind.W, layer)
        if action in order and dice.random() < 0.5:
            order.remove(action)
            order.insert(dice.randint(order.index(Action(Kind.B, layer)) + 1, len(order)), action)
    return data_parallel_program(
        "random", plain.buckets, plain.link, len(layers), size, gather, early_step, backward=order
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def trained(
    build: Callable[[], nn.Module], train: Train, split: Program | None, make: Any, **options: Any
) -> tuple[nn.Module, int]:
    """Return the trained model, and how many modules were split at most."""
    model = seeded(build)
    schedule = split if split is not None else "dear"
    optimizer: Any = hvd.DistributedOptimizer(
        make(model), model.named_parameters(), model=model, schedule=schedule, **options
    )
    most = 0
    for step in range(STEPS):
        train(model, optimizer, step)
        if optimizer._driver.split is not None:
            most = max(most, len(optimizer._driver.split._splits))
    release(optimizer)
    return model, most


def same(
    me: Me,
    build: Callable[[], nn.Module],
    train: Train,
    make: Any = momentum,
    at_least: int = 1,
    tries: int = 3,
    **options: Any,
) -> None:
    plain, none = trained(build, train, None, make, **options)
    assert none == 0
    gather, early = options.get("gather", "gradients"), options.get("early_step", False)
    for number in range(tries):
        program = random_program(seeded(build), me.size, me.seed * 100 + number, gather, early)
        model, most = trained(build, train, program, make, **options)
        assert most >= at_least, f"{most} modules were split: {program.backward}"
        assert_same_bits(model, plain, f"split as {program.backward}")


def normal(me: Me, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + me.rank))


def plainly(me: Me, *shape: int) -> Train:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        model(normal(me, step, *shape)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def mlp() -> nn.Module:
    """ReLUs write into what the split modules return."""
    sizes = [12, 33, 20, 33, 3]
    parts = [[nn.Linear(a, b, bias=b != 20), nn.ReLU(inplace=True)] for a, b in zip(sizes, sizes[1:])]
    return nn.Sequential(*(part for pair in parts for part in pair))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        y += x
        return F.relu(y)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        Residual(8),
        nn.ConvTranspose2d(8, 4, 2, stride=2, bias=False),
        Residual(4),
        nn.Flatten(),
        nn.Linear(4 * 12 * 12, 3),
    )


class Attention(nn.Module):
    """Three modules read the same input; one parameter is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.norm = nn.LayerNorm(12)
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(12, 20)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(words))
        mixed = F.scaled_dot_product_attention(*(f(x)[None] for f in (self.query, self.key, self.value)))
        return self.out(x + self.scale * mixed[0])


def on_words(me: Me) -> Train:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        words = torch.randint(20, (9,), generator=torch.Generator().manual_seed(100 * step + me.rank))
        F.cross_entropy(model(words), words.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


@case(ranks=(2, 3), slow=(4,))
def several_models(me: Me) -> None:
    same(me, mlp, plainly(me, 6, 12), at_least=3)
    same(me, mlp, plainly(me, 6, 12), adam, at_least=3)
    same(me, convolutions, plainly(me, 2, 3, 8, 8), at_least=3)
    same(me, Attention, on_words(me), adam, at_least=3)


@case(ranks=(2, 3), slow=(4,))
def on_shards(me: Me) -> None:
    for early in (False, True):
        same(me, mlp, plainly(me, 6, 12), adam, at_least=3, gather="parameters", early_step=early)


@case()
def while_ranks_are_late(me: Me) -> None:
    """Other ranks are late in other places; hooks of parameters would keep their modules from being split."""
    dice = random.Random(f"{me.seed} {me.rank}")

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if dice.random() < 0.3:
                time.sleep(dice.random() * 0.003)
            return grad

    def train(model: Any, optimizer: Any, step: int) -> None:
        x = normal(me, step, 6, 12)
        for part in model:
            x = Pause.apply(part(x))
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    same(me, mlp, train, at_least=3, tries=6)


@case()
def over_several_passes(me: Me) -> None:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        for part in range(3):
            model(normal(me, 3 * step + part, 6, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def without_sync(model: nn.Module, optimizer: Any, step: int) -> None:
        with optimizer.no_sync():
            model(normal(me, step, 6, 12)).square().mean().backward()
        plainly(me, 6, 12)(model, optimizer, step + 50)

    same(me, mlp, train, at_least=3, backward_passes_per_step=3)
    same(me, mlp, without_sync, at_least=3)


@case()
def clipped_and_read(me: Me) -> None:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        model(normal(me, step, 6, 12)).square().mean().backward()
        optimizer.clip_grad_norm_(0.1)
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()

    same(me, mlp, train, at_least=3)


class Odd(nn.Module):
    """A module that is called twice, tied weights, and a weight that is used without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.tied, self.alone, self.unused = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.first(x))))
        x = F.linear(self.alone(torch.tanh(x)), self.alone.weight)
        return self.last(self.tied(torch.tanh(x)))


@case()
def modules_that_are_left_alone(me: Me) -> None:
    same(me, Odd, plainly(me, 6, 12))

    for reentrant in (False, True):

        def checkpointed(model: Any, optimizer: Any, step: int, reentrant: bool = reentrant) -> None:
            x = normal(me, step, 6, 12).requires_grad_()
            for part in (model[:2], model[2:6]):
                x = checkpoint(part, x, use_reentrant=reentrant)
            model[6:](x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        same(me, mlp, checkpointed)


@case()
def hooks_see_what_they_see_without(me: Me) -> None:
    seen: list[torch.Tensor] = []

    def build() -> nn.Module:
        parts = [(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)]
        model: Any = nn.Sequential(*(part for pair in parts for part in pair))
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(torch.ones(1)))
        model[4].register_full_backward_hook(lambda *given: seen.extend(g for g in given[1] if g is not None))
        return model

    same(me, build, plainly(me, 6, 12))
    each = len(seen) // 4  # of one run without splits, and three with
    for run in range(1, 4):
        assert_same_bits(
            seen[run * each : (run + 1) * each], seen[:each], "gradients that a module's hook saw"
        )


@case()
def graphs_are_used_again(me: Me) -> None:
    """Kept for a second backward, differentiated twice, or asked for single gradients."""

    def twice(model: nn.Module, optimizer: Any, step: int) -> None:
        loss = model(normal(me, step, 6, 12)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def penalty(model: nn.Module, optimizer: Any, step: int) -> None:
        x = normal(me, step, 6, 12).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + slope.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def single(model: Any, optimizer: Any, step: int) -> None:
        x = normal(me, step, 6, 12)
        found = torch.autograd.grad(model(x).square().mean(), [model[2].weight, model[0].weight])
        model(x + float(found[0].mean()) + float(found[1].mean())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    same(me, mlp, twice, at_least=3, backward_passes_per_step=2)
    same(
        me,
        lambda: nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh()),
        penalty,
        at_least=0,
    )
    same(me, mlp, single, at_least=3)


@case()
def under_autocast(me: Me) -> None:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(normal(me, step, 6, 12)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    same(me, mlp, train, at_least=3)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, broken: bool) -> torch.Tensor:
        ctx.broken = broken
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.broken:
            raise ArithmeticError("this backward fails on purpose")
        return grad, None


@case()
def after_a_backward_that_has_failed(me: Me) -> None:
    def train(model: Any, optimizer: Any, step: int) -> None:
        x = normal(me, step, 6, 12)
        if step == 5:
            with contextlib.suppress(ArithmeticError):
                model[2:](Breaks.apply(model[:2](x), True)).sum().backward()
            optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    same(me, mlp, train, at_least=3)


@contextlib.contextmanager
def bytes_that_wait(found: list[int]) -> Iterator[None]:
    """Note behind each module how many bytes of gradients wait."""
    from commsched.optimizer.split_backward import SplitBackward

    run = SplitBackward.backward

    def watched(self: Any, *given: Any) -> Any:
        result = run(self, *given)
        found.append(sum(grad.nbytes for *_, grad in self._waiting))
        return result

    SplitBackward.backward = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        SplitBackward.backward = run  # type: ignore[method-assign]


@case(ranks=(2,))
def with_little_memory(me: Me) -> None:
    """The peaks of allocated memory are in tests/unit/optimizer/test_split_memory.py."""

    def build() -> nn.Module:
        """Each layer's input and gradient are larger than the memory that is allowed."""
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    train, program = plainly(me, 64, 64), latest_program(build(), me.size)
    plain, _ = trained(build, train, None, momentum)
    most = {}
    for allowed in (1 << 30, 4000, 0):
        waiting: list[int] = []
        with bytes_that_wait(waiting):
            model, _ = trained(build, train, program, momentum, extra_memory=allowed)
        assert_same_bits(model, plain, f"with {allowed} bytes")
        most[allowed] = max(waiting)
    assert 0 <= most[0] <= most[4000] < most[1 << 30] == 6 * 4 * 64 * 64, most


@case(ranks=(2,))
def copies_of_the_model_are_ordinary(me: Me) -> None:
    """Copied and pickled while modules are split."""
    losses: list[torch.Tensor] = []

    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        plainly(me, 6, 12)(model, optimizer, step)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
            loss = other(normal(me, step, 6, 12)).square().mean()
            loss.backward()
            assert all(p.grad is not None for p in other.parameters())
            losses.append(loss.detach())

    same(me, mlp, train, at_least=3, tries=1)
    half = len(losses) // 2
    assert_same_bits(losses[half:], losses[:half], "losses of the copies")


@case()
def measured_and_planned(me: Me) -> None:
    """The default: tried, measured, planned; with a slow link, weight gradients get places of their own."""

    def build() -> nn.Module:
        return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(96, 96), nn.ReLU())))

    results = []
    for split in (False, "auto"):
        model = seeded(build)
        optimizer: Any = hvd.DistributedOptimizer(
            momentum(model), model.named_parameters(), model=model, split_backward=split
        )
        for step in range(14):
            plainly(me, 64, 96)(model, optimizer, step)
        optimizer.synchronize()
        results.append(model)
        layers = optimizer.profile().layers
        assert any(layer.weight_backward > 0 for layer in layers) == bool(split), layers
        release(optimizer)
    assert_same_bits(results[1], results[0])


main(__name__)
