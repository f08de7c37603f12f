"""Counts of an evaluation, which add up over batches and ranks, and the scores that follow from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commsched.pipeline.job import Measure
from commsched.pipeline.stage import Loss


def classes(loss: Loss) -> Measure:
    """Top-1 and top-5 accuracy of logits; top-5 only if there are more than five classes."""

    def count(found: Any, targets: Tensor) -> Tensor:
        outputs = logits_of(found)
        best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
        right = best == targets[:, None]
        top5 = right.any(1).sum() if outputs.shape[1] > 5 else torch.tensor(-1.0)
        rows = len(targets)
        return torch.tensor(
            [rows, rows * float(loss(outputs, targets)), float(right[:, 0].sum()), float(top5)]
        )

    def scores(sums: Tensor) -> dict[str, float]:
        rows, total, top1, top5 = sums.tolist()
        found = {"loss": total / rows, "top1": top1 / rows}
        return found if top5 < 0 else {**found, "top5": top5 / rows}

    return Measure(count, scores)


def masks(loss: Loss, kinds: int, ignored: int) -> Measure:
    """Mean intersection over union of the classes that occur, and the share of right pixels."""

    def count(found: Any, targets: Tensor) -> Tensor:
        outputs = logits_of(found)
        known = targets != ignored
        pairs = targets[known] * kinds + outputs.argmax(1)[known]
        confusion = torch.bincount(pairs, minlength=kinds * kinds).double()
        rows = len(targets)
        return torch.cat([torch.tensor([rows, rows * float(loss(outputs, targets))]).double(), confusion])

    def scores(sums: Tensor) -> dict[str, float]:
        confusion = sums[2:].view(kinds, kinds)
        right = confusion.diagonal()
        union = confusion.sum(0) + confusion.sum(1) - right
        occurs = union > 0
        iou = float((right[occurs] / union[occurs]).mean())
        return {"loss": float(sums[1] / sums[0]), "iou": iou, "pixels": float(right.sum() / confusion.sum())}

    return Measure(count, scores)


def logits_of(outputs: Any) -> Tensor:
    """The logits of a model's outputs: a tensor, ``.logits`` (transformers) or ``["out"]`` (torchvision)."""
    if isinstance(outputs, Tensor):
        return outputs
    found: Tensor = outputs["out"] if isinstance(outputs, dict) and "out" in outputs else outputs.logits
    return found
