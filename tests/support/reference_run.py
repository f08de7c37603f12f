"""One model trained over all ranks beside a reference run in one process, compared bit for bit every step."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import commsched as hvd
from commsched.env import settings
from commsched.optimizer import planner
from scheduler.ir.profile import Layer, Profile
from tests.support.cases import Me
from tests.support.oracle import Oracle, assert_close, assert_same_bits, release, seeded, terms_of

Loss = Callable[[nn.Module, int], "torch.Tensor | None"]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Moves a parameter whenever it is stepped, its gradient being zero or not."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def some_profile(model: nn.Module) -> Profile:
    """Times made up: with a profile, an optimizer plans at once, and updates are deferred from the start."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kinds = list(dict.fromkeys(p.dtype for p in params.values()))
    layers = [Layer("(outside)", 1e-3, 0.0, 0)]
    layers += [
        Layer(name, 1e-3, 2e-3, p.numel() * p.element_size(), group=kinds.index(p.dtype))
        for name, p in params.items()
    ]
    return Profile("made up", tuple(layers))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a float32 tensor: zeros of different signs differ."""
    return tensor.detach().clone().view(torch.int32)


def bits_of_steps(
    model: nn.Module, optimizer: Any, train: Callable[[int], None], steps: int
) -> list[dict[str, torch.Tensor]]:
    """The bits of all gradients before, and of all parameters after each step."""
    found = []
    for step in range(steps):
        train(step)
        now = {f"grad of {n}": bits(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        found.append(now | {n: bits(p) for n, p in model.named_parameters()})
        optimizer.zero_grad()
    return found


def assert_same_steps(
    ours: list[dict[str, torch.Tensor]], plain: list[dict[str, torch.Tensor]], what: str
) -> None:
    for step, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert mine.keys() == theirs.keys(), f"{what}, step {step}: other gradients are None"
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), f"{what}, step {step}: {name} differs"


@contextmanager
def searching(seconds: float, wait: str = "") -> Iterator[None]:
    """Plans are searched beside the training, for so long, with this COMMSCHED_WAIT_FOR_PLAN."""
    before = os.environ.get("COMMSCHED_WAIT_FOR_PLAN", "")
    os.environ["COMMSCHED_WAIT_FOR_PLAN"] = wait
    settings.cache_clear()
    try:
        with patch.object(planner, "_CODE", f"import time; time.sleep({seconds})\n{planner._CODE}"):
            yield
    finally:
        os.environ["COMMSCHED_WAIT_FOR_PLAN"] = before
        settings.cache_clear()


@contextmanager
def comparing(every: int) -> Iterator[None]:
    """Compare so often the ranks of optimizers that are made within this context, where drift is an error."""
    os.environ["COMMSCHED_COMPARE_EVERY"] = str(every)
    settings.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "the ranks' parameters")
            yield
    finally:
        del os.environ["COMMSCHED_COMPARE_EVERY"]
        settings.cache_clear()


class Twin:
    """``model`` trains on all ranks through ``optimizer``; ``plain`` trains alike in one process (`Oracle`).

    In turn, one rank waits in its backward until another has returned from ``step()``: that one has gradients
    on their way then, however loaded the machine is. Where ``step()`` itself waits for gradients, that cannot
    be (always so with shards): each time it was in vain, the rank waits shorter, down to ``lag`` seconds.
    """

    def __init__(
        self,
        me: Me,
        build: Callable[[], nn.Module],
        make: MakeOptimizer = momentum,
        *,
        schedule: Any = "dear",
        bucket_mb: float | None = 0.002,
        planned: bool = True,
        lag: float = 0.01,
        sums: bool = False,
        **options: Any,
    ) -> None:
        self.me, self.lag = me, lag
        self.patience = lag if options.get("gather") == "parameters" else max(lag, 0.25)
        self.plain = seeded(build)
        self.oracle = Oracle(self.plain, make(self.plain), me.size, sums=sums)
        self.model = seeded(build)
        self.inner = make(self.model)
        if planned:
            options["profile"] = some_profile(self.model)
        if sums:
            options["op"] = hvd.Sum
        self.optimizer: Any = hvd.DistributedOptimizer(
            self.inner, self.model.named_parameters(), schedule=schedule, bucket_mb=bucket_mb, **options
        )
        self.number = me.twins = me.twins + 1
        self.steps = self.seen_pending = 0
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._late)
                break

    def _late(self, _: torch.Tensor) -> None:
        if self.steps % self.me.size != self.me.rank or not self.lag:
            return
        others = [self._stepped(rank) for rank in range(self.me.size) if rank != self.me.rank]
        start = time.monotonic()
        while not any(self.me.store.check([key]) for key in others):
            if time.monotonic() > start + self.patience:
                self.patience = max(self.lag, self.patience / 4)
                break
            time.sleep(0.0005)

    def _stepped(self, rank: int) -> str:
        return f"{self.me.name}/{self.number}: rank {rank} has taken step {self.steps}"

    def backward(self, *losses: Loss) -> None:
        for loss in losses:
            value = loss(self.model, self.me.rank)
            if value is not None:
                value.backward()
        self.oracle.backward(*losses)

    def step(self, *losses: Loss, zero: bool = True, zero_before: bool = False) -> None:
        """Backward of each loss and one step, with ``zero_grad`` behind the step or before the backward."""
        if zero_before:
            self.zero_grad()
        self.backward(*losses)
        self.update()
        if zero and not zero_before:
            self.zero_grad()

    def spoiled(self, loss: Loss, factor: float) -> Loss:
        """This loss; but in the plain model, the one of the last rank is multiplied by a factor."""
        last = self.me.size - 1
        return lambda model, rank: (
            loss(model, rank)
            * (  # type: ignore[operator]
                factor if model is self.plain and rank == last else 1.0
            )
        )

    def update(self, closure: Callable[[], Any] | None = None) -> Any:
        result = self.optimizer.step(*([closure] if closure else []))
        self.me.store.set(self._stepped(self.me.rank), "")
        self.steps += 1
        self.seen_pending += self.optimizer._session.round.pending > 0
        self.oracle.optimizer.step()
        return result

    def zero_grad(self, **how: Any) -> None:
        self.optimizer.zero_grad(**how)
        self.oracle.optimizer.zero_grad(**how)

    def both(self, act: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        return act(self.model), act(self.plain)

    @property
    def terms(self) -> int:
        return terms_of(self.plain, self.steps + 1)

    def compare(self, what: str = "parameters", exact: bool = True) -> None:
        """Equal bits; or, where sums have another order, equal within rounding (train in float64 then)."""
        if exact:
            assert_same_bits(self.model, self.plain, what)
        else:
            assert_close(self.model, self.plain, self.terms, what)

    def compare_update(self, what: str, terms: int = 4) -> None:
        """Compares one update within its own rounding; the plain model goes on from the other's weights.

        So rounding does not pile up, and a type of few bits can be compared as closely as any other.
        """
        assert_close(self.model, self.plain, terms, what)
        for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            q.data.copy_(p.data)

    def compare_grads(self, what: str = "gradients", exact: bool = True) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            mine, theirs = p.grad, q.grad
            assert (mine is None) == (theirs is None), f"{what}: {name} is {mine}, plain has {theirs}"
            if mine is not None and theirs is not None:
                pair = [mine.to_dense()], [theirs.to_dense()]
                if exact:
                    assert_same_bits(*pair, f"{what} of {name}")
                else:
                    assert_close(*pair, self.terms, f"{what} of {name}")

    def end(self, must_have_waited: bool = True) -> None:
        """Compares, and makes sure that what was to be tested has happened."""
        self.compare("at the end")
        release(self.optimizer)
        waited = [int(text) for text in self.me.everybody(str(self.seen_pending))]
        if must_have_waited:
            assert sum(waited) > 0, "no step() returned with gradients on their way; nothing was tested"
