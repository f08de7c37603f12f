"""Updates without an optimizer: a stage's gradients are summed over its ranks and left to the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from commsched.pipeline.reduction import Scattered
from commsched.pipeline.stage import Stage
from commsched.pipeline.update import Combine, dense
from commsched.pipeline.versions import Version


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


class Gradients:
    """No optimizer: the sums are left in the ``.grad`` of the stage's parameters, the same on all its ranks.
    ``scattered`` sums bucket by bucket, ``combine`` all at once; neither, where one rank holds the stage.
    """

    def __init__(
        self,
        stage: Stage,
        scattered: Scattered | None,
        numbers: Sequence[int],
        early: bool,
        combine: Combine | None,
        apart: frozenset[int],
    ) -> None:
        self.stage, self.scattered, self.combine, self.apart = stage, scattered, combine, apart
        self._place = {number: place for place, number in enumerate(numbers)}
        self._early, self.taken = early, 0
        self.optimizer: Optimizer | None = None
        self._coming: list[Tensor | None] = []

    def early(self, period: int, version: Version) -> AbstractContextManager[None]:
        if self.scattered is None or not self._early:
            return nullcontext()
        return self.scattered.leaving(period, version.leaves)

    def reduce(self, period: int, bucket: int) -> None:
        if self.scattered is not None:
            leaves = self.stage.versions.newest.leaves
            self.scattered.ready(period, self._place[bucket], self.stage.grads[period], leaves)

    def wait_reduced(self) -> None:
        if self.scattered is not None:
            self.scattered.wait_reduced()

    def step(self, period: int, needed: Callable[[int], bool]) -> None:
        leaves = self.stage.versions.newest.leaves
        grads = self.stage.grads.pop(period, self.stage._no_grads())
        summed = [p for p in range(len(grads)) if p not in self.apart]
        if self.combine is not None:
            for place in summed:
                grads[place] = dense(grads[place], leaves[place])
            self.combine([grad for place in summed if (grad := grads[place]) is not None])
        elif self.scattered is not None:
            for place in summed:
                grads[place] = torch.zeros_like(leaves[place], memory_format=torch.contiguous_format)
        self._coming = grads
        self.stage.versions.advance(lambda version: False)

    def gather(self, bucket: int) -> None:
        if self.scattered is not None:
            self.scattered.updated(self._place[bucket])

    def prepare(self, version: Version) -> None:
        """The caller steps the weights between two steps of the pipeline."""

    def finish(self) -> None:
        if self._coming and self.scattered is not None:
            for bucket in range(len(self.scattered.parts)):
                self.scattered.write(bucket, self._coming)
        for leaf, grad in zip(self.stage.versions.newest.leaves, self._coming):
            leaf.grad = grad
        self._coming = []

    def reload(self) -> None:
        """Nothing is kept of the weights."""

    def restart(self) -> None:
        if self.scattered is not None:
            self.scattered.begun = -1

    def close(self) -> None:
        if self.scattered is not None:
            self.scattered.close()
