"""Losses per pixel: computed on the parts, summed or averaged over the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.layout import common_cuts, enter, fit
from commsched.spatial.ops.reduce import unrounded, wide
from commsched.spatial.tile import Tile, handles, tiles_in, unsupported


def _reduced(losses: Tile, reduction: str) -> Any:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def _register(function: Callable[..., Tensor]) -> None:
    @handles(function)
    def loss(input: Any, target: Any, *args: Any, reduction: str = "mean", **options: Any) -> Any:
        tiles = list(tiles_in((input, target, args, options)))
        if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
            return unsupported(function, (input, target), {}, "size_average and reduce; use reduction")
        mesh, cuts = tiles[0].mesh, common_cuts(tiles)
        operands = [fit(t, mesh, cuts) if isinstance(t, Tensor) else t for t in (input, target, *args)]
        others = {k: fit(v, mesh, cuts) if isinstance(v, Tensor) else v for k, v in options.items()}
        return _reduced(Tile.make(function(*operands, reduction="none", **others), mesh, cuts), reduction)


for _function in (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.soft_margin_loss,
):
    _register(_function)


def _classified(
    function: Any,
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Per pixel over the channels; the mean weighs classes and leaves out ``ignore_index`` as torch does."""
    if not isinstance(input, Tile) or input.ndim < 3:
        return unsupported(function, (input, target), {}, "the classes must be dimension 1 of an image")
    mesh, cuts = input.mesh, common_cuts([t for t in (input, target) if isinstance(t, Tile)])
    weight = None if weight is None else enter(weight, mesh, cuts)
    scores, wanted = fit(input, mesh, cuts), fit(target, mesh, cuts)
    local = function(scores, wanted, weight, ignore_index=ignore_index, reduction="none", **options)
    losses, kind = Tile.make(local, mesh, cuts), wide(local.dtype)
    if reduction != "mean":
        return _reduced(losses, reduction)
    if wanted.is_floating_point():  # class probabilities: the mean is over pixels
        return (unrounded(losses, None, False, kind) / losses.numel()).to(local.dtype)
    counted = (wanted != ignore_index).to(kind)
    if weight is not None:
        counted = counted * weight.detach()[wanted.clamp(min=0)]
    return (unrounded(losses, None, False, kind) / Tile.make(counted, mesh, cuts).sum()).to(local.dtype)


for _classifying in (F.cross_entropy, F.nll_loss):
    handles(_classifying)(partial(_classified, _classifying))
