"""`Job`: what is trained; `Trainer`: one rank's training loop, of which baselines override parts."""

from __future__ import annotations

import importlib
import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dnn_bench import models


@dataclass(frozen=True)
class Job:
    """One training job; the same in every rank and for every baseline."""

    model: str
    batch: int = 0  # per rank; 0 is the model's default
    shape: dict[str, int] = field(default_factory=dict)
    seed: int = 1
    learning_rate: float = 1e-3
    momentum: float = 0.9
    threads: int = 1
    device: str = "cpu"
    data_dir: str = ""  # images or text; empty for synthetic data
    sparse_embeddings: bool = False  # embeddings with a weight of their own have sparse gradients

    @property
    def rank_batch(self) -> int:
        return self.batch or models.spec(self.model).batch

    def build_model(self) -> nn.Module:
        """Build the model with the same weights on every rank, without dropout, which would differ by run."""
        torch.manual_seed(self.seed)
        model = models.build(self.model)
        for module in model.modules():
            for name, value in vars(module).items():
                # Layers of libraries drop whole paths or attention weights.
                if isinstance(value, float) and (name == "p" or "drop" in name):
                    setattr(module, name, 0.0)
        if self.sparse_embeddings:
            make_embeddings_sparse(model)
        return model.to(self.device)

    def outline(self) -> nn.Module:
        """Build the model on the meta device, which has shapes but no data."""
        with torch.device("meta"):
            return replace(self, device="meta").build_model()

    def build_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum)

    def sample(self, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1000 + seed)
        return models.sample_batch(
            self.model, batch, self.device, generator, data_dir=self.data_dir, **self.shape
        )

    def local_batch(self, rank: int) -> tuple[Tensor, Tensor]:
        """The batch a rank repeats while it is timed."""
        return self.sample(self.rank_batch, rank)

    def global_batch(self, step: int, size: int) -> list[tuple[Tensor, Tensor]]:
        """One training step's batch, as the shards of its ranks; every process draws the same."""
        batch = self.sample(size * self.rank_batch, 500 + step)
        inputs, targets = (tensor.split(self.rank_batch) for tensor in batch)
        return list(zip(inputs, targets, strict=True))

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return models.loss(self.model, outputs, targets)


def make_embeddings_sparse(model: nn.Module) -> None:
    """Set `sparse` on embeddings whose weight no other module owns; raise `ValueError` if there are none."""
    modules_with = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    chosen = [each for each in embeddings if _may_be_sparse(each) and modules_with[id(each.weight)] == 1]
    if not chosen:
        raise ValueError(
            "the model has no trained nn.Embedding or nn.EmbeddingBag whose weight belongs to no other module"
        )
    for module in chosen:
        module.sparse = True


def _may_be_sparse(embedding: nn.Embedding | nn.EmbeddingBag) -> bool:
    # torch refuses sparse gradients of a maximum, and of rows scaled by how often they occur.
    refused = embedding.scale_grad_by_freq or getattr(embedding, "mode", "") == "max"
    return embedding.weight.requires_grad and not refused


class Stamps(NamedTuple):
    """Clock readings (`time.perf_counter`) around the phases of one iteration."""

    start: float
    forward: float
    backward: float
    end: float


Operation = tuple[str, float, float, int]  # label, start, end (on the clock of `Stamps`), bytes sent


class TorchRanks:
    """torch.distributed's group of all ranks, with the functions that Horovod's module has."""

    def __init__(self, device: str) -> None:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, rank=rank, world_size=size)
        self.rank, self.size = dist.get_rank, dist.get_world_size
        self.barrier, self.shutdown = dist.barrier, dist.destroy_process_group

    def allgather_object(self, value: Any) -> list[Any]:
        gathered = [None] * self.size()
        dist.all_gather_object(gathered, value)
        return gathered


def connected(library: str, job: Job) -> Any:
    """Join the other ranks. Returns the library's module, or what looks like it for torch."""
    torch.set_num_threads(job.threads)
    if library == "torch":
        return TorchRanks(job.device)
    module = importlib.import_module(library)
    module.init()
    return module


class Trainer:
    """Builds the job's model in this rank and steps it.

    A baseline overrides `library` (how ranks find each other) and `wrap` (what it makes of the model).
    """

    library = "torch"
    model: Any
    optimizer: Any
    loss: Tensor  # of the last iteration, on this rank's batch

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ranks = connected(self.library, job)
        self.rank, self.size, self.barrier = self.ranks.rank(), self.ranks.size(), self.ranks.barrier
        self.module = job.build_model()
        self.model, self.optimizer = self.wrap(self.module)

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        """The model to call and the optimizer to step."""
        return model, self.job.build_optimizer(model.parameters())

    def iteration(self, inputs: Tensor, targets: Tensor) -> Stamps:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.job.loss(self.model(inputs), targets)
        self.loss = loss.detach()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        return Stamps(start, forward, backward, time.perf_counter())

    def prediction(self) -> float | None:
        """The seconds of an iteration that its plan expects; None without a plan."""
        return None

    def is_settled(self) -> bool:
        """Whether nothing is searched any more that makes iterations faster; the same on all ranks."""
        return True

    def finish(self) -> None:
        """Wait for all operations in flight."""
        if self.job.device.startswith("cuda"):
            torch.cuda.synchronize()

    def record_operations(self) -> None:
        """Start to record. Called once, after all timing: recording takes time."""

    def operations(self) -> list[Operation]:
        """Communication since the last call, of baselines that record it."""
        return []

    def parameters(self) -> dict[str, Tensor]:
        """The whole parameters by the names of the plain model; every rank calls it."""
        self.finish()
        return {name: value.detach().clone() for name, value in self.module.named_parameters()}

    def close(self) -> None:
        self.ranks.shutdown()


# -- how much memory a job needs, estimated without allocating it --------------------------------------------

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
