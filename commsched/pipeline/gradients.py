"""Updates without an optimizer: a stage's gradients are summed over its ranks and left to the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from commsched.pipeline.reduction import Scattered
from commsched.pipeline.stage import Stage
from commsched.pipeline.update import Combine, Update, combined


@contextmanager
def added_to(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Adds the gradients that the body leaves to those that the parameters had before."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = None
    yield
    for parameter, grad in before.items():
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class Gradients(Update):
    """No optimizer: the sums are left in the ``.grad`` of the stage's parameters, the same on all its ranks.
    ``scattered`` sums bucket by bucket, ``combine`` all at once; neither, where one rank holds the stage. The
    caller steps the weights between two steps of the pipeline.
    """

    def __init__(
        self,
        stage: Stage,
        apart: frozenset[int],
        combine: Combine | None = None,
        scattered: Scattered | None = None,
        numbers: Sequence[int] = (),
        early: bool = False,
    ) -> None:
        super().__init__(stage, scattered, numbers, early)
        self.combine, self.apart = combine, apart
        self._coming: list[Tensor | None] = []

    def step(self, period: int, needed: Callable[[int], bool]) -> None:
        leaves = self.stage.versions.newest.leaves
        grads = self.stage.grads.pop(period, self.stage._no_grads())
        if self.combine is not None:
            grads = combined(self.combine, grads, leaves, self.apart)
        elif self.scattered is not None:
            for place, (leaf, count) in enumerate(zip(leaves, self.scattered.used)):
                if place not in self.apart:
                    sums = torch.zeros_like(leaf, memory_format=torch.contiguous_format)
                    grads[place] = sums if count else None
        self._coming = grads
        self.stage.versions.advance(lambda version: False)

    def finish(self) -> None:
        if self._coming and self.scattered is not None:
            for bucket in range(len(self.scattered.parts)):
                self.scattered.write(bucket, self._coming)
        for leaf, grad in zip(self.stage.versions.newest.leaves, self._coming):
            leaf.grad = grad
        self._coming = []
