"""Random and hand-made scheduling problems, and the slow ways to solve them that tests compare with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from scheduler.ir.actions import Action, Kind
from scheduler.ir.link import Link, TwoTierLink
from scheduler.ir.profile import Layer, Profile

SECONDS = st.one_of(st.just(0.0), st.floats(1e-4, 10.0))


def make_profile(
    sizes: Sequence[int], forward: Sequence[float], backward: Sequence[float], update: float = 0.0
) -> Profile:
    rows = zip(sizes, forward, backward, strict=True)
    layers = tuple(Layer(f"layer{n}", f, b, size) for n, (size, f, b) in enumerate(rows))
    return Profile("made up", layers, update)


@st.composite
def profiles(draw: st.DrawFn, most_layers: int = 8, groups: int = 1, updates: bool = True) -> Profile:
    """Any model: layers without bytes, layers that take no time, huge layers, several groups."""
    layers = tuple(
        Layer(
            f"layer{number}",
            draw(SECONDS),
            draw(SECONDS),
            draw(st.one_of(st.integers(0, 200), st.integers(0, 10**6))),
            group=draw(st.integers(0, groups - 1)),
        )
        for number in range(draw(st.integers(1, most_layers)))
    )
    update = draw(st.sampled_from([0.0, 0.0, 1e-6])) if updates else 0.0
    return Profile("random", layers, update)


@st.composite
def links(draw: st.DrawFn) -> Link:
    return Link(draw(st.sampled_from([0.0, 1e-3, 0.3])), draw(st.sampled_from([0.0, 1e-7, 1e-5, 1e-3])))


def two_tiers(inside: Link, between: Link, overlaps: bool = True) -> TwoTierLink:
    """Two tiers that take their sum where they are used one after the other."""
    both = inside.alpha + between.alpha, inside.beta + between.beta
    return TwoTierLink(*both, inside=inside, between=between, overlaps=overlaps)


@st.composite
def tiers(draw: st.DrawFn) -> TwoTierLink:
    """Any two tiers, either of which may be the slower one. Without overlap of buckets, segments of one
    bucket may be in both tiers at once.
    """
    link = two_tiers(draw(links()), draw(links()), draw(st.sampled_from([True, True, False])))
    if link.overlaps or not draw(st.booleans()):
        return link
    slower = max(link.inside.beta, link.between.beta)
    return replace(link, beta=slower, segment=draw(st.sampled_from([0.0, 64.0, 1e4])))


def all_orders(buckets: int, late: bool = False) -> Iterator[tuple[Action, ...]]:
    """Every order of the RS and AG of so many buckets, RS before AG (``late``: every RS before every AG)."""
    jobs = [(kind, bucket) for bucket in range(buckets) for kind in (Kind.RS, Kind.AG)]
    for order in itertools.permutations(jobs):
        place = {job: at for at, job in enumerate(order)}
        last_rs = max(place[Kind.RS, bucket] for bucket in range(buckets))
        if all(
            place[Kind.AG, bucket] > (last_rs if late else place[Kind.RS, bucket])
            for bucket in range(buckets)
        ):
            yield tuple(Action(kind, bucket) for kind, bucket in order)
