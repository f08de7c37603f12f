"""A searched plan is timed beside DDP's way: whose turn it is, on what ranks agree, and what is told."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commsched.optimizer.measuring import Sample
from commsched.optimizer.planner import Model, Options, Plan, Planner, Trial
from commsched.optimizer.reports import _trial_text, _tried
from commsched.optimizer.session import TRY_AFTER, Session
from scheduler import policies
from scheduler.ir.link import Link

LINK = Link(1e-4, 1e-8)
MIB = 1 << 20
MODEL = Model(tuple("abcdefgh"), (MIB,) * 8, (torch.float32,) * 8)  # layers of 4 MiB


def plan_of(model: Model, policy: str, **options: Any) -> Plan:
    order = list(model.layers)
    times = Sample([0.01] * len(order), [0.02] * len(order), 0.0)
    profile = model.profile(order, times, "a test")
    return Plan(policies.plan(profile, LINK, policy, **options), profile, LINK, (-1, *order))


def planner_of(model: Model, **asked: Any) -> Planner:
    """The planner of rank 0, which agrees with nobody else."""
    ranks = SimpleNamespace(
        rank=0, size=2, share=lambda value: value, agree=lambda *_: None, all_values=lambda value: [value]
    )
    backend: Any = SimpleNamespace(
        ranks=ranks,
        name="direct",
        exchange_seconds=lambda size: 1e-4 + 1e-8 * size,
        tier_seconds=lambda _: [],
    )
    return Planner(model, backend, Options(None, **asked))


SEARCHED = plan_of(MODEL, "dear", bucket_bytes=8 * MIB)
DEFAULT, TUNED = planner_of(MODEL).like_ddp(SEARCHED)


# -- what is tried -------------------------------------------------------------------------------------------


def sizes(plan: Plan) -> list[float]:
    return [bucket.bytes / MIB for bucket in plan.program.buckets]


def test_ddps_way_has_its_default_buckets_and_those_that_it_is_tuned_to() -> None:
    assert [sizes(DEFAULT), sizes(TUNED)] == [[4, 28], [4] * 8]
    assert DEFAULT.program.plan == "AR0 AR1"
    assert all(
        plan.profile == SEARCHED.profile and plan.layers == SEARCHED.layers for plan in (DEFAULT, TUNED)
    )


def test_sizes_that_the_user_gave_stay() -> None:
    (only,) = planner_of(MODEL, bucket_bytes=16 * MIB).like_ddp(SEARCHED)
    assert sizes(only) == [4, 16, 12]
    (only,) = planner_of(MODEL, groups=[[0, 1, 2, 3], [4, 5, 6, 7]]).like_ddp(SEARCHED)
    assert sizes(only) == [16, 16]


def test_ranks_agree_on_all_that_is_tried_in_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, told = planner_of(MODEL), []
    monkeypatch.setattr(planner.ranks, "share", lambda value: told.append(value) or value)
    assert planner.like_ddp(SEARCHED) == [DEFAULT, TUNED] and len(told) == 1


def test_what_sends_as_the_searched_plan_does_is_not_tried() -> None:
    """Whether a plan has an all-reduce or its two halves in a row."""
    assert planner_of(MODEL).like_ddp(DEFAULT) == [TUNED]
    small = Model(("a", "b"), (100, 100), (torch.float32,) * 2)
    one = plan_of(small, "dear", bucket_bytes=MIB)
    assert one.program.plan == "RS0 AG0" and planner_of(small).like_ddp(one) == []
    empty = Model(("a",), (0,), (torch.float32,))
    assert planner_of(empty).like_ddp(plan_of(empty, "dear", bucket_bytes=MIB)) == []


# -- which is the fastest ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "turns"),
    [
        ([1.0, 1.3, 1.2], [0, 1, 2, 0]),
        ([1.0, 0.98, 1.2], [0, 1, 2, 0]),  # not worth a change
        ([1.0, 0.8, 0.9, 1.0, 0.8], [0, 1, 2, 0, 1, 1]),
        ([1.0, 0.9, 0.8, 1.0, 0.8], [0, 1, 2, 0, 2, 2]),
        ([1.0, 0.9, 0.8, 0.7, 0.8], [0, 1, 2, 0, 2, 0]),  # something else had slowed down the first turn
        ([1.0, 0.8, 1.2, 1.0, 1.2], [0, 1, 2, 0, 1, 0]),  # or had not slowed down the second
    ],
)
def test_the_fastest_one_wins_if_it_is_faster_twice(seconds: list[float], turns: list[int]) -> None:
    trial = Trial([SEARCHED, DEFAULT, TUNED])
    seen = []
    for number, took in enumerate(seconds):
        assert not trial.over, number
        seen.append(trial.now)
        trial.end_turn(took)
    assert trial.over and [*seen, trial.now] == turns


def test_with_nothing_to_try_the_trial_is_over_at_once() -> None:
    trial = Trial([SEARCHED])
    trial.end_turn(1.0)
    assert trial.over and trial.now == 0


# -- on what the ranks agree ---------------------------------------------------------------------------------


class Turns:
    """A session of which a test knows whose turn it is; ``others``: what the other ranks have timed."""

    def __init__(self, mine: dict[int, float], joined: bool = False) -> None:
        self.others: list[float | None] = []
        self.plan, self.trial = SEARCHED, None
        self.round = SimpleNamespace(joined=joined, vote=7)
        self.backend = SimpleNamespace(ranks=SimpleNamespace(all_values=lambda own: [own, *self.others]))
        self.planner = SimpleNamespace(like_ddp=lambda plan: [DEFAULT, TUNED])
        self._try_after = TRY_AFTER
        self.times = SimpleNamespace(median_step=lambda: mine[len(self.plan.program.buckets)])

    def _install_next(self, plan: Plan) -> None:
        self.plan = plan

    def end_turn(self, *others: float | None) -> Plan:
        self.others = list(others)
        Session._end_turn(self)  # type: ignore[arg-type]
        return self.plan


def test_the_slowest_rank_counts_so_that_all_choose_alike() -> None:
    """This rank alone would have kept the searched plan, or taken the other one of DDP's."""
    rank = Turns({4: 1.0, 2: 1.2, 8: 0.9})
    told = [
        rank.end_turn(2.0),
        rank.end_turn(1.0),
        rank.end_turn(1.8),
        rank.end_turn(2.0),
        rank.end_turn(1.2),
    ]
    assert told == [DEFAULT, TUNED, SEARCHED, DEFAULT, DEFAULT]
    assert (
        rank.trial is not None and rank.trial.over and rank.trial.seconds == [[2.0, 2.0], [1.2, 1.2], [1.8]]
    )
    assert rank.round.vote == 0 and rank._try_after == TRY_AFTER


@pytest.mark.parametrize("joined", [True, False])
def test_while_a_rank_has_joined_the_searched_plan_is_used(joined: bool) -> None:
    rank = Turns({4: 1.0, 2: 1.2, 8: 0.9})
    assert rank.end_turn(1.0) is DEFAULT
    rank.round.joined = joined
    assert rank.end_turn(1.0 if joined else None) is SEARCHED
    assert rank.trial is None and rank._try_after == 2 * TRY_AFTER, "the next trial is due after some steps"
    assert rank.end_turn(1.0 if joined else None) is SEARCHED and rank.trial is None
    assert rank._try_after == 3 * TRY_AFTER, "steps are counted on: replans for drift wait for many"


class Voter:
    """A session of which a test gives the reasons to vote; ``told``: what it has measured again."""

    plan, trial, searches, why_untried = SEARCHED, None, False, "it was given"
    _reports, _timeline, _measuring, _adapts, _repeats, _try_after = None, None, None, True, 2, TRY_AFTER

    def __init__(self) -> None:
        self.told: list[str] = []
        self.disturbed = self.drifted = False
        self.round = SimpleNamespace(joined=False, vote=0, votes=0, mark=lambda _: None, waited=0)
        self.hooks = SimpleNamespace(order_changed=False)
        self.times = SimpleNamespace(
            step=lambda: None,
            last_wait=lambda: 0,
            are_settled=True,
            patience=1,
            may_replan_at_once=lambda: True,
            has_drifted=lambda: self.drifted,
            has_timed=lambda _: False,
        )
        self.backend = SimpleNamespace(ranks=SimpleNamespace(size=3))
        self._measure_again = partial(Session._measure_again, self)  # type: ignore[arg-type]
        self._has_majority = partial(Session._has_majority, self)  # type: ignore[arg-type]
        self._was_disturbed, self._is_due = lambda: self.disturbed, lambda: False
        self._start_measuring = lambda: self.told.append("alone")
        self._measure_beside = lambda: self.told.append("beside the traffic")


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        ([[("disturbed",), (), ()]], "beside the traffic"),
        ([[("reordered",), (), ()]], "alone"),  # and in the next steps the forward has its old order again
        ([[("disturbed",), (), ()], [], [("drifted",), (), ()]], "beside the traffic"),
        ([[("disturbed",), ("drifted",), ()]], "alone"),
        ([[("drifted",), ("drifted",), ()]], "alone"),
        ([[("drifted",), (), ()]] * 9, None),
    ],
)
def test_what_is_measured_again_is_what_was_voted_for(
    reasons: list[list[tuple[str, ...]]], told: str | None
) -> None:
    """The flags of a round carry the votes of the step before, and are read in the step after."""
    ranks, sent = [Voter() for _ in range(3)], [0, 0]
    for step in range(9):
        of_step = reasons[step] if step < len(reasons) else []
        for rank, why in zip(ranks, of_step or [()] * 3, strict=True):
            rank.hooks.order_changed = "reordered" in why
            rank.disturbed, rank.drifted = "disturbed" in why, "drifted" in why
            rank.round.votes = sent[-2]
        together = [Session.end_step(rank) for rank in ranks]  # type: ignore[arg-type]
        sent.append(sum(rank.round.vote for rank in ranks))
        if any(together):
            for each in together:
                assert each is not None, "only some of the ranks measure again"
                each()
            break
    assert [rank.told for rank in ranks] == [[told] if told else []] * 3


# -- what is told --------------------------------------------------------------------------------------------


def test_what_was_tried_is_told() -> None:
    trial = Trial([SEARCHED, DEFAULT, TUNED])
    trial.end_turn(1.0)
    assert _trial_text(trial, "") == "the searched plan 1000.00 ms: being tried"
    for seconds in (0.8, 1.2, 1.1, 0.9):
        trial.end_turn(seconds)
    assert _tried(trial) == (
        ("the searched plan", pytest.approx(1.05)),
        ("2 all-reduces of up to 28.00 MiB", pytest.approx(0.85)),
        ("8 all-reduces of up to 4.00 MiB", 1.2),
    )
    assert _trial_text(trial, "") == (
        "the searched plan 1050.00 ms, 2 all-reduces of up to 28.00 MiB 850.00 ms,"
        " 8 all-reduces of up to 4.00 MiB 1200.00 ms: 2 all-reduces of up to 28.00 MiB is used"
    )
    alone = Trial([SEARCHED])
    alone.end_turn(1.0)
    assert _trial_text(alone, "") == "the searched plan sends as DDP does"
    assert _trial_text(None, "") == "to be tried after some more steps"
    assert _trial_text(None, "it was given") == "not tried, because it was given"


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({}, ""),
        ({"schedule": "optimal"}, "was given"),
        ({"_adapts": False}, "was given"),
        ({"prepares_together": True}, "gather='parameters'"),
        ({"params": {1: None}}, "quantised"),
    ],
)
def test_why_none_is_tried(different: dict[str, Any], words: str) -> None:
    facts = {"schedule": "auto", "_adapts": True, "prepares_together": False, "params": {}, **different}
    session: Any = SimpleNamespace(
        planner=SimpleNamespace(schedule=facts["schedule"]),
        mode=SimpleNamespace(prepares_together=facts["prepares_together"]),
        round=SimpleNamespace(residuals=SimpleNamespace(params=facts["params"])),
        _adapts=facts["_adapts"],
    )
    why = Session.why_untried.fget(session)  # type: ignore[attr-defined]
    assert words in why and bool(why) == bool(words)
