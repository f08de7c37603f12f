"""From a stage's gradients to its next weight version: reduction over its replicas, and the optimizer.

[Note: what the optimizer steps]
The user's function gets the stage's whole parameters once. They follow the newest version: before each step
their memory becomes that of the version that is made. Where buckets sum the gradients, a rank steps its
shards in the groups of their parameters, each as a leaf over its elements of that memory::

    gradients of a bucket    RS ->  | . . slot . . |   update: leaf.grad = slot
    the version's memory               leaf            leaf -= ...
    the same bucket       <- copy   | . . slot . . |   AG -> | whole bucket |  copy -> the version's memory

So weights that a script changes between two steps count, if it changes them alike on all replicas. With
``master_weights`` the leaf of a half-precision parameter is a float32 copy of it, and its gradients are
summed in float32, over micro-batches, stages and replicas: half-precision sums would differ with the mesh.
The weights are gathered in half precision.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from commsched.optimizer.sharded_step import HALVES, by_element, take_written, total_norm
from commsched.optimizer.whole_step import OptimizerView, groups_of_leaves
from commsched.pipeline.chain import reads
from commsched.pipeline.messages import Fabric, from_host, to_host
from commsched.pipeline.reduction import Replicas, Scattered, Shard, summed_over
from commsched.pipeline.stage import Stage, Version

Factory = Callable[[list[Any]], Optimizer]
"""Makes an optimizer of parameters; if its first argument is called ``named_parameters``, of pairs of name
and parameter.
"""
OnStep = Callable[[Optimizer, int], None]
"""Called before each step with its number: for learning rates."""


def made_by(factory: Factory, named: Mapping[str, nn.Parameter]) -> Optimizer:
    try:
        first = next(iter(signature(factory).parameters), None)
    except ValueError:  # of a function in C
        first = None
    return factory(list(named.items() if first == "named_parameters" else named.values()))


class Update:
    """Sums a stage's gradients over its ranks and steps it; the interpreter calls in the program's order.

    ``scattered`` moves gradients and parameters bucket by bucket (None: no buckets); ``buckets``: its buckets
    by the program's number. ``early``: buckets may leave as they fill. ``replicas`` sums other gradients.
    ``counted``: the parameters whose gradients this rank counts in a norm over all stages.
    """

    optimizer: Optimizer | None = None
    taken = 0

    def __init__(
        self,
        stage: Stage,
        scattered: Scattered | None = None,
        buckets: Mapping[int, Sequence[int]] | None = None,
        early: bool = False,
        replicas: Replicas | None = None,
        counted: Collection[int] = (),
    ) -> None:
        self.stage, self.scattered, self._early = stage, scattered, early
        self.buckets, self.replicas, self.counted = buckets or {}, replicas, counted
        self.grads: list[Tensor | None] = []  # of the period that is stepped, without those in buckets

    def early(self, period: int, version: Version) -> AbstractContextManager[None]:
        """Around the backward that completes a gradient."""
        if self.scattered is None or not self._early:
            return nullcontext()
        self.finish()
        stage = self.stage
        gradients = partial(stage.gradients, version, stage.grads[period])
        return self.scattered.leaving(period, version.leaves, gradients, stage.zeros)

    def reduce(self, period: int, bucket: int) -> None:
        if self.scattered is not None:
            self.finish()
            grads = self.stage.grads[period]
            self.scattered.begin(period)
            for place in self.buckets[bucket]:
                self.scattered.ready(period, place, grads, self.stage.zeros)
            self.scattered.complete(grads)

    def wait_reduced(self) -> None:
        """Before the step: sums that are under way."""
        if self.scattered is not None:
            self.scattered.wait_reduced()

    def collect(self, period: int) -> None:
        """Sums the gradients that no bucket carries; those in buckets have arrived."""
        grads = self.stage.grads.pop(period, self.stage._no_grads())
        if self.scattered is not None:
            for place in self.scattered.places:
                grads[place] = None
        if self.replicas is not None:
            grads = self.replicas.sums(grads, self.stage)
        self.grads = grads

    def _slots(self) -> list[Tensor]:
        """The sums that this rank's shards have."""
        if self.scattered is None:
            return []
        used = self.scattered.used
        return [shard.slot for shard in self.scattered.shards if used[shard.place]]

    def counted_grads(self) -> list[Tensor]:
        """The gradients of the period that is stepped, each on one rank only."""
        return self._slots() + [grad for place in self.counted if (grad := self.grads[place]) is not None]

    def all_grads(self) -> list[Tensor]:
        """The gradients of the period that is stepped that this rank has."""
        return self._slots() + [grad for grad in self.grads if grad is not None]

    def settle(self) -> None:
        """No other rank needs this one for what has begun."""
        if self.scattered is not None:
            self.scattered.wait_begun()

    def step(self, period: int, needed: Callable[[int], bool], skip: bool = False) -> None:
        """Makes the next version of the weights, with ``skip`` a copy of the last one."""
        raise NotImplementedError

    def gather(self, bucket: int) -> None:
        if self.scattered is not None:
            for place in self.buckets[bucket]:
                self.scattered.updated(place)

    def prepare(self, version: Version) -> None:
        """Before a forward with this version."""

    def finish(self) -> None:
        """The newest version is complete."""

    def restart(self) -> None:
        """Periods count from 0 again."""
        if self.scattered is not None:
            self.scattered.begun = -1

    def state(self) -> dict[str, Any]:
        """For a checkpoint of this rank."""
        return {"taken": self.taken}

    def load(self, state: Mapping[str, Any]) -> None:
        self.taken = state["taken"]

    def close(self) -> None:
        if self.scattered is not None:
            self.scattered.close()


@dataclass
class Part:
    """The ``leaf`` that is stepped for the parameter at ``place``, or for this rank's ``shard`` of it.
    ``master``: the leaf is a float32 copy of ``weight``.
    """

    place: int
    shard: Shard | None
    leaf: nn.Parameter
    master: bool
    weight: Tensor

    def bind(self, parameter: Tensor) -> None:
        """Follows the parameter to the memory of another version."""
        whole = parameter.detach()
        self.weight = whole if self.shard is None else whole.view(-1)[self.shard.start : self.shard.stop]
        if not self.master:
            self.leaf.data = self.weight

    def begin(self, grad: Tensor) -> None:
        if self.master:
            take_written(self.leaf.detach(), self.weight)
        self.leaf.grad = from_host(grad, self.weight.device)

    def end(self) -> None:
        if self.master and self.leaf.grad is not None:
            self.weight.copy_(self.leaf.detach())
        self.leaf.grad = None


class Stepped(Update):
    """Steps the optimizer: on whole parameters, or on this rank's shards of those in buckets. ``parameters``:
    what the optimizer was made of, in the order of the stage's versions.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: Optimizer | None,
        parameters: Sequence[nn.Parameter],
        on_step: OnStep | None,
        master_weights: bool = False,
        wait_within: bool = False,
        **reduction: Any,
    ) -> None:
        super().__init__(stage, **reduction)
        self.optimizer, self.parameters, self.on_step = optimizer, parameters, on_step
        self.parts = list(self._parts(master_weights))
        # Of the parts' leaves; the optimizer's own state is empty where there are parts.
        self.leaf_state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        if optimizer is not None and self.parts:
            self._take_first_state(optimizer)
        self._handles: list[Any] = []
        self._first: list[int] = []
        if wait_within:
            self._wait_within()

    def _parts(self, master_weights: bool) -> Iterator[Part]:
        """No parts where the optimizer itself can step the parameters."""
        halves = [master_weights and parameter.dtype in HALVES for parameter in self.parameters]
        if self.scattered is None and not any(halves):
            return
        shards = [] if self.scattered is None else self.scattered.shards
        apart = [] if self.scattered is None else self.scattered.places
        whole = [place for place in range(len(self.parameters)) if place not in apart]
        for place, shard in [*((shard.place, shard) for shard in shards), *((p, None) for p in whole)]:
            parameter = self.parameters[place]
            part = Part(place, shard, parameter, halves[place], parameter.detach())
            if shard is not None and not part.master:
                part.leaf = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
            part.bind(parameter)
            if part.master:
                part.leaf = nn.Parameter(part.weight.float())
            yield part

    def _take_first_state(self, optimizer: Optimizer) -> None:
        """Some optimizers make their state at once: moves the parts' elements of it to their leaves."""
        first = dict(optimizer.state)
        for part in self.parts:
            parameter, shard = self.parameters[part.place], part.shard
            for key, value in first.get(parameter, {}).items():
                if by_element(key, value, parameter):
                    cut = value if shard is None else value.view(-1)[shard.start : shard.stop]
                    self.leaf_state[part.leaf][key] = cut.to(part.leaf.dtype, copy=True)
                else:
                    self.leaf_state[part.leaf][key] = copy.deepcopy(value)
        for parameter in self.parameters:
            optimizer.state.pop(parameter, None)

    def step(self, period: int, needed: Callable[[int], bool], skip: bool = False) -> None:
        version = self.stage.versions.advance(needed)
        for parameter, leaf, grad in zip(self.parameters, version.leaves, self.grads, strict=True):
            if self.scattered is not None:
                leaf.data = leaf.data.contiguous()  # a script may have given it other memory
            parameter.data = leaf.data
            if grad is None or grad.dtype == leaf.dtype:  # others are for masters
                parameter.grad = grad
        for part in self.parts:
            part.bind(self.parameters[part.place])
        if self.optimizer is not None and not skip:
            if self.on_step is not None:
                self.on_step(self.optimizer, self.taken)
            if self.parts:
                self._step_parts(self.optimizer)
            else:
                self.optimizer.step()
        self.taken += 1
        self.grads = []
        for parameter in self.parameters:
            parameter.grad = None
        if self.scattered is not None:
            for part in self.parts:
                if part.shard is not None:
                    part.shard.updated.copy_(part.weight)
            version.pending = set(range(len(self.scattered.parts)))

    def _step_parts(self, optimizer: Optimizer) -> None:
        used = [] if self.scattered is None else self.scattered.used
        members = []
        for part in self.parts:
            parameter = self.parameters[part.place]
            if part.shard is None:
                grad = self.grads[part.place]
            else:
                grad = part.shard.slot if used[part.place] else None
            if grad is not None:
                part.begin(grad)
                members.append((parameter, part.leaf))
        groups = groups_of_leaves(optimizer, members, self.leaf_state)
        view = OptimizerView(optimizer, type(optimizer), self.leaf_state)
        # With the hooks of the optimizer's own step.
        Optimizer.profile_hook_step(lambda _: view.step(groups))(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers of learning rates look
        for part in self.parts:
            part.end()

    def state(self) -> dict[str, Any]:
        parts = [
            (self.leaf_state.get(part.leaf, {}), part.leaf.detach() if part.master else None)
            for part in self.parts
        ]
        whole = None if self.optimizer is None else self.optimizer.state_dict()
        return {**super().state(), "optimizer": whole, "parts": parts}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        for part, (entries, master) in zip(self.parts, state["parts"], strict=True):
            self.leaf_state[part.leaf] = copy.deepcopy(entries)
            if master is not None:
                part.leaf.data.copy_(master)

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
                assert self.scattered is not None
                if any(place in places for place, _, _ in self.scattered.parts[bucket]):
                    self.scattered.take_in(version, bucket)

    def finish(self) -> None:
        version = self.stage.versions.newest
        for bucket in sorted(version.pending, reverse=True):
            assert self.scattered is not None
            self.scattered.take_in(version, bucket)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().close()


# -- updates without an optimizer: a stage's gradients are summed over its ranks and left to the caller ------


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


# -- clipping by the norm over all stages, and steps that all stages skip ------------------------------------


class Clipping:
    """Called before the steps of a period, when all gradients are there. Every rank computes the same norm
    from one number of each rank.
    """

    def __init__(
        self,
        fabric: Fabric,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        skip_nonfinite: bool = False,
    ) -> None:
        self.rank, self.size, self.lane = fabric.rank, fabric.size, fabric.lane("norms")
        self.max_norm, self.norm_type, self.skip_nonfinite = max_norm, norm_type, skip_nonfinite

    def __call__(self, updates: Collection[Update]) -> bool:
        """Clips the gradients of this rank's stages; whether the step is to be skipped."""
        counted = [grad for update in updates for grad in update.counted_grads()]
        finite = True
        if self.max_norm is not None:
            total = self.norm(counted, self.norm_type)
            scale([grad for update in updates for grad in update.all_grads()], self.max_norm, total)
            finite = bool(total.isfinite())
        if self.skip_nonfinite and (self.max_norm is None or not finite):
            # A norm may also overflow.
            finite = bool(self.norm(counted, torch.inf).isfinite())
        return self.skip_nonfinite and not finite

    def norm(self, grads: Iterable[Tensor], norm_type: float) -> Tensor:
        """The norm of all ranks' gradients, in double precision: rounded sums would differ with the mesh."""
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        norms = [torch.linalg.vector_norm(v, norm_type, dtype=_double(v)) for v in values if v.numel()]
        return total_norm([to_host(norm) for norm in norms], norm_type, self._everyones, torch.device("cpu"))

    def _everyones(self, mine: Tensor) -> Tensor:
        row = torch.zeros(self.size, dtype=torch.float64)
        row[self.rank] = mine
        summed_over(self.lane, self.rank, range(self.size), [row])
        return row


def _double(value: Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64


def scale(grads: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Multiplies the gradients, each once, as ``torch.nn.utils.clip_grad_norm_`` does."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0).item()
    if factor != 1.0:
        for grad in {id(grad): grad for grad in grads}.values():
            grad.mul_(factor)
