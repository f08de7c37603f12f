"""Train a model: in one process, or in stages and replicas that a plan, AshPipe's files or options describe.

Start it on every rank with a launcher, or rank by rank with --rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsched.cli.job_options import add_job, job_of, name_of
from commsched.cli.options import cuts_of
from commsched.cli.rank_options import add_ranks, set_rank

if TYPE_CHECKING:
    import torch
    from torch import nn

    from commsched.pipeline import Job, Pipeline
    from commsched.pipeline.job import Data
    from scheduler.formats.pipeline_plan import PipelinePlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    _add_stages(parser)
    _add_training(parser)
    add_ranks(parser)


def _add_stages(parser: argparse.ArgumentParser) -> None:
    stages = parser.add_argument_group("stages: a plan, AshPipe's files, or a schedule by name")
    source = stages.add_mutually_exclusive_group()
    source.add_argument("--plan", metavar="FILE", help="plan of `commsched partition`")
    source.add_argument("--conf", metavar="FILE", help="hybrid_conf.json of PipeDream or AshPipe")
    source.add_argument("--schedule", default="1f1b", help="order of the micro-batches")
    stages.add_argument(
        "--graph",
        metavar="FILE",
        help="with --conf: partitioned graph, gpus=N.txt (default: the model's layers)",
    )
    stages.add_argument(
        "--stages", type=int, metavar="S", help="ranks of one replica (default: all ranks, one replica)"
    )
    stages.add_argument(
        "--replicas", default="1", metavar="R", help="replicas, or one number for each stage: 4,3,1"
    )
    stages.add_argument("--microbatches", type=int, default=1, metavar="M", help="micro-batches of a step")
    stages.add_argument(
        "--cuts",
        metavar="A,B,...",
        help="layers with which the later stages begin: numbers, or names of modules (default: even)",
    )
    stages.add_argument(
        "--across",
        action="store_true",
        help="bundle: fronts on the first half of the hosts, rears on the rest",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("training")
    training.add_argument(
        "--rows", type=int, required=True, metavar="N", help="rows of one optimizer step, over all replicas"
    )
    training.add_argument("--epochs", type=int, default=1, metavar="N", help="epochs, of jobs with data sets")
    training.add_argument(
        "--steps", type=int, default=20, metavar="N", help="optimizer steps, of jobs without data sets"
    )
    training.add_argument(
        "--warmup-steps",
        type=int,
        default=0,
        metavar="N",
        help="data-parallel steps before the pipeline starts",
    )
    training.add_argument(
        "--optimizer", choices=("sgd", "adam", "adamw"), help="optimizer (default: the job's: sgd)"
    )
    training.add_argument("--lr", type=float, default=0.01, help="with --optimizer: learning rate")
    training.add_argument("--momentum", type=float, default=0.9, help="with --optimizer sgd: momentum")
    training.add_argument("--weight-decay", type=float, default=0.0, help="with --optimizer: weight decay")
    training.add_argument(
        "--decay", choices=("linear", "cosine"), help="let the learning rate fall to 0 (default: constant)"
    )
    training.add_argument("--load", metavar="FILE", help="start from the weights (state_dict) in FILE")
    training.add_argument("--eval", action="store_true", help="score the test data after every epoch")
    training.add_argument("--workers", type=int, default=0, metavar="N", help="processes that read data")
    training.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="write checkpoints into DIR, and continue from the latest one there",
    )
    training.add_argument(
        "--checkpoint-every", type=int, default=0, metavar="STEPS", help="besides one after every epoch"
    )
    training.add_argument(
        "--results", type=Path, metavar="DIR", help="write results.json and curves.svg into DIR"
    )
    training.add_argument("--save", metavar="FILE", help="write the trained model's state_dict to FILE")


def run(arguments: argparse.Namespace) -> None:
    import torch

    import commsched

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    job = _with_options(job_of(arguments), arguments)
    plan = _plan(arguments, job.model)
    set_rank(arguments, plan.ranks if plan is not None else _world(arguments))
    commsched.init()
    try:
        _train(arguments, job, plan)
    finally:
        commsched.shutdown()


def _train(arguments: argparse.Namespace, job: Job, plan: PipelinePlan | None) -> None:
    import torch

    from commsched.training.build import pipeline_of, state_of

    on_step = _on_step(arguments, job.data)
    started = arguments.checkpoint is not None and (arguments.checkpoint / "latest").exists()
    if arguments.warmup_steps and not started:
        _warm_up(arguments, job)
    pipeline = pipeline_of(
        job,
        plan,
        schedule=arguments.schedule,
        stages=arguments.stages,
        replicas=_replicas(arguments),
        microbatches=arguments.microbatches,
        cuts=cuts_of(arguments.cuts),
        across=arguments.across,
        on_step=on_step,
    )
    if job.data is None:
        _by_steps(arguments, pipeline, job, plan)
    else:
        _by_epochs(arguments, pipeline, job.data)
    state = state_of(pipeline) if arguments.save else {}
    if arguments.save and pipeline.rank == 0:
        torch.save(state, arguments.save)
    pipeline.close()


def _by_epochs(arguments: argparse.Namespace, pipeline: Pipeline, data: Data) -> None:
    from commsched.training import results
    from commsched.training.loop import Settings, Training

    settings = Settings(
        rows=arguments.rows,
        epochs=arguments.epochs,
        evaluate=arguments.eval,
        workers=arguments.workers,
        seed=arguments.seed,
        checkpoint=arguments.checkpoint,
        every=arguments.checkpoint_every,
    )
    epochs = Training(pipeline, data, settings).run()
    if arguments.results and pipeline.rank == 0:
        facts = {
            "job": name_of(arguments),
            "schedule": pipeline.program.policy,
            "ranks": pipeline.fabric.size,
            "delays": pipeline.delays,
            "rows": arguments.rows,
        }
        results.write(arguments.results, facts, epochs)


def _by_steps(arguments: argparse.Namespace, pipeline: Pipeline, job: Job, plan: PipelinePlan | None) -> None:
    if arguments.checkpoint or arguments.results or arguments.eval:
        raise ValueError(
            "--checkpoint, --results and --eval need a job with data sets; this one has batches only: return"
            " data (commsched.pipeline.job.Data) behind the optimizer"
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
    import itertools

    from torch.utils.data import DataLoader

    import commsched
    from commsched.training.build import pipeline_of, state_of

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


def _with_options(job: Job, arguments: argparse.Namespace) -> Job:
    """The job with the weights of --load and the optimizer of --optimizer."""
    import torch

    if arguments.load:
        job.model.load_state_dict(torch.load(arguments.load, weights_only=True))
    if arguments.optimizer is None:
        return job
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind: Callable[..., torch.optim.Optimizer] = kinds[arguments.optimizer]
    options = {"lr": arguments.lr, "weight_decay": arguments.weight_decay}
    if arguments.optimizer == "sgd":
        options["momentum"] = arguments.momentum
    return job._replace(optimizer=lambda params: kind(params, **options))


def _on_step(arguments: argparse.Namespace, data: Data | None) -> Any:
    if arguments.decay is None:
        return None
    from commsched.training.loop import Decay

    size: Any = None if data is None else data.train
    steps = arguments.steps if size is None else arguments.epochs * -(-len(size) // arguments.rows)
    return Decay(arguments.decay, steps)


def _replicas(arguments: argparse.Namespace) -> int | list[int]:
    words = arguments.replicas.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise ValueError(
            f"--replicas is a number, or one for each stage such as 4,3,1, not {arguments.replicas!r}"
        )
    counts = [int(word) for word in words]
    return counts if len(counts) > 1 else counts[0]


def _world(arguments: argparse.Namespace) -> int | None:
    """The ranks that --stages and --replicas need."""
    replicas = _replicas(arguments)
    if isinstance(replicas, list):
        return sum(replicas)
    return arguments.stages * replicas if arguments.stages else None


def _plan(arguments: argparse.Namespace, model: nn.Module) -> PipelinePlan | None:
    from commsched.pipeline.chain import Chain
    from scheduler.formats.pipeline_plan import PipelinePlan
    from scheduler.pipelines.planner.convert import read_plan

    if arguments.graph and not arguments.conf:
        raise ValueError("--graph belongs to --conf; a plan of `commsched partition` needs no graph")
    if (arguments.plan or arguments.conf) and arguments.cuts:
        raise ValueError("--cuts belongs to --schedule; a plan has cuts of its own")
    if arguments.plan:
        return PipelinePlan.load(arguments.plan)
    if not arguments.conf:
        return None
    sizes = None if arguments.graph else Chain(model).sizes
    return read_plan(arguments.conf, arguments.graph, sizes)
