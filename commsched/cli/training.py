"""Run `commsched train`: make the job, the plan and the pipeline of its options, and train."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import commsched
from commsched.checkpoint import is_saved
from commsched.cli.options import cuts_of, job_name, job_of
from commsched.pipeline import Chain, Job, Pipeline
from commsched.pipeline.job import Data
from commsched.training import loop
from commsched.training.loop import Decay, Training, TrainingSettings, pipeline_of, state_of
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.inputs import whole
from scheduler.pipelines.convert import read_plan


def run(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    job = _with_options(job_of(arguments), arguments)
    plan = _plan(arguments, job.model)
    set_rank(arguments, plan.ranks if plan is not None else world_of(arguments))
    commsched.init()
    try:
        _train(arguments, job, plan)
    finally:
        commsched.shutdown()


def _train(arguments: argparse.Namespace, job: Job, plan: PipelinePlan | None) -> None:
    if arguments.load:
        _load(arguments.load, job.model)
    if arguments.save and commsched.rank() == 0:  # now, and not when all has been trained
        Path(arguments.save).absolute().parent.mkdir(parents=True, exist_ok=True)
    decay = None if arguments.decay is None else Decay(arguments.decay, arguments.steps)
    kept = arguments.checkpoint is not None and is_saved(arguments.checkpoint)
    if arguments.warmup_steps and not kept:
        _warm_up(arguments, job)
    pipeline = pipeline_of(
        job,
        plan,
        schedule=arguments.schedule,
        stages=arguments.stages,
        replicas=replicas_of(arguments),
        microbatches=1 if arguments.microbatches is None else arguments.microbatches,
        cuts=cuts_of(arguments.cuts),
        across=arguments.across,
        on_step=decay,
    )
    if job.data is None:
        _by_steps(arguments, pipeline, job, plan)
    else:
        _by_epochs(arguments, pipeline, job.data, decay)
    state = state_of(pipeline) if arguments.save else {}
    if arguments.save and pipeline.rank == 0:
        torch.save(state, arguments.save)
    pipeline.close()


def _by_epochs(arguments: argparse.Namespace, pipeline: Pipeline, data: Data, decay: Decay | None) -> None:
    if arguments.eval and data.test is None:
        raise ValueError("--eval needs test data, and the job has none")
    if arguments.checkpoint_every and not arguments.checkpoint:
        raise ValueError("--checkpoint-every needs --checkpoint DIR")
    settings = TrainingSettings(
        rows=arguments.rows,
        epochs=arguments.epochs,
        evaluate=arguments.eval,
        workers=arguments.workers,
        seed=arguments.seed,
        checkpoint=arguments.checkpoint,
        every=arguments.checkpoint_every,
    )
    training = Training(pipeline, data, settings)
    if decay is not None:
        decay.steps = arguments.epochs * len(training.sampler)
    epochs = training.run()
    if arguments.results and pipeline.rank == 0:
        facts = {
            "job": job_name(arguments),
            "schedule": pipeline.program.policy,
            "ranks": pipeline.fabric.size,
            "delays": pipeline.delays,
            "rows": arguments.rows,
        }
        loop.write(arguments.results, facts, epochs)


def _by_steps(arguments: argparse.Namespace, pipeline: Pipeline, job: Job, plan: PipelinePlan | None) -> None:
    if arguments.checkpoint or arguments.results or arguments.eval:
        raise ValueError(
            "--checkpoint, --results and --eval need a job with data sets; this one has batches only: return"
            " data (commsched.pipeline.job.Data) after the optimizer"
        )
    batches = iter(job.batches(arguments.rows))
    seconds = _timed(pipeline, batches, arguments.steps, pipeline.program.policy)
    if pipeline.rank == 0:
        expected = ""
        if plan is not None and plan.period:
            expected = f"; the plan expects {plan.period:.4f} s ({plan.period / seconds - 1:+.1%})"
        print(f"{seconds:.4f} s per step, {arguments.rows / seconds:.1f} rows per second{expected}")


def _warm_up(arguments: argparse.Namespace, job: Job) -> None:
    """Train data parallel and leave the weights in the job's model."""
    first = pipeline_of(job, None, schedule="gpipe", stages=1, replicas=commsched.size())
    steps, name = arguments.warmup_steps, "data parallel"
    if job.data is None:
        _timed(first, iter(job.batches(arguments.rows)), steps, name)
    else:
        train: Any = job.data.train
        sampler = first.sampler(train, arguments.rows, seed=arguments.seed, drop_last=True)
        loader = DataLoader(train, batch_sampler=sampler)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        _timed(first, batches, steps, name, local=True)
    job.model.load_state_dict(state_of(first))
    first.close()


def _timed(pipeline: Pipeline, batches: Any, steps: int, name: str, local: bool = False) -> float:
    """Train and return the seconds of one step, measured without the first third and without the drain."""
    first_timed, losses = min(steps - 1, steps // 3), []
    start = time.perf_counter()
    for number in range(steps):
        if number == first_timed:
            start = time.perf_counter()
        losses.append(pipeline.step(next(batches), local=local))
    seconds = (time.perf_counter() - start) / (steps - first_timed)
    losses += pipeline.drain()
    if pipeline.rank == 0:
        for number, loss in enumerate(value for value in losses if value is not None):
            print(f"{name} step {number}: loss {loss:.6f}")
    return seconds


# -- reading the options -------------------------------------------------------------------------------------


def _load(path: str, model: nn.Module) -> None:
    """Take the weights of a file as far as they fit: a head for other classes stays as it is."""
    try:
        state, own = torch.load(path, weights_only=True), model.state_dict()
    except OSError as error:
        raise ValueError(f"--load {path}: {error.strerror}") from None
    fitting = {
        name: own[name].shape for name in own if name in state and state[name].shape == own[name].shape
    }
    if not fitting:
        raise ValueError(
            f"--load {path}: none of its tensors fits the model, whose first is {next(iter(own))}"
        )
    model.load_state_dict({name: state[name] for name in fitting}, strict=False)
    new = [name for name in own if name not in fitting]
    if commsched.rank() == 0:
        print(f"starts from {path}" + (f"; not in it, or of another shape: {', '.join(new)}" if new else ""))


def _with_options(job: Job, arguments: argparse.Namespace) -> Job:
    for name in ("lr", "momentum", "weight_decay"):
        if getattr(arguments, name) is not None and arguments.optimizer is None:
            raise ValueError(
                f"--{name.replace('_', '-')} needs --optimizer: else the job's own optimizer trains"
            )
    if arguments.momentum is not None and arguments.optimizer != "sgd":
        raise ValueError(f"--momentum is for --optimizer sgd, not {arguments.optimizer}")
    if arguments.optimizer is None:
        return job
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind: Callable[..., torch.optim.Optimizer] = kinds[arguments.optimizer]
    rate = 0.01 if arguments.lr is None else arguments.lr
    options = {"lr": rate, "weight_decay": arguments.weight_decay or 0.0}
    if arguments.optimizer == "sgd":
        options["momentum"] = 0.9 if arguments.momentum is None else arguments.momentum
    return replace(job, optimizer=lambda params: kind(params, **options))


def _plan(arguments: argparse.Namespace, model: nn.Module) -> PipelinePlan | None:
    if arguments.graph and not arguments.conf:
        raise ValueError("--graph belongs to --conf; a plan of `commsched partition` needs no graph")
    for name in ("cuts", "stages", "replicas", "microbatches", "across"):
        if (arguments.plan or arguments.conf) and getattr(arguments, name) not in (None, False):
            raise ValueError(f"--{name} belongs to --schedule; a plan says all of that itself")
    if arguments.plan:
        return PipelinePlan.load(arguments.plan)
    if not arguments.conf:
        return None
    sizes = None if arguments.graph else Chain(model).sizes
    return read_plan(arguments.conf, arguments.graph, sizes)


def replicas_of(arguments: argparse.Namespace) -> int | list[int]:
    words = (arguments.replicas or "1").split(",")
    what = f"--replicas is a number, or one for each stage such as 4,3,1, not {arguments.replicas!r}: each"
    counts = [whole(word.strip(), what) for word in words]
    return counts if len(counts) > 1 else counts[0]


def world_of(arguments: argparse.Namespace) -> int | None:
    """The ranks that --stages and --replicas need."""
    replicas = replicas_of(arguments)
    if isinstance(replicas, list):
        return sum(replicas)
    return arguments.stages * replicas if arguments.stages else None


def set_rank(arguments: argparse.Namespace, world: int | None) -> None:
    """Set the variables that a launcher would set. ``world``: the ranks of the plan, if it is known."""
    if arguments.rank is None:
        return
    size = arguments.world_size or world
    if size is None:
        raise ValueError("--rank needs the number of ranks: --world-size, a plan, or --stages")
    if world is not None and size != world:
        raise ValueError(f"--world-size is {size}, and the plan is for {world} ranks")
    if not 0 <= arguments.rank < size:
        raise ValueError(f"--rank must be 0 to {size - 1}, got {arguments.rank}")
    local = arguments.rank if arguments.local_rank is None else arguments.local_rank
    os.environ.update(
        RANK=str(arguments.rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(local),
        MASTER_ADDR=arguments.master_addr,
        MASTER_PORT=str(arguments.master_port),
    )
