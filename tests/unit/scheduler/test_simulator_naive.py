"""The simulator against a second one: slow, without graphs or events, written from the rules alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.ir.actions import Action, Kind
from scheduler.ir.buckets import Bucket, fuse_by_bytes
from scheduler.ir.link import Link, TwoTierLink
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import data_parallel_program
from scheduler.simulate.simulator import simulate
from scheduler.simulate.step_model import StepModel
from tests.support.scheduling_problems import two_tiers


class Naive:
    """One rank; one link, or one inside the host besides. Looks at everything again after every bit of
    progress.
    """

    def __init__(
        self, profile: Profile, link: Link, buckets: tuple[Bucket, ...], order: list[Action], **step: Any
    ) -> None:
        self.profile, self.link, self.buckets = profile, link, buckets
        self.sharded = step["gather"] == "parameters"
        self.early, self.ranks, self.slowdown = step["early_step"], step["ranks"], step["slowdown"]
        count = len(profile.layers)
        self.lanes: dict[str, list[tuple[str, int]]] = {
            "compute": [("B", layer) for layer in reversed(range(count))],
            "link": [(action.kind.value, action.index) for action in order],
            "update": [],
        }
        # Beside the link: the sum inside the host before an RS (one place early), and the copies after an AG.
        beside = [
            (place - 1.25 if action.kind is Kind.RS else place, f"{action.kind.value} inside", action.index)
            for place, action in enumerate(order)
            if self.inside(action.index)
        ]
        self.lanes["inside"] = [(kind, index) for _, kind, index in sorted(beside)]
        updates = [index for kind, index in self.lanes["link"] if kind == ("RS" if self.sharded else "AG")]
        if self.sharded:
            self.lanes["update"] = [("U", index) for index in updates]
        for layer in range(count):
            if not self.sharded:
                self.lanes["compute"] += [("U", b) for b in updates if min(buckets[b].layers) == layer]
            self.lanes["compute"].append(("F", layer))

    def inside(self, bucket: int) -> float:
        if not isinstance(self.link, TwoTierLink) or not self.link.overlaps:
            return 0.0
        size = sum(piece.stop - piece.start for piece in self.buckets[bucket].pieces)
        return self.link.inside.alpha + self.link.inside.beta * size

    def work(self, what: tuple[str, int]) -> float:
        kind, index = what
        if kind == "B":
            return self.profile.layers[index].backward
        if kind == "F":
            return self.profile.layers[index].forward
        if kind.endswith("inside"):
            return self.inside(index)
        size = sum(piece.stop - piece.start for piece in self.buckets[index].pieces)
        if kind == "U":
            return self.profile.update_per_byte * size / (self.ranks if self.sharded else 1)
        link = self.link.between if self.inside(index) else self.link  # type: ignore[attr-defined]
        return link.alpha + link.beta * size  # type: ignore[no-any-return]

    def needs(self, what: tuple[str, int]) -> list[tuple[str, int]]:
        kind, index = what
        if kind == "AG inside":
            return [("AG", index)]
        if kind == "RS" and self.inside(index):
            return [("RS inside", index)]
        if kind in ("RS", "RS inside"):
            return [("B", layer) for layer in self.buckets[index].layers]
        if kind == "AG":
            return [("U", index)] if self.sharded else [("RS", index)]
        if kind == "U" and self.sharded:
            return [("RS", index)] if self.early else [("RS", index), ("B", 0)]
        if kind == "U":
            return [self.gathered(index)]
        if kind == "F":
            return [self.gathered(b) for b, bucket in enumerate(self.buckets) if index in bucket.layers]
        return []

    def gathered(self, bucket: int) -> tuple[str, int]:
        return ("AG inside" if self.inside(bucket) else "AG", bucket)

    def period(self) -> float:
        """Backward to the end of the next forward; nothing is under way before or after."""
        clock = 0.0
        done: set[tuple[str, int]] = set()
        left = {what: self.work(what) for lane in self.lanes.values() for what in lane}
        while len(done) < len(left):
            heads = {
                lane: next((w for w in tasks if w not in done), None) for lane, tasks in self.lanes.items()
            }
            running = [w for w in heads.values() if w and all(need in done for need in self.needs(w))]
            over = [w for w in running if left[w] <= 1e-12]
            if over:
                done.update(over)
                continue
            busy = heads["link"] in running or heads["inside"] in running
            speed = {w: 1 / (1 + self.slowdown) if busy and w == heads["compute"] else 1.0 for w in running}
            passed = min(left[w] / speed[w] for w in running)
            clock += passed
            for w in running:
                left[w] -= passed * speed[w]
        return clock


seconds = st.integers(0, 40).map(lambda n: n / 4)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.lists(st.integers(0, 400), min_size=1, max_size=7))
    layers = tuple(Layer(f"l{i}", draw(seconds), draw(seconds), size) for i, size in enumerate(sizes))
    profile = Profile("random", layers, draw(st.sampled_from([0.0, 0.01])))
    buckets = fuse_by_bytes(sizes, draw(st.integers(1, 500)), part=draw(st.none() | st.integers(50, 200)))
    link, wire = (Link(draw(seconds), draw(st.integers(0, 8)) / 64) for _ in range(2))
    if draw(st.booleans()):
        link = two_tiers(wire, link, draw(st.sampled_from([True, True, False])))
    gather, early = draw(st.sampled_from([("gradients", False), ("parameters", False), ("parameters", True)]))
    order = [Action(Kind.RS, b) for b in range(len(buckets))]
    for b in draw(st.permutations(range(len(buckets)))):
        # An AG anywhere behind its RS (behind all of them where the step waits), RS in the order of the
        # backward.
        waits = gather == "parameters" and not early
        first = len(buckets) if waits else order.index(Action(Kind.RS, b)) + 1
        order.insert(draw(st.integers(first, len(order))), Action(Kind.AG, b))
    return dict(
        profile=profile,
        link=link,
        buckets=buckets,
        order=order,
        ranks=draw(st.integers(1, 4)),
        gather=gather,
        early_step=early,
    )


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from([0.0, 0.0, 0.5]))
def test_simulator_agrees(case: dict[str, Any], slowdown: float) -> None:
    profile, link, buckets, order = case["profile"], case["link"], case["buckets"], case["order"]
    step = {key: case[key] for key in ("ranks", "gather", "early_step")}
    program = data_parallel_program("random", buckets, order, len(profile.layers), **step)
    naive = Naive(profile, link, buckets, order, slowdown=slowdown, **step).period()
    result = simulate(program, profile, link, slowdown=slowdown)
    assert result.settled
    assert result.period == pytest.approx(naive, rel=1e-9, abs=1e-9)
    if not slowdown:
        model = StepModel(profile, link, buckets, **step)
        assert model.period(model.encode(order)) == pytest.approx(naive, rel=1e-9, abs=1e-9)
        assert model.decode(model.encode(order)) == tuple(order)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_period_lies_between_the_resources_and_their_sum(case: dict[str, Any]) -> None:
    profile, link = case["profile"], case["link"]
    step = {key: case[key] for key in ("ranks", "gather", "early_step")}
    program = data_parallel_program("random", case["buckets"], case["order"], len(profile.layers), **step)
    result = simulate(program, profile, link)
    times = [link.times(action.kind, case["buckets"][action.index].bytes) for action in case["order"]]
    wire, inside = sum(each.link for each in times), sum(each.before + each.after for each in times)
    update = profile.update_per_byte * profile.total_bytes
    assert result.period >= max(profile.compute, wire, inside) * (1 - 1e-9)
    assert result.period <= (profile.compute + wire + inside + update) * (1 + 1e-9) + 1e-9
