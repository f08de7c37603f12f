"""`python -m dnn_bench converge`: real training with every schedule and number of workers."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dnn_bench.baselines import OURS, Baseline, get, names
from dnn_bench.baselines.trainer import Job, Trainer
from dnn_bench.command_line import check_least, console, numbers, one_line_errors, parser, table
from dnn_bench.models.transformer import LanguageModel


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser(
        "converge",
        "Trains a small CNN on digits and a character model on Python's documentation: in one process, and "
        "with every schedule and number of workers at the same global batch. All loss curves must be one.",
    )
    command.add_argument("--task", default="digits,text", help="tasks to train")
    command.add_argument("--baseline", default="all", metavar="A,B", help="schedules to train with, or 'all'")
    command.add_argument("--workers", default="1,2,3,4", help="numbers of workers")
    command.add_argument("--steps", type=int, default=200, help="steps of a run")
    command.add_argument("--seeds", type=int, default=1, help="seeds of weights and batches (default: 1)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write every curve to this file")
    command.add_argument("--png", type=Path, metavar="FILE", help="draw the curves into this file")
    return command.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    all_ours = [entry for entry in map(get, names()) if entry.kind == OURS]
    wanted = options.baseline.split(",")
    entries = all_ours if options.baseline == "all" else [get(name.strip()) for name in wanted]
    workers = numbers("--workers", options.workers)
    check_least(options, 1, "steps", "seeds")
    runs: list[Run] = []
    failures: dict[str, list[str]] = {}
    seeds = range(1, options.seeds + 1)
    for kind, seed in itertools.product(options.task.split(","), seeds):
        task = kind if len(seeds) == 1 else f"{kind}, seed {seed}"
        plain = train_one(kind, seed, get("local"), 1, options.steps, task, "plain")
        runs.append(plain)
        for size, entry in itertools.product(workers, entries):
            label = f"{task}, {entry.name}, {size} workers"
            print(f"training {label}", file=sys.stderr, flush=True)
            try:
                runs.append(train_one(kind, seed, entry, size, options.steps, task, entry.name))
            except RuntimeError as error:
                failures[label] = [str(error).splitlines()[0]]
                continue
            if entry.exact and (differences := problems(runs[-1], plain)):
                failures[label] = differences
    console().print(curves(runs, failures))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in runs]) + "\n")
    if options.png:
        draw(runs, options.png)
    for name, reasons in failures.items():
        print(f"{name}: {'; '.join(reasons)}")
    return int(bool(failures))


def train_one(kind: str, seed: int, entry: Baseline, size: int, steps: int, task: str, name: str) -> Run:
    from dnn_bench.launch import ThisMachine
    from dnn_bench.runner.sets import asked

    job = replace(TaskJob.make(kind, size), seed=seed)
    with tempfile.TemporaryDirectory(prefix="dnn_bench-") as directory:
        path = Path(directory) / "parameters.pt"
        answers = asked(entry, job, ThisMachine(size), "train", steps, str(path))
        return Run(task, name, size, mean_losses(answers), answers[0]["accuracy"], digest(torch.load(path)))


def curves(runs: list[Run], failures: dict[str, list[str]]) -> Any:
    words = ("task", "baseline", "parameters")
    figures = ("end loss", "accuracy", "loss off by", "end loss off by", "parameters")
    columns = ("task", "baseline", "workers", *figures)
    shown = table("the same training, by schedule and workers", columns, words)
    plain = {run.task: run for run in runs if run.baseline == "plain"}
    for run in runs:
        off = f"{deviation(run, plain[run.task]):.1e}"
        end = f"{run.end_loss / plain[run.task].end_loss - 1:+.2%}"
        cells = (f"{run.end_loss:.5f}", f"{run.accuracy:.4f}", off, end, run.digest)
        style = "red" if f"{run.task}, {run.baseline}, {run.workers} workers" in failures else None
        shown.add_row(run.task, run.baseline, str(run.workers), *cells, style=style)
    return shown


def draw(runs: list[Run], path: Path) -> None:
    """One panel per task; runs that coincide lie on top of each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(run.task for run in runs))
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(7 * len(tasks), 5), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for index, run in enumerate(run for run in runs if run.task == task):
            label = f"{run.baseline}, {run.workers} ({run.accuracy:.3f})"
            style: dict[str, Any] = {"linewidth": 1, "linestyle": ("-", "--", ":", "-.")[index % 4]}
            if run.baseline == "plain":
                style = {"linewidth": 4, "alpha": 0.3, "color": "black"}
            axis.plot(run.losses, label=label, **style)
        axis.set(title=task, xlabel="step", ylabel="loss of the global batch", yscale="log")
        axis.legend(fontsize=7, title="baseline, workers (accuracy)", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# -- two learning problems, their training, and the comparison of runs with the plain one --------------------

# Their data are on every machine that has the tools.

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
    hashed = hashlib.sha256()
    for name in sorted(parameters):
        hashed.update(name.encode())
        hashed.update(parameters[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:12]


def deviation(run: Run, plain: Run) -> float:
    """The largest difference of the loss curves, relative to the larger value."""
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(run.losses, plain.losses, strict=True))


def problems(run: Run, plain: Run) -> list[str]:
    """List how a run differs from plain training by more than rounding."""
    differences = []
    if (off := deviation(run, plain)) > LOSS_TOLERANCE:
        differences.append(f"its loss differs by {off:.1e} from plain training's")
    if abs(run.accuracy - plain.accuracy) > ACCURACY_TOLERANCE:
        differences.append(f"its accuracy is {run.accuracy:.4f}, plain training's {plain.accuracy:.4f}")
    return differences
