"""``schedule="auto"`` while training goes on: all ranks at once measure and plan anew what has changed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from pytest import approx
from torch import nn
from torch.utils.checkpoint import checkpoint

import commsched as hvd
from commsched.backends import cpu, interface
from commsched.collectives import operations
from commsched.optimizer import measuring, planner
from commsched.optimizer import round as rounds
from commsched.optimizer.session import SAMPLES, WARM_UP, Session
from scheduler.ir.profile import Profile
from tests.support.cases import Me, case, main
from tests.support.oracle import batch, release, seeded
from tests.support.reference_run import Twin, momentum, searching
from tests.support.uneven import GATHERS


class Clock:
    """A clock that pauses move, and each look at it by a microsecond; other work takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now


@contextmanager
def only_pauses_take_time() -> Iterator[None]:
    """Within this context, layers and steps are timed by a ``Clock``, which pauses move without sleeping."""
    clock = Clock()
    times = SimpleNamespace(sleep=clock.sleep, monotonic=clock.monotonic)
    with (
        patch.object(cpu, "time", times),
        patch.object(measuring, "time", times),
        patch.object(rounds, "time", times),
        patch.object(interface, "Watch", lambda: measuring.Watch(clock.monotonic)),
        patch.object(Stack, "sleep", staticmethod(clock.sleep)),
    ):
        yield


class Stack(nn.Module):
    """Layers that take their time, in an order of their own."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.order, self.pause = [0, 1, 2], 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            self.sleep(self.pause)
            x = torch.tanh(self.layers[number](x))
        return x


def adapting(me: Me, **options: Any) -> Twin:
    return Twin(me, Stack, schedule="auto", planned=False, bucket_mb=0.0005, lag=0.0, **options)


def profiles_until(twin: Twin, steps: range, change: Callable[[Profile, Profile], bool]) -> int:
    """Trains until the profile has changed so; the step at which it had."""
    before = twin.optimizer.profile()
    for step in steps:
        twin.step(lambda m, rank, step=step: m(batch(rank, step)).square().mean())
        if change(before, twin.optimizer.profile()):
            return step
    raise AssertionError(f"the plan is still the one for {before.layers}")


def train(twin: Twin, steps: range) -> None:
    for step in steps:
        twin.step(lambda m, rank, step=step: m(batch(rank, step)).square().mean())


def forward(profile: Profile) -> float:
    return sum(layer.forward for layer in profile.layers if layer.bytes)


class Functional(nn.Module):
    """Runs the forward of no module that has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.layer.weight)


@case()
def a_forward_that_is_not_seen_is_mentioned_once_where_it_matters(me: Me) -> None:
    """Bare tensors (architecture parameters, prompts) and LBFGS have nothing to gain from its times."""
    bare = torch.ones(12, 12, requires_grad=True)
    functional, whole = seeded(Functional), seeded(Stack)
    trained: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.optim.Optimizer, bool]] = [
        (lambda x: torch.tanh(x @ bare), torch.optim.SGD([bare], lr=0.1), False),
        (whole, torch.optim.LBFGS(whole.parameters(), lr=0.1, max_iter=2), False),
        (functional, torch.optim.SGD([functional.layer.weight], lr=0.1), me.rank == 0),
    ]
    for model, inner, told in trained:
        optimizer: Any = hvd.DistributedOptimizer(inner)

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(me.rank, 0)).square().mean()
            loss.backward()
            return loss

        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(WARM_UP + SAMPLES + 1):
                optimizer.step(closure)
        texts = [str(one.message) for one in seen if "could not time the forward" in str(one.message)]
        assert len(texts) == told, (inner, texts)
        release(optimizer)


@case()
@only_pauses_take_time()
def a_step_that_has_become_slower_is_planned_anew(me: Me) -> None:
    twin = adapting(me)
    twin.model.pause = 0.001
    train(twin, range(50))
    twin.optimizer._session.times.patience = 30  # as if many more steps had passed
    twin.model.pause = 0.03
    step = profiles_until(twin, range(50, 400), lambda old, new: forward(new) > 2 * forward(old))
    assert me.everybody(str(step)) == [str(step)] * me.size, "not the same step on all ranks"
    train(twin, range(step + 1, step + 12))
    twin.end(must_have_waited=False)


@case()
@only_pauses_take_time()
def what_was_measured_beside_another_program_is_measured_again(me: Me) -> None:
    """The first ten iterations take one rank twice as long. Their times are not those of training."""
    twin = adapting(me)
    twin.model.pause = 0.06 if me.rank == 1 else 0.03
    train(twin, range(10))
    twin.model.pause = 0.03
    step = profiles_until(twin, range(10, 40), lambda old, new: forward(new) < 0.75 * forward(old))
    assert me.everybody(str(step)) == [str(step)] * me.size, "not the same step on all ranks"
    train(twin, range(step + 1, step + 12))
    twin.end(must_have_waited=False)


@case()
@only_pauses_take_time()
def a_disturbed_measurement_costs_no_second_series_of_slow_steps(me: Me) -> None:
    """One rank is slow for the series alone, or until after the one beside the traffic too."""
    for disturbed in (WARM_UP + SAMPLES, 10):
        twin, alone = adapting(me), []
        for step in range(40):
            twin.model.pause = 0.06 if me.rank == 1 and step < disturbed else 0.03
            alone.append(twin.optimizer._session.round.send_at_end)
            train(twin, range(step, step + 1))
            if step + 1 == WARM_UP + SAMPLES:
                measured = forward(twin.optimizer.profile())
        steps = [step for step, slow in enumerate(alone) if slow]
        assert len(steps) == WARM_UP + SAMPLES, f"slow until step {disturbed}, then alone in steps {steps}"
        assert forward(twin.optimizer.profile()) < 0.75 * measured, twin.optimizer.profile().source
        twin.end(must_have_waited=False)


@case(ranks=(2, 3))
def training_goes_on_while_a_plan_is_searched(me: Me) -> None:
    """All ranks, of which each has its own speed, take the plan at the same step; none waits for the search.

    Between any two steps they agree on whether they have settled, and they have once the plan has been tried.
    Both gathers are exact before and after.
    """
    answer, asked = planner.Child.answer, []

    def noted(child: planner.Child) -> Any:
        asked.append(child.has_ended)
        return answer(child)

    for gather in GATHERS:
        with searching(1.5), patch.object(planner.Child, "answer", noted):
            twin = adapting(me, gather=gather)
            twin.model.pause = 0.002 * me.rank
            session, meanwhile, tried, settled = twin.optimizer._session, [], [], []
            # Other work on this machine is no reason to measure again.
            session._repeats, session.times.has_drifted = 0, lambda: False

            def take_step(twin: Twin = twin, settled: list[bool] = settled) -> None:
                train(twin, range(len(settled), len(settled) + 1))
                settled.append(hvd.is_settled(twin.optimizer))
                assert len(settled) < 5000, "no plan was taken"

            while session._measuring is not None or session.searches:
                assert not any(settled), "settled before the plan was found"
                if session.searches:
                    meanwhile.append(len(settled))
                take_step()
            assert len(meanwhile) > 2 and session.plan.program.policy == "optimal", (meanwhile, session.plan)
            while not settled[-1]:
                if session.trial is not None:
                    tried.append(len(settled))
                take_step()
            assert len(tried) > 2 if gather == "gradients" else session.trial is None, tried
            assert session.trial is None or session.trial.over, "settled while plans were tried"
            for _ in range(5):
                take_step()
            assert sum(settled) == 6 and all(settled[-6:]), settled
            told = f"{meanwhile} {tried} {settled}"
            assert me.everybody(told) == [told] * me.size
            twin.end(must_have_waited=False)
    assert all(asked) and bool(asked) == (me.rank == 0), f"the child had ended when it was asked: {asked}"


@case(ranks=(2, 3))
def the_step_that_takes_a_plan_can_be_fixed(me: Me) -> None:
    """It takes the plan whether the search was over before it or not; rank 0's setting counts."""
    steps = {}
    for search in (0.0, 1.0):
        with searching(search, "6" if me.rank == 0 else ""):
            twin = adapting(me)
            session, seen = twin.optimizer._session, []
            twin.model.pause = 0.15 if search == 0.0 else 0.0
            while session._measuring is not None or session.searches:
                train(twin, range(len(seen), len(seen) + 1))
                seen.append((session.searches, session.plan.program.policy))
                assert len(seen) < 60, "no plan was taken"
            steps[search] = seen[: WARM_UP + SAMPLES + 8]
            twin.end(must_have_waited=False)
    first = WARM_UP + SAMPLES - 1
    assert steps[0.0][first : first + 5] == [(True, "dear")] * 5 and not steps[0.0][first + 5][0], steps
    assert steps[0.0] == steps[1.0] and me.everybody(str(steps)) == [str(steps)] * me.size, steps


@case(ranks=(2,))
def ranks_keep_their_plan_where_a_search_fails(me: Me) -> None:
    """The training process, which cannot do better, is not stopped for a search of its own."""
    with searching(1000.0):
        twin = adapting(me)
        session = twin.optimizer._session
        train(twin, range(8))
        before, child = session.plan.program.hash, session.planner._child
        assert session.searches and session.plan.program.policy == "dear"
        if child is not None:
            child._process.kill()
        while session.searches:
            train(twin, range(twin.steps, twin.steps + 1))
            assert twin.steps < 5000, "the search does not end"
        ended = str(twin.steps)
        assert me.everybody(ended) == [ended] * me.size
        for _ in range(5):
            train(twin, range(twin.steps, twin.steps + 1))
            assert session.plan.program.hash == before and session._measuring is None, session.plan
        assert not session._measure_next, "a later plan would be timed as if it were the first one"
        twin.end(must_have_waited=False)


@case(ranks=(2,))
def a_search_ends_with_what_it_is_for(me: Me) -> None:
    """Other parameters need another plan; a closed optimizer needs none."""

    def some(model: nn.Module) -> torch.optim.Optimizer:
        model.layers[1].requires_grad_(False)
        return momentum(model)

    with searching(1000.0):
        twin = adapting(me, make=some)
        session = twin.optimizer._session
        train(twin, range(8))
        assert session.searches
        children = [session.planner._child]
        twin.both(lambda m: m.layers[1].requires_grad_(True))
        train(twin, range(8, 16))
        assert session.searches
        children.append(session.planner._child)
        twin.end(must_have_waited=False)
        assert [child is None for child in children] == [me.rank > 0] * 2
        assert all(child.has_ended for child in children if child), "a search goes on"


@case()
def a_forward_in_another_order_is_planned_anew(me: Me) -> None:
    def order_of(profile: Profile) -> list[str]:
        return [layer.name for layer in profile.layers if layer.name.endswith("weight")]

    twin = adapting(me)
    twin.model.pause = 0.001
    train(twin, range(12))
    assert order_of(twin.optimizer.profile()) == [f"layers.{i}.weight" for i in (0, 1, 2)]
    twin.model.order = twin.plain.order = [2, 0, 1]
    # The delays of the other ranks' gradients let a forward find its parameters on their way.
    if me.rank == 0:
        twin.model.pause = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = profiles_until(twin, range(12, 200), lambda old, new: order_of(new) != order_of(old))
    assert order_of(twin.optimizer.profile()) == [f"layers.{i}.weight" for i in (2, 0, 1)]
    assert me.everybody(str(step)) == [str(step)] * me.size, "not the same step on all ranks"
    train(twin, range(step + 1, step + 12))
    twin.end(must_have_waited=False)


@case(ranks=(2, 3))
def ranks_agree_on_plans_while_gradients_are_on_their_way(me: Me) -> None:
    """``step()`` waited for all gradients, as it needed the flags: who has joined.

    That step took half as long again.
    """
    twin = adapting(me)
    session, waited, inside = twin.optimizer._session, [], []
    session._repeats = 0  # other work on this machine is no reason to measure again
    backend, after_step = session.backend, session.after_step
    wait = backend.wait_gathered

    def counted() -> None:
        inside.append(twin.steps)
        after_step()
        inside.clear()

    def noted(bucket: int) -> None:
        waited.extend(inside)
        wait(bucket)

    with (
        patch.object(session, "after_step", counted),
        patch.object(backend, "wait_gathered", noted),
        patch.object(backend, "is_gathered", lambda bucket: False),
    ):
        train(twin, range(12))
    assert "beside the traffic" in twin.optimizer.profile().source, twin.optimizer.profile().source
    assert not waited, f"rank {me.rank} waited for gradients at the end of steps {waited}"
    twin.end(must_have_waited=False)


class Twice(nn.Module):
    """A layer whose gradient comes twice in one backward, the second time after its bucket was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor, twice: bool) -> torch.Tensor:
        x = self.layers[3](x)
        for number in (0, 1, 0) if twice else (0, 1):
            layer = self.layers[number]
            x = x + checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
        return self.layers[2](x)


@case(ranks=(2, 3))
def ranks_that_read_late_gradients_and_those_that_agree_do_not_wait_for_each_other(me: Me) -> None:
    """Rank 0 reads gradients while the others agree. A part came late, which all ranks reduce together."""
    twin = Twin(me, lambda: Twice().double(), schedule="auto", planned=False, bucket_mb=0.0001, lag=0.0)
    session = twin.optimizer._session
    session._repeats = 0
    if me.rank > 0:
        session.round.arrived = list  # type: ignore[method-assign, assignment]  # the step itself reads no flags

    def train(late: bool) -> None:
        step = twin.steps
        twin.backward(lambda m, rank: m(batch(rank, step).double(), late and rank == 0).square().mean())
        if late and me.rank == 0:
            assert twin.model.layers[0].weight.grad.any()
        twin.update()
        twin.zero_grad()
        twin.compare(f"parameters after step {step}", exact=False)

    def agrees_next() -> bool:
        now = session._measuring
        return now is not None and not now.alone and now.seen == WARM_UP + SAMPLES - 1

    while not agrees_next():
        train(late=False)
        assert twin.steps < 50, "nothing was measured beside the traffic"
    assert not session.round.apart
    train(late=True)
    assert session.round.apart and session._measuring is None, "nothing came late, or the ranks did not agree"
    for _ in range(3):
        train(late=False)
    release(twin.optimizer)


@case(ranks=(2, 3))
@only_pauses_take_time()
def a_searched_plan_that_is_slower_than_ddps_way_gives_way_to_it(me: Me) -> None:
    """The planner is made to choose no overlap.

    A step takes as long as is said here of plans with so many buckets.
    """
    with patch.object(planner, "DDP_BYTES", (1000, 600)):
        for pauses, turns in (
            ({1: 0.05, 2: 0.04, 3: 0.03}, [1, 2, 3, 1, 3]),
            ({1: 0.03, 2: 0.04, 3: 0.05}, [1, 2, 3, 1]),
        ):
            twin = Twin(me, Stack, schedule="auto", planned=False, bucket_mb=None, lag=0.0)
            session, seen = twin.optimizer._session, []
            session.planner.policy, session._repeats = "sequential", 0
            while session.trial is None or not session.trial.over or session._next is not None:
                seen.append(len(session.plan.program.buckets))
                twin.model.pause = pauses[seen[-1]]
                train(twin, range(len(seen), len(seen) + 1))
                assert len(seen) < 60, "no plan was found the fastest"
            told = hvd.explain(twin.optimizer, show=False)
            assert [number for number, _ in groupby([*seen, len(told.buckets)])] == turns, (seen, told.trial)
            assert [seconds for _, seconds in told.tried] == approx(
                [3 * pauses[n] for n in (1, 2, 3)], rel=0.01
            )
            used = "3 all-reduces of up to 0.00 MiB" if turns[-1] == 3 else "the searched plan"
            assert told.trial.endswith(f": {used} is used") and told.trial in str(told), told.trial
            assert me.everybody(f"{seen} {told.hash}") == [f"{seen} {told.hash}"] * me.size
            train(twin, range(100, 102))
            twin.end(must_have_waited=False)


class Table(Stack):
    """A stack after an embedding, whose gradient may travel by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.table(x.abs().mul(3).long() % 40).mean(1))


@case(ranks=(2, 3))
@only_pauses_take_time()
def a_plan_takes_few_exchanges(me: Me) -> None:
    """Each exchange takes several ways over the link, behind the gradients that are on theirs."""
    started: list[str] = []
    exchanges: dict[str, set[int]] = {}
    start = operations._start

    def noted(kind: str, *arguments: Any, **more: Any) -> int:
        started.append(kind)
        return start(kind, *arguments, **more)

    def counted(name: str) -> Any:
        function = getattr(Session, name)

        def run(session: Session, *arguments: Any) -> None:
            before = len(started)
            function(session, *arguments)
            exchanges.setdefault(name, set()).add(len(started) - before)

        return patch.object(Session, name, run)

    expected = {"_agree_on_order": 1, "_plan_from_samples": 2, "_finish_plan": 1, "_plan_again": 2}
    with searching(0.1), patch.object(operations, "_start", noted), ExitStack() as counts:
        for name in expected:
            counts.enter_context(counted(name))
        twin = Twin(me, Table, schedule="auto", planned=False, lag=0.0, transport="direct", row_sparse=True)
        twin.model.pause, step = 0.01, 0
        while "_plan_again" not in exchanges:
            if "_finish_plan" in exchanges:
                twin.model.pause = 0.011  # so another plan is made
            train(twin, range(step, step + 1))
            step += 1
        train(twin, range(step, step + 3))
        assert exchanges == {name: {number} for name, number in expected.items()}, exchanges
        assert twin.optimizer._session.planner.model.rows
        twin.end(must_have_waited=False)


main(__name__)
