"""Plans as the files of PipeDream and AshPipe, and back: a partitioned graph and a ``hybrid_conf.json``.

    write_files(plan, Graph.load("graph.txt"), "converted")    # gpus=4.txt and hybrid_conf.json in there
    plan = read_plan("converted/hybrid_conf.json", "converted/gpus=4.txt")

The graph has the layers and their stages, the other file the ranks of each stage, its depth and whether it
recomputes. The rest of a plan (``REST``) stands in a field of its own that the other systems do not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.formats.pipedream import OURS, Graph, HybridConf, format_graph, parse_hybrid_conf
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.codec import decode
from scheduler.ir.inputs import InputError, read_json, reading
from scheduler.ir.link import Cluster
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import delays
from scheduler.pipelines.build import generate, program_of
from scheduler.pipelines.report import examine
from scheduler.simulate.costs import memory_by_rank, stages_of

CONF = "hybrid_conf.json"
REST = ("model", "schedule", "microbatches", "placement", "devices", "period", "bottleneck", "memory")
"""The fields of a plan for which both formats have no field."""


def to_conf(plan: PipelinePlan) -> HybridConf:
    stages = len(plan.cuts)
    if len(plan.replicas) != stages:
        raise ValueError(
            f"the plan's {stages} stages are on {len(plan.replicas)} positions, and hybrid_conf.json allows a"
            " rank one stage; plan with a schedule that has one stage on a rank"
        )
    return HybridConf(
        modules=tuple(range(stages)),
        ranks=plan.rank_map,
        depths=_depths(plan),
        recompute=plan.recompute,
        ours={name: getattr(plan, name) for name in REST},
    )


def write_files(plan: PipelinePlan, graph: Graph, folder: str | Path) -> tuple[Path, Path]:
    """Writes ``gpus=N.txt`` and ``hybrid_conf.json``; ``graph`` is of the profile that was partitioned."""
    plan.check_model(graph.profile(plan.model).sizes)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / f"gpus={plan.ranks}.txt", folder / CONF
    files[0].write_text(format_graph(graph.with_stages(plan.cuts)))
    files[1].write_text(to_conf(plan).text())
    return files


def read_plan(
    conf: str | Path, graph: str | Path | None = None, sizes: Sequence[int] | None = None, **options: Any
) -> PipelinePlan:
    """The plan in a ``hybrid_conf.json`` and its graph. ``sizes``: weight bytes of the layers of the model
    that it is for, needed without a graph. ``options``: fields of the plan (``schedule``, ...) to be used
    instead of the file's.
    """
    if graph is None and sizes is None:
        raise InputError(f"{conf}: needs the partitioned graph (gpus=N.txt) or a model to read it for")
    hybrid = parse_hybrid_conf(read_json(conf), str(conf))
    if graph is not None:
        plan = to_plan(hybrid, Graph.load(graph), **options)
        return plan if sizes is None else plan.on(tuple(sizes))
    layers = tuple(Layer(f"layer{number}", 1.0, 2.0, size) for number, size in enumerate(sizes or ()))
    return _plan(hybrid, Profile("model", layers), hybrid.cuts_alone(len(layers)), options)


def to_plan(conf: HybridConf, graph: Graph, **options: Any) -> PipelinePlan:
    cuts = conf.cuts(graph.cuts(), graph.where)
    return _plan(conf, graph.profile(Path(graph.where).stem), cuts, options)


def _plan(conf: HybridConf, profile: Profile, cuts: tuple[int, ...], options: dict[str, Any]) -> PipelinePlan:
    world = sum(map(len, conf.ranks))
    known: dict[str, Any] = {
        "model": profile.name,
        "schedule": "ashpipe",
        "microbatches": 1,
        "placement": "bubble",
        "devices": tuple(range(world)),
        "period": 0.0,
        "bottleneck": 0.0,
        "memory": (0,) * world,
    }
    if conf.ours and set(conf.ours) != set(REST):
        raise InputError(f"{conf.where}: field {OURS!r} must have {sorted(REST)}, got {sorted(conf.ours)}")
    if options:
        # The times in the file are for the schedule in the file.
        options = {"period": 0.0, "bottleneck": 0.0, **options}
    stages = {
        "sizes": profile.sizes,
        "cuts": cuts,
        "replicas": tuple(map(len, conf.ranks)),
        "recompute": conf.recompute,
        "rank_map": conf.ranks,
    }
    plan: PipelinePlan = decode({**stages, **known, **conf.ours, **options}, PipelinePlan, conf.where)
    with reading(conf.where):
        _check_depths(conf, plan)
    return plan if conf.ours else replace(plan, memory=memory_by_rank(program_of(plan, profile), profile))


def expecting(plan: PipelinePlan, profile: Profile, cluster: Cluster) -> PipelinePlan:
    """The same plan with period, bottleneck and memory as simulated on this cluster."""
    program = program_of(plan, profile)
    report = examine(program, profile, cluster.at(plan.devices))
    sharded, seconds = program.layout.reduction == "scatter", []
    for stage, replicas in zip(stages_of(profile, program.layout), plan.replicas, strict=True):
        work = plan.microbatches * stage.seconds(stage.forward + stage.backward, replicas)
        seconds.append(work + stage.step(replicas, sharded))
    return replace(plan, period=report.period, bottleneck=max(seconds), memory=report.memory)


def _depths(plan: PipelinePlan) -> tuple[int, ...]:
    """By stage, how many minibatches it runs ahead of its last STEP: its delay."""
    return delays(generate(plan.schedule, len(plan.cuts), plan.microbatches))


def _check_depths(conf: HybridConf, plan: PipelinePlan) -> None:
    needed = _depths(plan)
    if conf.depths is not None and conf.depths != needed:
        raise InputError(
            f"{conf.where}: field 'stage_to_depth_map' lets the stages be {list(conf.depths)} minibatches"
            f" ahead, schedule {plan.schedule!r} with {plan.microbatches} micro-batches a step"
            f" {list(needed)}; choose another schedule, or remove the field to train with these depths"
        )
