"""From a stage's gradients to its next weight version: reduction over its replicas, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from commsched.pipeline.chain import reads
from commsched.pipeline.reduction import Scattered
from commsched.pipeline.stage import Stage
from commsched.pipeline.versions import Version

Factory = Callable[[list[nn.Parameter]], Optimizer]
OnStep = Callable[[Optimizer, int], None]
"""Called before each step with its number: for learning rates."""
Combine = Callable[[list[Tensor]], None]


class Update:
    """Sums a stage's gradients over its ranks and steps it; the interpreter calls in the program's order.

    ``scattered`` moves gradients and parameters bucket by bucket (None: no buckets); ``numbers``: the
    program's names of the buckets. ``early``: buckets may leave as they fill.
    """

    optimizer: Optimizer | None = None
    taken = 0

    def __init__(
        self,
        stage: Stage,
        scattered: Scattered | None = None,
        numbers: Sequence[int] = (),
        early: bool = False,
    ) -> None:
        self.stage, self.scattered, self._early = stage, scattered, early
        self._place = {number: place for place, number in enumerate(numbers)}

    def early(self, period: int, version: Version) -> AbstractContextManager[None]:
        """Around the backward that completes a gradient."""
        if self.scattered is None or not self._early:
            return nullcontext()
        self.finish()
        return self.scattered.leaving(period, version.leaves)

    def reduce(self, period: int, bucket: int) -> None:
        if self.scattered is not None:
            self.finish()
            leaves, grads = self.stage.versions.newest.leaves, self.stage.grads[period]
            self.scattered.ready(period, self._place[bucket], grads, leaves)
            self.scattered.complete(grads)

    def wait_reduced(self) -> None:
        """Before the step: sums that are under way."""
        if self.scattered is not None:
            self.scattered.wait_reduced()

    def settle(self) -> None:
        """No other rank needs this one for what has begun."""
        if self.scattered is not None:
            self.scattered.wait_begun()

    def step(self, period: int, needed: Callable[[int], bool]) -> None:
        raise NotImplementedError

    def gather(self, bucket: int) -> None:
        if self.scattered is not None:
            self.scattered.updated(self._place[bucket])

    def prepare(self, version: Version) -> None:
        """Before a forward with this version."""

    def finish(self) -> None:
        """The newest version is complete."""

    def reload(self) -> None:
        """The newest weights were changed from outside."""

    def restart(self) -> None:
        """Periods count from 0 again."""
        if self.scattered is not None:
            self.scattered.begun = -1

    def close(self) -> None:
        if self.scattered is not None:
            self.scattered.close()


class Whole(Update):
    """The optimizer on whole parameters; ``combine`` sums gradients over replicas, in place. Parameters in
    ``apart`` have been summed before.
    """

    def __init__(
        self,
        stage: Stage,
        factory: Factory,
        on_step: OnStep | None,
        combine: Combine | None = None,
        apart: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(stage)
        self.on_step, self.combine, self.apart = on_step, combine, apart
        self.masters = [nn.Parameter(leaf.data) for leaf in stage.versions.newest.leaves]
        self.optimizer = factory(self.masters) if self.masters else None

    def step(self, period: int, needed: Callable[[int], bool]) -> None:
        grads = self.stage.grads.pop(period, self.stage._no_grads())
        if self.combine is not None:
            grads = combined(self.combine, grads, self.masters, self.apart)
        version = self.stage.versions.advance(needed)
        for master, leaf, grad in zip(self.masters, version.leaves, grads, strict=True):
            master.data, master.grad = leaf.data, grad
        self.taken = _take_step(self.optimizer, self.on_step, self.taken)
        for master in self.masters:
            master.grad = None

    def reload(self) -> None:
        for master, leaf in zip(self.masters, self.stage.versions.newest.leaves, strict=True):
            master.data = leaf.data


class Sharded(Update):
    """Reduce-scatter, the optimizer on this rank's shard, all-gather. Parameters in ``apart`` are stepped
    whole, with gradients summed before.
    """

    scattered: Scattered

    def __init__(
        self,
        stage: Stage,
        factory: Factory,
        on_step: OnStep | None,
        scattered: Scattered,
        numbers: Sequence[int],
        early: bool,
        wait_within: bool,
        apart: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(stage, scattered, numbers, early)
        self.on_step, self._apart = on_step, sorted(apart)
        leaves = stage.versions.newest.leaves
        self.whole = [nn.Parameter(leaves[place].data) for place in self._apart]
        masters = [*(shard.master for shard in scattered.shards), *self.whole]
        self.optimizer = factory(masters) if masters else None
        self._handles: list[Any] = []
        self._first: list[int] = []
        if wait_within:
            self._wait_within()

    def step(self, period: int, needed: Callable[[int], bool]) -> None:
        grads = self.stage.grads.pop(period)
        version = self.stage.versions.advance(needed)
        for place, master in zip(self._apart, self.whole, strict=True):
            master.data, master.grad = version.leaves[place].data, grads[place]
        used = self.scattered.used
        for shard in self.scattered.shards:
            shard.master.grad = shard.grad if used[shard.place] else None
        self.taken = _take_step(self.optimizer, self.on_step, self.taken)
        version.pending = set(range(len(self.scattered.parts)))

    # Reading a new version

    def _wait_within(self) -> None:
        """Makes the forward wait for each bucket at the first module that needs it."""
        places = {name: place for place, name in enumerate(self.stage.versions.names)}
        modules, direct = reads(self.stage.module)
        self._first += [places[name] for name in direct if name in places]
        for module in modules:
            mine = self._held(module)
            if mine:
                hook = module.register_forward_pre_hook(lambda *_, mine=mine: self._take_in(mine))
                self._handles.append(hook)

    def _held(self, module: nn.Module) -> frozenset[int]:
        """The parameters under a module."""
        owners = {id(part._parameters) for part in module.modules()}
        slots = self.stage.versions.slots.values()
        return frozenset(
            place for place, kept in enumerate(slots) if any(id(owner) in owners for owner, _ in kept)
        )

    def prepare(self, version: Version) -> None:
        if not self._handles:
            self.finish()
        elif self._first:
            self._take_in(frozenset(self._first))

    def _take_in(self, places: frozenset[int]) -> None:
        version = self.stage.versions.newest
        # The forward in which this is called sees its own operations only.
        with torch._C.DisableTorchFunction():
            for bucket in sorted(version.pending, reverse=True):
                if any(place in places for place, _, _ in self.scattered.parts[bucket]):
                    self.scattered.take_in(version, bucket)

    def finish(self) -> None:
        version = self.stage.versions.newest
        for bucket in sorted(version.pending, reverse=True):
            self.scattered.take_in(version, bucket)

    def reload(self) -> None:
        leaves = self.stage.versions.newest.leaves
        self.scattered.read(leaves)
        for place, master in zip(self._apart, self.whole, strict=True):
            master.data = leaves[place].data

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().close()


def combined(
    combine: Combine, grads: Sequence[Tensor | None], leaves: Sequence[Tensor], apart: frozenset[int]
) -> list[Tensor | None]:
    """The sums of the gradients over the replicas; None where no replica has one, as in one process. Those
    in ``apart`` stay as they are.
    """
    places = [place for place in range(len(grads)) if place not in apart]
    used = torch.tensor([int(grads[place] is not None) for place in places], dtype=torch.int32)
    sums = [torch.zeros_like(leaves[p]) if (grad := grads[p]) is None else grad for p in places]
    combine([*sums, used])
    result = list(grads)
    for place, total, count in zip(places, sums, used.tolist(), strict=True):
        result[place] = total if count else None
    return result


def _take_step(optimizer: Optimizer | None, on_step: OnStep | None, taken: int) -> int:
    """A step of the optimizer, and how many that makes."""
    if optimizer is not None:
        if on_step is not None:
            on_step(optimizer, taken)
        optimizer.step()
    return taken + 1
