"""What a stage costs: the layers of a profile between two cuts, for one micro-batch with all its rows."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.ir.layout import Layout
from scheduler.ir.profile import Profile


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds and bytes of one stage on one rank without replicas. ``kept``: activations between forward and
    backward; ``inputs``, ``outputs``: what crosses its borders. ``backward`` includes ``weight`` and, where
    the stage recomputes, a second forward. ``fixed``: the part of these seconds that stays with fewer rows.
    ``traffic``: what sending all of its bytes once takes from its computation.
    """

    forward: float
    backward: float
    weight: float
    bytes: int
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
        moved = 2 * (replicas - 1) / replicas
        return self.update / (replicas if sharded else 1) + moved * self.traffic


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
    # A stage that recomputes keeps only its input; all activations exist once, while its backward runs.
    return Stage(
        forward=forward,
        backward=sum(layer.backward for layer in layers) + (forward if again else 0.0),
        weight=sum(layer.weight_backward for layer in layers),
        bytes=size,
        kept=inputs if again else activations,
        working=activations if again else 0,
        inputs=inputs,
        outputs=layers[-1].activation_bytes,
        update=profile.update_per_byte * size,
        fixed=fixed / sum(compute) if fixed else 0.0,
        traffic=profile.traffic_per_byte * size,
    )
