"""From a model and a program to the stages of one rank, with what steps them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from commsched.optimizer.whole_step import ELEMENTWISE
from commsched.pipeline.chain import Chain
from commsched.pipeline.fabric import Fabric
from commsched.pipeline.gradients import Gradients
from commsched.pipeline.reduction import Replicas, Scattered, bucket_parts
from commsched.pipeline.stage import Loss, Stage
from commsched.pipeline.ties import Tie
from commsched.pipeline.update import Factory, OnStep, Stepped, Update, made_by
from scheduler.ir.actions import COLLECTIVE, Kind
from scheduler.ir.layout import Layout
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import LINK_LANE, Program, buckets_of, depth

if TYPE_CHECKING:
    from commsched.pipeline.tiled_module import TiledModule


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
    own_parameters: bool,
    tile_options: Any,
) -> dict[int, Stage]:
    layout, rank = program.layout, fabric.rank
    stages: dict[int, Stage] = {}
    for number in layout.held_by(rank):
        layers = layout.layers(number, len(chain))
        module = chain.stage(layers.start, layers.stop)
        if any(number in users and users.keys() & stages.keys() for users in tied):
            # Each of a rank's stages steps its own copy; the caller steps a shared parameter once.
            module = copy.deepcopy(module, _parameters(module) if own_parameters else {})
        last = number + 1 == layout.stages
        stages[number] = Stage(
            number,
            module,
            loss if last else None,
            layout.recompute[number],
            depth(program) > 0,
            _on_tiles(layout, number, module, fabric, tile_options),
            own_parameters,
        )
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
    from commsched.pipeline.tiled_module import TiledModule

    found: dict[tuple[int, ...], TiledModule] = {}
    by_index = {}
    modules = iter([module, copy.deepcopy(module, _parameters(module))] if layout.mirror else [module])
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
        master_weights: bool = False,
    ) -> None:
        """``names``: see ``Chain.first_names``."""
        self.chain, self.program, self.layout, self.fabric = chain, program, program.layout, fabric
        self.factory, self.on_step, self.hosts = factory, on_step, hosts
        self.names, self.master_weights = names, master_weights
        self.lane = fabric.lane("sums")

    def make(self, stages: dict[int, Stage], ties: Sequence[Tie]) -> dict[int, Update]:
        return {number: self._make(stage, ties) for number, stage in stages.items()}

    def _make(self, stage: Stage, ties: Sequence[Tie]) -> Update:
        ranks, leaves = self.layout.members(stage.number), stage.versions.newest.leaves
        tied = {place: tie for tie in ties for number, place in tie.mine if number == stage.number}
        parameters = [nn.Parameter(leaf.data) for leaf in leaves]
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
            if not masters and (optimizer is None or type(optimizer) in ELEMENTWISE):
                outside = sparse | {place for place, leaf in enumerate(leaves) if leaf.is_complex()}
                places = self._places(stage, frozenset(tied))
                parts = [
                    bucket_parts(self.program.buckets[number], places, leaves, outside) for number in numbers
                ]
                if any(parts):
                    alone = [place for place in untied if place in outside]
                    shared |= self._buckets(stage, ranks, numbers, parts)
                    shared["early"] = early
            if alone:
                hosts = self._hosts_of(ranks) if masters else [ranks]
                shared["replicas"] = Replicas(self.lane, self.fabric.rank, hosts, alone, sparse)
        if self.factory is None:
            return Gradients(stage, **shared)
        within = len(numbers) > 1 and self.layout.placement != "eager" and len(stage.modules) == 1
        wait_within = within and "scattered" in shared
        return Stepped(stage, optimizer, parameters, self.on_step, self.master_weights, wait_within, **shared)

    def _optimizer(self, stage: Stage, parameters: Sequence[nn.Parameter]) -> Optimizer | None:
        """The user's, of whole parameters in the model's order and under its names."""
        if self.factory is None or not parameters:
            return None
        names = [self.names.get(name, name) for name in stage.versions.names]
        order = {name: number for number, name in enumerate(self.names)}
        named = sorted(zip(names, parameters), key=lambda pair: order.get(pair[0], len(order)))
        return made_by(self.factory, dict(named))

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
        ranks: Sequence[int],
        numbers: Sequence[int],
        parts: Sequence[Sequence[list[tuple[int, int, int]]]],
    ) -> dict[str, Any]:
        """The engine. ``parts``: of each of the program's buckets, one for each type of parameter."""
        ends = list(accumulate(map(len, parts), initial=0))
        buckets = {number: range(*span) for number, span in zip(numbers, pairwise(ends))}
        plan = [(kind, each) for kind, number in self._plan(stage.number) for each in buckets[number]]
        scattered = Scattered(
            self.fabric.transport(f"stage {stage.number}", ranks),
            list(ranks).index(self.fabric.rank),
            len(ranks),
            self.fabric.timeout,
            [part for same in parts for part in same],
            [leaf.data for leaf in stage.versions.newest.leaves],
            plan,
        )
        return {"scattered": scattered, "buckets": buckets}

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
    """The parameters whose gradients are sparse."""
    found = set()
    for prefix, module in stage.module.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            found.add(stage.versions.places.get(f"{prefix}.weight" if prefix else "weight"))
    return frozenset(place for place in found if place is not None)
