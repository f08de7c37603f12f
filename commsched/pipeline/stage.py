"""One stage on one rank: forward, backward and weight gradients of micro-batches, with weight versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from commsched.pipeline.parts import Cut
from commsched.pipeline.random_state import random_state, set_random_state
from commsched.pipeline.versions import Version, Versions
from commsched.pipeline.weight_gradients import split_backward

if TYPE_CHECKING:
    from commsched.pipeline.tiled_module import TiledModule

Loss = Callable[[Any, Any], Tensor]
Micro = tuple[int, int]
"""Micro-batch and period."""


@dataclass
class Head:
    """Targets and weight of this replica's part of the mean loss. ``counts``: add the value to the step's
    loss; one tile of a replica does that, since all tiles have the same value. ``count``: a function of whole
    outputs and targets to call instead of the loss.
    """

    targets: Any
    weight: float
    counts: bool = True
    count: Loss | None = None


@dataclass
class Saved:
    """The state that a stage keeps of a micro-batch until its backward."""

    version: Version
    leaves: list[Any]
    spec: Any
    head: Head | None
    random: list[Tensor]
    micro: Micro
    cuts: list[Cut | None]
    outputs: list[Any] = field(default_factory=list)
    weights: Callable[[], Any] | None = None


class Stage:
    """``module`` with its parameters in versions. ``recompute``: keep inputs only and repeat the forward.
    ``stays``: micro-batches may be in flight between two steps; a checkpoint repeats their forward.
    ``tiled``: by micro-batch, the module on the grid of tiles that computes it; empty for whole samples.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        loss: Loss | None,
        recompute: bool,
        stays: bool = True,
        tiled: Mapping[int, TiledModule] | None = None,
        own_parameters: bool = False,
    ) -> None:
        self.number, self.module, self.loss, self.recompute = number, module, loss, recompute
        self.tiled = tiled or {}
        self.modules = list(dict.fromkeys([module, *(each.module for each in self.tiled.values())]))
        self.versions = Versions(self.modules, own_parameters)
        self._repeats = recompute or stays
        self.saved: dict[Micro, Saved] = {}
        self.grads: defaultdict[int, list[Tensor | None]] = defaultdict(self._no_grads)
        self.losses: defaultdict[int, float] = defaultdict(float)
        self.most_saved = 0
        self.output_spec: Any = None
        self.output_cuts: list[Cut | None] = []
        self.device = next(module.parameters(), torch.empty(0)).device
        self._buffer_slots = [
            (part._buffers, key)
            for part in dict.fromkeys(part for each in self.modules for part in each.modules())
            for key, buffer in part._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies a state into the module; its copies share the parameters and get the same buffers."""
        for module in self.modules:
            for key, value in module.state_dict().items():
                value.copy_(state[key])

    @torch.no_grad()
    def load_buffers(self, state: Mapping[str, Tensor]) -> None:
        for module in self.modules:
            for key, value in module.named_buffers():
                value.copy_(state[key])

    def _no_grads(self) -> list[Tensor | None]:
        return [None] * len(self.versions.names)

    # Forward

    def forward(
        self,
        micro: Micro,
        inputs: tuple[list[Any], Any, list[Cut | None]],
        version: Version,
        head: Head | None,
    ) -> list[Any]:
        """The leaves of what the stage puts out; the last stage's is the loss of its rows. ``inputs``:
        leaves, structure, and how tiles cut the leaves.
        """
        leaves, spec, cuts = inputs
        random = random_state(self.device) if self._repeats else []
        saved = Saved(version, leaves, spec, head, random, micro, cuts)
        self.saved[micro] = saved
        self.most_saved = max(self.most_saved, len(self.saved))
        with torch.no_grad() if self.recompute else nullcontext():
            saved.outputs = self.run(saved)
        if head is not None and head.counts:
            self.losses[micro[1]] += float(saved.outputs[0].detach()) * head.weight
        outputs = saved.outputs
        if self.recompute:
            saved.outputs = []
        return outputs

    def run(self, saved: Saved) -> list[Any]:
        """The leaves that the module puts out, or the loss."""
        self.versions.use(saved.version)
        tiled = self.tiled.get(saved.micro[0])
        leaves = saved.leaves if tiled is None else tiled.enter(saved.leaves, saved.cuts)
        module = self.module if tiled is None else tiled.module
        output = module(*_unflattened(leaves, saved.spec))
        if saved.head is not None:
            if saved.head.count is not None:
                whole = output if tiled is None else tiled.whole(output)
                return [saved.head.count(whole, saved.head.targets)]
            assert self.loss is not None
            loss = self.loss(output, saved.head.targets)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ValueError(
                    "loss(outputs, targets) must return one number, the mean over the rows or, with count=,"
                    " the sum over the terms; got"
                    f" {tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}"
                )
            return [loss if tiled is None else tiled.local(loss)]
        leaves, self.output_spec = flattened(output, self.output_spec)
        if tiled is None:
            self.output_cuts = [None] * len(leaves)
        else:
            leaves, self.output_cuts = tiled.leave(leaves)
        return leaves

    @property
    def differentiable(self) -> bool:
        """Whether anything in this stage can have a gradient."""
        return bool(self.versions.names)

    def needs_grad(self, leaves: list[Any], inputs: list[Any]) -> list[bool]:
        """Which outputs have a gradient. Without a graph (recomputation) all that can have one."""
        if not self.recompute:
            return [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        possible = self.differentiable or any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return [possible and isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]

    # Backward

    def backward(self, micro: Micro, grads: list[Tensor | None], split: bool) -> list[Tensor | None]:
        """The gradients of the inputs, for each leaf; those of the parameters are added to the period's,
        unless ``split`` leaves them to ``weight_gradients``.
        """
        saved = self.saved[micro]
        if self.recompute:
            self._repeat(saved)
        # A checkpointed block is computed again in its backward.
        self.versions.use(saved.version)
        pairs = self._roots(saved, grads)
        inputs = [x for x in saved.leaves if isinstance(x, Tensor) and x.requires_grad]
        if split and inputs and pairs:
            outputs, sent = [output for output, _ in pairs], [grad for _, grad in pairs]
            found, saved.weights = split_backward(outputs, sent, inputs, saved.version.leaves)
            result = iter(found)
        else:
            self._whole_backward(pairs, inputs, saved.version, self.grads[micro[1]])
            result = iter([x.grad for x in inputs])
        saved.outputs = []
        if saved.weights is None and not split:
            del self.saved[micro]
        return [next(result) if isinstance(x, Tensor) and x.requires_grad else None for x in saved.leaves]

    def _roots(self, saved: Saved, grads: list[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        if saved.head is not None:
            loss = saved.outputs[0]
            return [(loss, torch.full_like(loss, saved.head.weight))] if loss.requires_grad else []
        return [
            (output, grad)
            for output, grad in zip(saved.outputs, grads, strict=True)
            if grad is not None and isinstance(output, Tensor) and output.requires_grad
        ]

    def weight_gradients(self, micro: Micro) -> None:
        """The second half of a split backward."""
        saved = self.saved.pop(micro)
        if saved.weights is None:
            return
        self.versions.use(saved.version)
        mine = self.grads[micro[1]]
        for place, grad in enumerate(saved.weights()):
            if grad is not None:
                before = mine[place]
                mine[place] = grad if before is None else before.add_(grad)

    def _whole_backward(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        inputs: list[Tensor],
        version: Version,
        mine: list[Tensor | None],
    ) -> None:
        """Adds to a period's gradients, ``mine``: several periods may use one version."""
        for x in inputs:
            x.grad = None
        for leaf, grad in zip(version.leaves, mine, strict=True):
            leaf.grad = grad
        try:
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        finally:
            for place, leaf in enumerate(version.leaves):
                mine[place], leaf.grad = leaf.grad, None

    # Recomputation

    def _repeat(self, saved: Saved) -> None:
        """The forward again, with the same random numbers; running statistics have had their update."""
        now = random_state(self.device)
        set_random_state(saved.random, self.device)
        kept = [(buffers, key, buffers[key]) for buffers, key in self._buffer_slots]
        for buffers, key, buffer in kept:
            assert buffer is not None
            buffers[key] = buffer.clone()
        try:
            with torch.enable_grad():
                saved.outputs = self.run(saved)
        finally:
            set_random_state(now, self.device)
            for buffers, key, buffer in kept:
                buffers[key] = buffer

    def restore(self, micro: Micro, saved: Saved) -> None:
        """Takes up a micro-batch that was between forward and backward when it was saved."""
        self.saved[micro] = saved
        if not self.recompute:
            self._repeat(saved)


def _is_flat(spec: Any, count: int) -> bool:
    """A tuple of so many leaves, which needs no walk: this happens for every micro-batch."""
    return spec is not None and spec.type is tuple and spec.num_nodes == spec.num_children + 1 == count + 1


def _unflattened(leaves: list[Any], spec: Any) -> Any:
    return leaves if _is_flat(spec, len(leaves)) else tree_unflatten(leaves, spec)


def flattened(output: Any, last: Any) -> tuple[list[Any], Any]:
    """Leaves and structure; ``last`` was that of the one before."""
    if type(output) is tuple and _is_flat(last, len(output)) and all(isinstance(x, Tensor) for x in output):
        return list(output), last
    return tree_flatten(output)
