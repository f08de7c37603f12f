"""A step on tiles: halos between the layers, gradients in chunks, one link for both.

    program = plan_tiles(profile, borders, link, longest_wait=2e-3)
    simulate(program, profile, link).period
    predict(profile, borders, link).hidden      # the part of the halo time that interiors hide

``profile`` holds the seconds of one tile, ``borders[l]`` what layer l exchanges (None: nothing). ``link`` is
one link for everything, or a mapping: ``link`` for RS and AG, ``halo`` for a message between neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.ir.actions import Action, Kind
from scheduler.ir.buckets import ALIGNMENT, fuse_by_bytes
from scheduler.ir.link import Links, named_link
from scheduler.ir.profile import Border, Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, Program
from scheduler.pipelines.passes.traffic_priority import largest_chunk, urgent_first
from scheduler.simulate.durations import HALO_LANE
from scheduler.simulate.lower_data_parallel import lower_data_parallel
from scheduler.simulate.simulator import simulate

Borders = Sequence[Border | None]


def plan_tiles(
    profile: Profile, borders: Borders, link: Links, *, ranks: int = 2, longest_wait: float = 2e-3
) -> Program:
    """Halos first, then gradients, in chunks that hold a halo up for ``longest_wait`` seconds at most."""
    chunk = largest_chunk(named_link(link, LINK_LANE), longest_wait)
    # A bucket closes with the part that fills it, so it can exceed the limit by one part: use half.
    half = max(chunk / 2 - ALIGNMENT, 1.0)
    layers = range(len(profile.layers))
    compute = [Action(Kind.F, layer) for layer in layers] + [Action(Kind.B, layer) for layer in layers[::-1]]
    program = Program(
        policy="tiles",
        buckets=fuse_by_bytes(profile.sizes, half, part=half) if profile.total_bytes else (),
        kernel=({COMPUTE_LANE: tuple(compute)},),
        layers=len(profile.layers),
        ranks=ranks,
        borders=tuple(borders) or (None,) * len(profile.layers),
    )
    order = urgent_first(lower_data_parallel(program, profile, link, ordered=False))
    return replace(program, kernel=({**program.lanes(), LINK_LANE: order},))


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step: if halos took no time, with halos behind interiors, with halos waited for. And the
    layers whose interiors are too small to hide their halos, forward and backward.
    """

    without: float
    overlapped: float
    waiting: float
    exposed: tuple[Action, ...]

    @property
    def hidden(self) -> float:
        """The part of the halo time that interiors hide; 1 where there is nothing to hide."""
        halos = self.waiting - self.without
        return 1.0 if halos <= 1e-12 else 1.0 - (self.overlapped - self.without) / halos


def predict(profile: Profile, borders: Borders, link: Links, *, longest_wait: float = 2e-3) -> Prediction:
    """Whether interiors are large enough to hide the halos, gradients on the same link included."""
    wire = named_link(link, HALO_LANE, LINK_LANE)

    def period(these: Borders) -> float:
        program = plan_tiles(profile, these, link, longest_wait=longest_wait)
        return simulate(program, profile, link).period

    waiting = [None if b is None else replace(b, share=1.0) for b in borders]
    exposed = []
    for layer, border in enumerate(borders):
        if border is None:
            continue
        times, interior = profile.layers[layer], 1 - border.share
        if border.forward and wire.cost(Kind.HALO, border.forward) > interior * times.forward:
            exposed.append(Action(Kind.HALO, layer))
        if border.backward and wire.cost(Kind.HALOB, border.backward) > interior * times.backward:
            exposed.append(Action(Kind.HALOB, layer))
    nothing = [None] * len(borders)
    return Prediction(period(nothing), period(borders), period(waiting), tuple(exposed))
