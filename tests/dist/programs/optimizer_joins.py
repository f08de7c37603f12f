"""``join()``: ranks with fewer batches take part in the others' steps; which optimizers it concerns."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import commsched as hvd
from commsched.optimizer import planner
from commsched.optimizer.session import TURN
from tests.support.cases import Me, case, main
from tests.support.oracle import assert_close, fingerprint, release, seeded, terms_of, values
from tests.support.reference_run import momentum, searching
from tests.support.small_models import mlp64, words64
from tests.support.uneven import GATHERS, Pair, mean_loss, rows


def epoch(me: Me, pair: Pair, first: int, batches: list[int], act: Any = lambda: None) -> int:
    """Rank r has ``batches[r]`` batches from step ``first`` on; everybody replays what active ranks learn."""
    for number in range(max(batches)):
        step = first + number
        active = [rank for rank in range(me.size) if batches[rank] > number]
        everybody = [rows(rank, step) for rank in active]
        if me.rank not in active:
            continue
        pair.backward(rows(me.rank, step), everybody)
        act()
        pair.step()
    last: int = hvd.join()
    for number in range(batches[me.rank], max(batches)):
        step = first + number
        pair.together([rows(rank, step) for rank in range(me.size) if batches[rank] > number])
        pair.alone.step()
        pair.steps += 1
    return last


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)


@case(ranks=(2, 3, 4))
def joined_ranks_wait_for_the_others_batches(me: Me) -> None:
    """Twice, with another rank first; sums of active ranks still work; the results are those of all."""
    for gather in GATHERS:
        pair = Pair(make=adam, gather=gather)
        batches, active = [3 + 2 * rank for rank in range(me.size)], []

        def metric(active: list[int] = active) -> None:
            active.append(int(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="metric")))

        assert epoch(me, pair, 0, batches, metric) == me.size - 1
        wanted = [sum(count > n for count in batches) for n in range(batches[me.rank])]
        assert active == wanted, f"{active}, not {wanted}"
        pair.compare(f"{gather}, first epoch")
        assert epoch(me, pair, 20, batches[::-1]) == 0
        pair.compare(f"{gather}, second epoch")
        everywhere = me.everybody(fingerprint(pair.model))
        assert len(set(everywhere)) == 1, everywhere
        saved = pair.optimizer.state_dict()["state"]
        for i, state in pair.alone.state_dict()["state"].items():
            assert float(saved[i]["step"]) == float(state["step"])
        epoch(me, pair, 40, [2] * me.size)
        pair.end(f"{gather}, a third one without a difference")


@case(ranks=(2, 3))
def joined_ranks_wait_on_a_stream(me: Me) -> None:
    """On a CPU's stream nothing ever counted as arrived, so that ranks that had joined did not go on."""
    for gather in GATHERS:
        pair = Pair(make=adam, gather=gather, transport="stream")
        assert epoch(me, pair, 0, [2 + rank for rank in range(me.size)]) == me.size - 1
        pair.end(gather)


@case(ranks=(2, 3))
def plans_change_while_ranks_have_joined(me: Me) -> None:
    """Rank 0 joins before the first plan is made; the others measure, plan, and plan again."""
    for gather in GATHERS:
        pair = Pair(planned=False, schedule="auto", bucket_mb=None, gather=gather)
        session = pair.optimizer._session
        before = session.plan.program.hash
        batches = [2] + [16] * (me.size - 1)
        epoch(me, pair, 0, batches)
        assert session.plan.program.hash != before and session.profile is not None
        assert session.profile.source.startswith("measured"), session.profile.source
        pair.compare(f"{gather}, planned")
        hashes = me.everybody(session.plan.program.hash)
        assert len(set(hashes)) == 1, hashes
        session._start_measuring()
        epoch(me, pair, 50, [3 + 9 * (rank == 0) for rank in range(me.size)])
        pair.end(f"{gather}, planned anew")


@case(ranks=(2, 3))
def a_plan_that_is_searched_comes_after_a_join(me: Me) -> None:
    """Rank 0, which has the plan searched, joins meanwhile; the others take it at the same step."""
    for gather in GATHERS:
        with searching(0.5):
            pair = Pair(planned=False, schedule="auto", bucket_mb=None, gather=gather)
            session, step = pair.optimizer._session, 0
            while session._measuring is not None or session.searches:
                epoch(me, pair, step, [5] + [10] * (me.size - 1))
                step += 10
                assert step < 5000, "no plan was taken"
            assert session.plan.program.policy == "optimal", session.plan
            hashes = me.everybody(session.plan.program.hash)
            assert len(set(hashes)) == 1, hashes
            pair.end(gather)


@case(ranks=(2, 3))
def frozen_steps_are_counted_alike_after_a_join(me: Me) -> None:
    """A parameter that is frozen for ten steps leaves the plan; a rank that had joined had counted fewer."""
    for gather in GATHERS:
        pair = Pair(gather=gather)
        for model in (pair.model, pair.plain):
            next(model.parameters()).requires_grad_(False)
        epoch(me, pair, 0, [3 + 2 * rank for rank in range(me.size)])
        planned = len(pair.optimizer._session.round.params)
        epoch(me, pair, 20, [12] * me.size)
        assert len(pair.optimizer._session.round.params) == planned - 1
        pair.end(gather)


@case(ranks=(2, 3))
def votes_for_a_new_plan_work_while_ranks_have_joined(me: Me) -> None:
    pair = Pair(planned=False, schedule="auto", bucket_mb=None)
    session, step = pair.optimizer._session, 0
    while session._measuring is not None:  # again, where another program has disturbed it
        epoch(me, pair, step, [5] * me.size)
        step += 5
    session.times.has_drifted = lambda: True
    patience = session.times.patience
    epoch(me, pair, step, [2] + [12] * (me.size - 1))
    assert session.times.patience > patience, "no new plan"
    pair.end("voted")


@case(ranks=(2, 3))
def a_trial_of_plans_is_broken_off_by_a_join_and_made_later(me: Me) -> None:
    """Steps without some ranks take another time, so the searched plan is used until all are there again."""
    with patch.object(planner, "DDP_BYTES", (1 << 14, 1 << 13)):
        pair = Pair(planned=False, schedule="auto", bucket_mb=None)
        session, step = pair.optimizer._session, 0
        session._repeats = 0
        session.times.median_step = lambda: 2.0 if session.plan.program.policy == "optimal" else 1.0
        while session.trial is None:
            epoch(me, pair, step, [1] * me.size)
            step += 1
            assert step < 60, "no trial has begun"
        epoch(me, pair, step, [1] + [4 * TURN] * (me.size - 1))
        step += 4 * TURN
        assert session.trial is None and session.plan.program.policy == "optimal", session.plan
        while session.trial is None or not session.trial.over or session._next is not None:
            epoch(me, pair, step, [1] * me.size)
            step += 1
            assert step < 120, "it has not been made later"
        assert session.plan.program.policy == "wfbp", session.plan
        told = f"{step} {session.plan.program.hash}"
        assert me.everybody(told) == [told] * me.size
        pair.end("tried")


@case(ranks=(2, 3))
def clipping_and_schedules_while_ranks_have_joined(me: Me) -> None:
    for gather in GATHERS:
        pair = Pair(make=adam, gather=gather)

        def clip(pair: Pair = pair) -> None:
            norm = pair.optimizer.clip_grad_norm_(0.05)
            plain = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            assert torch.allclose(norm, plain, rtol=1e-12), f"{norm} {plain}"
            for optimizer in (pair.optimizer, pair.alone):
                optimizer.param_groups[0]["lr"] *= 0.9

        batches = [2 + 2 * rank for rank in range(me.size)]
        for step in range(max(batches)):
            active = [rank for rank in range(me.size) if batches[rank] > step]
            pair.together([rows(rank, step) for rank in active])
            if me.rank in active:
                mine = rows(me.rank, step)
                pair.optimizer.weighted(mean_loss(pair.model, mine), len(mine)).backward()
                clip()
                pair.step()
                continue
            # This rank has joined for the whole rest: one process goes on alone.
            nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            pair.alone.param_groups[0]["lr"] *= 0.9
            pair.alone.step()
            pair.steps += 1
        hvd.join()
        assert pair.optimizer.param_groups[0]["lr"] == pair.alone.param_groups[0]["lr"]
        pair.end(gather)


@case(ranks=(2, 3))
def averages_divide_by_all_ranks(me: Me) -> None:
    """Without ``weighted()``, as in Horovod: the gradients of joined ranks are zeros."""
    for gather in GATHERS:
        pair = Pair(gather=gather)
        batches = [1 + rank for rank in range(me.size)]
        for step in range(batches[me.rank]):
            mean_loss(pair.model, rows(me.rank, step)).backward()
            pair.optimizer.step()
            pair.optimizer.zero_grad()
        hvd.join()
        for step in range(max(batches)):
            pair.alone.zero_grad()
            for rank in range(me.size):
                if batches[rank] > step:
                    (mean_loss(pair.plain, rows(rank, step)) / me.size).backward()
            pair.alone.step()
            pair.steps += 1
        pair.end(gather)


@case(ranks=(2,))
def two_optimizers_join_together(me: Me) -> None:
    """Also where one of them takes more steps than the other."""
    pairs = [Pair(gather=gather) for gather in GATHERS]
    counts = ((2, 3), (4, 9))[me.rank]
    for step in range(max(counts)):
        for pair, count in zip(pairs, counts, strict=True):
            if step < count:
                pair.backward(rows(me.rank, step), [rows(r, step) for r in (0, 1)])
                pair.step()
    hvd.join()
    for number, pair in enumerate(pairs):
        plain = seeded(mlp64)
        alone = momentum(plain)
        for step in range((4, 9)[number]):
            active = (0, 1) if step < (2, 3)[number] else (1,)
            alone.zero_grad()
            mean_loss(plain, torch.cat([rows(rank, step) for rank in active])).backward()
            alone.step()
        assert_close(pair.model, plain, terms_of(plain, 10), f"optimizer {number}")
        release(pair.optimizer)


@case(ranks=(2,))
def wrong_use_of_join_says_so(me: Me) -> None:
    def said(text: str, act: Any) -> None:
        try:
            act()
        except (ValueError, hvd.CommError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")

    pair = Pair()
    pair.backward(rows(0, 0), [rows(0, 0)])
    said("call step() first", hvd.join)
    release(pair.optimizer)
    pair = Pair(gather="parameters", early_step=True)
    said("early_step", hvd.join)
    release(pair.optimizer)
    # A backward without step() after a rank has joined: an error on both ranks.
    pair = Pair()
    if me.rank == 0:
        said("did not call step()", hvd.join)
    else:
        for step in range(2):
            mean_loss(pair.model, rows(1, step)).backward()
        said("did not call step()", lambda: values(p.grad for p in pair.model.parameters()))
    me.everybody()
    release(pair.optimizer)
    if me.rank == 0:
        time.sleep(0.3)  # rank 1 joins
    hvd.join()  # rank 0 goes on with the join that it had begun, although all ranks have joined by now
    assert int(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == me.size


# -- which optimizers take part ------------------------------------------------------------------------------


@contextmanager
def without_collector() -> Iterator[None]:
    """Only ``gc.collect()`` frees cycles in this context, as if the collector ran late on this rank."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def in_a_cycle(*things: Any) -> None:
    """Leave these objects to the collector."""
    knot: list[Any] = [things]
    knot.append(knot)


def train(me: Me, pair: Pair, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        pair.backward(rows(me.rank, step), [rows(rank, step) for rank in range(me.size)])
        pair.step()


def uneven(me: Me) -> list[int]:
    return [2 + rank for rank in range(me.size)]


def close_alone(pair: Pair) -> None:
    """Close on this rank only; where each rank has a part of the state, ``close()`` would wait for all."""
    pair.optimizer.close(wait=not pair.optimizer.spreads_state)


def fails(act: Any, *parts: str) -> None:
    try:
        act()
    except hvd.CommError as error:
        assert all(part in str(error) for part in parts), f"{parts} not all in {error}"
    else:
        raise AssertionError(f"no CommError, expected one with {parts}")


@case(ranks=(2, 3))
def one_rank_has_dropped_what_the_others_keep(me: Me) -> None:
    for gather in GATHERS:
        with without_collector():
            left = Pair(gather=gather)
            train(me, left, 0, 1)
            if me.rank:
                in_a_cycle(left)
            del left
            if me.rank == 0:
                gc.collect()
            hvd.join()
            pair = Pair(gather=gather)
            for first in (0, 20):
                epoch(me, pair, first, uneven(me))
            pair.end(gather)


@case(ranks=(2, 3))
def others_reduce_while_an_idle_optimizer_is_open(me: Me) -> None:
    """Horovod's join must have begun on the first rank, or the all-reduces wait for it without end."""
    for gather in GATHERS:
        pair = Pair(gather=gather)
        train(me, pair, 0, 2)
        for _ in range(2):
            for number in range(3 if me.rank else 0):
                total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"metric.{number}")
                assert int(total) == me.size - 1, total
            hvd.join()
        train(me, pair, 10, 2)
        pair.end(gather)


@case(ranks=(2, 3))
def closed_optimizers_do_not_take_part(me: Me) -> None:
    """Closed everywhere, or on one rank: there it can never be stepped again, and the error says by whom."""
    for gather in GATHERS:
        everywhere, somewhere, pair = Pair(gather=gather), Pair(gather=gather), Pair(gather=gather)
        train(me, somewhere, 0, 1)
        everywhere.optimizer.close()
        me.everybody()
        if me.rank == 0:
            close_alone(somewhere)
        epoch(me, pair, 0, uneven(me))
        pair.compare(gather)
        hvd.join()
        if me.rank:
            fails(partial(train, me, somewhere, 1, 2), "rank 0")
        somewhere.optimizer.close()
        epoch(me, pair, 20, uneven(me))
        pair.end(gather)


@case(ranks=(2, 3))
def a_step_without_the_joined_ranks_optimizer_fails(me: Me) -> None:
    for gather in GATHERS:
        closed, pair = Pair(gather=gather), Pair(gather=gather)
        train(me, closed, 0, 2)
        me.everybody()
        if me.rank == 0:
            close_alone(closed)
        else:
            fails(partial(train, me, closed, 2, 2), "rank 0")
        epoch(me, pair, 0, uneven(me))
        pair.end(gather)
        closed.optimizer.close(wait=False)


@case(ranks=(2, 3))
def several_optimizers_that_step_after_all_backwards(me: Me) -> None:
    """In another order than that of their making; the joined ranks cannot know which is next."""
    for gather in GATHERS:
        with without_collector():
            unused = Pair(gather=gather)
            pairs = [Pair(gather=gather) for _ in range(3)]
            for number, pair in enumerate(pairs):
                for optimizer in (pair.optimizer, pair.alone):
                    optimizer.param_groups[0]["lr"] *= 1 + number
            if me.rank == 0:
                close_alone(unused)
            else:
                in_a_cycle(unused)
            del unused
            batches = uneven(me)
            for step in range(batches[me.rank]):
                for pair in pairs:
                    mine = rows(me.rank, step)
                    pair.optimizer.weighted(mean_loss(pair.model, mine), len(mine)).backward()
                for pair in reversed(pairs):
                    pair.optimizer.step()
                    pair.optimizer.zero_grad()
            hvd.join()
            for number, pair in enumerate(pairs):
                for step in range(max(batches)):
                    pair.together([rows(rank, step) for rank in range(me.size) if step < batches[rank]])
                    pair.alone.step()
                    pair.steps += 1
                pair.end(f"{gather}, optimizer {number}")


@case(ranks=(3,))
def optimizers_of_process_sets(me: Me) -> None:
    """Every rank holds other ones; of the first set's, rank 0 has dropped one that rank 1 keeps."""
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2])]
    counts = [[2, 4, 0], [0, 3, 5]]
    for gather in GATHERS:
        with without_collector():
            left = Pair(gather=gather, process_set=sets[0]) if me.rank < 2 else None
            if me.rank == 1:
                in_a_cycle(left)
            del left
            gc.collect() if me.rank == 0 else None
            pairs = {n: Pair(gather=gather, process_set=sets[n]) for n in (0, 1) if me.rank in sets[n].ranks}
            for first in (0, 20):
                for number, pair in pairs.items():
                    for step in range(counts[number][me.rank]):
                        mine = rows(me.rank, first + step)
                        pair.optimizer.weighted(mean_loss(pair.model, mine), len(mine)).backward()
                        pair.optimizer.step()
                        pair.optimizer.zero_grad()
                assert hvd.join() in range(3)
                for number, pair in pairs.items():
                    for step in range(max(counts[number])):
                        active = [rank for rank in range(3) if step < counts[number][rank]]
                        pair.together([rows(rank, first + step) for rank in active])
                        pair.alone.step()
                        pair.steps += 1
                    pair.compare(f"{gather}, set {number}")
            for pair in pairs.values():
                release(pair.optimizer)
    for one in sets:
        hvd.remove_process_set(one)


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("this step fails")


def fails_in_backward(me: Me, pair: Pair) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("this backward fails")

    hook = list(pair.model.parameters())[2].register_hook(fail)
    try:
        mean_loss(pair.model, rows(me.rank, 0)).backward()
    finally:
        hook.remove()


def fails_in_step(me: Me, pair: Pair) -> None:
    mean_loss(pair.model, rows(me.rank, 0)).backward()
    pair.optimizer.step()


@case(ranks=(2, 3))
def failed_steps_leave_optimizers_behind(me: Me) -> None:
    """One rank has collected them, another has not; a third keeps the error, and with it all frames."""
    kept = []
    hvd.register_elementwise(Failing)
    for gather in GATHERS:
        for fail in (fails_in_backward, fails_in_step):
            make = momentum if fail is fails_in_backward else lambda m: Failing(m.parameters(), 0.1)
            with without_collector():
                failed = Pair(make=make, gather=gather)
                try:
                    fail(me, failed)
                except RuntimeError as error:
                    assert "fails" in str(error), error
                    in_a_cycle(failed, error)
                    if me.rank == 2 and fail is fails_in_backward:
                        kept.append(error)
                del failed
                if me.rank == 0:
                    gc.collect()
                pair = Pair(gather=gather)
                epoch(me, pair, 0, uneven(me))
                pair.end(f"{gather}, {fail.__name__}")
    kept.clear()


@case(ranks=(2,))
def an_update_that_raises_does_so_once(me: Me) -> None:
    """In step(), or in join() before the other rank knows that this one joins. The rest is left out."""
    hvd.register_elementwise(Failing)
    pair = Pair(make=lambda m: Failing(m.parameters(), 0.1))
    try:
        fails_in_step(me, pair)
        with pytest.raises(RuntimeError, match="this step fails"):
            hvd.join()
    except RuntimeError as error:
        assert "this step fails" in str(error), error
        pair.optimizer.zero_grad()
    hvd.join()
    pair.compare("nothing was updated")
    release(pair.optimizer)


@case(ranks=(2,))
def an_optimizer_whose_backward_failed_ends_with_join(me: Me) -> None:
    """Its gradients are half sent. The other rank is not left waiting for it, nor this one silently apart."""
    pair, other = Pair(), Pair()
    train(me, pair, 0, 2)
    if me.rank == 0:
        try:
            fails_in_backward(me, pair)
        except RuntimeError as error:
            assert "fails" in str(error), error
    else:
        fails(lambda: train(me, pair, 2, 3), "rank 0", "join()")
    epoch(me, other, 0, [0, 4])
    other.end("the other optimizer")
    if me.rank == 0:
        fails(lambda: train(me, pair, 2, 2), "join()", "zero_grad()")
    pair.optimizer.close(wait=False)


def words(rank: int, step: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 30, (2 + 3 * rank,), generator=dice)


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@case(ranks=(2, 3))
def sparse_gradients_while_ranks_have_joined(me: Me) -> None:
    """Two models at once: the joined rank must not wait for one while the others step the other."""
    pairs = [Pair(words64, descent) for _ in range(2)]
    batches = uneven(me)
    for step in range(max(batches)):
        everybody = [words(rank, step) for rank in range(me.size) if step < batches[rank]]
        for pair in pairs:
            if step < batches[me.rank]:
                mine = words(me.rank, step)
                pair.optimizer.weighted(mean_loss(pair.model, mine), len(mine)).backward()
        for pair in reversed(pairs) if step < batches[me.rank] else ():
            pair.optimizer.step()
            pair.optimizer.zero_grad()
        for pair in pairs:
            pair.together(everybody)
            pair.alone.step()
            pair.steps += 1
    hvd.join()
    for pair in pairs:
        pair.end("sparse")


@case(ranks=(2, 3))
def layers_are_unfrozen_while_ranks_have_joined(me: Me) -> None:
    """Their gradients are reduced outside of the plan, which nobody replaces meanwhile."""

    def all_but_the_last(model: nn.Module) -> torch.optim.Optimizer:
        *_, last = model.parameters()
        last.requires_grad_(False)
        return torch.optim.SGD(model.parameters(), lr=0.05)

    batches = [2] + [9] * (me.size - 1)
    for gather, build, draw in (
        (GATHERS[0], mlp64, rows),
        (GATHERS[1], mlp64, rows),
        (GATHERS[0], words64, words),
    ):
        pair = Pair(build, all_but_the_last, planned=False, gather=gather)
        for step in range(max(batches)):
            everybody = [draw(rank, step) for rank in range(me.size) if step < batches[rank]]
            if step == batches[me.rank]:
                hvd.join()
            if step == 4:
                pair.plain.requires_grad_(True)
                if step < batches[me.rank]:
                    pair.model.requires_grad_(True)
            if step < batches[me.rank]:
                pair.backward(draw(me.rank, step), everybody)
                pair.step()
            else:
                pair.together(everybody)
                pair.alone.step()
                pair.steps += 1
        if max(batches) == batches[me.rank]:
            hvd.join()
        pair.end(f"{gather}, {build.__name__}")


@case(ranks=(2, 3))
def a_dense_and_a_sparse_model_are_measured_after_a_join(me: Me) -> None:
    """The joined rank must not plan for the dense model while the others still step the other one."""
    sparse, dense = Pair(words64, descent, planned=False), Pair(planned=False)
    batches = [2] + [7] * (me.size - 1)
    for step in range(batches[me.rank]):
        for pair, mine in ((dense, rows(me.rank, step)), (sparse, words(me.rank, step))):
            pair.optimizer.weighted(mean_loss(pair.model, mine), len(mine)).backward()
        time.sleep(0.05)  # the dense gradients arrive
        for pair in (sparse, dense):
            pair.optimizer.step()
            pair.optimizer.zero_grad()
    hvd.join()
    for pair, draw in ((sparse, words), (dense, rows)):
        for step in range(max(batches)):
            pair.together([draw(rank, step) for rank in range(me.size) if step < batches[rank]])
            pair.alone.step()
            pair.steps += 1
        pair.end("measured")


@case(ranks=(2,))
def quantised_gradients_while_ranks_have_joined(me: Me) -> None:
    """Plans, which move the residuals of all ranks, are made while one has joined."""
    model = seeded(mlp64).float()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), model.named_parameters(), compression=hvd.Compression.int8
    )
    for step in range((2, 14)[me.rank]):
        mean_loss(model, rows(me.rank, step).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.join()
    assert optimizer.profile().source.startswith("measured")
    everywhere = me.everybody(fingerprint(model))
    assert len(set(everywhere)) == 1, everywhere
    release(optimizer)


main(__name__)
