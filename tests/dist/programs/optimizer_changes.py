"""What changes while training - parameters, groups, the optimizer itself - and backwards that fail."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import commsched as hvd
from commsched.env import settings
from commsched.optimizer.round import _counted_in
from tests.support.cases import Me, case, main
from tests.support.oracle import (
    Oracle,
    assert_close,
    assert_same_bits,
    batch,
    fingerprint,
    release,
    seeded,
    terms_of,
)
from tests.support.reference_run import Twin, momentum
from tests.support.small_models import Branches, branches64, loss_of, mlp, mlp64, samples, using


@case()
def frozen_later_unfrozen_and_frozen_again(me: Me) -> None:
    twin = Twin(me, branches64, frozen_branch, planned=False)
    for step in range(12):
        if step in (3, 6, 9):
            twin.both(lambda m, step=step: m.branch[1].requires_grad_(step != 6))
        if step == 7:
            twin.both(lambda m: m.stem.requires_grad_(False))
        twin.step(using(step, 0, 1, 2, 3))
        twin.compare(f"step {step}")
    release(twin.optimizer)


@case()
def parameter_groups_added_later(me: Me) -> None:
    def some(model: nn.Module) -> torch.optim.Optimizer:
        params = [p for name, p in model.named_parameters() if "branch.3" not in name]
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)

    twin = Twin(me, Branches, some, planned=False)
    for step in range(12):
        if step == 6:
            for optimizer, model in ((twin.optimizer, twin.model), (twin.oracle.optimizer, twin.plain)):
                optimizer.add_param_group({"params": list(model.branch[3].parameters()), "lr": 0.2})
        twin.step(using(step, 0, 1, 2, 3))
        twin.compare(f"step {step}")
        if step < 6:  # nobody clears the gradient of what is not the optimizer's
            twin.both(lambda m: m.branch[3].zero_grad())
    twin.end(must_have_waited=False)


@case()
def the_last_update_outlives_the_optimizer(me: Me) -> None:
    """A function that trains returns the model; its optimizer is gone before the gradients are there."""
    for gather in ("gradients", "parameters"):
        twin = Twin(me, branches64, gather=gather)
        for step in range(4):
            twin.step(using(step, 0, 1, 2))
        twin.optimizer = twin.inner = None
        assert all(type(p) is nn.Parameter for p in twin.model.parameters()), "something still waits"
        twin.compare(gather, exact=gather == "gradients")
        assert sum(map(int, me.everybody(str(twin.seen_pending)))) > 0


@case()
def gradients_whose_memory_is_moved(me: Me) -> None:
    """By a queue to another process, or by a script that resizes them: later ones were read from there."""

    def each(change: Any) -> Any:
        def changed(model: nn.Module) -> None:
            for parameter in model.parameters():
                change(parameter.grad)

        return changed

    changes: dict[tuple[str, str], Any] = {
        ("shared", "before the step"): each(lambda grad: grad.share_memory_()),
        ("shared", "after the step"): each(lambda grad: grad.share_memory_()),
        ("grown", "after the step"): each(lambda grad: grad.resize_(3 * grad.numel())),
        ("emptied", "after the step"): each(lambda grad: grad.untyped_storage().resize_(0)),
        ("all shared", "after the step"): nn.Module.share_memory,
        ("all shared", "when cleared"): nn.Module.share_memory,
    }
    for ((how, when), change), gather in product(changes.items(), ("gradients", "parameters")):
        if gather == "parameters" and when == "after the step":
            continue  # there are none
        model, plain = seeded(mlp64), seeded(mlp64)
        optimizer: Any = hvd.DistributedOptimizer(momentum(model), gather=gather, schedule="dear")
        oracle = Oracle(plain, momentum(plain), me.size)
        for step in range(6):
            loss_of(step)(model, me.rank).backward()
            optimizer.synchronize()
            if step % 3 == 1 and when == "before the step":
                change(model)
            optimizer.step()
            if step % 3 == 1 and when == "after the step":
                change(model)
            optimizer.zero_grad()
            if step % 3 == 1 and when == "when cleared":
                change(model)
            oracle.step(loss_of(step))
            what = f"{how} {when}, {gather}, step {step}"
            assert_close(model, plain, terms_of(plain, step + 1), what)
        release(optimizer)


@case()
def a_model_may_be_wrapped_again(me: Me) -> None:
    for gather in ("gradients", "parameters"):
        twin = Twin(me, branches64, gather=gather)
        for step in range(4):
            twin.step(using(step, 0, 1, 2))
        twin.inner = momentum(twin.model)
        twin.optimizer = hvd.DistributedOptimizer(
            twin.inner, twin.model.named_parameters(), schedule="dear", bucket_mb=0.003, gather=gather
        )
        twin.oracle.optimizer = momentum(twin.plain)
        for step in range(4, 12):
            twin.step(using(step, 0, 1, 3))
            assert len(twin.model.stem._forward_pre_hooks) == 1, "the old optimizer's hooks are still there"
        twin.compare(gather, exact=gather == "gradients")
        release(twin.optimizer)


@case(ranks=(2,))
def an_optimizer_may_be_wrapped_again(me: Me) -> None:
    """Closed later, it steps alone: its own ``step()`` was that of the first wrapper."""
    for gather, kept in (("gradients", True), ("gradients", False), ("parameters", True)):
        model, plain = seeded(branches64), seeded(branches64)
        inner, oracle = momentum(model), Oracle(plain, momentum(plain), me.size)
        optimizers = []
        for step in range(4):
            if step in (0, 2):
                optimizers = optimizers if kept else []
                optimizers.append(hvd.DistributedOptimizer(inner, gather=gather))
            using(step)(model, me.rank).backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()
            oracle.step(using(step))
        optimizers[-1].close()
        for net, single in ((model, inner), (plain, oracle.optimizer)):
            single.zero_grad()
            using(4)(net, 0).backward()
            single.step()
        assert_close(model, plain, 1e-12)


@case(ranks=(2,))
def groups_outlast_freezing_and_unfreezing(me: Me) -> None:
    """The second change once looked groups up in a list of parameters that was gone."""
    model, plain = seeded(Branches), seeded(Branches)
    optimizer: Any = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), groups=3)
    oracle = Oracle(plain, momentum(plain), me.size)
    for step in range(6):
        if step in (2, 4):
            for net in (model, plain):
                net.branch[0].requires_grad_(step == 4)
        using(step)(model, me.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(using(step))
        assert_same_bits(model, plain, f"step {step}")
    release(optimizer)


@case(ranks=(2,))
def parameters_without_a_name_may_be_added(me: Me) -> None:
    twin = Twin(me, Branches, planned=False)
    for optimizer, net in ((twin.optimizer, twin.model), (twin.oracle.optimizer, twin.plain)):
        net.extra = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [net.extra]})
    for step in range(3):
        twin.step(
            lambda m, rank, step=step: (
                using(step)(m, rank) + (m.extra * batch(rank, step, (3,))).square().sum()
            )
        )
        twin.compare(f"step {step}")
    twin.end(must_have_waited=False)


@case(ranks=(2,))
def groups_may_be_edited_by_hand(me: Me) -> None:
    """``zero_grad()`` left the new parameters' gradients, and their names could be those of others."""

    def some(model: nn.Module) -> torch.optim.Optimizer:
        later = {*model.branch[1].parameters(), *model.branch[3].parameters()}
        return torch.optim.SGD([p for p in model.parameters() if p not in later], lr=0.05)

    ways = ((None, "gradients"), (None, "parameters"), ("plain", "gradients"))
    for (transport, gather), op in product(ways, (hvd.Average, hvd.Sum)):
        model, plain = seeded(branches64), seeded(branches64)
        optimizer: Any = hvd.DistributedOptimizer(some(model), op=op, gather=gather, transport=transport)
        oracle = Oracle(plain, some(plain), me.size, sums=op == hvd.Sum)
        for step in range(4):
            used = using(step, 0, 1, 2) if step < 3 else using(step, 0, 1, 2, 3)
            if step == 1:
                for each, one in ((model, optimizer), (plain, oracle.optimizer)):
                    params = one.param_groups[0]["params"]
                    del params[0]
                    params += [*each.branch[3].parameters(), *each.branch[1].parameters()]
                    one.zero_grad(set_to_none=False)
            used(model, me.rank).backward()
            oracle.backward(used)
            if step == 1 and not transport:
                with pytest.raises(ValueError, match="add_param_group"):
                    nn.utils.clip_grad_norm_(model.branch[1].parameters(), 1.0)
            for one in (optimizer, oracle.optimizer):
                one.step()
                one.zero_grad()
        assert_close(model, plain, terms_of(plain, 1), f"{transport}, {gather}")
        release(optimizer)


@case(ranks=(2,))
def gradients_are_reduced_again_after_a_change_within_no_sync(me: Me) -> None:
    """The new buckets once stayed paused for ever."""
    twin = Twin(me, Branches)
    twin.step(using(0))
    with twin.optimizer.no_sync():
        twin.both(lambda m: m.branch[2].requires_grad_(False))
        twin.step(using(1))
    for step in range(2, 5):
        twin.backward(using(step))
        twin.compare_grads(f"step {step}")
        twin.update()
        twin.zero_grad()
        twin.compare(f"step {step}")
    release(twin.optimizer)


@case(ranks=(2,))
def buckets_made_anew_leave_no_threads_and_files_behind(me: Me) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    for transport in ("direct", "ring"):
        twin = Twin(me, Branches, transport=transport, lag=0.0)
        counts = []
        gc.disable()  # nothing that was replaced is in a cycle
        try:
            for step in range(7):
                twin.both(lambda m, step=step: m.branch[0].requires_grad_(step % 2 == 0))
                twin.step(using(step))
                counts.append(held())
            threads, files = counts[2]
            deadline = time.monotonic() + 60  # the last of what was closed may still be ending
            while (now := held())[0] > threads or now[1] > files:
                assert time.monotonic() < deadline, f"{transport}: {counts} by step, now {now}"
                time.sleep(0.05)
        finally:
            gc.enable()
        release(twin.optimizer)


@case(ranks=(2,))
def early_steps_end_their_thread(me: Me) -> None:
    twin = Twin(me, Branches, gather="parameters", early_step=True)
    twin.backward(using(0))
    twin.update()
    release(twin.optimizer)
    left = [thread.name for thread in threading.enumerate() if "early" in thread.name]
    assert not left, left


def fails(model: nn.Module, rank: int, step: int) -> None:
    """Run a backward that raises after the gradients of the head."""

    def spoil(_: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    hidden = model.branch[0](model.stem(samples(model, rank, step)))
    hidden.register_hook(spoil)
    with pytest.raises(RuntimeError, match="on purpose"):
        model.head(hidden).square().mean().backward()


@case(ranks=(2,))
def a_backward_that_fails_leaves_nothing_behind(me: Me) -> None:
    """The end of the next backward once went unnoticed, and ``p.grad`` was None until ``step()``."""

    for gather in ("gradients", "parameters"):
        twin = Twin(me, branches64, gather=gather)
        for step in range(6):
            if step % 2:
                fails(twin.model, me.rank, step)
                twin.optimizer.zero_grad()
            twin.backward(using(step))
            if gather == "gradients":
                twin.compare_grads(f"step {step}")
            twin.update()
            twin.zero_grad()
            twin.compare(f"step {step}", exact=gather == "gradients")
        release(twin.optimizer)


@case(ranks=(2,))
def a_new_plan_is_refused_on_all_ranks_where_one_has_failed(me: Me) -> None:
    """One rank's backward raises, and parameters are added: the other one must not wait for it."""
    for gather in ("gradients", "parameters"):
        twin = Twin(me, branches64, gather=gather)
        twin.backward(using(0))
        twin.update()
        twin.zero_grad()
        if me.rank == 1:
            fails(twin.model, 1, 1)
        else:
            using(1)(twin.model, 0).backward()
        more = nn.Linear(2, 2).double()
        with pytest.raises(ValueError, match="rank 1.*the last backward raised"):
            twin.optimizer.add_param_group({"params": list(more.parameters())})
            twin.optimizer.step()
        release(twin.optimizer)


@case(ranks=(2,))
def gradients_that_somebody_else_takes_are_an_error(me: Me) -> None:
    model = seeded(Branches)

    def take(p: torch.Tensor) -> None:
        p.grad = None

    model.head.bias.register_post_accumulate_grad_hook(take)
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
    try:
        using(0)(model, me.rank).backward()
    except ValueError as error:
        assert "head.bias" in str(error) and "hook" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    release(optimizer)


@case(ranks=(2,))
def a_plain_optimizer_follows_changes_and_closures(me: Me) -> None:
    """Without a plan too: what is unfrozen or added later is reduced, and closures see reduced gradients."""

    def some(model: nn.Module) -> torch.optim.Optimizer:
        model.branch[1].requires_grad_(False)
        params = [p for name, p in model.named_parameters() if "branch.3" not in name]
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    model, plain = seeded(branches64), seeded(branches64)
    # Every rank keeps the whole state, which used to be so without a word.
    with pytest.warns(UserWarning, match="gather='parameters' and early_step=True without effect"):
        optimizer: Any = hvd.DistributedOptimizer(
            some(model),
            model.named_parameters(),
            transport="plain",
            groups=2,
            gather="parameters",
            early_step=True,
        )
    oracle = Oracle(plain, some(plain), me.size)
    for step in range(6):
        for one, net in ((optimizer, model), (oracle.optimizer, plain)):
            if step == 2:
                net.branch[1].requires_grad_(True)
            if step == 4:
                one.add_param_group({"params": net.branch[3].parameters()})

        loss_of = using(step, *range(4 if step >= 4 else 3))

        def closure(loss_of: Any = loss_of) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, me.rank)
            loss.backward()
            return loss

        if step % 2:
            assert optimizer.step(closure).item() > 0
        else:
            closure()
            optimizer.step()
        oracle.step(loss_of)
        assert_close(model, plain, terms_of(plain, step + 1), f"step {step}")


@case(ranks=(2,))
def recording_a_timeline_does_not_change_the_plan(me: Me) -> None:
    """The recording once took the operations away that the link's speed is learnt from."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COMMSCHED_TIMELINE"] = os.path.join(me.everybody(folder)[0], "trace.json")
        settings.cache_clear()
        try:
            twin = Twin(me, Branches, schedule="auto", planned=False, lag=0.0)
            link, seen = twin.optimizer._session.planner._timed_link, []
            link.refined = lambda by_rank: seen.extend(by_rank[me.rank]) or link.link
            for step in range(6):
                twin.step(using(step))
        finally:
            del os.environ["COMMSCHED_TIMELINE"]
            settings.cache_clear()
        assert seen and all(seconds > 0 for _, seconds in seen), seen
        kinds = {event["name"][:2] for event in twin.optimizer._session._timeline._events}
        assert {"RS", "AG"} <= kinds, kinds
        release(twin.optimizer)
        me.everybody()


@case(ranks=(2,))
def operations_are_told(me: Me) -> None:
    twin = Twin(me, Branches)
    for step in range(3):
        twin.step(using(step))
    twin.compare()
    told, plan = hvd.operations(twin.optimizer), hvd.explain(twin.optimizer, show=False)
    sums = [op for op in told if op.step == 2 and op.kind == "RS"]
    assert sorted(op.bucket for op in sums) == list(range(len(plan.buckets))), told
    assert sum(op.bytes for op in sums) >= sum(size for size, _ in plan.buckets) * (me.size - 1) / me.size
    assert all(op.ready <= op.start <= op.end for op in told)
    assert told == hvd.operations(twin.optimizer)[: len(told)], "asking took them away"
    release(twin.optimizer)


class Holder:
    """Holds an optimizer and hands on what it lacks, as Lightning's and Fabric's objects do."""

    def __init__(self, optimizer: Any) -> None:
        self._held = optimizer
        self.__class__ = type("Held", (Holder, optimizer.__class__), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)


@case()
def objects_that_imitate_the_optimizer(me: Me) -> None:
    """Their ``zero_grad()`` once cleared no pending gradient, and ``state`` was a KeyError."""
    for gather in ("gradients", "parameters"):
        twin = Twin(me, mlp64, gather=gather)
        held: Any = Holder(twin.optimizer)
        assert isinstance(held, torch.optim.SGD)
        for step in range(6):
            twin.backward(loss_of(step))
            held.clip_grad_norm_(0.1)
            nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.1)
            twin.update()
            pending = twin.optimizer._session.round.pending
            held.zero_grad()
            twin.oracle.optimizer.zero_grad()
            assert twin.optimizer._session.round.pending == pending
        assert held.state == twin.optimizer.state
        assert held.state_dict()["state"].keys() == twin.oracle.optimizer.state_dict()["state"].keys()
        twin.compare(exact=False)
        release(twin.optimizer)


@case()
def freezing_waits_for_nothing(me: Me) -> None:
    """Between two steps a GAN freezes the other network's parameters, whose updates are on their way."""
    twin = Twin(me, mlp)
    for step in range(6):
        twin.step(loss_of(step))
        before = twin.optimizer._session.round.pending
        twin.both(lambda model: model.requires_grad_(False))
        for p in twin.model.parameters():
            p.requires_grad = True
        twin.plain.requires_grad_(True)
        assert twin.optimizer._session.round.pending == before
    twin.end()


@case()
def a_released_optimizer_steps_alone_with_the_whole_state(me: Me) -> None:
    for gather in ("gradients", "parameters"):
        twin = Twin(me, mlp64, gather=gather)
        for step in range(4):
            twin.step(loss_of(step))
        twin.optimizer.release()
        assert all(type(p) is nn.Parameter for p in twin.model.parameters())
        for step in range(4, 6):  # every rank the same batch
            for model, optimizer in ((twin.model, twin.optimizer), (twin.plain, twin.oracle.optimizer)):
                optimizer.zero_grad()
                loss_of(step)(model, 0).backward()
                optimizer.step()
        twin.compare(exact=False)


# -- what one rank alone knows -------------------------------------------------------------------------------


@case(ranks=(2, 3))
def a_rank_without_data_may_do_something_else_first(me: Me) -> None:
    """A forward once made the plan for unfrozen layers. A rank without one meets the others elsewhere."""
    for gather in ("gradients", "parameters"):
        twin = Twin(me, branches64, frozen_branch, gather=gather, planned=False, lag=0)
        for step in range(6):
            if step == 2:
                twin.both(lambda model: model.branch[1].requires_grad_(True))
            idle = me.size - 1 if step in (2, 3) else None
            twin.backward(
                lambda model, rank, step=step, idle=idle: None if rank == idle else using(step)(model, rank)
            )
            assert float(hvd.allreduce(torch.ones(1), name=f"{gather} {step}")) == 1.0
            twin.update()
            twin.zero_grad()
        twin.compare(gather, exact=gather == "gradients")
        release(twin.optimizer)


@case(ranks=(2, 3))
def a_rank_may_read_a_gradient_alone(me: Me) -> None:
    """For a log. Others wait in a collective meanwhile, and do not reduce what is outside of the plan."""
    twin = Twin(me, branches64, frozen_branch, planned=False, lag=0)
    twin.both(lambda model: model.branch[1].requires_grad_(True))
    for step in range(6):
        twin.backward(using(step))
        if me.rank == 0:
            assert twin.model.stem.weight.grad is not None
        assert float(hvd.allreduce(torch.ones(1), name=f"log {step}")) == 1.0
        twin.update()
        twin.zero_grad()
    twin.compare()
    release(twin.optimizer)


@case(ranks=(2,))
def a_rank_that_synchronizes_counts_no_further_step(me: Me) -> None:
    """Layers that are frozen for some steps leave the plan, after equally many on all ranks."""
    twin = Twin(me, branches64, planned=False, lag=0)
    for step in range(16):
        if step == 2:
            twin.both(lambda model: model.branch[1].requires_grad_(False))
        twin.backward(using(step))
        if me.rank == 1:
            twin.optimizer.synchronize()
            with twin.optimizer.skip_synchronize():
                twin.update()
        else:
            twin.update()
        twin.zero_grad()
    assert len(twin.optimizer._session.round.outside) == 2, "the frozen layer is still in the plan"
    twin.compare()
    release(twin.optimizer)


@case(ranks=(2,))
def a_gradient_on_other_ranks_alone_is_told(me: Me) -> None:
    """Rank 1 has no data, and nothing tells it of a layer that was trained between two of its steps."""
    twin = Twin(me, branches64, frozen_branch, planned=False, lag=0)
    model, optimizer = twin.model, twin.optimizer
    for step in range(8):  # then steps return before the sums are there
        twin.step(using(step))
    with optimizer.no_sync():
        for trained in (False, True, False):
            model.branch[1].requires_grad_(trained)
            if me.rank == 0:
                using(0)(model, 0).backward()
    if me.rank == 0:
        me.store.wait(["rank 1 has stepped"])
    told = "nothing"
    try:
        optimizer.step()
        me.store.set(f"rank {me.rank} has stepped", "")
        model.stem.weight.sum()
    except hvd.CommError as error:
        told = str(error)
    assert (told == "nothing") == (me.rank == 0), told
    assert me.rank == 0 or "freeze parameters after step()" in told, told
    release(optimizer)


def frozen_branch(model: nn.Module) -> torch.optim.Optimizer:
    model.branch[1].requires_grad_(False)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


@case(ranks=(2,))
def all_gradients_may_come_in_inner_backwards(me: Me) -> None:
    """Where everything that is trained is checkpointed, nobody noticed the end of the outer backward."""

    def blocks() -> nn.Module:
        return nn.Sequential(*(nn.Linear(12, 12) for _ in range(3))).double()

    def loss(step: int) -> Any:
        def of(model: nn.Module, rank: int) -> torch.Tensor:
            x = batch(rank, step, (6, 12), torch.float64).requires_grad_()
            for block in model:
                run = block if modules else partial(F.linear, weight=block.weight, bias=block.bias)
                x = checkpoint(run, x, use_reentrant=True)
            return x.square().mean()

        return of

    for modules, passes in product((True, False), ("no_sync", "passes")):
        twin = Twin(me, blocks, planned=False, lag=0)
        twin.optimizer.set_backward_passes_per_step(2 if passes == "passes" else 1)
        for step in range(6):
            with twin.optimizer.no_sync() if passes == "no_sync" else nullcontext():
                loss(step)(twin.model, me.rank).backward()
            loss(step + 6)(twin.model, me.rank).backward()
            twin.oracle.backward(loss(step), loss(step + 6))
            twin.compare_grads(f"step {step}")
            twin.both(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            twin.update()
            twin.zero_grad()
        twin.compare(f"{passes}, modules: {modules}")
        release(twin.optimizer)


@case(ranks=(2,))
def another_optimizer_over_the_same_parameters(me: Me) -> None:
    """It takes them over. Two that were open took each other's gradients, and updated nothing."""
    for gather, how in product(("gradients", "parameters"), ("wrap", "add")):
        model, plain = seeded(branches64), seeded(branches64)

        def train(
            optimizer: Any,
            single: torch.optim.Optimizer,
            steps: range,
            model: nn.Module = model,
            plain: nn.Module = plain,
        ) -> None:
            for step in steps:
                for rank in range(me.size):
                    loss = plain(batch(rank, step, (4, 12), torch.float64)).square().mean()
                    (loss / me.size).backward()
                single.step()
                single.zero_grad()
                model(batch(me.rank, step, (4, 12), torch.float64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        earlier = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01), gather=gather)
        train(earlier, torch.optim.Adam(plain.parameters(), 0.01), range(2))
        first, *others = model.parameters()
        later: Any = torch.optim.SGD(model.parameters() if how == "wrap" else [first], lr=0.05)
        later = hvd.DistributedOptimizer(later)
        if how == "add":
            later.add_param_group({"params": others})
        train(later, torch.optim.SGD(plain.parameters(), lr=0.05), range(2, 5))
        assert_close(model, plain, 1e-12)
        try:
            earlier.step()
        except hvd.CommError as error:
            assert "another one was made over some of its parameters" in str(error), error
        else:
            raise AssertionError("an optimizer whose parameters another one has stepped")
        release(later)


@case(ranks=(2,))
def gradients_that_are_reduced_one_by_one_are_taken_over_too(me: Me) -> None:
    """Their Adasum was one of the earlier optimizer's means."""
    results = []
    for others in (0, 1):
        model = seeded(branches64)
        earlier = [hvd.DistributedOptimizer(momentum(model)) for _ in range(others)]
        optimizer = hvd.DistributedOptimizer(momentum(model), op=hvd.Adasum)
        for step in range(3):
            using(step)(model, me.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model)
        for one in earlier:
            one.close()
    assert_same_bits(*results)


# -- parameters outside of the plan --------------------------------------------------------------------------


@case(ranks=(2,))
def layers_are_unfrozen_and_added_between_weighted_passes(me: Me) -> None:
    """Their gradients are divided by the samples like all others."""
    for change in ("unfreeze", "add", "add after"):
        for local in (True, False):
            model, plain = seeded(branches64), seeded(branches64)
            plain.branch[1].requires_grad_(change == "add after")
            model.branch[1].requires_grad_(change == "add after")
            params = [p for n, p in model.named_parameters() if "branch.1" not in n or change == "unfreeze"]
            optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.05))
            counts = {rank: (rank + 1, 3 - rank) for rank in range(2)}
            for number in range(2):
                if number == 1:
                    model.branch[1].requires_grad_(True), plain.branch[1].requires_grad_(True)
                    if change == "add":
                        optimizer.add_param_group({"params": list(model.branch[1].parameters())})
                with optimizer.no_sync() if local or number == 0 else nullcontext():
                    loss = using(number)(model, me.rank)
                    optimizer.weighted(loss, counts[me.rank][number]).backward()
                every = sum(map(sum, counts.values()))
                for rank in range(2):
                    (using(number)(plain, rank) * counts[rank][number] / every).backward()
            if change == "add after":
                optimizer.add_param_group({"params": list(model.branch[1].parameters())})
            optimizer.step()
            torch.optim.SGD(plain.parameters(), lr=0.05).step()
            assert_close(model, plain, terms_of(plain, 1), f"{change}, {local}")
            release(optimizer)


@case(ranks=(2,))
def a_loss_that_another_optimizer_has_weighted_is_refused(me: Me) -> None:
    model = seeded(branches64)
    head, rest = list(model.head.parameters()), [p for n, p in model.named_parameters() if "head" not in n]
    a, b = (hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1)) for params in (head, rest))
    with pytest.raises(ValueError, match="another optimizer has weighted"):
        a.weighted(using(0)(model, me.rank), 3).backward()
    for optimizer in (a, b):
        optimizer.zero_grad()
    assert not _counted_in, "the backward that raised counts as one that runs"
    a.weighted(model.head(torch.ones(1, 33).double()).sum(), 3).backward()  # trains no other's
    using(1)(model, me.rank).backward(inputs=rest)
    for optimizer in (a, b):
        optimizer.step()
        release(optimizer)


@case(ranks=(2,))
def layers_frozen_before_a_step_are_reduced_one_by_one_too(me: Me) -> None:
    for op in (hvd.Average, hvd.Sum, hvd.Adasum):
        model, plain = seeded(branches64), seeded(branches64)
        optimizer: Any = hvd.DistributedOptimizer(
            momentum(model), model.named_parameters(), op=op, transport="plain"
        )
        oracle = Oracle(plain, momentum(plain), me.size, sums=op == hvd.Sum)
        for step in range(3):
            using(step)(model, me.rank).backward()
            oracle.backward(using(step))
            for frozen in (True, False):
                model.branch[1].requires_grad_(not frozen)
                optimizer.step()  # the second one uses the same gradients again
                oracle.optimizer.step()
                if op == hvd.Sum:
                    break
            optimizer.zero_grad()
            oracle.optimizer.zero_grad()
            model.branch[1].requires_grad_(True)
        if op != hvd.Adasum:
            assert_close(model, plain, terms_of(plain, 6), str(op))
        assert len(set(me.everybody(fingerprint(model)))) == 1, "the ranks differ"


@case(ranks=(2,))
def state_on_shards_is_changed_by_no_accident(me: Me) -> None:
    """``state.clear()`` once did nothing, and a second wrapping lost the momentum."""
    twin = Twin(me, branches64, gather="parameters")
    for step in range(3):
        twin.step(using(step))
    state = twin.optimizer.state
    for change in (
        state.clear,
        lambda: state.pop(twin.model.head.weight),
        lambda: state[twin.model.head.weight],
    ):
        with pytest.raises(ValueError, match="load_state_dict"):
            change()
    with pytest.raises(ValueError, match="load_state_dict"):
        twin.optimizer.state = {}
    twin.optimizer = hvd.DistributedOptimizer(
        twin.inner, twin.model.named_parameters(), gather="parameters", schedule="dear"
    )
    for step in range(3, 6):
        twin.step(using(step))
    twin.compare(exact=False)
    del twin.optimizer
    with pytest.raises(ValueError, match="lost"):
        hvd.DistributedOptimizer(twin.inner, twin.model.named_parameters())


main(__name__)
