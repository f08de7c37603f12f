"""From a model and a program to the stages of one rank, with what steps them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.optimizer.sharded_step import check_elementwise
from commsched.pipeline.chain import Chain
from commsched.pipeline.fabric import Fabric
from commsched.pipeline.gradients import Gradients
from commsched.pipeline.reduction import Scattered, bucket_parts, by_masters
from commsched.pipeline.stage import Loss, Stage
from commsched.pipeline.update import Combine, Factory, OnStep, Sharded, Update, Whole
from scheduler.ir.actions import COLLECTIVE, Kind
from scheduler.ir.layout import Layout
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import LINK_LANE, Program, buckets_of
from scheduler.ir.unroll import depth

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
    ) -> None:
        self.chain, self.program, self.layout, self.fabric = chain, program, program.layout, fabric
        self.factory, self.on_step, self.hosts = factory, on_step, hosts
        self.lane = fabric.lane("sums")

    def make(self, stages: dict[int, Stage], tied: Sequence[tuple[int, int]]) -> dict[int, Update]:
        """``tied``: stage and place of the parameters that other stages have too."""
        return {
            number: self._make(stage, frozenset(place for n, place in tied if n == number))
            for number, stage in stages.items()
        }

    def _make(self, stage: Stage, apart: frozenset[int]) -> Update:
        ranks = self.layout.members(stage.number)
        if self.factory is None:
            return self._gradients(stage, ranks, apart)
        if len(ranks) == 1 or not stage.versions.names:
            return Whole(stage, self.factory, self.on_step, apart=apart)
        if self.layout.reduction == "masters":
            return Whole(stage, self.factory, self.on_step, self._sum(self._hosts_of(ranks)), apart)
        if not self._elementwise(stage):
            return Whole(stage, self.factory, self.on_step, self._sum([ranks]), apart)
        return self._sharded(stage, ranks, apart)

    def _sum(self, hosts: Sequence[Sequence[int]]) -> Combine:
        """The sum over these ranks, in place."""
        return partial(by_masters, self.lane, self.fabric.rank, hosts)

    def _hosts_of(self, ranks: Sequence[int]) -> list[list[int]]:
        """This stage's ranks, host by host."""
        hosts = self.hosts or [ranks]
        found = [[rank for rank in ranks if rank in host] for host in hosts]
        return [host for host in found if host]

    def _elementwise(self, stage: Stage) -> bool:
        """Whether the optimizer can step a shard without the rest."""
        assert self.factory is not None
        probe: Optimizer = self.factory([nn.Parameter(torch.zeros(1))])
        try:
            check_elementwise(type(probe))
        except ValueError:
            return False
        return True

    def _gradients(self, stage: Stage, ranks: Sequence[int], apart: frozenset[int]) -> Update:
        """Gradients alone: summed bucket by bucket, where all have one type."""
        leaves = stage.versions.newest.leaves
        kinds = {leaf.dtype for place, leaf in enumerate(leaves) if place not in apart}
        if len(ranks) == 1 or self.layout.reduction == "masters" or len(kinds) != 1:
            return Gradients(stage, apart, self._sum([ranks]) if len(ranks) > 1 else None)
        numbers = buckets_of(self.program)[stage.number]
        scattered = self._scattered(stage, ranks, apart, numbers, gathers_gradients=True)
        early = self.layout.placement == "eager" or len(numbers) > 1
        return Gradients(stage, apart, None, scattered, numbers, early)

    def _sharded(self, stage: Stage, ranks: Sequence[int], apart: frozenset[int]) -> Update:
        assert self.factory is not None
        leaves = stage.versions.newest.leaves
        kinds = {leaf.dtype for place, leaf in enumerate(leaves) if place not in apart}
        if len(kinds) > 1:
            raise ValueError(
                f"the parameters of stage {stage.number} have several types ({', '.join(map(str, kinds))});"
                " stages with replicas need one"
            )
        numbers = buckets_of(self.program)[stage.number]
        if not numbers:
            return Whole(stage, self.factory, self.on_step, apart=apart)
        scattered = self._scattered(stage, ranks, apart, numbers)
        eager = self.layout.placement == "eager"
        several = len(numbers) > 1
        return Sharded(
            stage,
            self.factory,
            self.on_step,
            scattered,
            numbers,
            eager or several,
            several and not eager and len(stage.modules) == 1,
            apart,
        )

    def _scattered(
        self,
        stage: Stage,
        ranks: Sequence[int],
        apart: frozenset[int],
        numbers: Sequence[int],
        gathers_gradients: bool = False,
    ) -> Scattered:
        leaves, places = stage.versions.newest.leaves, self._places(stage, apart)
        parts = [bucket_parts(self.program.buckets[number], places, leaves) for number in numbers]
        return Scattered(
            self.fabric.transport(f"stage {stage.number}", ranks),
            list(ranks).index(self.fabric.rank),
            len(ranks),
            self.fabric.timeout,
            parts,
            [leaf.data for leaf in leaves],
            self._plan(stage.number, numbers),
            gathers_gradients,
        )

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

    def _plan(self, stage: int, numbers: Sequence[int]) -> list[tuple[str, int]]:
        """The program's order of one period: all reductions, then all gathers, each as they stand."""
        link = self.program.kernel[self.fabric.rank][LINK_LANE]
        mine = [action for action in link if action.stage == stage and action.kind in COLLECTIVE]
        reductions = [a for a in mine if a.kind is Kind.RS]
        gathers = [a for a in mine if a.kind is Kind.AG]
        return [(a.kind.value, numbers.index(a.index)) for a in (*reductions, *gathers)]
