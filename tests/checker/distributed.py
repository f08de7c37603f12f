"""One distributed rank of a program: a thread of this process, or a process."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

import commsched
from scheduler.ir.profile import Layer, Profile
from tests.checker.threads import Held, late_backend
from tests.checker.world import World

ALL_REDUCING = ("wfbp", "mgwfbp", "bytescheduler")
OPS = {"average": commsched.Average, "sum": commsched.Sum}


def made_up_profile(names: list[str], params: list[torch.Tensor]) -> Profile:
    """Return times made up: with a profile, an optimizer plans at once."""
    kinds = list(dict.fromkeys(p.dtype for p in params))
    layers = [Layer("(outside)", 1e-3, 0.0, 0)]
    for name, p in zip(names, params):
        layers.append(Layer(name, 1e-3, 2e-3, p.numel() * p.element_size(), group=kinds.index(p.dtype)))
    return Profile("made up", tuple(layers))


def arguments(world: World, base: torch.optim.Optimizer, model: Any) -> dict[str, Any]:
    """Return the arguments of ``DistributedOptimizer`` that the program's options name."""
    options = world.options
    mine = {id(p) for group in base.param_groups for p in group["params"]}
    named = [(n, p) for n, p in model.named_parameters() if id(p) in mine]
    trained = [(n, p) for n, p in named if p.requires_grad]
    profile = made_up_profile([n for n, _ in trained], [p for _, p in trained])
    compression = getattr(commsched.Compression, options["compression"])
    sharded = options["gather"] == "parameters" and model is world.model
    schedule = options["schedule"]
    if sharded and schedule in ALL_REDUCING:
        schedule = "dear"
    return {
        "named_parameters": named,
        "compression": compression,
        "backward_passes_per_step": options["passes"],
        "op": OPS[options["op"]],
        "gradient_predivide_factor": options["predivide"],
        "schedule": schedule,
        "gather": "parameters" if sharded else "gradients",
        "early_step": sharded and options["early_step"],
        "sparse_as_dense": options["sparse_as_dense"],
        "num_groups": options["groups"],
        "bucket_mb": options["bucket_mb"],
        "profile": profile if options["profile"] and options["schedule"] != "auto" else None,
        "row_sparse": "auto" if sharded or model is not world.model else options["row_sparse"],
        "model": model if isinstance(model, torch.nn.Module) else torch.nn.Module(),
    }


class DistributedWorld(World):
    """Keeps all optimizers that it has wrapped, to close them at the end."""

    def __init__(self, program: Any, rank: int) -> None:
        self.every: list[Any] = []
        super().__init__(program.seed, program.options, rank, program.options["ranks"])

    def distributed(self, base: torch.optim.Optimizer, model: Any) -> Any:
        wrapped = commsched.DistributedOptimizer(base, **arguments(self, base, model), **self.place())
        self.every.append(wrapped)
        return wrapped

    def place(self) -> dict[str, Any]:
        """Return the arguments that say where the ranks are."""
        raise NotImplementedError

    def end(self) -> int:
        """Close every optimizer, whatever has happened; return how many raised."""
        raised = 0
        for wrapped in self.every:
            try:
                wrapped.close(wait=False)
            except Exception:
                raised += 1
        self.every.clear()
        return raised


class ThreadWorld(DistributedWorld):
    """``job`` has the meeting of the threads and ends them all when one has failed."""

    def __init__(self, job: Any, rank: int) -> None:
        self.job, self.held = job, Held()
        super().__init__(job.program, rank)

    def place(self) -> dict[str, Any]:
        options, number = self.options, len(self.every)
        dice = random.Random(f"{self.seed} {self.rank} {number}")
        backend = late_backend(
            self.job.meeting,
            self.rank,
            options["stream"],
            self.held,
            options["lateness"],
            dice,
            self.job.patience,
            self.job.watched(self.rank),
        )
        self.job.made(backend)
        return {"process_set": backend.ranks.process_set, "transport": backend}


class ProcessWorld(DistributedWorld):
    """Waits now and then, other times on every rank, so that messages are on their way when others read."""

    def __init__(self, program: Any, rank: int) -> None:
        self.delays = random.Random(f"delays {program.seed} {rank}")
        super().__init__(program, rank)

    def place(self) -> dict[str, Any]:
        return {"transport": self.options["transport"]}

    def pause(self) -> None:
        if self.delays.random() < 0.3:
            time.sleep(self.delays.random() * 0.004)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.pause()
        return super().forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self.pause()
        super().backward(*args, **kwargs)
        self.pause()

    def step(self) -> None:
        self.pause()
        super().step()

    def join(self) -> None:
        commsched.join()
