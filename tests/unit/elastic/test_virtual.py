"""Virtual ranks: the tree of sums, what a loop leaves, what it refuses. One rank; the tree also on more."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import commsched as hvd
from commsched.elastic import recovery, virtual
from commsched.elastic import sampler as sampler_module
from commsched.elastic.sampler import share_of
from commsched.optimizer.planner import owners_of
from tests.support.virtual_training import Net, made_model, trained


@pytest.fixture(autouse=True)
def job():
    hvd.init()
    yield
    hvd.shutdown()


def tree(values, start, length):
    """The rule of docs/elastic.md: halves of a power of two; without a right half, the left one."""
    if length == 1:
        return values[start].clone()
    left = tree(values, start, length // 2)
    right = start + length // 2
    return left if right >= len(values) else left + tree(values, right, length // 2)


def spread(count):
    """Float32 vectors whose sum depends on the order."""
    return [torch.randn(64) * 10.0 ** torch.randint(-4, 5, (64,)) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 12, 16])
def test_sums_are_those_of_one_tree_on_any_ranks(count):
    values = spread(count)
    expected = tree(values, 0, 1 << (count - 1).bit_length())
    in_turn = sum(values[1:], values[0].clone())
    assert count < 4 or not torch.equal(in_turn, expected), "these values cannot tell one order from another"
    for ranks in range(1, count + 3):
        shares = [share_of(rank, ranks, count) for rank in range(ranks)]
        assert [v for share in shares for v in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        there = {}
        for share in shares:
            nodes = []
            for v in share:
                virtual.add_leaf(nodes, v, {0: values[v].clone()})
            assert [node[:2] for node in nodes] == virtual._places(share)
            assert len(nodes) <= max(1, 2 * (count - 1).bit_length())
            there |= {node[:2]: node[2][0] for node in nodes}
        assert torch.equal(virtual.add_up(there, count), expected), ranks


def test_a_tensor_that_some_virtual_ranks_lack_is_added_where_it_is():
    nodes = []
    for v, sums in enumerate([{}, {0: torch.ones(1)}, {0: torch.ones(1)}, {}]):
        virtual.add_leaf(nodes, v, sums)
    assert [node[:2] for node in nodes] == [(0, 4)] and nodes[0][2][0].item() == 2


def run(body, state, count=4, **options):
    """Call a function of ``run`` once."""
    return hvd.elastic.run(virtual_ranks=count, **options)(body)(state)


def made(make=lambda params: torch.optim.AdamW(params, lr=0.1), model=None, **values):
    model = made_model() if model is None else model
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model=model)
    return model, optimizer, hvd.elastic.TorchState(model, optimizer, **values)


def data(v, step=0):
    return torch.randn(5, 13, generator=torch.Generator().manual_seed(100 * step + v))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_one_rank_does_what_plain_torch_does_with_the_gradients_of_the_tree(op):
    count, model, plain = 6, made_model(), made_model()
    for each in (model, plain):
        each.dropout.p = 0.0
        each.norm.momentum = 0.5
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), op=op)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)

    def body(state):
        for step in range(5):
            optimizer.zero_grad()
            for v in hvd.elastic.virtual_ranks(state):
                model(data(v, step)).backward()
            optimizer.step()

    run(body, hvd.elastic.TorchState(model, optimizer), count)
    for step in range(5):
        gradients, first, of_rank_0 = [], [b.clone() for b in plain.buffers()], None
        for v in range(count):
            plain.zero_grad()
            for buffer, value in zip(plain.buffers(), first, strict=True):
                buffer.copy_(value)
            plain(data(v, step)).backward()
            gradients.append([p.grad for p in plain.parameters()])
            of_rank_0 = of_rank_0 or [b.clone() for b in plain.buffers()]
        for buffer, value in zip(plain.buffers(), of_rank_0, strict=True):
            buffer.copy_(value)
        for p, each in zip(plain.parameters(), zip(*gradients, strict=True), strict=True):
            each = [torch.zeros_like(p) if grad is None else grad for grad in each]
            p.grad = tree(each, 0, 8) / (count if op == hvd.Average else 1)
        plain.unused.zero_grad()
        theirs.step()
    assert int(model.norm.num_batches_tracked) == 5
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )


def test_random_numbers_are_those_of_step_and_virtual_rank():
    model, optimizer, state = made()
    drawn, outside = [], []

    def body(state):
        for _ in range(2):
            optimizer.zero_grad()
            for v in hvd.elastic.virtual_ranks(state):
                model(data(v)).backward()
                drawn.append((state.virtual_steps, v, torch.rand(1).item(), random.random()))
            optimizer.step()
            outside.append(torch.rand(1).item())

    torch.manual_seed(1)
    expected = [torch.rand(1).item() for _ in range(2)]
    torch.manual_seed(1)
    run(body, state)
    assert outside == expected and len({one[2:] for one in drawn}) == 8
    state.virtual_steps, first = 0, list(drawn)
    torch.manual_seed(2)
    run(body, state)
    assert drawn[8:] == first
    state.virtual_steps = 0
    run(body, state, seed=1)
    assert {one[2:] for one in drawn[16:]}.isdisjoint(one[2:] for one in first)


def test_a_restored_step_draws_the_same_numbers():
    model, optimizer, state = made()
    drawn = []

    def body(state):
        for _ in range(3):
            optimizer.zero_grad()
            for v in hvd.elastic.virtual_ranks(state):
                model(data(v)).backward()
                drawn.append(torch.rand(1).item())
            optimizer.step()
            if len(drawn) == 4:
                state.commit()
            elif len(drawn) == 8:
                state.restore()

    run(body, state)
    assert drawn[4:8] == drawn[8:]


def test_bits_depend_on_the_virtual_ranks_alone():
    once, again, other = (trained("gradients", 3, count)[0] for count in (4, 4, 5))
    assert once == again != other


def test_each_parameter_is_updated_as_a_whole_by_one_rank():
    """Kernels may round a tensor's last elements otherwise, so shards that end elsewhere gave other bits."""
    ranks = SimpleNamespace(size=3, agree=lambda *_: None)
    backend = SimpleNamespace(uneven_parts=True, name="direct", ranks=ranks)
    params = list(made_model().parameters())
    owners = owners_of(torch.optim.AdamW, params, backend, virtual=True)
    assert len(owners) == len(params) and set(owners) == {0, 1, 2}
    assert owners_of(torch.optim.AdamW, params, backend) is None
    backend.uneven_parts = False
    with pytest.raises(ValueError, match="gives each rank whole parameters"):
        owners_of(torch.optim.AdamW, params, backend, virtual=True)


def loop(model, state, leave=lambda v: False):
    for v in hvd.elastic.virtual_ranks(state):
        model(data(v)).backward()
        if leave(v):
            break


def outside(model, optimizer, state):
    loop(model, state)
    model(data(0)).backward()


def before(model, optimizer, state):
    loop(model, state)
    optimizer.step()
    loop(model, state)


def left_early(model, optimizer, state):
    loop(model, state, leave=lambda v: v == 2)
    optimizer.step()


def twice(model, optimizer, state):
    loop(model, state)
    optimizer.step()
    optimizer.step()


def nested(model, optimizer, state):
    for _ in hvd.elastic.virtual_ranks(state):
        loop(model, state)


def weighted(model, optimizer, state):
    for v in hvd.elastic.virtual_ranks(state):
        optimizer.weighted(model(data(v)), 5).backward()


def made_inside(model, optimizer, state):
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (outside, "a backward outside of"),
        (before, "begins with a gradient that is not zero"),
        (left_early, "to the end of that loop"),
        (twice, "to the end of that loop"),
        (nested, "inside of its own loop"),
        (weighted, "weighted.. divides by the samples"),
        (made_inside, "make DistributedOptimizer before elastic.run's function"),
    ],
)
def test_what_would_depend_on_the_ranks_is_an_error(act, text):
    model, optimizer, state = made()
    with pytest.raises(ValueError, match=text):
        run(lambda state: act(model, optimizer, state), state)
    if act is made_inside:
        return
    optimizer.zero_grad()  # the script goes on: nothing is left of the error

    def body(state):
        loop(model, state)
        optimizer.step()

    run(body, state)
    with pytest.raises(ValueError, match="inside of it"):
        loop(model, state)


def test_gradients_that_are_zeros_stay_so():
    """torch steps with a gradient of zeros, and not without one."""
    model, optimizer, state = made(lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.5))
    before = model.unused.weight.detach().clone()

    def body(state):
        for set_to_none in (True, False):
            for p in model.parameters():
                p.grad = None if set_to_none else torch.zeros_like(p)
            loop(model, state)
            assert (model.unused.weight.grad is None) == set_to_none
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(model.unused.weight, before) == set_to_none

    run(body, state)


def test_what_is_refused():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(table, optimizer)

    def body(state):
        for _ in hvd.elastic.virtual_ranks(state):
            table(torch.tensor([1])).sum().backward()

    with pytest.raises(ValueError, match="sparse=True"):
        run(body, state)
    with pytest.raises(ValueError, match="at least 1"):
        run(body, state, -1)
    with pytest.raises(ValueError, match="need a TorchState"):
        run(body, hvd.elastic.ObjectState(lambda value: value, lambda: 0))
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        run(body, hvd.elastic.TorchState(model, optimizer))


def test_a_function_without_an_optimizer_is_refused():
    with pytest.raises(ValueError, match="need a DistributedOptimizer"):
        run(lambda state: None, hvd.elastic.TorchState(nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": hvd.Compression.fp16}, "compression="),
        ({"gather": "parameters", "early_step": True}, "early_step"),
        ({"gradient_predivide_factor": 2.0}, "predivide"),
        ({"op": hvd.Adasum}, "Adasum"),
    ],
)
def test_options_whose_sums_depend_on_the_ranks_are_refused(options, text):
    model = Net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    with pytest.raises(ValueError, match=text):
        run(lambda state: None, hvd.elastic.TorchState(model, optimizer))


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float16, "direct"), (torch.bfloat16, None), (torch.float32, None)]
)
def test_float16_takes_no_tiers_which_scale_it(dtype, expected, monkeypatch):
    model, optimizer, state = made(model=Net().to(dtype))
    run(lambda state: None, state)
    assert optimizer._options.transport == expected
    monkeypatch.setattr(optimizer._ordinary.process_set.__class__, "size", lambda self: 64)
    optimizer.set_virtual_ranks(4)
    assert optimizer._options.transport == (expected and "ring")


def test_tiers_are_refused_for_float16():
    model = Net().half()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), transport="tiers")
    with pytest.raises(ValueError, match="transport 'tiers' rounds"):
        run(lambda state: None, hvd.elastic.TorchState(model, optimizer))


class Replacing(nn.Module):
    """Its forward assigns buffers: one that is there, one that is None, one that it registers."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(13, 1)
        self.register_buffer("mean", torch.ones(13))
        self.register_buffer("last", None)
        self.seen = []

    def forward(self, x):
        self.seen.append((self.mean.clone(), self.last, hasattr(self, "new")))
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.last = x[0].clone()
        if not hasattr(self, "new"):
            self.register_buffer("new", x[1].clone())
        return self.line(x).sum()


def test_buffers_that_a_forward_replaces_are_those_of_virtual_rank_0():
    model = Replacing()
    model, optimizer, state = made(model=model)
    mean = model.mean

    def body(state):
        loop(model, state)
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(m, torch.ones(13)) and not last and not new for m, last, new in model.seen)
        assert model.mean is mean and torch.equal(mean, 0.5 + 0.5 * data(0).mean(0))
        assert torch.equal(model.last, data(0)[0]) and torch.equal(model.new, data(0)[1])
        model.seen.clear()
        loop(model, state)
        assert len(model.seen) == 4
        assert all(torch.equal(last, data(0)[0]) and new for _, last, new in model.seen)

    run(body, state)


@pytest.mark.parametrize("raises", [False, True])
def test_a_loop_that_is_left_leaves_no_buffers(raises):
    for model in (made_model(), Replacing()):
        model, optimizer, state = made(model=model)
        before = {name: value.clone() for name, value in model.named_buffers()}

        def leave(v):
            if raises:
                raise KeyError(v)
            return v == 2

        def body(state, model=model):
            try:
                loop(model, state, leave)
            except KeyError:
                assert raises

        run(body, state)
        now = dict(model.named_buffers())
        assert now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)


@pytest.mark.parametrize("attribute", ["_closed", "_released"])
def test_an_optimizer_that_is_closed_is_not_used(attribute):
    other = nn.Linear(2, 2)
    closed = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    setattr(closed, attribute, True)  # as on several ranks
    model, optimizer, state = made()
    late = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    asked = closed._options

    def body(state):
        assert closed._options is asked
        setattr(late, attribute, True)  # as by another one that is connected
        for p in other.parameters():
            p.grad = torch.ones_like(p)
        loop(model, state)
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in other.parameters())
        setattr(optimizer, attribute, True)
        with pytest.raises(ValueError, match="not closed or released"):
            loop(model, state)
        setattr(optimizer, attribute, False)

    run(body, state)


def test_a_sampler_serves_real_ranks_again():
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    model, optimizer, state = made(sampler=sampler)
    run(lambda state: sampler.record_batch(0, 1), state)
    assert sampler.num_replicas == 1 and list(sampler) == [4, 5, 6, 7]
    run(lambda state: hvd.shutdown(), state)  # no ranks to divide samples among
    hvd.init()


def test_an_optimizer_serves_real_ranks_again():
    model, optimizer, state = made()
    asked = optimizer._options
    run(lambda state: None, state)
    assert optimizer._options.virtual_divisor == 4
    with pytest.raises(ValueError, match=r"virtual_ranks.*ordinary elastic.run function restores"):
        optimizer.step()

    @hvd.elastic.run
    def plainly(state):
        model(data(0)).backward()
        optimizer.step()

    plainly(state)
    assert optimizer._options == asked


def test_ranks_that_disagree_are_named(monkeypatch):
    _, _, state = made()
    gathered = recovery.allgather_object

    def with_another(mine, name):
        found = gathered(mine, name)
        if name != "commsched.elastic":
            return found
        _, [(what, count, seed), *optimizers] = found[0]
        return [*found, (True, [[what, 2 * count, seed], *optimizers])]

    monkeypatch.setattr(recovery, "allgather_object", with_another)
    with pytest.raises(ValueError, match=r"rank 0 has \[\['virtual ranks', 4, 0\].* rank 1 has \[.* 8, 0\]"):
        run(lambda state: None, state)


@pytest.mark.parametrize("exact", [False, True])
def test_samples_are_dealt_out_to_virtual_ranks(monkeypatch, exact):
    """Also after a change of ranks in the middle of the data, and whichever ranks there are."""
    samples, size, count, here = 41, 3, 4, {"rank": 0, "size": 1}
    monkeypatch.setattr(sampler_module, "rank", lambda: here["rank"])
    monkeypatch.setattr(sampler_module, "size", lambda: here["size"])

    def sampler():
        one = hvd.elastic.ElasticSampler(range(samples), seed=3, exact=exact)
        _, _, state = made(sampler=one)
        virtual.VirtualRanks(state, count, 0)
        return one

    one, steps = sampler(), []
    order = list(one._order)
    while one.batch(0, size):
        steps.append([one.batch(v, size) for v in range(count)])
        one.record_batch(0, size)
    dealt = [batch for step in steps for batch in step]
    assert len(steps) == 4 and not any(one.batch(v, size) for v in range(count))
    for number, step in enumerate(steps[:3]):
        begin = number * size * count
        assert [i for k in zip(*step, strict=True) for i in k] == order[begin : begin + size * count]
    assert sorted(map(len, steps[3])) == ([1, 1, 1, 2] if exact else [2] * 4)
    assert sorted(i for batch in dealt for i in batch) == sorted(order + ([] if exact else order[:3]))
    for ranks in (2, 3):
        shares = []
        for rank in range(ranks):
            here.update(rank=rank, size=ranks)
            other = sampler()
            other.load_state_dict({"epoch": 0, "processed_num": size * count})
            shares.append((share_of(rank, ranks, count), list(other.batches(size))))
        for step in range(1, 4):
            found = [batch for mine, batches in shares for batch in batches[: len(mine)]]
            assert found == steps[step], (ranks, step)
            shares = [(mine, batches[len(mine) :]) for mine, batches in shares]
    with pytest.raises(ValueError, match="a rank has no samples"):
        list(one)


def test_batches_are_for_virtual_ranks():
    with pytest.raises(ValueError, match="pass the sampler"):
        hvd.elastic.ElasticSampler(range(3)).batch(0, 1)
