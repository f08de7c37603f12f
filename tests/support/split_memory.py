"""The most memory that tensors take in one step, with weight gradients that wait and without, in one process.

    python -m tests.support.split_memory --model vgg_tiny --batch-size 4

prints the peak of an unsplit step, of the one in which modules are tried, and of a split one, whose weight
gradients wait as long as they may, for several values of ``extra_memory``. Ends with an error where a peak
is above the unsplit one and ``extra_memory``.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from commsched.optimizer.hooks import owners
from commsched.optimizer.split_backward import SplitBackward
from dnn_bench import models

Loss = Callable[[nn.Module], Tensor]


class Allocated:
    """The bytes of all tensors that torch has allocated in ``watched`` blocks: now, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
            yield
        results: Any = profile.profiler
        events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
        self.most = self.now
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.now += event.nbytes()
            self.most = max(self.most, self.now)


class Training:
    """A model whose modules are split without a reducer; one step after the other."""

    def __init__(self, build: Callable[[], nn.Module], loss: Loss, extra_memory: int | None) -> None:
        gc.collect()  # an earlier one, which would be freed while this one is watched
        torch.manual_seed(0)
        self.allocated, self.loss = Allocated(), loss
        with self.allocated.watched():
            self.model = build()
            self.params = list(self.model.parameters())
            for p in self.params:
                p.grad = torch.zeros_like(p)
        self.reducer: Any = SimpleNamespace(
            params=self.params, arrivals=SimpleNamespace(watch=None), without=set(), splitting=False
        )
        self.split = SplitBackward(self.reducer, owners(self.params, self.model), extra_memory)
        self.reducer.end_of_backward = lambda: self.reducer.compute_waiting()

    def step(self) -> int:
        """Return the most bytes that tensors took."""
        before = self.allocated.now
        with self.allocated.watched():
            self.loss(self.model).backward()
            for p in self.params:
                assert p.grad is not None
                p.grad.zero_()
        assert self.allocated.now == before, f"{self.allocated.now - before} bytes are left of a step"
        return self.allocated.most

    def place(self, seed: int | None) -> None:
        """Give each weight gradient a random place behind its input's; None: the end of the backward."""
        dice, split = random.Random(seed), self.split
        parts = [part for part in split.parts if part.passed][::-1]
        end = 2 * len(parts)
        for number, part in enumerate(parts):
            own = 2 * number
            part.places = end if seed is None else dice.randint(own + 2, end), own, own + 2
        split._behind = {part.weight: part.places[2] for part in parts}
        split._follow(parts)


def peaks(build: Callable[[], nn.Module], loss: Loss, extra: int | None, seed: int | None) -> dict[str, int]:
    """Return the peaks of an unsplit step, of trying, measuring and split steps, and what is allowed."""
    training = Training(build, loss, extra)
    training.step()
    found = {"unsplit": training.step()}
    training.split.try_modules()
    found["tried"] = training.step()
    assert any(part.passed for part in training.split.parts)
    training.split.measure()
    found["measured"] = training.step()
    training.place(seed)
    found["split"] = training.step()
    training.split.remove()
    return {**found, "extra": training.split.extra_memory}


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--model", default="vgg_tiny", choices=models.names())
    given.add_argument("--batch-size", type=int, default=4)
    options = given.parse_args()
    torch.set_num_threads(1)
    inputs, targets = models.sample_batch(options.model, options.batch_size)

    def loss(model: nn.Module) -> Tensor:
        return models.loss(options.model, model(inputs), targets)

    for extra in (0, None):
        for seed in (None, 0, 1):
            found = peaks(lambda: models.build(options.model), loss, extra, seed)
            print(", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in found.items()), flush=True)
            assert max(found.values()) <= found["unsplit"] + found["extra"]


if __name__ == "__main__":
    main()
