"""A model's stages one after the other in one process, as the ranks of a pipeline compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from commsched.pipeline.chain import Chain


def in_stages(chain: Chain, cuts: Sequence[int], inputs: Any, loss_of: Callable[[Any], Tensor]) -> Tensor:
    """The loss; gradients are left in the parameters, as a pipeline computes them."""
    state, borders = chain.arguments(inputs), []
    for first, end in zip(cuts, [*cuts[1:], len(chain)], strict=True):
        sent = [x for x in tree_leaves(state) if isinstance(x, Tensor)]
        arguments = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), state)
        came = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        borders.append(list(zip(sent, came, strict=True)))
        state = chain.stage(first, end)(*arguments)
    loss = loss_of(state)
    loss.backward()
    for border in reversed(borders[1:]):
        pairs = [(sent, came.grad) for sent, came in border if came.grad is not None]
        torch.autograd.backward([sent for sent, _ in pairs], [grad for _, grad in pairs])
    return loss
