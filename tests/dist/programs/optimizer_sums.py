"""``op=Sum``: what was summed and is added to counts once."""

from __future__ import annotations

from torch import nn

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.oracle import release
from tests.support.reference_run import Twin
from tests.support.small_models import loss_of, mlp, mlp64, plain_sgd, words64, words_loss


@case()
def sums(me: Me) -> None:
    for read in (False, True):
        twin = Twin(me, mlp, sums=True)
        for step in range(6):
            twin.backward(loss_of(step))
            if read:
                twin.compare_grads(f"step {step}")
            twin.update()
            twin.zero_grad()
        twin.end(must_have_waited=not read)


@case()
def sums_that_are_added_to(me: Me) -> None:
    """Further backwards add to the sum; it is not summed once more."""
    for read in (False, True):
        twin = Twin(me, mlp64, sums=True)
        for step in range(6):
            for k in range(3):
                twin.backward(loss_of(9 * step + k))
                if read:
                    twin.compare_grads(exact=False)
            twin.update()
            if step % 2:
                twin.zero_grad()
        twin.compare(exact=False)
        release(twin.optimizer)


@case()
def sums_kept_while_a_new_plan_is_installed(me: Me) -> None:
    twin = Twin(me, mlp64, sums=True, planned=False)
    for step in range(9):
        twin.backward(loss_of(step, 0.1))
        twin.update()
        if step == 0:
            twin.zero_grad()
    twin.compare(exact=False)
    release(twin.optimizer)


@case()
def a_sum_changed_by_hand_is_refused(me: Me) -> None:
    twin = Twin(me, mlp, sums=True)
    twin.backward(loss_of(0))
    for p in twin.model.parameters():
        for _ in range(3):
            p.grad.mul_(0.5)
    try:
        loss_of(1)(twin.model, me.rank).backward()
    except ValueError as error:
        assert me.rank != 0 and "zero_grad" in str(error)
    except hvd.CommError:
        assert me.rank == 0, "only the rank whose sum counts may go on, until it hears that others have not"
    else:
        assert me.rank == 0, "nobody said that a changed sum was added to"
    release(twin.optimizer)


@case()
def sums_on_shards_are_not_summed_again(me: Me) -> None:
    """What was reduced and is added to counts once: after a second backward, a step, and in new buckets."""

    for gathered in (False, True):
        twin = Twin(me, mlp64, sums=True, gather="parameters")
        for step in range(6):
            for k in range(2):
                twin.backward(loss_of(9 * step + k, 0.1))
                if gathered:
                    twin.optimizer.synchronize()
            if step == 4:
                twin.both(lambda m: m[2].requires_grad_(False))
            if step == 3:
                nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.02)
                twin.optimizer.clip_grad_norm_(0.02)
            twin.update()
            if step % 2 or not gathered or step == 4:  # new buckets leave no gradients after the step
                twin.zero_grad()
            twin.compare(f"step {step}, gathered={gathered}", exact=False)
        release(twin.optimizer)


@case()
def sums_of_several_passes(me: Me) -> None:
    twin = Twin(me, mlp, sums=True, backward_passes_per_step=2)
    for step in range(6):
        twin.step(loss_of(2 * step), loss_of(2 * step + 1))
    twin.end()


@case(ranks=(2,))
def sparse_sums_that_are_added_to(me: Me) -> None:
    for read in (False, True):
        twin = Twin(me, words64, plain_sgd, sums=True)
        for step in range(6):
            for k in range(2):
                twin.backward(lambda m, rank, k=k, step=step: words_loss(m, rank, 9 * step + k) * 0.1)
                if read:
                    twin.compare_grads(exact=False)
            twin.update()
            if step % 2:
                twin.zero_grad()
            twin.compare(f"step {step}, read={read}", exact=False)
        release(twin.optimizer)


main(__name__)
