"""Commits and checkpoints that become whole under the next forward hold what a wait would have shown.

Nothing that has been sent arrives by itself here (``puts_off``): after ``step()`` all parameters are pending.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import commsched as hvd
from commsched.errors import CheckpointError
from tests.support.cases import Me, case, main
from tests.support.oracle import release
from tests.support.reference_run import MakeOptimizer, Twin, momentum
from tests.support.small_models import loss_of, mlp


class Tied(nn.Module):
    """Has a parameter under two names, a buffer, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 33)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros(()))
        self.second, self.third = (nn.Linear(33, 33, bias=False) for _ in range(2))
        self.third.weight = self.second.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.third(torch.tanh(self.second(self.first(x))))
        return out


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def without_state(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@hvd.register_separable
class Own(torch.optim.SGD):
    """Changes what its state holds in a later update; fails in one if it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if type(self).fails:
            raise ArithmeticError("this update fails")
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
            if count > 2:
                self.state[p]["later"] = p.detach() * count


def own(model: nn.Module) -> torch.optim.Optimizer:
    return Own(model.parameters(), lr=0.05, momentum=0.9)


class Committed(Twin):
    """Both models with a ``TorchState``. What the plain one has saved did not wait for anything."""

    def __init__(self, me: Me, build: Callable[[], nn.Module], make: MakeOptimizer, **options: Any) -> None:
        super().__init__(me, build, make, lag=0.0, **options)
        self.optimizer._session.backend.puts_off = True
        self.state = hvd.elastic.TorchState(self.model, self.optimizer, n=0)
        self.reference = hvd.elastic.TorchState(self.plain, self.oracle.optimizer, n=0)

    def commit(self) -> None:
        for state in (self.state, self.reference):
            state.n = self.steps
            state.commit()

    @property
    def is_arriving(self) -> bool:
        return self.state._arriving is not None

    def compare_commits(self, what: str) -> None:
        assert not self.is_arriving, f"{what}: parameters are missing"
        assert self.state._commits == self.reference._commits, what
        pairs = [(state._saved_state, *saved(state)) for state in (self.state, self.reference)]
        assert_same(*pairs, what)

    def end(self, must_have_waited: bool = True) -> None:
        assert self.seen_pending > 0, "nothing was pending"
        self.compare("at the end")
        release(self.optimizer)


def saved(state: Any) -> list[Any]:
    return [state._handlers[name]._saved for name in ("model", "optimizer")]


def assert_same(mine: Any, theirs: Any, what: str) -> None:
    """The same nesting, keys in the same order, and bits; not whether numbers are tensors."""
    shape = tree_map(lambda _: 0, [mine, theirs])
    assert repr(shape[0]) == repr(shape[1]), f"{what}: {shape}"
    for a, b in zip(tree_leaves(mine), tree_leaves(theirs), strict=True):
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert same, f"{what}: {a} {b}"


@case()
def commits_hold_what_a_wait_would_have_shown(me: Me) -> None:
    for build, make in ((mlp, momentum), (mlp, adamw), (mlp, without_state), (mlp, own), (Tied, adamw)):
        twin = Committed(me, build, make)
        for step in range(4):
            twin.step(loss_of(step))
            twin.commit()
            assert twin.is_arriving, "nothing was pending"
            copies = [t.data_ptr() for t in tree_leaves(saved(twin.state)) if isinstance(t, torch.Tensor)]
            assert not {p.data_ptr() for p in twin.model.parameters()}.intersection(copies)
            if build is Tied:
                twin.both(lambda model: model.steps.add_(1))
            if step % 2:
                twin.backward(loss_of(step))  # which completes the commit, and so does what follows
                twin.zero_grad()
            twin.state._settle()
            twin.compare_commits(f"{make.__name__}, step {step}")
        twin.end()


@case()
def what_comes_after_a_commit_is_not_in_it(me: Me) -> None:
    def writes(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3.0)

    def writes_beside_torch(model: nn.Module) -> None:
        for p in model.parameters():
            p.data.fill_(2.0)

    def replaces(model: nn.Module) -> None:
        for p in model.parameters():
            p.data = torch.full_like(p, 0.1)

    def loads(model: nn.Module) -> None:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})

    def evaluates(model: nn.Module) -> None:
        with torch.inference_mode():
            model(torch.ones(2, 12))

    def converts(model: nn.Module) -> None:
        model.double().float()

    for act in (writes, writes_beside_torch, replaces, loads, evaluates, converts):
        twin = Committed(me, mlp, adamw)
        for step in range(3):
            twin.step(loss_of(step))
            twin.commit()
            assert twin.is_arriving
            twin.both(act)
            for optimizer in (twin.optimizer, twin.oracle.optimizer):
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
            twin.state._settle()
            twin.compare_commits(f"{act.__name__}, step {step}")
        twin.end()


@case()
def restore_waits_for_what_is_on_its_way(me: Me) -> None:
    twin = Committed(me, mlp, momentum)
    for step in range(4):
        twin.step(loss_of(step))
        twin.commit()
        assert twin.is_arriving
        for state in (twin.state, twin.reference):
            state.n = -1
            state.restore()
            assert state.n == step + 1
        twin.compare("restored")
    twin.step(loss_of(4))
    twin.commit()
    twin.commit()  # once more, with nothing between
    twin.state.optimizer = (
        twin.optimizer
    )  # assigning saves this part alone, which must not be in half a commit
    twin.compare_commits("the same step twice")
    twin.end()


@case()
def other_ways_of_reading_a_state_are_waited_for(me: Me) -> None:
    """Hooks of a state dict may compute anything from it, and shards are gathered."""

    def halve(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for key in state:
            state[key] = state[key] / 2

    for gather in ("gradients", "parameters"):
        twin = Committed(me, mlp, adamw, gather=gather)
        twin.both(lambda model: model.register_state_dict_post_hook(halve))
        for step in range(3):
            twin.step(loss_of(step))
            twin.commit()
            twin.compare_commits(f"{gather}, step {step}")
        twin.end()
    twin = Committed(me, mlp, adamw)
    seen: list[int] = []
    twin.optimizer.register_state_dict_post_hook(lambda _, state: seen.append(len(state["state"])))
    twin.step(loss_of(0))
    twin.commit()
    twin.compare_commits("a hook of the optimizer")
    assert seen and seen[-1] == 6, "the hook saw a state without the update"
    twin.end()


@case()
def the_commit_before_stands_where_the_rest_is_lost(me: Me) -> None:
    """One rank has all of a commit and the others have not; then all get what rank 0 has."""
    for ahead in range(me.size):
        twin = Committed(me, mlp, adamw)
        for step in range(2):
            twin.step(loss_of(step))
            twin.commit()
        twin.state._settle()
        before = tree_map(lambda leaf: leaf, saved(twin.reference))
        twin.step(loss_of(2))
        twin.commit()
        if me.rank == ahead:
            for p in twin.model.parameters():
                p.sum()
            assert not twin.is_arriving and twin.state._commits == 3
        else:
            assert twin.is_arriving and twin.state._commits == 3
        me.everybody()
        twin.optimizer.release(wait=False)  # as ``run`` does where a rank is lost
        twin.state.restore()
        found = 3 if me.rank == ahead else 2
        assert (twin.state.n, twin.state._commits) == (found, found) and not twin.is_arriving
        expected = saved(twin.reference) if me.rank == ahead else before
        assert_same(saved(twin.state), expected, f"restored, rank {ahead} has all")
        assert_same([twin.model.state_dict()], [expected[0]], "the model")
        twin.state.sync()
        found = 3 if ahead == 0 else 2
        expected = saved(twin.reference) if ahead == 0 else before
        assert twin.state.n == found
        assert_same(saved(twin.state), expected, f"after sync, rank {ahead} has all")
        twin.optimizer.resume()
        twin.plain.load_state_dict(expected[0])
        twin.oracle.optimizer.load_state_dict(expected[1])
        for step in range(found, found + 2):
            twin.step(loss_of(step))
        twin.compare("after the loss")
        twin.optimizer.release()


@case()
def an_update_that_fails_is_in_no_commit(me: Me) -> None:
    twin = Committed(me, mlp, own)
    twin.step(loss_of(0))
    twin.commit()
    twin.state._settle()
    before = tree_map(lambda leaf: leaf, saved(twin.state))
    twin.optimizer.zero_grad()
    loss_of(1)(twin.model, me.rank).backward()
    twin.optimizer.step()
    twin.state.commit()
    Own.fails = True
    try:
        with pytest.raises(ArithmeticError):
            twin.model(torch.ones(2, 12))
    finally:
        Own.fails = False
    twin.model(torch.ones(2, 12))  # what comes after a failed update is left out, and completes no commit
    assert twin.is_arriving
    twin.state.restore()
    assert twin.state.n == 1 and twin.state._commits == 1
    assert_same(saved(twin.state), before, "the commit before")
    twin.compare("restored")
    release(twin.optimizer)


def folder_of(me: Me) -> Path:
    return Path(me.everybody(tempfile.mkdtemp() if me.rank == 0 else "")[0])


@case()
def checkpoints_hold_what_a_wait_would_have_shown(me: Me) -> None:
    def channels_last() -> nn.Module:
        layers = nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Linear(8, 3)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    folder = folder_of(me)
    cases = (
        (mlp, momentum),
        (mlp, adamw),
        (mlp, without_state),
        (mlp, own),
        (Tied, adamw),
        (channels_last, adamw),
    )
    for build, make in cases:
        twin = Committed(me, build, make)
        for step in range(4):
            twin.step(loss_of(step))
            twin.commit()  # both at once, as in ``dnn_bench``
            assert twin.is_arriving, "nothing was pending"
            saving = hvd.save({"model": twin.model, "optimizer": twin.optimizer, "step": step}, folder)
            if step % 2:
                with torch.no_grad():
                    twin.both(lambda model: [p.mul_(0.5) for p in model.parameters()])
            expected = saved(twin.reference)
            saving.wait()
            twin.state._settle()  # this rank's part of the save may lack what arrives last
            twin.compare_commits(f"{make.__name__}, step {step}")
            found: dict[str, Any] = {"model": Kept(), "optimizer": Kept()}
            assert hvd.load(found, folder) == {"step": step}
            states = [found[name].state for name in ("model", "optimizer")]
            assert_same(
                states, [dict(expected[0]), expected[1]], f"{make.__name__}, step {step}, on the disk"
            )
        twin.end()
    me.everybody()
    shutil.rmtree(folder, ignore_errors=True)


class Kept:
    """Takes a state as it was saved."""

    state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = dict(state)


@case()
def ranks_that_wait_in_other_places_save_the_same(me: Me) -> None:
    """States came in the order of the first updates, and save() said that the ranks differ."""
    folder = folder_of(me)
    for waits in range(me.size):
        twin = Committed(me, mlp, adamw)
        twin.step(loss_of(0))
        if me.rank == waits:
            list(twin.model.parameters())[-1].sum()
        hvd.save({"model": twin.model, "optimizer": twin.optimizer}, folder / str(waits)).wait()
        for step in (1, 2):
            twin.step(loss_of(step))
            if me.rank == waits:
                list(twin.model.parameters())[-1].sum()
        hvd.save({"model": twin.model, "optimizer": twin.optimizer}, folder / str(waits)).wait()
        twin.end()
    me.everybody()
    shutil.rmtree(folder, ignore_errors=True)


@case()
def a_save_whose_rest_is_lost_is_told(me: Me) -> None:
    folder = folder_of(me)
    twin = Committed(me, mlp, momentum)
    for step in (0, 1):
        twin.step(loss_of(step))
        saving = hvd.save({"model": twin.model, "optimizer": twin.optimizer, "step": step}, folder)
    if me.rank == 0:
        for p in twin.model.parameters():
            p.sum()
    me.everybody()
    twin.optimizer.close(wait=False)
    with pytest.raises(CheckpointError, match="rank 1 lacks parameters: their optimizer has ended"):
        saving.wait()
    assert hvd.load({"model": Kept(), "optimizer": Kept()}, folder) == {"step": 0}
    me.everybody()
    shutil.rmtree(folder, ignore_errors=True)


main(__name__)
