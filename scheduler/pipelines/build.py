"""The registry of generators, and the road from an order of computation to a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.buckets import MIB, Bucket, fuse_by_bytes
from scheduler.ir.layout import Layout, Placed, Placement, Samples, place
from scheduler.ir.profile import Border, Layer, Profile
from scheduler.ir.program import Program, live
from scheduler.pipelines import schedules
from scheduler.pipelines.passes import Traffic, in_both_directions, with_steps
from scheduler.pipelines.schedules import Order

Generator = Callable[..., Sequence[Order]]

BUCKET = 4 * MIB
"""Bytes of a bucket, unless told otherwise."""

_OWN: dict[str, Generator] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zero_bubble": schedules.zero_bubble,
    "pipedream": schedules.pipedream,
    "2bw": schedules.two_bw,
    "wpipe": schedules.wpipe,
    "ashpipe": schedules.ashpipe,
    "bundle": schedules.bundle,
}
_ADDED: dict[str, Generator] = {}


def names() -> list[str]:
    return [*_OWN, *_ADDED]


def register(name: str, generator: Generator) -> None:
    """Adds a generator of your own under a new name."""
    if _key(name) in map(_key, names()):
        raise ValueError(f"pipeline schedule {name!r} exists already; choose another name")
    _ADDED[name] = generator


def get(name: str) -> Generator:
    """The generator of this name, in any case; a ``ValueError`` lists the names there are."""
    wanted = _key(name)
    for known, generator in (_OWN | _ADDED).items():
        if _key(known) == wanted:
            return generator
    raise ValueError(f"there is no pipeline schedule {name!r}; the schedules are {', '.join(names())}")


def _key(name: str) -> str:
    return name.lower().replace("-", "_")


def generate(
    schedule: str,
    stages: int,
    microbatches: int = 1,
    *,
    replicas: int | Sequence[int] = 1,
    ranks: Sequence[Sequence[int]] | None = None,
    profile: Profile | None = None,
    cuts: Sequence[int] | None = None,
    placement: str = "bubble",
    bucket_bytes: float = BUCKET,
    recompute: bool | Sequence[bool] = False,
    memory: int | Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
    mirrored: bool = False,
    borders: Sequence[Border | None] = (),
    **options: Any,
) -> Program:
    """A pipeline program of ``stages`` positions.

    ``replicas``: of every position, or of each; ``ranks`` instead says which ranks hold each position (by
    default numbered position by position). ``profile`` and ``cuts`` (the first layer of each stage) give the
    layers; without a profile every stage is one layer of 4 bytes. ``placement`` and ``bucket_bytes`` place
    the data-parallel traffic: stages with slack of their own have one bucket unless placed ``eager``.
    ``memory``: bytes allowed per rank. ``options`` go to the generator.

    ``placements`` puts each position on a grid of tiles or on ranks that share samples, ``replicas`` times on
    ranks of their own; ``mirrored`` adds to each replica one on the same ranks in opposite order, with as
    many micro-batches again. ``borders``: what tiles exchange at each layer, for the simulator.
    """
    if stages < 1 or microbatches < 1:
        raise ValueError(
            f"a pipeline needs at least 1 stage and 1 micro-batch, got {stages} and {microbatches}"
        )
    orders = orders_of(schedule, stages, microbatches, options, list(signature(generate).parameters))
    count = stage_count(orders)
    profile = profile or Profile("stages", tuple(Layer(f"stage{s}", 1.0, 2.0, 4) for s in range(count)))
    placed = _placed(stages, replicas, ranks, placements, mirrored)
    limits = [memory] * sum(map(len, placed.ranks)) if isinstance(memory, int) else memory
    layout = Layout(
        cuts=_checked_cuts(tuple(range(count)) if cuts is None else tuple(cuts), count, profile),
        ranks=tuple(placed.ranks[stage % stages] for stage in range(count)),
        microbatches=microbatches * (2 if mirrored else 1),
        versions=(0,) * count,
        activations=(0,) * count,
        placement=placement,
        reduction=reduction_of(schedule),
        recompute=(recompute,) * count if isinstance(recompute, bool) else tuple(recompute),
        memory=limits if limits is None else tuple(limits),
        tiles=tuple(placed.tiles[stage % stages] for stage in range(count) if placed.tiles),
        mirror=tuple(placed.mirror[stage % stages] for stage in range(count) if mirrored),
    )
    return replace(assemble(schedule, orders, layout, profile, bucket_bytes), borders=tuple(borders))


def orders_of(
    schedule: str, positions: int, microbatches: int, options: Mapping[str, Any], others: Sequence[str] = ()
) -> Sequence[Order]:
    """The orders that a generator makes; a ``ValueError`` for an option that it does not have lists its
    options. The option may have been meant for the caller, who has the options ``others``.
    """
    generator = get(schedule)
    parameters = list(signature(generator).parameters.values())
    takes = [p.name for p in parameters[2:] if p.kind is not Parameter.VAR_KEYWORD]
    if unknown := [name for name in options if name not in takes and len(takes) == len(parameters) - 2]:
        has = "the options " + ", ".join(takes) if takes else "no options of its own"
        raise ValueError(f"{no_option(unknown[0], [*takes, *others])} Schedule {schedule!r} has {has}")
    return generator(positions, microbatches, **options)


def no_option(name: str, known: Sequence[str]) -> str:
    """The sentence of an error, with the one of the known options that may have been meant."""
    close = get_close_matches(name, known, 1)
    return f"there is no option {name!r}{f'; did you mean {close[0]!r}?' if close else '.'}"


def reduction_of(schedule: str) -> str:
    """How a schedule's replicas sum gradients (``Layout.reduction``)."""
    return "masters" if schedule.lower() == "bundle" else "scatter"


def virtual_option(schedule: str, virtual: int) -> dict[str, Any]:
    """The option that puts so many stages on a rank, where the schedule leaves the choice."""
    return {"virtual": virtual} if "virtual" in signature(get(schedule)).parameters else {}


def stage_count(orders: Sequence[Order]) -> int:
    """The number of stages in the orders of all positions."""
    return len({action.stage for order in orders for action in order})


def assemble(
    schedule: str, orders: Sequence[Order], layout: Layout, profile: Profile, bucket_bytes: float = BUCKET
) -> Program:
    """The program of these orders, one for each position: steps, messages and collectives are added, and the
    layout declares as many versions and activations as the order needs.
    """
    late = layout.placement != "eager"
    relaxed = {stage for stage in range(layout.stages) if late and len(layout.members(stage)) > 1}
    if layout.mirror:
        compute = list(in_both_directions(orders, layout))
    else:
        position = {rank: stage for stage in range(layout.positions) for rank in layout.ranks[stage]}
        stepped = [with_steps(order, relaxed) for order in orders]
        compute = [stepped[position[rank]] for rank in range(layout.world)]
    buckets = [_buckets(layout, stage, profile, bucket_bytes) for stage in range(layout.stages)]
    numbers: dict[int, range] = {}
    everything: list[Bucket] = []
    for stage in reversed(range(layout.stages)):
        numbers[stage] = range(len(everything), len(everything) + len(buckets[stage]))
        everything += buckets[stage]
    kernel = Traffic(layout, compute, numbers).lanes()
    program = Program(
        policy=schedule,
        buckets=tuple(everything),
        kernel=tuple(kernel),
        layers=len(profile.layers),
        ranks=layout.world,
        gather="parameters" if layout.reduction == "scatter" else "gradients",
        pipeline=layout,
    )
    versions, activations = live(program)
    return replace(program, pipeline=replace(layout, versions=versions, activations=activations))


def program_of(plan: PipelinePlan, profile: Profile, *, check_sizes: bool = True) -> Program:
    """The program of a plan for a profile of the same model. Without ``check_sizes`` the profile's sizes may
    differ from the model's, as where several stages share parameters.
    """
    if check_sizes:
        plan.check_model(profile.sizes)
    return generate(
        plan.schedule,
        len(plan.replicas),
        plan.microbatches,
        ranks=None if plan.tiles else plan.rank_map,
        placements=plan.placements,
        profile=profile,
        cuts=plan.cuts,
        recompute=plan.recompute,
        placement=plan.placement,
        **virtual_option(plan.schedule, len(plan.cuts) // len(plan.replicas)),
    )


def _placed(
    stages: int,
    replicas: int | Sequence[int],
    ranks: Sequence[Sequence[int]] | None,
    placements: Sequence[Placement] | None,
    mirrored: bool,
) -> Placed:
    if placements is not None:
        if len(placements) != stages or ranks is not None or not isinstance(replicas, int):
            raise ValueError(
                f"placements say where each of {stages} positions is, with one number of replicas and without"
                f" ranks; got {len(placements)} placements, replicas {replicas} and ranks {ranks}"
            )
        return place(placements, replicas, mirrored)
    if mirrored:
        if ranks is not None or not isinstance(replicas, int):
            raise ValueError(
                "mirrored replicas are on the same ranks in opposite order, so that all positions have as"
                f" many, and nobody chooses the ranks; got replicas {replicas} and ranks {ranks}"
            )
        return place([Samples()] * stages, replicas, mirrored)
    if ranks is not None:
        if len(ranks) != stages:
            raise ValueError(f"ranks must list the ranks of each of {stages} positions, got {len(ranks)}")
        return Placed(tuple(tuple(held) for held in ranks), (), ())
    counts = [replicas] * stages if isinstance(replicas, int) else list(replicas)
    if len(counts) != stages or min(counts) < 1:
        raise ValueError(f"replicas must be a count of at least 1 for each of {stages} positions: {counts}")
    held = [tuple(range(sum(counts[:at]), sum(counts[: at + 1]))) for at in range(stages)]
    return Placed(tuple(held), (), ())


def _checked_cuts(cuts: tuple[int, ...], count: int, profile: Profile) -> tuple[int, ...]:
    if len(cuts) != count:
        raise ValueError(f"this schedule has {count} stages and needs as many cuts, got {list(cuts)}")
    if not 0 <= cuts[-1] < len(profile.layers):
        raise ValueError(
            f"stage {count - 1} starts at layer {cuts[-1]}, profile {profile.name!r} has"
            f" {len(profile.layers)} layers"
        )
    return cuts


def _buckets(layout: Layout, stage: int, profile: Profile, limit: float) -> tuple[Bucket, ...]:
    layers = layout.layers(stage, len(profile.layers))
    sizes = [size if layer in layers else 0 for layer, size in enumerate(profile.sizes)]
    groups = [layer.group for layer in profile.layers]
    # Behind the first position there is slack after the backward; more buckets would only cost start-ups.
    whole = layout.placement != "eager" and stage % layout.positions > 0
    if whole:
        return fuse_by_bytes(sizes, float("inf"), groups=groups)
    return fuse_by_bytes(sizes, limit, part=limit, groups=groups)
