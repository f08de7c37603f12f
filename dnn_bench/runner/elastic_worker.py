"""One rank of `python -m dnn_bench faults`: elastic training that notes every batch it uses.

    python -m dnn_bench.runner.elastic_worker FOLDER TRAINING (as JSON)

[Note: what a rank notes]
Each process appends lines of JSON to a file of its own in FOLDER, one system call a line, so that they are
there whatever ends the process:

    hello      the process has started; from now on SIGUSR1 writes its stacks
    begin      the function of elastic.run begins: epoch (a random name), size, steps committed before
    use        before the backward: the samples of this rank's batch
    done       the step is over, and its commit comes next: a digest of the parameters, sometimes their values
    saved      a checkpoint has begun, and the one before is written; or `unsaved`, with the error
    error      an exception leaves the function; elastic.run decides what follows
    failed     elastic.run has raised
    end        the training is over, after an epoch of the data

The state holds `runs`: which steps of which epochs made it what it is. It is committed, restored and
synchronised with the parameters, so it tells which of the noted batches they come from, by construction.

[Note: orders]
A file FOLDER/orders/PLACE is a fault of the rank at that place: skip (once), shape, dtype, lr, and for a
process that starts wider, deeper, float32. A place is a host and a number there: host1-0.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import commsched as hvd

CHECKPOINT_EVERY, VALUES_EVERY = 10, 10  # steps
WIDTH = 8


@dataclass(frozen=True)
class Training:
    """What all ranks train: few numbers, so that they can be noted, and samples that no size divides."""

    seed: int
    optimizer: str = "sgd"
    gather: str = "gradients"
    samples: int = 251
    batch: int = 4
    pause: float = 0.03  # seconds after each step: the processors are few, and new processes must start

    def model(self, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> nn.Sequential:
        torch.manual_seed(self.seed)
        layers = nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, 3)
        return nn.Sequential(*layers).to(dtype)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=0.003)
        return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)

    def data(self) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(self.seed)
        inputs = torch.randn(self.samples, WIDTH, dtype=torch.float64, generator=drawn)
        noise = torch.randn(self.samples, 3, dtype=torch.float64, generator=drawn)
        return inputs, torch.sin(inputs[:, :3] + inputs[:, 3:6]) + noise / 4


def digest(model: nn.Module) -> str:
    """A short name of the parameters' exact bits."""
    hashed = hashlib.sha256()
    for tensor in model.state_dict().values():
        hashed.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:12]


def values(model: nn.Module) -> list[float]:
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]


def replayed(
    training: Training, batches: Iterable[Sequence[Sequence[int]]], noted: dict[int, list[float]]
) -> tuple[int, str] | None:
    """Train in one process on each step's batches of all ranks; return the first step that ends elsewhere.

    `noted` has the parameters after some steps. Float64 sums of the same numbers in another order may differ
    by half a last bit for each term: of each step as many as the model's products, forward and backward.
    """
    model, (inputs, targets) = training.model(), training.data()
    optimizer = training.make_optimizer(model)
    params = list(model.parameters())
    terms = sum(p.numel() for p in params) * 2 * len(params)
    for step, ranks in enumerate(batches):
        optimizer.zero_grad()
        total = sum(map(len, ranks))
        for indices in filter(None, ranks):
            loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
            (loss * (len(indices) / total)).backward()
        optimizer.step()
        if step in noted:
            allowed = terms * (step + 1) * torch.finfo(torch.float64).eps
            for ours, theirs in zip(values(model), noted[step], strict=True):
                if not abs(ours - theirs) <= allowed * max(abs(ours), 1e-3):
                    return (
                        step,
                        f"{theirs!r} where one process has {ours!r} (rounding explains {allowed:.0e})",
                    )
    return None


# -- a rank --------------------------------------------------------------------------------------------------


class Notes:
    """This process's file: see [Note: what a rank notes]."""

    def __init__(self, folder: Path, place: str) -> None:
        path = folder / f"{place}.{os.getpid()}"
        self._file = os.open(f"{path}.notes", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        self._stacks = open(f"{path}.stacks", "w")  # noqa: SIM115  # faulthandler keeps its number
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self("hello")

    def __call__(self, what: str, **facts: Any) -> None:
        always = {"what": what, "at": time.monotonic(), "rank": int(os.environ["HOROVOD_RANK"])}
        line = json.dumps(always | facts)
        os.write(self._file, line.encode() + b"\n")


class Rank:
    """The training of one process."""

    def __init__(self, folder: Path, training: Training, place: str) -> None:
        self.note = Notes(folder, place)
        self.folder, self.training = folder, training
        self.order_file = folder / "orders" / place
        self.inputs, self.targets = training.data()
        order = self.order()
        other = {"wider": {"width": WIDTH + 1}, "float32": {"dtype": torch.float32}}.get(order, {})
        self.model = training.model(**other)  # type: ignore[arg-type]
        if order == "deeper":
            self.model.append(nn.Linear(3, 3, dtype=torch.float64))
        self.dtype = next(self.model.parameters()).dtype
        made = training.make_optimizer(self.model)
        self.rate = made.param_groups[0]["lr"]
        self.optimizer = hvd.DistributedOptimizer(made, model=self.model, gather=training.gather)
        self.sampler = hvd.elastic.ElasticSampler(range(training.samples), seed=training.seed, exact=True)

    def order(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.order_file.read_text()
        return ""

    def run(self) -> None:
        objects = {"sampler": self.sampler, "step": 0, "runs": []}
        state: Any = hvd.elastic.TorchState(self.model, self.optimizer, **objects)
        try:
            hvd.elastic.run(self._function)(state)
            facts = {"digest": digest(self.model), "values": values(self.model)}
            self.note("end", step=state.step, runs=state.runs, **facts)
        except BaseException as error:
            self.note("failed", text=f"{type(error).__name__}: {error}")
            raise

    def _function(self, state: Any) -> None:
        try:
            self.epoch = hvd.broadcast_object(secrets.token_hex(4), name="epoch")
            self.note("begin", epoch=self.epoch, size=hvd.size(), step=state.step, runs=state.runs)
            while True:
                self._pass(state)
                if hvd.broadcast_object((self.folder / "stop").exists(), name="stop"):
                    return
        except BaseException as error:
            self.note("error", kind=type(error).__name__, text=str(error))
            raise

    def _pass(self, state: Any) -> None:
        """The rest of an epoch of the data, as docs/elastic.md has it."""
        batch = self.training.batch
        steps = -(-len(self.sampler.remaining_indices) // (batch * hvd.size()))
        mine = list(self.sampler)
        for step in range(steps):
            self._step(state, mine[step * batch : (step + 1) * batch])
            self.sampler.record_batch(step, batch)
            state.step += 1
            if not state.runs or state.runs[-1][0] != self.epoch:
                state.runs.append([self.epoch, state.step - 1, 0])
            state.runs[-1][2] = state.step
            self._note_done(state.step - 1)
            state.commit()
            if state.step % CHECKPOINT_EVERY == 0:
                self._save(state.step)
            time.sleep(self.training.pause)
        self.sampler.set_epoch(self.sampler.epoch + 1)

    def _step(self, state: Any, indices: list[int]) -> None:
        order = self.order()
        place = {"epoch": self.epoch, "step": state.step}
        self.note("use", **place, data=self.sampler.epoch, indices=indices)
        if order == "skip":
            self.order_file.unlink()
            return
        if order == "lr":
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * 2
        self.optimizer.zero_grad()
        loss = torch.zeros((), dtype=self.dtype)
        if indices:
            outputs = self.model(self.inputs[indices].to(self.dtype))
            loss = nn.functional.mse_loss(outputs, self.targets[indices].to(self.dtype))
            self.optimizer.weighted(loss, samples=len(indices)).backward()  # type: ignore[attr-defined]
        self.optimizer.step()
        shown = loss.detach().reshape(1)  # the mean over the ranks, as for a progress bar
        shown = shown.repeat(2) if order == "shape" else shown.float() if order == "dtype" else shown
        hvd.allreduce(shown, name="loss")

    def _note_done(self, step: int) -> None:
        facts: dict[str, Any] = {"digest": digest(self.model)}
        if step % VALUES_EVERY == 0 and hvd.rank() == 0:
            facts["values"] = values(self.model)
        self.note("done", epoch=self.epoch, step=step, **facts)

    def _save(self, step: int) -> None:
        """Write a checkpoint, and train on where that fails: an earlier one is there."""
        try:
            hvd.save({"model": self.model, "optimizer": self.optimizer, "step": step}, self.folder / "disk")
            self.note("saved")
        except hvd.CheckpointError as error:
            self.note("unsaved", text=str(error))


def main(arguments: list[str]) -> None:
    folder, training = Path(arguments[0]), Training(**json.loads(arguments[1]))
    hvd.init()
    place = f"{os.environ['HOROVOD_HOSTNAME']}-{os.environ['HOROVOD_LOCAL_RANK']}"
    Rank(folder, training, place).run()


if __name__ == "__main__":
    main(sys.argv[1:])
