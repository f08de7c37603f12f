"""Losses of classifiers and of segmentation models, whatever form a model's outputs have."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from commsched.training.images import IGNORED


def logits_of(outputs: Any) -> Tensor:
    """The logits of a model's outputs: a tensor, ``.logits`` (transformers) or ``["out"]`` (torchvision)."""
    if isinstance(outputs, dict) and "out" in outputs:
        outputs = outputs["out"]
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def class_loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(outputs), targets)


def mask_loss(outputs: Any, targets: Tensor) -> Tensor:
    """The mean over each image's known pixels, then over the images."""
    each = F.cross_entropy(logits_of(outputs), targets, reduction="none", ignore_index=IGNORED)
    known = (targets != IGNORED).sum((1, 2)).clamp(min=1)
    return (each.sum((1, 2)) / known).mean()
