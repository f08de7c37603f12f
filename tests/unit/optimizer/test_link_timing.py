"""The timing of a link: how much precedes each timed message, and which plans need none of their own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import commsched as hvd
from commsched.backends import cpu
from commsched.backends.cpu import EngineBackend
from commsched.optimizer import planner as planner_module
from commsched.optimizer.buckets import shares_by_host
from commsched.optimizer.planner import Model, Options, Planner, TimedLink
from commsched.optimizer.session import STAY
from dnn_bench.emulate import OneProcess, emulated_backend, emulated_ranks
from scheduler.ir.link import Link, TwoTierLink
from tests.unit.backends.test_transport_choice import job, on

BURST = 256 << 10
RANKS = 2


class Recorder:
    """A transport that moves nothing and notes the bytes of its operations, and where ranks' parts end."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ends: list[tuple[int, ...]] = []
        self.size, self.closed = 4, False

    def close(self, _: str) -> None:
        self.closed = True

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def reduce_scatter(self, tensor: torch.Tensor, ends: tuple[int, ...] = ()) -> None:
        self.sizes.append(tensor.nbytes)
        self.ends.append(ends)

    all_gather = reduce_scatter


def fillers(name: str, process_set: Any) -> list[int]:
    """Return the bytes of what a backend gathers before each timed message, of all ranks together."""
    backend: Any = EngineBackend.__new__(EngineBackend)
    backend.name, backend._transport = name, Recorder()
    backend.ranks = SimpleNamespace(process_set=process_set, size=process_set.size())
    backend.exchange_seconds(1 << 12)
    operations: list[int] = backend._transport.sizes
    return operations[::3]  # each followed by a reduce-scatter and an all-gather


@pytest.mark.parametrize(
    ("nodes", "transport", "total"),
    [
        ("aaaabbbb", "tiers", 2 * BURST),
        ("aaaabbbb", "direct", 2 * BURST),
        ("aaaaaaaa", "direct", BURST),
        ("aaab", "tiers", 4 * BURST),  # the single rank of host b sends all of its burst
        ("ab", "direct", 2 * BURST),
    ],
)
def test_each_host_sends_a_burst_before_a_timed_message(
    monkeypatch: pytest.MonkeyPatch, nodes: str, transport: str, total: int
) -> None:
    """Each rank sent one: with several ranks a host, most of the time went into what was not timed."""
    assert fillers(transport, job(monkeypatch, on(*nodes))) == [total] * 3


def test_parts_of_a_burst_that_ranks_cannot_share_evenly_are_rounded_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = set(fillers("tiers", job(monkeypatch, on(*"aaabbb"))))
    assert len(sent) == 1 and 2 * BURST < sent.pop() < 1.01 * 2 * BURST


def test_ranks_of_unknown_hosts_have_a_host_each(monkeypatch: pytest.MonkeyPatch) -> None:
    contradicting = [("a", 0), ("a", 1), ("b", 2), ("b", 3)]
    assert fillers("direct", job(monkeypatch, contradicting)) == [4 * BURST] * 3
    emulated = emulated_ranks(8)  # no launcher can be asked for their hosts
    assert fillers("EMULATED", emulated) == [8 * BURST] * 3


def test_a_message_between_uneven_hosts_has_the_parts_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host owns half. In equal parts the one with 3 ranks owned three quarters of it, and so the time of
    a message was 1.5 times that of a bucket.
    """
    backend: Any = EngineBackend.__new__(EngineBackend)
    backend.name, backend._transport, process_set = "tiers", Recorder(), job(monkeypatch, on(*"aaab"))
    backend.ranks = SimpleNamespace(process_set=process_set, size=4)
    for shares, parts in (((), ()), (shares_by_host([0, 0, 0, 1]), (10880, 21824, 32768, 65536))):
        backend.shares = shares
        backend.exchange_seconds(1 << 18)
        assert backend._transport.ends[-3:] == [(), parts, parts]


def test_between_hosts_a_rank_sends_its_part_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a host it sends all of it; all ranks of the host do both at once."""
    backend: Any = EngineBackend.__new__(EngineBackend)
    inside, between, whole = Recorder(), Recorder(), Recorder()
    backend.name, backend._transport, process_set = "tiers", whole, job(monkeypatch, on(*"aaaabbbb"))
    backend.ranks = SimpleNamespace(process_set=process_set, size=8, number=1)
    monkeypatch.setattr(cpu, "tier_exchanges", lambda *_: (inside, between))
    assert len(backend.tier_seconds([(1 << 20, 1 << 20), (1 << 16, 1 << 15)])) == 2
    assert inside.sizes == [1 << 20] * 6 + [1 << 16] * 6
    assert between.sizes == [1 << 18] * 6 + [1 << 13] * 6
    assert inside.closed and between.closed and not whole.closed


class Timed:
    """A backend that notes which messages were timed."""

    name, by_rows = "timed", False

    def __init__(self) -> None:
        self.ranks = OneProcess(emulated_ranks(RANKS))
        self.sizes: list[int] = []

    def exchange_seconds(self, size: int) -> float:
        self.sizes.append(size)
        return 1e-4 + 1e-9 * size

    def tier_seconds(self, sizes: Any) -> list[tuple[float, float]]:
        return []


def planner(backend: Any, elements: int, before: Planner | None = None, wire: Any = None) -> Planner:
    model = Model.of([nn.Parameter(torch.zeros(elements))], ["weight"], wire)
    return Planner(model, backend, Options(backend.ranks.process_set, wire_dtype=wire), before=before)


LARGE, SMALL = 1 << 20, 1 << 15  # elements


@pytest.mark.parametrize(
    ("first", "then", "anew"),
    [
        pytest.param({"elements": LARGE}, {"elements": LARGE}, False, id="same parameters"),
        pytest.param({"elements": LARGE}, {"elements": SMALL}, False, id="fewer"),
        pytest.param({"elements": LARGE}, {"elements": 2 * LARGE}, False, id="more than the largest message"),
        pytest.param({"elements": SMALL}, {"elements": LARGE}, True, id="more"),
        pytest.param(
            {"elements": LARGE}, {"elements": LARGE, "wire": torch.bfloat16}, True, id="another wire type"
        ),
    ],
)
def test_a_planner_times_the_link_anew_for_larger_messages_only(
    first: dict[str, Any], then: dict[str, Any], anew: bool
) -> None:
    backend = Timed()
    before = planner(backend, **first)
    timed = len(backend.sizes)
    after = planner(backend, **then, before=before)
    assert timed == 6 and len(backend.sizes) == (12 if anew else 6)
    assert (after.link is before.link) is not anew


def test_the_rate_of_buckets_counts_where_small_messages_were_faster() -> None:
    """A shaped link lets 2 MB pass at full speed. The mean of the ranks counts; one that joined has none."""
    timed = TimedLink(Timed(), 4 * LARGE)  # type: ignore[arg-type]
    assert (timed.link.alpha, timed.link.beta) == pytest.approx((1e-4, 1e-9))
    sizes = 4 << 20, 16 << 20
    by_rank = [[(size, 1e-4 + rate * size) for size in sizes] for rate in (3e-8, 5e-8)]
    refined = timed.refined([*by_rank, []])
    assert refined.beta == pytest.approx(4e-8, rel=1e-3)
    assert timed.refined([]) == timed.link


class Tiers(Timed):
    """Two hosts of two ranks: as many seconds for each byte that moves inside a host as between hosts."""

    name = "tiers"

    def tier_seconds(self, sizes: Any) -> list[tuple[float, float]]:
        return [(1e-5 + 1e-9 * inside, 1e-5 + 4e-9 * between) for inside, between in sizes]


@pytest.mark.parametrize(
    ("shares", "inside", "between"),
    [
        pytest.param((1.0, 1.0), 1.0, 1.0, id="own type"),
        pytest.param((0.5, 0.5), 0.75, 0.5, id="bfloat16"),  # the ranks of a host add whole gradients
        pytest.param((0.5, 1.0), 1.0, 0.75, id="bfloat16, parameters are gathered"),
        pytest.param((0.25, 0.25), 0.625, 0.25, id="int8"),
    ],
)
def test_gradients_in_other_types_and_in_their_own(
    shares: tuple[float, float], inside: float, between: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates are per own byte. Predictions of DDP had those of compressed messages, which it does not send."""
    backend: Any = Tiers()
    monkeypatch.setattr(planner_module, "hosts_of", lambda process_set: [0, 0, 1, 1])
    backend.ranks = SimpleNamespace(size=4, process_set=None, all_values=lambda values: [values])
    timed = TimedLink(backend, 4 * LARGE, shares)
    link, plain = timed.link, timed.uncompressed(timed.link)
    assert isinstance(link, TwoTierLink) and isinstance(plain, TwoTierLink)
    assert link.inside.beta == pytest.approx(inside * 1e-9, rel=1e-2)
    assert link.between.beta == pytest.approx(between * 4e-9, rel=1e-2)
    assert (plain.inside.beta, plain.between.beta) == pytest.approx((1e-9, 4e-9), rel=1e-2)
    assert plain.as_ring().beta == pytest.approx(3 / 4 * 2 * 4e-9, rel=1e-2)
    flat = TimedLink(Timed(), 4 * LARGE, shares)  # type: ignore[arg-type]
    assert flat.uncompressed(flat.link).beta == pytest.approx(1e-9, rel=1e-2)


def test_the_prediction_of_ddp_does_not_depend_on_compression() -> None:
    plain, packed = (planner(Timed(), LARGE, wire=wire) for wire in (None, torch.bfloat16))
    assert packed.link.beta == pytest.approx(plain.link.beta / 2, rel=1e-3)
    one, other = plain.first([0]), packed.first([0])
    other = replace(other, program=one.program, profile=one.profile)  # of the same compute
    assert other.prediction.ddp_period == pytest.approx(one.prediction.ddp_period, rel=1e-2)
    assert other.prediction.period < 0.8 * one.prediction.period


def test_another_backend_is_timed_even_with_the_same_ranks() -> None:
    """After an elastic restart the process set's number is the same, and its connections are not."""
    before, backend = planner(Timed(), LARGE), Timed()
    assert planner(backend, LARGE, before).link is not before.link
    assert len(backend.sizes) == 6


def test_layers_that_are_frozen_for_a_while_do_not_have_the_link_timed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both the plan without them and the plan with them again had it timed."""
    timed: list[int] = []

    def exchange_seconds(_: EngineBackend, size: int) -> float:
        timed.append(size)
        return 1e-4 + 1e-9 * size

    monkeypatch.setattr(EngineBackend, "exchange_seconds", exchange_seconds)
    # Gradients of layers that have just been unfrozen are summed outside of the plan.
    monkeypatch.setattr(OneProcess, "add_up", lambda ranks, tensor, name: tensor.mul_(ranks.size))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        process_set=emulated_ranks(RANKS),
        transport=emulated_backend("cpu", Link(0.0, 0.0), RANKS),  # type: ignore[arg-type]
        schedule="dear",
        bucket_mb=1,
    )

    def train(steps: int) -> int:
        """Return how many parameters the plan has afterwards."""
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        return len(optimizer._session.round.params)

    try:
        assert train(2) == 6
        model[0].requires_grad_(False)
        assert train(STAY) == 4
        model[0].requires_grad_(True)
        assert train(2) == 6
        assert len(timed) == 6, f"messages of {timed} bytes were timed"
    finally:
        optimizer.close()
