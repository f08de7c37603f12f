"""One distributed rank that is a thread."""

from __future__ import annotations

import random
from typing import Any

import torch

import commsched
from scheduler.ir.profile import Layer, Profile
from tests.checker.threads import late_backend
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


def arguments(world: World, base: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the arguments of ``DistributedOptimizer`` that the program's options name."""
    options = world.options
    mine = {id(p) for group in base.param_groups for p in group["params"]}
    named = [(n, p) for n, p in world.model.named_parameters() if id(p) in mine]
    trained = [(n, p) for n, p in named if p.requires_grad]
    profile = made_up_profile([n for n, _ in trained], [p for _, p in trained])
    compression = getattr(commsched.Compression, options["compression"])
    schedule = options["schedule"]
    if options["gather"] == "parameters" and schedule in ALL_REDUCING:
        schedule = "dear"
    return {
        "named_parameters": named,
        "compression": compression,
        "backward_passes_per_step": options["passes"],
        "op": OPS[options["op"]],
        "gradient_predivide_factor": options["predivide"],
        "schedule": schedule,
        "gather": options["gather"],
        "bucket_mb": options["bucket_mb"],
        "profile": profile if options["profile"] and options["schedule"] != "auto" else None,
        "row_sparse": options["row_sparse"],
        "model": world.model if options["model"] else None,
    }


class ThreadWorld(World):
    """``job`` has the meeting of the threads and ends them all when one has failed."""

    def __init__(self, job: Any, rank: int) -> None:
        self.job, self.every = job, []
        program = job.program
        super().__init__(program.seed, program.options, rank, program.options["ranks"])

    def distributed(self, base: torch.optim.Optimizer) -> Any:
        options, number = self.options, len(self.every)
        dice = random.Random(f"{self.seed} {self.rank} {number}")
        backend = late_backend(
            self.job.meeting, self.rank, options["stream"], options["lateness"], dice, self.job.patience
        )
        self.job.made(backend)
        wrapped = commsched.DistributedOptimizer(
            base, **arguments(self, base), process_set=backend.ranks.process_set, transport=backend
        )
        self.every.append(wrapped)
        return wrapped

    def end(self) -> None:
        """Close every optimizer, whatever has happened."""
        for wrapped in self.every:
            try:
                wrapped.close(wait=False)
            except Exception:
                self.job.close_failures += 1
        self.every.clear()
