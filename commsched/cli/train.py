"""Train a model in the stages of a plan or of AshPipe's files; start it on every rank with a launcher."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from commsched.cli.profile import add_job

if TYPE_CHECKING:
    from torch import nn

    from commsched.pipeline import Pipeline
    from scheduler.formats.pipeline_plan import PipelinePlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", metavar="FILE", help="plan of `commsched partition`")
    source.add_argument("--conf", metavar="FILE", help="hybrid_conf.json of PipeDream or AshPipe")
    parser.add_argument(
        "--graph",
        metavar="FILE",
        help="with --conf: partitioned graph, gpus=N.txt (default: the model's layers)",
    )
    parser.add_argument(
        "--rows", type=int, required=True, metavar="N", help="rows of one optimizer step, over all replicas"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps")
    parser.add_argument(
        "--warmup-steps",
        type=int,
        default=0,
        metavar="N",
        help="data-parallel steps before the pipeline starts",
    )
    parser.add_argument("--save", metavar="FILE", help="write the trained model's state_dict to FILE")


def run(arguments: argparse.Namespace) -> None:
    import torch

    import commsched
    from commsched.pipeline import Pipeline
    from commsched.pipeline.job import load_job

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    model, loss, make_batches, optimizer = load_job(arguments.job)
    plan = _plan(arguments, model)
    commsched.init()
    batches = iter(make_batches(arguments.rows))
    common: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    if arguments.warmup_steps:
        first = Pipeline(model, "gpipe", mesh=(1, commsched.size()), **common)
        _train(first, batches, arguments.warmup_steps, "data parallel")
        model.load_state_dict(first.state_dict())
        first.close()
        del first
    pipeline = Pipeline(model, plan=plan, **common)
    del model  # the pipeline keeps this rank's stages; the others' parameters are freed
    seconds = _train(pipeline, batches, arguments.steps, pipeline.program.policy)
    state = pipeline.state_dict() if arguments.save else {}
    if commsched.rank() == 0:
        expected = f"; the plan expects {plan.period:.4f} s ({plan.period / seconds - 1:+.1%})"
        print(
            f"{seconds:.4f} s per step, {arguments.rows / seconds:.1f} rows per second"
            + (expected if plan.period else "")
        )
        if arguments.save:
            torch.save(state, arguments.save)
    pipeline.close()
    commsched.shutdown()


def _plan(arguments: argparse.Namespace, model: nn.Module) -> PipelinePlan:
    from commsched.pipeline.chain import Chain
    from scheduler.formats.pipeline_plan import PipelinePlan
    from scheduler.pipelines.planner.convert import read_plan

    if arguments.plan:
        if arguments.graph:
            raise ValueError("--graph belongs to --conf; a plan of `commsched partition` needs no graph")
        return PipelinePlan.load(arguments.plan)
    sizes = None if arguments.graph else Chain(model).sizes
    return read_plan(arguments.conf, arguments.graph, sizes)


def _train(pipeline: Pipeline, batches: Any, steps: int, name: str) -> float:
    """Train and return the seconds of one step, measured without the first third and without the drain."""
    first_timed, losses = min(steps - 1, steps // 3), []
    start = time.perf_counter()
    for number in range(steps):
        if number == first_timed:
            start = time.perf_counter()
        losses.append(pipeline.step(next(batches)))
    seconds = (time.perf_counter() - start) / (steps - first_timed)
    losses += pipeline.drain()
    if pipeline.rank == 0:
        for number, loss in enumerate(value for value in losses if value is not None):
            print(f"{name} step {number}: loss {loss:.6f}")
    return seconds
