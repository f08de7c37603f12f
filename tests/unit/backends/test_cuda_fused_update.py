"""Shards of optimizers made with ``fused=True``: torch's fused operations on flat parts do what they do on
whole parameters, and no step asks the device for a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from commsched.optimizer.buckets import Buffers, build_layout
from commsched.optimizer.gradient import Gradient
from commsched.optimizer.sharded_step import Shards
from scheduler.ir.buckets import fuse_by_bytes
from tests.support.device_waits import NoQuestions
from tests.support.oracle import assert_close

NUMELS = [300, 7, 1000, 64]
OPERATIONS = 4  # roundings of numbers as large as the largest weight, in one update
ALL = [1] * 4


class Run:
    """One rank's shards beside a plain optimizer. One tensor of the last group lies in two buckets."""

    def __init__(self, rank: int, base: type, **options: Any) -> None:
        self.plain, self.plain_optimizer = self._optimizer(base, options)
        self.params, self.optimizer = self._optimizer(base, options)
        layout = build_layout(NUMELS, [4] * 4, fuse_by_bytes([4 * n for n in NUMELS], 2000, part=2000), 2)
        self.grads = Buffers(layout, {0: (torch.float32, torch.device("cpu"))})
        gradients = [Gradient(i, param, f"parameter {i}") for i, param in enumerate(self.params)]
        for gradient in gradients:
            gradient.place(self.grads)
        ranks = SimpleNamespace(rank=rank, size=2)
        self.shards = Shards(
            self.optimizer,
            base,
            gradients,
            self.grads,
            ranks,
            masters=False,
            overlapping=set(),
            attempt=lambda update, *arguments: update(*arguments),
        )

    @staticmethod
    def _optimizer(base: type, options: dict[str, Any]) -> tuple[list[nn.Parameter], Any]:
        generator = torch.Generator().manual_seed(3)
        params = [nn.Parameter(torch.randn(n, generator=generator)) for n in NUMELS]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]
        return params, base(groups, **{"lr": 0.1, "fused": True, **options})

    def step(self, seed: int, used: list[int] = ALL, scale: float = 1.0, overflow: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i, plain in enumerate(self.plain):
            grad = torch.randn(NUMELS[i], generator=generator) * scale
            if overflow:
                grad[::50] = float("inf")
            self.grads.view(plain, self.shards.layout.slots[i]).copy_(grad)
            plain.grad = grad if used[i] else None
        if hasattr(self.optimizer, "found_inf"):
            for each in (self.optimizer, self.plain_optimizer):
                each.found_inf = torch.tensor(float(overflow))
        self.plain_optimizer.step()
        with NoQuestions():
            for bucket in range(len(self.shards.parts)):
                self.shards.update(bucket, used)

    def compare(self, steps: int) -> None:
        """This rank's weights and state against the same elements of the plain optimizer's."""
        for part in sum(self.shards.parts, []):
            plain = self.plain[part.gradient.number]
            mine = slice(part.start, part.stop)
            assert_close([part.weight], [plain.detach()[mine]], OPERATIONS * steps)
            state, theirs = self.shards.state.get(part.leaf, {}), self.plain_optimizer.state.get(plain, {})
            assert set(state) == set(theirs)
            for key, value in theirs.items():
                expected = value[mine] if value.shape == plain.shape else value
                assert state[key].dtype == value.dtype
                assert_close([state[key]], [expected], OPERATIONS * steps, key)


CASES = [
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    (torch.optim.SGD, {}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"betas": (0.8, 0.9)}),
]


@pytest.mark.parametrize(("base", "options"), CASES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("used", [[ALL] * 4, [ALL, [1, 0, 1, 1], ALL, ALL], [[0, 0, 1, 1], ALL, ALL, ALL]])
def test_equal_to_torch(base: type, options: dict[str, Any], rank: int, used: list[list[int]]) -> None:
    run = Run(rank, base, **options)
    for step, flags in enumerate(used):
        run.step(step, flags)
        run.compare(step + 1)


def test_a_parameter_may_start_later_than_its_neighbour() -> None:
    """torch's fused SGD cannot update one parameter that has a momentum beside one that has none."""
    run = Run(0, torch.optim.SGD, momentum=0.9)
    starts = [[0, 1, 1, 1], ALL]
    for step, flags in enumerate(starts):
        for bucket in range(len(run.shards.parts)):
            run.grads.flat[0].fill_(float(step + 1))
            run.shards.update(bucket, flags)
    found = {
        part.gradient.number: run.shards.state[part.leaf]["momentum_buffer"]
        for part in sum(run.shards.parts, [])
    }
    assert found[0].eq(2.0).all() and found[2].isclose(torch.tensor(0.9 * 1 + 2)).all()


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW])
def test_a_skipped_step_does_not_count(base: type) -> None:
    """Counted all the same, every later bias correction would be that of another step."""
    # In the second step only some parameters are used: later the parts of a bucket have different counts.
    overflows, used = [True, False, True, False, False], [ALL, [1, 0, 1, 0], [0, 1, 1, 1], ALL, ALL]
    run = Run(0, base, weight_decay=0.1)
    for each in (run.optimizer, run.plain_optimizer):
        each.grad_scale, each.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    for step, (overflow, flags) in enumerate(zip(overflows, used, strict=True)):
        run.step(step, flags, 4.0, overflow)
    run.compare(len(used))
    assert {int(run.shards.state[part.leaf]["step"]) for part in sum(run.shards.parts, [])} == {2, 3}


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_skipped_first_step_leaves_no_momentum() -> None:
    """torch's fused SGD allocates the momentum and writes nothing into it when the step is skipped."""
    run = Run(0, torch.optim.SGD, momentum=0.9)
    before = [param.detach().clone() for param in run.params]
    run.optimizer.found_inf = torch.tensor(1.0)
    with uninitialised_memory_is_nan():
        run.step(0, overflow=True)
    assert all(torch.equal(param, old) for param, old in zip(run.params, before, strict=True))
    assert all(state["momentum_buffer"].eq(0.0).all() for state in run.shards.state.values())


def test_gradients_are_unscaled_and_clipped_by_numbers_on_the_device() -> None:
    scaled, plain = Run(0, torch.optim.SGD), Run(0, torch.optim.SGD)
    scaled.optimizer.grad_scale = scaled.plain_optimizer.grad_scale = torch.tensor(4.0)
    scaled.shards.factor = torch.tensor(0.5, dtype=torch.float64)
    scaled.step(0, scale=8.0)
    plain.step(0)
    assert all(torch.equal(mine, other) for mine, other in zip(scaled.params, plain.params, strict=True))


def test_state_taken_over_is_gone_on_with() -> None:
    run = Run(0, torch.optim.Adam)
    run.step(0)
    state = {"step": torch.tensor(7.0)}
    whole = {
        p: {**state, "exp_avg": torch.ones_like(p.data), "exp_avg_sq": torch.ones_like(p.data)}
        for p in run.plain
    }
    run.shards.take_state({mine: whole[p] for mine, p in zip(run.params, run.plain, strict=True)})
    run.plain_optimizer.state.update({p: {k: v.clone() for k, v in s.items()} for p, s in whole.items()})
    run.step(1)
    run.compare(2)
