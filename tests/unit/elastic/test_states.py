"""States: commits are copies, all or nothing; what hosts tell; handlers of one's own. One rank."""

from __future__ import annotations

import copy

import pytest
import torch

import commsched as hvd
from commsched.elastic import state as states


@pytest.fixture(autouse=True)
def job():
    hvd.init()
    yield
    hvd.shutdown()


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()


def trained(**values):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    return model, optimizer, hvd.elastic.TorchState(model, optimizer, **values)


def parts(model, optimizer):
    return copy.deepcopy(
        [*model.state_dict().values(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    )


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_restored_twice_from_one_commit():
    """A loaded state dict shares its tensors with the optimizer, which updates them in place."""
    model, optimizer, state = trained(step=3)
    before = parts(model, optimizer)
    for _ in range(2):
        step(model, optimizer)
        state.step += 1
        state.restore()
        assert same(parts(model, optimizer), before) and state.step == 3


def test_a_commit_of_a_list_is_a_copy():
    state = hvd.elastic.TorchState(losses=[1.0])
    state.losses.append(2.0)
    state.restore()
    state.losses.append(3.0)
    state.restore()
    assert state.losses == [1.0]


def test_sync_commits_the_present_values():
    model, optimizer, state = trained(step=0)
    step(model, optimizer)
    state.step, before = 7, parts(model, optimizer)
    state.sync()
    step(model, optimizer)
    state.step = 8
    state.restore()
    assert state.step == 7 and same(parts(model, optimizer), before)


def test_a_commit_that_raises_saves_nothing(monkeypatch):
    """Reading the optimizer may find that a rank is lost, when the model is saved already."""
    model, optimizer, state = trained(step=0)
    before = parts(model, optimizer)
    step(model, optimizer)

    def lost():
        raise hvd.CommError("rank 1 died")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "state_dict", lost)
        with pytest.raises(hvd.CommError):
            state.commit()
    state.restore()
    assert same(parts(model, optimizer), before)


def test_a_commit_to_which_the_others_do_not_come_saves_nothing(monkeypatch):
    """A rank 0 that had left out a step kept its state, and gave it to the others: a batch was lost."""
    model, optimizer, state = trained(step=0)
    before = parts(model, optimizer)
    step(model, optimizer)

    def waits_in_vain(value):
        raise hvd.CommError("rank 1 did not call broadcast_object()")

    monkeypatch.setattr(state, "_bcast_object", waits_in_vain)
    with pytest.raises(hvd.CommError):
        state.commit()
    assert state._commits == 0
    state.restore()
    assert same(parts(model, optimizer), before)


def test_hosts_that_came_and_went():
    state = hvd.elastic.TorchState(step=0)
    state.check_host_updates()
    state.step = 3
    for results, removed_only in (((1,), True), ((2,), False), ((1, 2), False)):
        for result in results:
            state.on_hosts_updated(state._last_updated_timestamp + 1, result)
        with pytest.raises(hvd.elastic.HostsUpdatedInterrupt) as interrupt:
            state.commit()
        assert interrupt.value.skip_sync == removed_only
    state.restore()
    assert state.step == 3, "what is committed is saved, though hosts have changed"
    state.on_hosts_updated(state._last_updated_timestamp, 2)  # the same message once more
    state.commit()
    state.on_hosts_updated(state._last_updated_timestamp + 1, 2)
    state.forget_host_updates()
    state.commit()


def test_another_object_in_the_place_of_a_model():
    state = trained()[2]
    state.model = other = torch.nn.Linear(3, 3)
    weight = other.weight.detach().clone()
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert state.model is other and torch.equal(other.weight, weight)


def test_handlers_of_ones_own():
    class Counter:
        count = 0

    class Handler(states.StateHandler):
        def save(self):
            self.saved = self.value.count

        def restore(self):
            self.value.count = self.saved

        def sync(self):
            pass

    before = states.get_handler_registry()
    states.set_handler_registry([(Counter, Handler), *before])
    try:
        counter = Counter()
        state = hvd.elastic.TorchState(counter=counter)
        counter.count = 2
        state.commit()
        counter.count = 3
        state.restore()
        assert state.counter is counter and counter.count == 2
    finally:
        states.set_handler_registry(before)


def test_schedulers_go_back_too():
    model, optimizer, _ = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler)
    scheduler.step()
    state.restore()
    assert scheduler.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.1


def test_what_has_a_state_goes_back_without_a_kind():
    """Copies were restored, of the scaler and of the schedule's optimizer, which the script does not have."""
    model, optimizer, _ = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = hvd.elastic.TorchState(model, optimizer, scaler=scaler, schedule=None)
    state.schedule = schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state.commit()
    schedule.step()
    state.restore()
    assert state.scaler is scaler and state.schedule is schedule and schedule.optimizer is optimizer
    assert schedule.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.1


def test_a_new_rank_that_lacks_an_optimizer_is_named(monkeypatch):
    """Where the function makes the optimizer, a new rank has none yet; it waited in another broadcast."""
    model, optimizer, _ = trained()
    state, of_new_rank = (hvd.elastic.TorchState(model) for _ in range(2))
    state.optimizer = optimizer
    monkeypatch.setattr(states, "allgather_object", lambda mine, name: [mine, mine, of_new_rank._kinds()])
    with pytest.raises(
        ValueError, match=r"'optimizer', 'OptimizerStateHandler'.* and rank 2 has \[\('model'"
    ):
        state.sync()


def test_gradients_stay_where_all_get_one_state():
    model = torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(4, 2)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    state.sync()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_samples_are_dealt_out_anew_where_ranks_were_only_removed(monkeypatch):
    """Nobody synchronises the state then; the sampler went on with the share of one rank of two."""
    from commsched.elastic import sampler as module

    sizes = {"size": 2}
    monkeypatch.setattr(module, "size", lambda: sizes["size"])
    sampler = hvd.elastic.ElasticSampler(range(12), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler)
    sampler.record_batch(0, 2)
    sizes["size"] = 1
    state.on_reset()
    assert list(sampler) == list(range(4, 12)) and sampler.num_replicas == 1


def test_samples_that_are_left(monkeypatch):
    from commsched.elastic import sampler as module

    sizes = {"rank": 0, "size": 4}
    monkeypatch.setattr(module, "size", lambda: sizes["size"])
    monkeypatch.setattr(module, "rank", lambda: sizes["rank"])
    sampler = hvd.elastic.ElasticSampler(range(21), seed=5)
    sampler.record_batch(0, 3)  # on each of four ranks
    kept, parts = sampler.state_dict(), []
    sizes["size"] = 2
    for sizes["rank"] in range(2):
        sampler.load_state_dict(kept)
        parts.append(list(sampler))
    assert [len(part) for part in parts] == [5, 5] == [len(sampler)] * 2
    left = set(sampler.remaining_indices)
    assert len(left) == 9 and set(parts[0] + parts[1]) == left
    sampler.set_epoch(1)
    assert len(sampler) == 11 and sampler.processed_num == 0


def test_fewer_samples_than_ranks(monkeypatch):
    from commsched.elastic import sampler as module

    monkeypatch.setattr(module, "size", lambda: 4)
    sampler = hvd.elastic.ElasticSampler(range(1), shuffle=False)
    assert list(sampler) == [0]
    sampler.record_batch(0, 1)
    sampler.reset()
    assert list(sampler) == [] and len(sampler) == 0


@pytest.mark.parametrize("last", [0, -1])
def test_exact_shares(monkeypatch, last):
    """Every sample once in an epoch, with ranks that come and go, whichever rank's commit is given on."""
    from commsched.elastic import sampler as module

    here, batch, seen, kept = {"rank": 0, "size": 1}, 2, [], None
    monkeypatch.setattr(module, "size", lambda: here["size"])
    monkeypatch.setattr(module, "rank", lambda: here["rank"])
    for size, steps in ((4, 2), (3, 1), (5, 9)):
        here["size"], samplers = size, []
        for here["rank"] in range(size):
            samplers.append(hvd.elastic.ElasticSampler(range(31), seed=3, exact=True))
            samplers[-1].load_state_dict(kept or samplers[-1].state_dict())
        shares = [list(one) for one in samplers]
        assert [len(share) for share in shares] == [len(one) for one in samplers]
        assert len(samplers[0]) - len(samplers[-1]) in (0, 1)
        for step in range(steps):
            seen += [index for share in shares for index in share[batch * step : batch * (step + 1)]]
            for one in samplers:
                one.record_batch(step, batch)
            assert {one.processed_num for one in samplers} == {len(seen)}
        kept = samplers[last].state_dict()
    assert sorted(seen) == list(range(31))
