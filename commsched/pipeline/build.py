"""Start of a pipeline: choose and agree on the program, and build this rank's stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.collectives.compression import Compression
from commsched.errors import CommError
from commsched.optimizer.whole_step import ELEMENTWISE
from commsched.pipeline.chain import Chain
from commsched.pipeline.messages import Fabric, Lane, everyones, from_first
from commsched.pipeline.reduction import ReplicaBuckets, Replicas, StageRanks, Tie, of_parameters
from commsched.pipeline.stage import GradientTypes, Loss, Stage, with_attributes
from commsched.pipeline.update import Factory, Gradients, OnStep, Stepped, Update, made_by
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.actions import COLLECTIVE, Kind
from scheduler.ir.buckets import Bucket
from scheduler.ir.layout import Layout
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import LINK_LANE, Program, buckets_of, delays, depth
from scheduler.pipelines.build import generate, no_option, orders_of, program_of, stage_count
from scheduler.validate import validate

if TYPE_CHECKING:
    from commsched.pipeline.tiled import TiledModule

# -- the program, and weights that all ranks share -----------------------------------------------------------


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


def checked_wire(compression: Any) -> torch.dtype | None:
    """The type in which the gradients of replicas travel; None: their own."""
    if compression is not Compression.none and not hasattr(compression, "wire_dtype"):
        raise ValueError(
            f"compression= must be Compression.none, fp16, bf16, int8 or fp8, got {compression!r}: a stage's"
            " buckets cannot call compressors of your own"
        )
    return getattr(compression, "wire_dtype", None)


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


_DECIDED = "num_microbatches mesh ranks cuts placement bucket_bytes recompute placements mirrored".split()


def check_decided(made: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """``ValueError`` for arguments of a pipeline that others decide."""
    names: Sequence[str] = ("mesh",) if given["ranks"] is not None else ()
    by, defaults = "ranks=", signature(made).parameters
    if given["plan"] is not None:
        by, names = "plan=", ("schedule", *_DECIDED)
    elif isinstance(given["schedule"], Program):
        by, names = "a Program", _DECIDED
    if twice := [f"{name}=" for name in names if given[name] != defaults[name].default]:
        raise ValueError(f"{by} decides what {', '.join(twice)} would: leave {', '.join(twice)} out")


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
    if options and (plan is not None or isinstance(schedule, Program)):
        has = "A Program" if plan is None else "plan="
        raise ValueError(f"{no_option(next(iter(options)), others)} {has} says all of the schedule itself")
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
    everyone = everyones(lane, fabric.rank, range(fabric.size), mine)
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
    random = from_first(lane, fabric.rank, range(fabric.size), torch.get_rng_state())
    mine = [layout.layers(number, len(chain)) for number in layout.held_by(fabric.rank)]
    chain.fill(mine, random, device)


@torch.no_grad()
def share_weights(
    chain: Chain,
    layout: Layout,
    fabric: Fabric,
    lane: Lane,
    stages: dict[int, Stage],
    shared: Collection[Mapping[int, str]],
) -> None:
    """Ranks that are not seeded alike have made other weights and buffers: a stage starts with those of its
    first rank, and all stages that have a tensor, or run a module in no layer, with the first one's.
    ``shared``: the values of ``Chain.shared``.
    """
    for number, stage in stages.items():
        ranks, unsaved = layout.members(number), dict(stage.module.named_buffers())
        state = from_first(lane, fabric.rank, ranks, unsaved | stage.module.state_dict())
        if fabric.rank != ranks[0]:
            stage.load(state)
            stage.load_buffers(state)
    alike = [(users, [t for n, name in users.items() if n in stages for t in stages[n].copies(name)])
             for users in shared]  # fmt: skip
    alike += [(dict.fromkeys(range(layout.stages), ""), [buffer.data]) for buffer in chain.free_buffers()]
    for users, mine in alike:
        first = layout.members(min(users))[0]
        others = {rank for number in users for rank in layout.members(number)} - {first}
        if mine:
            value = from_first(lane, fabric.rank, [first, *sorted(others)], mine[0])
            for tensor in mine:
                tensor.copy_(value)


# -- the stages of one rank, with what steps them ------------------------------------------------------------


def bare_profile(chain: Chain, name: str, cuts: Sequence[int]) -> Profile:
    """Sizes only, without the parameters that several stages share: these travel by themselves."""
    sizes = chain.layer_sizes(frozenset(chain.tied(cuts)))
    return Profile(name, tuple(Layer(n, 1.0, 2.0, size) for n, size in zip(chain.names, sizes, strict=True)))


def make_stages(
    chain: Chain,
    program: Program,
    fabric: Fabric,
    loss: Loss,
    tied: Collection[Mapping[int, str]],
    shared: Collection[Mapping[int, str]],
    own_parameters: bool,
    tile_options: Any,
    types: GradientTypes,
) -> dict[int, Stage]:
    layout, rank = program.layout, fabric.rank
    stages: dict[int, Stage] = {}
    for number in layout.held_by(rank):
        layers = layout.layers(number, len(chain))
        module = chain.stage(layers.start, layers.stop)
        given = dict(module.named_parameters(remove_duplicate=False))
        if any(number in users and users.keys() & stages.keys() for users in tied):
            # Each of a rank's stages steps its own copy; the caller steps a shared parameter once.
            memo: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
            module = copy.deepcopy(module, memo | (_parameters(module) if own_parameters else {}))
        last = number + 1 == layout.stages
        stage = stages[number] = Stage(
            number,
            module,
            loss if last else None,
            layout.recompute[number],
            depth(program) > 0,
            _on_tiles(layout, number, module, fabric, tile_options),
            own_parameters,
            types,
            [users[number] for users in shared if number in users],
        )
        stage.versions.given = [given[name] for name in stage.versions.names]
    return stages


def _on_tiles(
    layout: Layout, number: int, module: nn.Module, fabric: Fabric, options: Any
) -> dict[int, TiledModule]:
    """By micro-batch, the module on the grid of tiles that computes it. A rank that is a tile of the replica
    and of the mirrored one gets a copy of the module for the second. The copy shares the parameters, not the
    buffers: all tiles of a replica must have the same buffers.
    """
    tiles = layout.grid(number)
    if tiles is None:
        return {}
    from commsched.pipeline.tiled import TiledModule

    found: dict[tuple[int, ...], TiledModule] = {}
    by_index = {}
    modules = iter([module])
    if layout.mirror:
        second = copy.deepcopy(module, _parameters(module))
        second._stage_followed = []  # type: ignore[assignment]  # the first computes in what it would follow
        modules = iter([module, second])
    for index in layout.computed_by(fabric.rank, number):
        replica = layout.place(number, fabric.rank, index)[0] * tiles.size
        ranks = layout.holders(number, index)[replica : replica + tiles.size]
        if ranks not in found:
            channel = fabric.channel(f"tiles of stage {number}", ranks)
            found[ranks] = TiledModule(number, next(modules), tiles, channel, options)
        by_index[index] = found[ranks]
    return by_index


def _parameters(module: nn.Module) -> dict[int, Any]:
    """The memo with which ``deepcopy`` makes a copy that shares the module's parameters."""
    return {id(parameter): parameter for parameter in module.parameters()}


class UpdateMaker:
    """Chooses how each stage of a rank is reduced and stepped."""

    def __init__(
        self,
        chain: Chain,
        program: Program,
        fabric: Fabric,
        factory: Factory | None,
        on_step: OnStep | None,
        hosts: Sequence[Sequence[int]] | None,
        names: Mapping[str, str],
    ) -> None:
        """``names``: see ``Chain.first_names``."""
        self.chain, self.program, self.layout, self.fabric = chain, program, program.layout, fabric
        self.factory, self.on_step, self.hosts = factory, on_step, hosts
        self.names, self.lane = names, fabric.lane("sums")

    def make(self, stages: dict[int, Stage], ties: Sequence[Tie]) -> dict[int, Update]:
        """Every rank raises what the ranks of one stage were refused, such as two tiers."""
        made: dict[int, Update] = {}
        refused: CommError | None = None
        try:
            made = {number: self._make(stage, ties) for number, stage in stages.items()}
        except CommError as error:
            refused = error
        mine = "" if refused is None else str(refused)
        told = everyones(self.lane, self.fabric.rank, range(self.fabric.size), mine)
        if refused is not None:
            raise refused
        for rank, reason in enumerate(told):
            if reason:
                raise CommError(f"rank {rank} cannot exchange with the replicas of its stage: {reason}")
        return made

    def _make(self, stage: Stage, ties: Sequence[Tie]) -> Update:
        ranks, leaves = self.layout.members(stage.number), stage.versions.newest.leaves
        tied = {place: tie for tie in ties for number, place in tie.mine if number == stage.number}
        parameters = [with_attributes(nn.Parameter(leaf.data), leaf) for leaf in leaves]
        optimizer = self._optimizer(stage, parameters)
        untied = [place for place in range(len(leaves)) if place not in tied]
        shared: dict[str, Any] = {"counted": [p for p, tie in tied.items() if self._counts(tie, stage)]}
        shared["counted"] += untied if self.fabric.rank == ranks[0] else []
        numbers = buckets_of(self.program)[stage.number]
        early = self.layout.placement == "eager" or len(numbers) > 1
        if len(ranks) > 1 and untied:
            masters = self.layout.reduction == "masters"
            sparse = sparse_places(stage)
            alone = untied
            in_buckets = not masters and (optimizer is None or type(optimizer) in ELEMENTWISE)
            if stage.types.wire is not None and not in_buckets:
                whose = f"schedule {self.program.policy!r}" if masters else type(optimizer).__name__
                raise ValueError(
                    f"compression= is for gradients in buckets, and {whose} needs those of stage"
                    f" {stage.number} whole on every replica: leave it out"
                )
            if in_buckets:
                outside = sparse | {place for place, leaf in enumerate(leaves) if leaf.is_complex()}
                places = self._places(stage, frozenset(tied))
                parts = [
                    of_parameters(self.program.buckets[number], places, stage, outside) for number in numbers
                ]
                if any(parts):
                    alone = [place for place in untied if place in outside]
                    shared |= self._buckets(stage, numbers, parts, parameters, optimizer)
                    shared["early"] = early
            if alone:
                hosts = self._hosts_of(ranks) if masters else [ranks]
                shared["replicas"] = Replicas(self.lane, self.fabric.rank, hosts, alone, sparse)
        if self.factory is None:
            return Gradients(stage, **shared)
        within = len(numbers) > 1 and self.layout.placement != "eager" and len(stage.modules) == 1
        wait_within = within and "buckets" in shared
        return Stepped(stage, optimizer, parameters, self.on_step, wait_within, **shared)

    def _optimizer(self, stage: Stage, parameters: Sequence[nn.Parameter]) -> Optimizer | None:
        """The user's, of whole parameters in the model's order and under its names. The function gets the
        caller's own, for it may choose groups by identity; the optimizer then steps ``parameters``.
        """
        if self.factory is None or not parameters:
            return None
        names = [self.names.get(name, name) for name in stage.versions.names]
        order = {name: number for number, name in enumerate(self.names)}
        with stage.versions.callers() as given:
            named = sorted(zip(names, given), key=lambda pair: order.get(pair[0], len(order)))
            return made_by(self.factory, dict(named), dict(zip(given, parameters, strict=True)))

    def _counts(self, tie: Tie, stage: Stage) -> bool:
        return tie.first == self.fabric.rank and min(tie.mine)[0] == stage.number

    def _hosts_of(self, ranks: Sequence[int]) -> list[list[int]]:
        """This stage's ranks, host by host."""
        hosts = self.hosts or [ranks]
        found = [[rank for rank in ranks if rank in host] for host in hosts]
        return [host for host in found if host]

    def _buckets(
        self,
        stage: Stage,
        numbers: Sequence[int],
        parts: Sequence[Sequence[Bucket]],
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer | None,
    ) -> dict[str, Any]:
        """The engine. ``parts``: of each of the program's buckets, one for each type of parameter."""
        ranks = self.layout.members(stage.number)
        ends = list(accumulate(map(len, parts), initial=0))
        numbered = {number: range(*span) for number, span in zip(numbers, pairwise(ends))}
        plan = [(kind, each) for kind, number in self._plan(stage.number) for each in numbered[number]]
        moved = ReplicaBuckets(
            self.fabric.transport(f"stage {stage.number}", ranks),
            StageRanks(self.lane, self.fabric.rank, ranks),
            self.fabric.timeout,
            stage,
            [part for same in parts for part in same],
            plan,
            parameters,
            dict if optimizer is None else lambda: optimizer.state,
            self.fabric.staging(stage.device),
        )
        return {"buckets": moved, "numbers": numbered}

    def _places(self, stage: Stage, apart: frozenset[int]) -> dict[int, list[int]]:
        """By layer the parameters that it is the first one to use."""
        names = {name: place for place, name in enumerate(stage.versions.names)}
        seen = set(apart)
        places: dict[int, list[int]] = {}
        for layer in self.layout.layers(stage.number, len(self.chain)):
            mine = [names[name] for name in self.chain.layer_parameters(layer) if name in names]
            places[layer] = [place for place in mine if place not in seen]
            seen |= set(mine)
        return places

    def _plan(self, stage: int) -> list[tuple[str, int]]:
        """The program's order of one period: all reductions, then all gathers, each as they stand."""
        link = self.program.kernel[self.fabric.rank][LINK_LANE]
        mine = [action for action in link if action.stage == stage and action.kind in COLLECTIVE]
        reductions = [a for a in mine if a.kind is Kind.RS]
        gathers = [a for a in mine if a.kind is Kind.AG]
        return [(a.kind.value, a.index) for a in (*reductions, *gathers)]


def sparse_places(stage: Stage) -> frozenset[int]:
    found = set()
    for prefix, module in stage.module.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            found.add(stage.versions.places.get(f"{prefix}.weight" if prefix else "weight"))
    return frozenset(place for place in found if place is not None)
