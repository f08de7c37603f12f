"""Updates without an optimizer: a stage's gradients are summed over its ranks and left to the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from commsched.pipeline.update import Update


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
    The caller steps the weights between two steps of the pipeline.
    """

    def step(self, period: int, needed: Callable[[int], bool], skip: bool = False) -> None:
        if self.scattered is not None:
            leaves, used = self.stage.versions.newest.leaves, self.scattered.used
            for place in self.scattered.places:
                sums = torch.zeros_like(leaves[place], memory_format=torch.contiguous_format)
                self.grads[place] = sums if used[place] else None
        self.stage.versions.advance(lambda version: False)

    def finish(self) -> None:
        if self.grads and self.scattered is not None:
            for bucket in range(len(self.scattered.parts)):
                self.scattered.write(bucket, self.grads)
        for leaf, grad in zip(self.stage.versions.newest.leaves, self.grads):
            leaf.grad = grad
        self.grads = []
