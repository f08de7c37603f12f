"""How much memory a job needs, estimated without allocating it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from dnn_bench import models
from dnn_bench.baselines.trainer import Job

PROCESS = 200 * 10**6  # an interpreter with torch loaded; libraries are shared
COPIES = 4  # parameters, gradients, momentum, and buffers for communication
PROBE = 2  # samples; activations grow with the batch


@dataclass(frozen=True)
class Need:
    """Bytes: of the parameters, and of what one sample leaves behind for the backward."""

    parameters: int
    per_sample: int

    def rank(self, batch: int = 0) -> int:
        """For one rank; between its turns, activations have gone back to the system."""
        return PROCESS + COPIES * self.parameters + batch * self.per_sample


def estimate(job: Job) -> Need:
    """Runs the model's forward on the meta device, which has shapes but no data."""
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # a freed tensor's identity could be given to another

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in saved and not isinstance(tensor, torch.nn.Parameter):
            saved[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.device("meta"):
        model = models.build(job.model)
        inputs, targets = models.sample_batch(job.model, PROBE, "meta", None, data_dir="", **job.shape)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs: Any = model(inputs)
            models.loss(job.model, outputs, targets)
    activations = sum(size for storage, size in saved.items() if storage not in weights)
    return Need(sum(p.numel() * p.element_size() for p in model.parameters()), activations // PROBE)


def check_fit(job: Job, ranks: int, available: int | None = None) -> Need:
    """The estimate, or a `ValueError` when not even one baseline's ranks fit into memory."""
    need = estimate(job)
    limit = psutil.virtual_memory().available if available is None else available
    total = ranks * need.rank(job.rank_batch)
    if total > limit:
        room = limit / ranks - need.rank()
        fits = int(room // need.per_sample) if room > 0 else 0
        advice = f"a batch of about {fits} would fit" if fits else "the model itself does not fit"
        raise ValueError(
            f"{job.model} with a batch of {job.rank_batch} needs about {total / 1e9:.1f} GB on {ranks} "
            f"ranks, and {limit / 1e9:.1f} GB are free: {advice}"
        )
    return need
