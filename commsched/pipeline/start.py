"""Start of a pipeline, once before the first step: choose the program, agree on it, share weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.errors import CommError
from commsched.pipeline.build import bare_profile
from commsched.pipeline.chain import Chain
from commsched.pipeline.fabric import Fabric, Lane
from commsched.pipeline.messages import receive_object, receive_tree, send_object, send_tree
from commsched.pipeline.stage import Stage
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.layout import Layout
from scheduler.ir.program import Program, delays, depth
from scheduler.pipelines.build import generate, orders_of, program_of, stage_count
from scheduler.validate import validate


def check_functions(loss: Any, optimizer: Any, count: Any) -> None:
    """``ValueError`` for what is easily passed in place of these functions."""
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise ValueError(
            f"optimizer= is a function that makes an optimizer of a stage's parameters, and got a {name} that"
            f" has parameters already: pass lambda params: {name}(params, ...)"
        )
    for name, function in (("loss", loss), ("optimizer", optimizer), ("count", count)):
        if not callable(function) and (function is not None or name == "loss"):
            raise ValueError(f"{name}= must be a function, got {function!r}")
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        names = ", ".join(name for name, _ in loss.named_parameters())
        raise ValueError(
            f"loss= has parameters ({names}) that would never be stepped: a pipeline trains those of the"
            " model; make them part of the model's last layer, or freeze them"
        )
    if count is None and _reduction(loss) == "sum":
        raise ValueError(
            "loss= has reduction='sum', and a pipeline takes the mean over the rows: pass reduction='mean',"
            " or count= with the number of terms that the loss of some targets adds up"
        )
    if count is not None and _reduction(loss) == "mean":
        raise ValueError(
            "loss= has reduction='mean', and a pipeline with count= divides a sum by the number of its terms:"
            " pass reduction='sum'"
        )


def _reduction(loss: Any) -> str | None:
    """How a loss of torch reduces its terms; None for other losses, whose own code may go on from there."""
    is_module = isinstance(loss, nn.Module)
    made_by = type(loss) if is_module else loss.func if isinstance(loss, partial) else loss
    if not str(getattr(made_by, "__module__", "")).startswith("torch.nn"):
        return None
    if is_module:
        return getattr(loss, "reduction", None)
    parameter = signature(loss).parameters.get("reduction")
    return None if parameter is None else parameter.default


def choose(
    chain: Chain,
    plan: PipelinePlan | str | Path | None,
    schedule: str | Program,
    microbatches: int,
    mesh: tuple[int, int | Sequence[int]],
    cuts: Sequence[int | str] | None,
    options: dict[str, Any],
    others: Sequence[str] = (),
    **layout: Any,
) -> tuple[Program, Chain]:
    """The program (a plan's, a given one, or that of a schedule by name), and the chain whose layers it
    counts. ``options`` are the schedule's own; ``others``: the names of the caller's.
    """
    if plan is not None:
        return planned(plan, chain)
    if isinstance(schedule, Program):
        return schedule, chain
    stages = stage_count(orders_of(schedule, mesh[0], microbatches, options, others))
    chosen = chain.even_cuts(stages) if cuts is None else chain.cuts(cuts)
    program = generate(
        schedule,
        mesh[0],
        microbatches,
        replicas=mesh[1],
        profile=bare_profile(chain, type(chain.model).__name__, chosen),
        cuts=chosen,
        **layout,
        **options,
    )
    return program, chain


def planned(plan: PipelinePlan | str | Path, chain: Chain) -> tuple[Program, Chain]:
    """The program of a plan file, if it is for this model, and the chain whose layers the program counts."""
    plan = plan if isinstance(plan, PipelinePlan) else PipelinePlan.load(plan)
    if len(plan.sizes) > len(chain):
        plan, chain = _on_nodes(plan, chain)
    plan.check_model(chain.sizes)
    return program_of(plan, bare_profile(chain, plan.model, plan.cuts), check_sizes=False), chain


def _on_nodes(plan: PipelinePlan, chain: Chain) -> tuple[PipelinePlan, Chain]:
    """A plan that counts the nodes of a graph.txt: on the nodes of the traced model where they are the same,
    on its layers where the graph's nodes are finer.
    """
    nodes = chain.by_node()
    # A graph has nodes for the model's inputs, a trace does not count them.
    inputs = len(plan.sizes) - len(nodes)
    if (
        inputs >= 0
        and plan.sizes == (0,) * inputs + nodes.sizes
        and inputs < (*plan.cuts, len(plan.sizes))[1]
    ):
        return plan.after(inputs), nodes
    return plan.on(chain.sizes), chain


def check(
    program: Program, chain: Chain, fabric: Fabric, leaves_gradients: bool, clips: bool = False
) -> Layout:
    """The program's layout, if it can run here. ``leaves_gradients``: the caller takes the steps; ``clips``:
    a step needs the gradients of all stages.
    """
    layout = program.pipeline
    if layout is None:
        raise ValueError("the program has no stages; commsched.DistributedOptimizer runs it")
    if program.layers != len(chain):
        raise ValueError(
            f"the program is for a model of {program.layers} layers, this model has {len(chain)};"
            " make a program for this model"
        )
    if layout.world != fabric.size:
        raise ValueError(
            f"stages on {' + '.join(str(len(ranks)) for ranks in dict.fromkeys(layout.ranks))} ranks need"
            f" {layout.world} ranks, and there are {fabric.size}; start {layout.world} processes, or choose"
            " another mesh=, placements= or plan="
        )
    validate(program)
    if leaves_gradients and clips:
        raise ValueError(
            "max_norm= and skip_nonfinite= are for steps of the pipeline, and with optimizer=None the caller"
            " takes them: call pipeline.clip_grad_norm_() before each"
        )
    asynchronous = any(delays(program)) or depth(program) > 0
    if clips and asynchronous:
        raise ValueError(
            f"schedule {program.policy!r} is asynchronous: it steps stages before others have the gradients"
            " of the same step, so there is no norm of all for max_norm= or skip_nonfinite=; use a"
            " synchronous schedule like 1f1b or gpipe"
        )
    if leaves_gradients and asynchronous:
        raise ValueError(
            f"schedule {program.policy!r} begins a step before the last one has ended, so the pipeline must"
            " take the steps itself; pass optimizer=, or use a schedule like 1f1b or gpipe"
        )
    return layout


def agree(fabric: Fabric, lane: Lane, mine: str) -> None:
    """Raises ``CommError`` on every rank unless all have the same text."""
    peers = [rank for rank in range(fabric.size) if rank != fabric.rank]
    pending = [p for peer in peers for p in send_object(lane, peer, mine)]
    everyone = [mine if rank == fabric.rank else receive_object(lane, rank) for rank in range(fabric.size)]
    for sent in pending:
        sent.wait()
    others = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if others:
        listed = "; ".join(f"rank {rank} has {everyone[rank]}" for rank in others[:4])
        raise CommError(
            f"rank {fabric.rank}: all ranks must make the same pipeline, but rank 0 has {everyone[0]} and"
            f" {listed}; pass the same model, schedule and options on every rank"
        )


def fill(
    chain: Chain,
    program: Program,
    fabric: Fabric,
    lane: Lane,
    device: torch.device | str | None,
    options: str,
) -> None:
    """Gives this rank's stages their parameters where the model came without, once all ranks are known to
    make the same pipeline. Those that a factory makes with random numbers are the same for all ranks as in
    one process that starts like rank 0. ``options``: others that all ranks must have.
    """
    agree(fabric, lane, f"program {program.hash}, layers of {chain.sizes} bytes, {options}")
    layout = program.layout
    random, pending = torch.get_rng_state(), []
    if fabric.rank == 0:
        pending = [p for peer in range(1, fabric.size) for p in send_tree(lane, peer, random)]
    else:
        random = receive_tree(lane, 0)
    mine = [layout.layers(number, len(chain)) for number in layout.held_by(fabric.rank)]
    chain.fill(mine, random, device)
    for sent in pending:
        sent.wait()


def share_weights(layout: Layout, fabric: Fabric, lane: Lane, stages: dict[int, Stage]) -> None:
    """Replicas start with their first rank's weights and buffers."""
    pending = []
    for number, stage in stages.items():
        ranks = layout.members(number)
        if fabric.rank == ranks[0]:
            mine = stage.module.state_dict()
            pending += [p for peer in ranks[1:] for p in send_tree(lane, peer, mine)]
        else:
            stage.load(receive_tree(lane, ranks[0]))
    for sent in pending:
        sent.wait()
