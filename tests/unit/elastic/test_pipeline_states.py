"""States of pipelines: commits are whole on every rank or on none, and other ranks go on with them in other
stages. Ranks are threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commsched.elastic import HostsUpdatedInterrupt, PipelineState, pipelines
from commsched.errors import CommError
from commsched.pipeline import Pipeline, ThreadWorld
from commsched.pipeline.messages import everyones
from tests.support.pipeline_runs import adam, batches, chain_model, loss_of, train
from tests.support.thread_ranks import run_threads

DATA = batches(12)
_here = threading.local()  # the job of a thread


class Job:
    """A rank's part of a job, with what ``PipelineState`` asks of it."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.lane = world.fabric(rank).lane("job")
        self.dies_in = ""  # the name of a collective

    def gathered(self, value: Any, name: str) -> list[Any]:
        if name == self.dies_in:
            raise Died
        return everyones(self.lane, self.rank, range(self.size), value)


class Died(Exception):
    """Of a rank."""


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(value: Any, root: int = 0, name: str = "broadcast") -> Any:
        return _here.job.gathered(value, name)[root]

    monkeypatch.setattr(pipelines, "broadcast_object", broadcast)
    monkeypatch.setattr(pipelines, "allgather_object", lambda value, name: _here.job.gathered(value, name))
    monkeypatch.setattr(pipelines, "rank", lambda: _here.job.rank)
    monkeypatch.setattr(pipelines, "size", lambda: _here.job.size)


def make(ranks: int) -> Pipeline:
    """In as many stages, or replicas if there are four ranks. New ranks begin with other weights."""
    mesh = (2, 2) if ranks == 4 else (ranks, 1)
    model = chain_model(4, seed=ranks)
    fabric = _here.job.world.fabric(_here.job.rank)
    return Pipeline(model, "1f1b", 2, mesh, loss=loss_of, optimizer=adam, fabric=fabric)


def in_job(states: list[Any], work: Callable[[Any], Any], dies: int = -1, where: str = "") -> list[Any]:
    """An epoch of a job: ``work(state)`` on a rank for each state, after ``sync()``. Rank ``dies`` does, in a
    collective of this name; the others' errors are their results.
    """
    world = ThreadWorld(len(states), 100.0)

    def on_rank(rank: int) -> Any:
        _here.job = Job(world, rank)
        state = states[rank]
        state.sync()
        if rank == dies:
            _here.job.dies_in = where
        try:
            return work(state)
        except CommError as error:
            state.restore()
            return error
        except Died:
            world.abort()
            return None

    return run_threads(len(states), on_rank, 300.0, world.abort)


def new_states(count: int, **values: Any) -> list[Any]:
    return [PipelineState(make, **({"step": 0, "losses": []} | values)) for _ in range(count)]


def steps(until: int, every: int = 1) -> Callable[[Any], None]:
    def work(state: Any) -> None:
        while state.step < until:
            state.losses.append(state.pipeline.step(DATA[state.step]))
            state.step += 1
            if state.step % every == 0:
                state.commit()

    return work


def wanted(count: int) -> tuple[Any, list[float]]:
    weights, losses, _ = train(chain_model(4, seed=3), DATA[:count], 1, adam, num_microbatches=2)
    return weights, losses


def weights_of(state: Any) -> Any:
    return state.pipeline.state_dict()


def same(found: Any, other: Any) -> bool:
    return found.keys() == other.keys() and all(torch.equal(found[key], other[key]) for key in found)


def test_ranks_go_and_come() -> None:
    """Three stages, two, and three with a rank that has nothing yet: the bits of one process."""
    states = new_states(3)
    in_job(states, steps(3))
    assert [state.step for state in states] == [3, 3, 3]
    in_job(states[1:], steps(6))
    newcomer = new_states(1, step=7)[0]
    in_job([newcomer, *states[1:]], steps(9, 3))
    weights, losses = wanted(9)
    for state in (newcomer, *states[1:]):
        assert state.step == 9 and state.losses == losses
        assert same(state.model_state_dict(), weights)


@pytest.mark.parametrize("where", ["commsched.elastic.commit", "nowhere"])
def test_a_rank_dies_between_steps(where: str) -> None:
    """All that is left go back to one commit, whether it died in a step or in a commit."""
    states = new_states(3)

    def work(state: Any) -> None:
        steps(4, 2)(state)
        if _here.job.rank == 2 and where == "nowhere":
            raise Died
        steps(6, 2)(state)

    errors = in_job(states, work, dies=2, where=where)
    assert all(isinstance(error, CommError) for error in errors[:2])
    left = [states[0].step, states[1].step]
    assert left == ([4, 4] if where == "nowhere" else [0, 0])
    with pytest.raises(ValueError, match="there is no pipeline .*after a lost rank"):
        states[0].pipeline  # noqa: B018
    if where == "nowhere":
        assert same(states[1].model_state_dict(), wanted(4)[0])
    in_job(states[:2], steps(8))
    weights, losses = wanted(8)
    assert states[0].losses == states[1].losses == losses
    assert same(states[0].model_state_dict(), weights)


def test_a_commit_that_one_rank_alone_knows_to_be_whole_is_everyones() -> None:
    """A rank may die while it says that it has all of a commit: some hear it, and some do not."""
    states = new_states(3)

    def work(state: Any) -> None:
        steps(2)(state)
        hears, gathered = _here.job.rank == 1, _here.job.gathered
        state.pipeline.step(DATA[2])
        state.step += 1

        def told(value: Any, name: str) -> list[Any]:
            everyone: list[Any] = gathered(value, name)
            if name == "commsched.elastic.commit" and not hears:
                raise Died if _here.job.rank == 2 else CommError("rank 2 died")
            return everyone

        _here.job.gathered = told
        state.save()

    in_job(states, work)
    assert [state.step for state in states[:2]] == [2, 3]
    in_job(states[:2], lambda state: None)
    assert [state.step for state in states[:2]] == [3, 3]
    assert same(states[0].model_state_dict(), wanted(3)[0])
    # One that was cut off comes back with commit 3 of the ranks that have gone on: two commits of one number.
    back = new_states(1)[0]
    back._commit = pipelines._Commit((states[0]._commit.key[0], "zz"), {"step": 2, "losses": []},
                                     states[0]._commit.training)  # fmt: skip
    in_job([*states[:2], back], lambda state: None)
    assert [state.step for state in (*states[:2], back)] == [2, 2, 2]


def test_a_rank_dies_while_the_others_gather() -> None:
    states = new_states(3)

    def work(state: Any) -> None:
        steps(2)(state)
        steps(3, 9)(state)
        if _here.job.rank == 1:
            raise Died
        state.commit()

    errors = in_job(states, work)
    assert isinstance(errors[0], CommError) and isinstance(errors[2], CommError)
    assert [states[0].step, states[2].step] == [2, 2]
    in_job([states[2], states[0]], steps(5))
    assert same(states[2].model_state_dict(), wanted(5)[0])


def test_values_that_one_rank_cannot_copy_end_the_commit_on_all() -> None:
    states = new_states(2, kept=None)

    def work(state: Any) -> str:
        steps(1)(state)
        state.step += 1
        state.kept = threading.Lock() if _here.job.rank == 1 else None
        with pytest.raises((TypeError, ValueError)) as raised:
            state.commit()
        return str(raised.value)

    said = in_job(states, work)
    assert "nothing is committed" in said[0] and "rank 1: TypeError: cannot pickle" in said[0]
    assert "cannot pickle" in said[1]
    assert [state._commit.values["step"] for state in states] == [1, 1]


@pytest.mark.parametrize("call", ["check_host_updates", "commit"])
def test_changed_hosts_save_the_present_state_once(call: str) -> None:
    """Fewer hosts need another pipeline, too: the state is not left where it is."""
    states = new_states(3)

    def work(state: Any) -> None:
        steps(3, 9)(state)
        if _here.job.rank == 0:
            state.on_hosts_updated(state._last_updated_timestamp + 1, 1)
        saves = state._commit.key[0]
        with pytest.raises(HostsUpdatedInterrupt) as interrupt:
            getattr(state, call)()
        assert not interrupt.value.skip_sync and state._commit.key[0] == saves + 1

    in_job(states, work)
    for state in states:
        state.on_reset()
    in_job(states[:2], steps(5))
    weights, losses = wanted(5)
    assert states[0].losses == losses and same(states[1].model_state_dict(), weights)


def test_replicas_go() -> None:
    states = new_states(4)
    in_job(states, steps(3))
    in_job(states[1:], steps(5))
    model = chain_model(4, seed=4)
    weights, losses, _ = train(model, DATA[:5], 1, adam, num_microbatches=2)
    torch.testing.assert_close(states[1].model_state_dict(), weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states[1].losses, losses, rtol=1e-12, atol=1e-12)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="PipelineState keeps plain values and a pipeline, sampler is a"):
        PipelineState(make, sampler=torch.optim.SGD([torch.zeros(1)], lr=0.1))
    state = PipelineState(make, step=0)
    for read in (lambda: state.pipeline, state.model_state_dict):
        with pytest.raises(ValueError, match="there is no pipeline before|nothing was committed"):
            read()
    with pytest.raises(ValueError, match=r"make\(ranks\) must return a Pipeline, but returned a Linear"):
        in_job([PipelineState(lambda ranks: torch.nn.Linear(1, 1))], lambda state: None)  # type: ignore[arg-type, return-value]


def test_nothing_may_be_in_flight() -> None:
    """Refused before hosts change, and not only then."""

    def make_asynchronous(ranks: int) -> Pipeline:
        fabric = _here.job.world.fabric(_here.job.rank)
        return Pipeline(chain_model(4), "2bw", 2, loss=loss_of, optimizer=adam, fabric=fabric)

    def work(state: Any) -> None:
        for batch in DATA[:4]:
            state.pipeline.step(batch)
        for refused in (state.commit, state.check_host_updates):
            with pytest.raises(ValueError, match=r"micro-batches in flight.*call drain\(\) first"):
                refused()
        assert len(state.pipeline.drain()) > 0
        state.commit()

    in_job([PipelineState(make_asynchronous) for _ in range(2)], work)
