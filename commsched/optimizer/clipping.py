"""The norm of gradients that are spread over the ranks.

It stays on the gradients' device, so that the host does not wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch


def total_norm(
    mine: Iterable[torch.Tensor],
    norm_type: float,
    gather: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Return the norm of all ranks' gradients in double precision; ``gather`` gathers one number per rank."""
    norms = _norms(list(mine), norm_type)
    here = torch.linalg.vector_norm(torch.cat(norms), norm_type) if norms else torch.zeros((), device=device)
    return torch.linalg.vector_norm(gather(here.double()), norm_type)


def _norms(grads: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return each gradient's norm, one vector for each type; halves are summed in float32."""
    by_type: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        by_type[grad.dtype].append(grad)
    return [
        torch.stack(torch._foreach_norm(same, norm_type, torch.promote_types(dtype, torch.float32))).double()
        for dtype, same in by_type.items()
    ]


def factor_for(total: torch.Tensor, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
    """Return the factor for this norm; only with ``error_if_nonfinite`` the host waits for the norm."""
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the total norm of the gradients is {total.item()}, so they cannot be clipped")
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)
