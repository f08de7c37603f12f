"""Virtual ranks: parameters after n steps do not depend on the ranks there were, bit for bit.

[Note: one order of sums]
A step is always that of V virtual ranks. Each rank computes a run of neighbours, one after the other. Adding
floating-point numbers in another order gives other bits, so their gradients are added in one tree for every
number of ranks, for V = 6::

                  0..5
                /      \\
            0..3        4..5        a node begins at a multiple of its length, a power of two;
           /    \\      /    \\       a node without a right half, as 4..7 here, is its left half
         0..1  2..3   4      5
         /  \\  /  \\
        0   1 2   3     on two ranks, 0..2 and 3..5:  rank 0 adds 0..1 and keeps 2,
                        rank 1 keeps 3 and adds 4..5

Each rank adds what makes a whole node of its own gradients (``add_leaf``): at most 2 log2(V) tensors. These
go to ranks that each own a part of the elements, and add them up the rest of the tree (``add_up``). A rank's
``p.grad`` then holds its own part of the sum and zeros elsewhere, so any exchange adds the parts without
rounding, and the optimizer's session, with ``op=Sum``, is used as it is. The exception is float16 over
``tiers``, which halve its sums on their way: small ones lose bits, so it takes another transport.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from commsched.collectives.job import is_initialized, rank, size
from commsched.collectives.operations import Max, allreduce, alltoall, broadcast_object
from commsched.collectives.sync_batch_norm import SyncBatchNorm
from commsched.elastic.sampler import ElasticSampler, share_of
from commsched.elastic.state import TorchState
from commsched.optimizer.gradient import is_zero
from commsched.pipeline.random_state import default_generators, seed_random

_PIECE = 1 << 24  # elements that are exchanged at once, unless one parameter has more: they take memory

Params = Sequence[tuple[Any, nn.Parameter]]
"""Parameters, each with its optimizer."""

Node = tuple[int, int, dict[int, Tensor]]
"""Start, length, and the sums of a whole node of the tree, by the parameters' numbers."""


Buffers = dict[tuple[nn.Module, str], tuple[Tensor | None, Tensor | None]]
"""By their places, what is there and a copy of its value. A forward may put another tensor into a place."""


def add_leaf(nodes: list[Node], virtual: int, tensors: dict[int, Tensor]) -> None:
    """Add the next virtual rank's tensors, which become the nodes' own."""
    start, length, right = virtual, 1, tensors
    while nodes and nodes[-1][1] == length and nodes[-1][0] % (2 * length) == 0:
        start, _, left = nodes.pop()
        for i, tensor in right.items():
            left[i] = left[i].add_(tensor) if i in left else tensor
        length, right = 2 * length, left
    nodes.append((start, length, right))


def add_up(there: Mapping[tuple[int, int], Tensor], count: int) -> Tensor:
    """Return the sum over ``count`` virtual ranks from nodes, given by start and length; it changes them."""

    def of(start: int, length: int) -> Tensor:
        if (start, length) in there:
            return there[start, length]
        half = length // 2
        left = of(start, half)
        return left if start + half >= count else left.add_(of(start + half, half))

    return of(0, 1 << (count - 1).bit_length())


def _places(virtual: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and length of the nodes of a rank with these virtual ranks."""
    nodes: list[Node] = []
    for v in virtual:
        add_leaf(nodes, v, {})
    return [node[:2] for node in nodes]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: those of half-precision gradients are rounded once, in the end."""
    return torch.promote_types(dtype, torch.float32)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or (one.dtype, one.device) != (other.dtype, other.device):
        return one is other
    return torch.equal(one, other)


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


@torch.no_grad()
def _put_back(modules: Sequence[nn.Module], first: Buffers) -> None:
    for module in modules:
        for name in [name for name in module._buffers if (module, name) not in first]:
            del module._buffers[name]
    for (module, name), (buffer, value) in first.items():
        module._buffers[name] = buffer
        if buffer is not None and value is not None:
            buffer.copy_(value)


class VirtualRanks:
    """The virtual ranks of one call of ``run``'s function."""

    def __init__(self, state: Any, count: int, seed: int) -> None:
        if not isinstance(state, TorchState):
            raise ValueError(f"virtual ranks need a TorchState, got a {type(state).__name__}")
        self.count, self.seed = count, seed
        self._state: Any = state
        self._optimizers: Sequence[Any] = ()
        self._hooks: dict[nn.Parameter, Any] = {}
        self._inside: object = None  # the loop that runs
        if "virtual_steps" not in state._saved_state:
            state._saved_state["virtual_steps"] = state.virtual_steps = 0
        self._state._virtual = self
        for sampler in self._of_kind(ElasticSampler):
            sampler.virtual_ranks = count
            sampler.reset()

    def close(self) -> None:
        """Let the parameters have gradients without a loop again."""
        self._state._virtual = None
        for hook in self._hooks.values():
            hook.remove()
        for sampler in self._of_kind(ElasticSampler):
            sampler.virtual_ranks = 0
            if is_initialized():
                sampler.reset()

    def connect(self, optimizers: Sequence[Any]) -> None:
        """Take the optimizers of an epoch that begins."""
        self._keep_open(optimizers)
        every = chain.from_iterable(model.modules() for model in self._of_kind(nn.Module))
        if any(isinstance(module, (nn.SyncBatchNorm, SyncBatchNorm)) for module in every):
            raise ValueError(
                "SyncBatchNorm communicates in each forward, and ranks run different numbers of forwards; use"
                " BatchNorm, whose batch is then a virtual rank's"
            )
        self._inside = None

    def _keep_open(self, optimizers: Sequence[Any]) -> None:
        """Use those that are not closed: connecting one closes another one over the same parameters."""
        self._optimizers = [one for one in optimizers if not (one._released or one._closed)]
        if not self._optimizers:
            raise ValueError(
                "virtual ranks need a DistributedOptimizer that is not closed or released; make it before"
                " elastic.run's function"
            )

    def _of_kind(self, kind: type) -> list[Any]:
        return [one.value for one in self._state._handlers.values() if isinstance(one.value, kind)]

    # -- the loop --------------------------------------------------------------------------------------------

    def loop(self) -> Iterator[int]:
        """Yield this rank's virtual ranks; in the end every gradient is that of all of them. Collective."""
        params = self._begin()
        kept = {i for i, (_, p) in enumerate(params) if p.grad is not None}  # zeros, which torch steps with
        modules = list(dict.fromkeys(chain.from_iterable(one.modules() for one in self._of_kind(nn.Module))))
        first: Buffers = {
            (module, name): (buffer, _copy(buffer))
            for module in modules
            for name, buffer in module._buffers.items()
        }
        changed: dict[tuple[int, str], Tensor | None] = {}  # by the modules' numbers
        nodes: list[Node] = []
        device = params[0][1].device
        before = default_generators(device)
        self._inside = inside = object()
        try:
            for v in share_of(rank(), size(), self.count):
                self._clear(params, modules, first)
                self._seed(v, device)
                yield v
                add_leaf(nodes, v, self._taken(params))
                if v == 0:
                    changed = {
                        (i, name): _copy(now)
                        for i, module in enumerate(modules)
                        for name, now in module._buffers.items()
                        if (module, name) not in first or not _is_same(now, first[module, name][1])
                    }
        finally:
            if self._inside is inside:  # else it was left long ago, and the state is another one
                self._inside = None
                for generator, set_generator in before:
                    set_generator(generator)
                _put_back(modules, first)
        self._clear(params, modules, first)
        if modules:
            changed = broadcast_object(changed, name="commsched.elastic.buffers")
        with torch.no_grad():
            for (i, name), value in changed.items():
                buffer = modules[i]._buffers.get(name)
                if value is not None and value.device.type != "cpu":  # it is on rank 0's GPU
                    value = value.to(device)
                if (
                    buffer is None
                    or value is None
                    or buffer.shape != value.shape
                    or buffer.dtype != value.dtype
                ):
                    modules[i]._buffers[name] = value
                else:
                    buffer.copy_(value)
            self._set_sums(params, nodes, kept)
        self._state.virtual_steps += 1

    def _begin(self) -> Params:
        """Return all parameters, of which none has a gradient but zero."""
        if self._inside:
            raise ValueError("virtual_ranks() is called inside of its own loop; end that loop first")
        self._keep_open(self._optimizers)
        params = [(one, p) for one in self._optimizers for p in one._every_param()]
        for _, p in params:
            if p.grad is not None and not is_zero(p.grad):
                raise ValueError(
                    f"rank {rank()}: virtual_ranks() begins with a gradient that is not zero, of a parameter"
                    f" of shape {tuple(p.shape)}; call zero_grad() before the loop"
                )
            if p.requires_grad and p not in self._hooks:
                self._hooks[p] = p.register_post_accumulate_grad_hook(self._check_inside)
        for one in self._optimizers:
            one._is_summed = False
        return params

    def _check_inside(self, _: nn.Parameter) -> None:
        if not self._inside:
            raise ValueError(
                f"rank {rank()}: a backward outside of 'for v in hvd.elastic.virtual_ranks(state):' computes"
                " gradients that depend on the ranks there are; call zero_grad(), compute them in that loop"
            )

    def _clear(self, params: Params, modules: Sequence[nn.Module], first: Buffers) -> None:
        for _, p in params:
            p.grad = None
        _put_back(modules, first)

    def _seed(self, v: int, device: torch.device) -> None:
        place = f"{self.seed} {self._state.virtual_steps} {v}"
        seed = int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "little")
        seed_random(seed, device)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    @torch.no_grad()
    def _taken(self, params: Params) -> dict[int, Tensor]:
        """Return the gradients of the virtual rank that has ended: copies, which user code does not have."""
        taken = {i: p.grad.detach() for i, (_, p) in enumerate(params) if p.grad is not None}
        if any(grad.is_sparse for grad in taken.values()):
            raise ValueError(
                "virtual ranks add dense gradients, but an embedding has sparse=True; leave it out"
            )
        return {i: grad.to(_wide(grad.dtype), copy=True) for i, grad in taken.items()}

    # -- the sum ---------------------------------------------------------------------------------------------

    def _set_sums(self, params: Params, nodes: list[Node], kept: set[int]) -> None:
        """Give every parameter that a virtual rank has used its gradient. Collective."""
        used = torch.zeros(len(params), dtype=torch.int32, device="cpu")
        used[sorted(kept.union(*(sums for _, _, sums in nodes)))] = 1
        if size() > 1:
            used = allreduce(used, op=Max, name="commsched.elastic.used")
        alike, elements = defaultdict[Any, list[int]](list), 0
        for i in used.nonzero().flatten().tolist():
            one, p = params[i]
            elements += p.numel()
            alike[p.dtype, p.device, one._options.virtual_divisor, elements // _PIECE].append(i)
        for (_, _, divisor, _), chosen in alike.items():
            grads = {i: torch.empty_like(params[i][1], requires_grad=False) for i in chosen}
            for (i, grad), part in zip(grads.items(), self._summed(grads, nodes, divisor), strict=True):
                params[i][1].grad = grad.copy_(part.view_as(grad))
        for one in self._optimizers:
            if one._session is not None:
                one._session.round.require_sent()  # so that who reads a gradient gets the whole sum
            one._is_summed = True

    def _summed(self, like: Mapping[int, Tensor], nodes: list[Node], divisor: int) -> Sequence[Tensor]:
        """Return this rank's part of each sum, and zeros in the place of the others'. Collective."""
        one, sizes, ranks = next(iter(like.values())), [grad.numel() for grad in like.values()], size()
        length = max(1, -(-sum(sizes) // ranks))  # of a part
        rows = torch.zeros(len(nodes), ranks * length, dtype=_wide(one.dtype), device=one.device)
        for row, (_, _, sums) in zip(rows, nodes, strict=True):
            for i, place in zip(like, row[: sum(sizes)].split(sizes), strict=True):
                if i in sums:
                    place.copy_(sums.pop(i).reshape(-1))
        if ranks > 1:
            rows = rows.view(len(nodes), ranks, length).transpose(0, 1).reshape(ranks * len(nodes), length)
            rows, _ = alltoall(rows, [len(nodes)] * ranks, "commsched.elastic.sums")
        places = chain.from_iterable(_places(share_of(other, ranks, self.count)) for other in range(ranks))
        total = add_up(dict(zip(places, rows, strict=True)), self.count)
        whole = torch.zeros(ranks, length, dtype=total.dtype, device=total.device)
        whole[rank()].add_(total.div_(divisor))  # to +0: else a -0 would be +0 only where there are others
        return whole.view(-1)[: sum(sizes)].split(sizes)


def virtual_ranks(state: TorchState) -> Iterator[int]:
    """Yield this rank's virtual ranks, each with its own random numbers, in a function of ``run``.

    Compute the gradients of virtual rank v's mean loss inside of the loop, with ``sampler.batch(v, size)``
    for example. After the loop every ``p.grad`` is the mean over all virtual ranks. Every rank must loop to
    the end, before each ``step()``.
    """
    virtual: VirtualRanks | None = getattr(state, "_virtual", None)
    if virtual is None:
        raise ValueError("virtual_ranks() is for a function of elastic.run(virtual_ranks=...), inside of it")
    return virtual.loop()
