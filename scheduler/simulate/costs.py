"""Costs of a pipeline program: how long its actions take, and how much memory it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.ir.actions import COLLECTIVE, HALOS, RECVS, Action, Kind, peer_of, stage_of
from scheduler.ir.layout import Layout, far_stage
from scheduler.ir.link import Cluster, Links, named_link
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, Program, moments, settled, unroll

# -- how long the actions of a pipeline program take, and what the layers of a stage need together -----------

SEND_LANE = "send"
HALO_LANE = "halo"
"""Links of these names beside ``link`` give messages between stages, and halos, wires of their own."""

Wires = Links | Cluster
"""One wire for all that a rank sends; ``link`` for collectives and ``send`` for messages; or a cluster's."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds and bytes of one stage on one rank without replicas. ``bytes``: of its parameters;
    ``gradients``: of their gradients in memory; ``kept``: of activations between forward and backward;
    ``inputs``, ``outputs``: what crosses its borders. ``backward`` includes ``weight`` and, where
    the stage recomputes, a second forward. ``fixed``: the part of these seconds that stays with fewer rows.
    ``traffic``: what sending all that its replicas exchange in a step takes from the computation.
    """

    forward: float
    backward: float
    weight: float
    bytes: int
    gradients: float
    kept: int
    working: int
    inputs: int
    outputs: int
    update: float
    fixed: float
    traffic: float

    def seconds(self, whole: float, replicas: int) -> float:
        """One of these times for a replica that computes its share of the rows."""
        return whole * (self.fixed + (1 - self.fixed) / replicas)

    def step(self, replicas: int, sharded: bool) -> float:
        """Seconds of the optimizer step, plus seconds in which RS and AG keep a replica from computing."""
        sent = (replicas - 1) / replicas
        return self.update / (replicas if sharded else 1) + sent * self.traffic


def stages_of(profile: Profile, layout: Layout) -> tuple[Stage, ...]:
    """The stages of a model. What crosses a border is the output of the last layer before it."""
    return tuple(_stage(profile, layout, number) for number in range(layout.stages))


def _stage(profile: Profile, layout: Layout, number: int) -> Stage:
    numbers = layout.layers(number, len(profile.layers))
    layers = [profile.layers[layer] for layer in numbers]
    forward = sum(layer.forward for layer in layers)
    size = sum(layer.bytes for layer in layers)
    activations = sum(layer.activation_bytes for layer in layers)
    inputs = profile.layers[numbers[0] - 1].activation_bytes if number else 0
    again = layout.recompute[number]
    compute = [layer.forward + layer.backward for layer in layers]
    fixed = sum(layer.fixed * seconds for layer, seconds in zip(layers, compute, strict=True))
    exchanged = sum(layer.exchanged(layout.reduction == "scatter") for layer in layers)
    # A stage that recomputes keeps only its input; all activations exist once, while its backward runs.
    return Stage(
        forward=forward,
        backward=sum(layer.backward for layer in layers) + (forward if again else 0.0),
        weight=sum(layer.weight_backward for layer in layers),
        bytes=size,
        gradients=sum(layer.bytes * layer.grad_share for layer in layers),
        kept=inputs if again else activations,
        working=activations if again else 0,
        inputs=inputs,
        outputs=layers[-1].activation_bytes,
        update=profile.update_per_byte * size,
        fixed=fixed / sum(compute) if fixed else 0.0,
        traffic=profile.traffic_per_byte * exchanged,
    )


class Durations:
    """Seconds of each action of ``program`` on a rank."""

    def __init__(self, program: Program, profile: Profile, wires: Wires) -> None:
        self.program, self.layout, self.profile, self.wires = program, program.layout, profile, wires
        self.stages = stages_of(profile, program.layout)
        computed = [action for lanes in program.kernel for action in lanes[COMPUTE_LANE]]
        self.split = {action.stage for action in computed if action.kind is Kind.W}

    def seconds(self, rank: int, action: Action) -> float:
        stage, members = self.stages[stage_of(action)], self.layout.members(stage_of(action))
        parts = len(self.layout.ranks[stage_of(action)])
        if action.kind is Kind.F:
            return stage.seconds(stage.forward, parts)
        if action.kind is Kind.B:
            later = stage.weight if action.stage in self.split else 0.0
            return stage.seconds(stage.backward - later, parts)
        if action.kind is Kind.W:
            return stage.seconds(stage.weight, parts)
        if action.kind is Kind.STEP:
            return stage.step(len(members), sharded=self.layout.reduction == "scatter")
        if action.kind in HALOS:
            return self._exposed_halos(rank, action, parts)
        if action.kind in COLLECTIVE:
            pieces, layers = self.program.buckets[action.index].pieces, self.profile.layers
            size = sum(layers[piece.layer].moved(action.kind, piece.bytes) for piece in pieces)
            if isinstance(self.wires, Cluster):
                # Two tiers add whole gradients inside a host, whatever travels between hosts.
                whole = sum(layers[piece.layer].grad_share * piece.bytes for piece in pieces)
                more = max(1.0, whole / size) if size and action.kind is not Kind.AG else 1.0
                return self.wires.collective(action.kind, members, size, more)
            return named_link(self.wires, LINK_LANE).cost(action.kind, size)
        if action.kind in RECVS:
            return 0.0
        if isinstance(self.wires, Cluster):
            return self.wires.message(rank, peer_of(action), self._message(rank, action))
        return named_link(self.wires, SEND_LANE, LINK_LANE).cost(Kind.RS, self._message(rank, action))

    def _exposed_halos(self, rank: int, action: Action, parts: int) -> float:
        """Seconds by which the halos of a micro-batch are longer than the interiors beside them."""
        seconds = 0.0
        for layer in self.layout.layers(stage_of(action), self.program.layers):
            border = self.program.borders[layer] if self.program.borders else None
            forward = action.kind is Kind.HALO
            size = 0.0 if border is None else border.forward if forward else border.backward
            if border is not None and size:
                times = self.profile.layers[layer]
                interior = (1 - border.share) * (times.forward if forward else times.backward) / parts
                seconds += max(0.0, self._halo(rank, action, size) - interior)
        return seconds

    def _halo(self, rank: int, action: Action, size: float) -> float:
        if not isinstance(self.wires, Cluster):
            return named_link(self.wires, HALO_LANE, LINK_LANE).cost(action.kind, size)
        stage = stage_of(action)
        replica, count = self.layout.place(stage, rank, action.index)[0], self.layout.tile_count(stage)
        tiles = self.layout.holders(stage, action.index)[replica * count : (replica + 1) * count]
        return max(self.wires.message(rank, peer, size) for peer in tiles if peer != rank)

    def _message(self, rank: int, action: Action) -> float:
        number, other = stage_of(action), far_stage(action)
        size = self.stages[number].outputs if other > number else self.stages[number].inputs
        return size * self.layout.overlaps(number, rank, other, action.index).get(peer_of(action), 0.0)


# -- peak memory of a program, derived from its compute order ------------------------------------------------


def peak_memory(program: Program, profile: Profile) -> int:
    """The peak bytes of parameters, gradients and activations on one rank.

    A forward keeps its activations until its backward; a backward makes its gradients, which live until the
    next forward that uses the parameters (the last moment at which their bucket is gathered and the update
    made). Optimizer state is not counted. For a program with stages: the peak of the rank that holds most.
    """
    if program.pipeline is not None:
        return max(memory_by_rank(program, profile))
    layers = profile.layers
    # The kernel starts with the backward: all activations are alive.
    live = sum(layer.activation_bytes for layer in layers)
    peak = live
    for action in program.lanes().get(COMPUTE_LANE, ()):
        if action.kind is Kind.B:
            live += layers[action.index].bytes
            peak = max(peak, live)
            live -= layers[action.index].activation_bytes
        elif action.kind is Kind.F:
            live += layers[action.index].activation_bytes
            peak = max(peak, live)
            live -= layers[action.index].bytes
    return profile.total_bytes + peak


def memory_by_rank(program: Program, profile: Profile) -> tuple[int, ...]:
    """The peak bytes of each rank: all live weight versions, one gradient, and the activations between
    forward and backward. Optimizer state and buffers of messages are not counted.
    """
    layout = program.layout
    stages = stages_of(profile, layout)
    lanes = unroll(program, settled(program), (COMPUTE_LANE,))
    return tuple(
        round(max(_bytes(layout, stages, rank, lanes[rank][COMPUTE_LANE]), default=0))
        for rank in range(layout.world)
    )


def _bytes(
    layout: Layout, stages: tuple[Stage, ...], rank: int, order: tuple[Action, ...]
) -> Iterator[float]:
    held = layout.held_by(rank)
    runs = {stage: moments(order, stage) for stage in held}
    resting = {stage: float(stage_bytes(stages[stage], 1, 0)) for stage in held}
    for action in order:
        if action.stage not in runs:
            continue
        cost, share = stages[action.stage], 1 / len(layout.ranks[action.stage])
        moment = next(runs[action.stage])
        working = cost.working * share if action.kind is Kind.B else 0.0
        others = sum(size for stage, size in resting.items() if stage != action.stage)
        yield others + working + stage_bytes(cost, moment.versions, moment.activations, share)
        resting[action.stage] = stage_bytes(cost, moment.versions_after, moment.activations_after, share)


def stage_bytes(stage: Stage, versions: int, activations: int, share: float = 1.0) -> float:
    """Bytes of one stage on one rank for these numbers of weight versions and micro-batches, with the
    gradient.
    """
    return stage.bytes * versions + stage.gradients + stage.kept * activations * share
