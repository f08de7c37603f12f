"""Two small learning problems whose data are on every machine that has the tools, their training, and the
comparison of runs with the plain one.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dnn_bench.baselines.trainer import Job, Trainer
from dnn_bench.models.transformer import LanguageModel

GLOBAL_BATCH = 96  # divides by 1, 2, 3 and 4 workers
TEXT_LENGTH = 32
CHARACTERS = 128
LOSS_TOLERANCE = 1e-2  # of the loss, at any step: rounding grows while training goes on
ACCURACY_TOLERANCE = 0.01
END = 20  # steps

Data = tuple[Tensor, Tensor]


def digits() -> tuple[Data, Data]:
    """scikit-learn's 8x8 digits as (training, test)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError(
            "the digits task needs scikit-learn: pip install scikit-learn; or --task text"
        ) from None
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    return (images[train], labels[train]), (images[test], labels[test])


def text() -> tuple[Data, Data]:
    """The documentation that comes with Python, cut into lines; a character's target is the next one."""
    from pydoc_data import topics

    joined = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    codes = torch.tensor([ord(c) if ord(c) < CHARACTERS else ord("?") for c in joined[:400_000]])
    length = TEXT_LENGTH + 1
    lines = codes[: len(codes) // length * length].view(-1, length)
    lines = lines[torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))]
    inputs, targets = lines[:, :-1].contiguous(), lines[:, 1:].contiguous()
    return (inputs[500:], targets[500:]), (inputs[:500], targets[:500])


def digits_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


TASKS: dict[str, tuple[Any, Any, float]] = {  # data, model, learning rate
    "digits": (digits, digits_model, 0.05),
    "text": (text, partial(LanguageModel, "gpt2", CHARACTERS, dim=64, depth=2, heads=4, dropout=0.0), 0.1),
}


@dataclass(frozen=True)
class TaskJob(Job):
    """A `Job` on real data: every process draws the same global batches and takes its share."""

    task: str = "digits"

    @classmethod
    def make(cls, task: str, workers: int, threads: int = 1) -> TaskJob:
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}; choose of: {', '.join(TASKS)}")
        if GLOBAL_BATCH % workers:
            raise ValueError(
                f"the global batch of {GLOBAL_BATCH} cannot be shared equally by {workers} workers"
            )
        share = GLOBAL_BATCH // workers
        return cls("mlp_tiny", share, learning_rate=TASKS[task][2], threads=threads, task=task)

    @cached_property
    def data(self) -> tuple[Data, Data]:
        training, test = TASKS[self.task][0]()
        return training, test

    def build_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model: nn.Module = TASKS[self.task][1]()
        return model.to(self.device)

    def global_batch(self, step: int, size: int) -> list[Data]:
        inputs, targets = self.data[0]
        per_epoch = len(inputs) // GLOBAL_BATCH
        generator = torch.Generator().manual_seed(self.seed + step // per_epoch)
        order = torch.randperm(len(inputs), generator=generator)
        chosen = order[(step % per_epoch) * GLOBAL_BATCH :][:GLOBAL_BATCH]
        return [(inputs[part], targets[part]) for part in chosen.chunk(size)]

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.flatten())

    def accuracy(self, model: Any) -> float:
        """The share of the test set's targets that the model predicts."""
        inputs, targets = self.data[1]
        model.eval()
        with torch.no_grad():
            right = (model(inputs).argmax(dim=-1) == targets).float().mean().item()
        model.train()
        return float(right)


def train(trainer: Trainer, steps: int, path: str) -> dict[str, Any]:
    """Train one rank; return its shards' losses and the accuracy. Rank 0 saves the parameters in `path`."""
    job = trainer.job
    assert isinstance(job, TaskJob)
    losses = []
    for step in range(steps):
        trainer.iteration(*job.global_batch(step, trainer.size)[trainer.rank])
        losses.append(float(trainer.loss))
    parameters = trainer.parameters()
    accuracy = job.accuracy(trainer.model)
    if trainer.rank == 0:
        torch.save(parameters, path)
    trainer.barrier()
    return {"losses": losses, "accuracy": accuracy}


@dataclass(frozen=True)
class Run:
    """One training run; `digest` names its final parameters bit for bit."""

    task: str
    baseline: str
    workers: int
    losses: tuple[float, ...]
    accuracy: float
    digest: str

    @property
    def end_loss(self) -> float:
        """The mean over the last steps, whose batches differ."""
        return statistics.mean(self.losses[-END:])


def mean_losses(ranks: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """The global batch's loss at every step: the mean over equal shards."""
    return tuple(statistics.mean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True))


def digest(parameters: dict[str, Tensor]) -> str:
    """A short name of the parameters' exact bits."""
    found = hashlib.sha256()
    for name in sorted(parameters):
        found.update(name.encode())
        found.update(parameters[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def deviation(run: Run, plain: Run) -> float:
    """The largest difference of the loss curves, relative to the larger value."""
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(run.losses, plain.losses, strict=True))


def problems(run: Run, plain: Run) -> list[str]:
    """List how a run differs from plain training by more than rounding."""
    found = []
    if (off := deviation(run, plain)) > LOSS_TOLERANCE:
        found.append(f"its loss differs by {off:.1e} from plain training's")
    if abs(run.accuracy - plain.accuracy) > ACCURACY_TOLERANCE:
        found.append(f"its accuracy is {run.accuracy:.4f}, plain training's {plain.accuracy:.4f}")
    return found
