"""Checks of what belongs to the job: process sets, join, objects, state, normalisation, groups, shutdown."""

import json
import random
import tempfile
import threading
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

import commsched as hvd
from commsched.collectives.carrier import carrier
from commsched.collectives.torch_carrier.operation_queue import OperationRunner
from tests.support.collectives_checks import everyone, of_rank, raises, same


def check_identity():
    assert hvd.is_initialized() and 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.gloo_built() is True and isinstance(hvd.nccl_built(), int)
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    assert hvd.global_process_set.rank() == hvd.rank() and hvd.global_process_set.included()


def check_process_sets():
    size, rank = hvd.size(), hvd.rank()
    last = hvd.add_process_set([size - 1])
    others = hvd.add_process_set(hvd.ProcessSet(range(size - 1)))
    assert last.included() == (rank == size - 1) and others.included() == (rank != size - 1)
    mine, foreign = (last, others) if last.included() else (others, last)
    assert mine.ranks[mine.rank()] == rank and mine.size() == len(mine.ranks)
    for _ in range(rank + 1):  # ranks in different sets may call unnamed operations unequally often
        mine_sum = (
            hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=last)
            if rank == size - 1
            else None
        )
    assert mine_sum is None or mine_sum.item() == rank
    expected = torch.stack([of_rank(r, 3) for r in mine.ranks])
    same(hvd.allreduce(of_rank(rank, 3), op=hvd.Sum, process_set=mine), expected.sum(0))
    same(
        hvd.allgather(of_rank(rank, 1, 3), process_set=mine),
        torch.cat([of_rank(r, 1, 3) for r in mine.ranks]),
    )
    same(hvd.broadcast(of_rank(rank, 3), mine.ranks[-1], process_set=mine), of_rank(mine.ranks[-1], 3))
    same(hvd.allreduce(of_rank(rank, 3), op=hvd.Sum), everyone(3).sum(0))  # the global set again
    x = of_rank(rank, 3).requires_grad_()
    hvd.allreduce(x, op=hvd.Sum, process_set=mine).sum().backward()
    same(x.grad, torch.full((3,), float(mine.size())))
    hvd.barrier(process_set=mine)
    same(
        hvd.broadcast_object(rank, mine.ranks[0], process_set=mine) + torch.zeros(1),
        torch.tensor([mine.ranks[0]]) + 0.0,
    )
    raises((ValueError, hvd.CommError), lambda: hvd.allreduce(torch.ones(1), process_set=foreign))
    raises(ValueError, foreign.rank)
    raises(ValueError, lambda: hvd.add_process_set([size - 1]), "exists")
    raises(ValueError, lambda: hvd.add_process_set([0, size]), "ranks")
    assert hvd.remove_process_set(last) and hvd.remove_process_set(others)
    assert last.size() is None and not hvd.remove_process_set(hvd.global_process_set)
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=last), "not registered")


def check_join():
    """Rank r has r + 1 batches; averages divide by all ranks, and unnamed calls fit again afterwards."""
    for step in range(hvd.rank() + 1):
        active = [r for r in range(hvd.size()) if r >= step]
        found = hvd.allreduce(torch.full((3,), float(hvd.rank() + 1)))
        assert torch.allclose(found, torch.full((3,), sum(r + 1 for r in active) / hvd.size()))
        whole = hvd.allreduce(torch.full((2,), hvd.rank() + 1), op=hvd.Sum)
        same(whole, torch.full((2,), sum(r + 1 for r in active)))
    last = hvd.join()
    assert hvd.allgather_object(last) == [last] * hvd.size() and last == hvd.size() - 1
    if hvd.rank() == 0:
        last = hvd.join()
    else:  # an operation that zeros can not stand in for
        raises(hvd.CommError, lambda: hvd.allgather(torch.ones(2)), "oin")
        last = hvd.join()
    assert last > 0
    same(hvd.allgather(torch.tensor([hvd.rank()])), torch.arange(hvd.size()))


def bits(result):
    """A result's bytes, or those of a group's."""
    parts = [result] if isinstance(result, torch.Tensor) else result
    return [part.reshape(-1).view(torch.uint8).tolist() for part in parts]


def check_many_at_once():
    """Operations that each rank starts in an order of its own have the bits that each has alone."""
    rank, size, chance = hvd.rank(), hvd.size(), random.Random(0)
    ends = hvd.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
    torch.manual_seed(rank)
    calls = {}
    for i in range(60):
        dtype = chance.choice([torch.float32, torch.float64, torch.float16, torch.int32, torch.int64])
        shapes = [chance.choice([(), (3,), (5, 2), (0,), (4097,)]) for _ in range(chance.choice([1, 1, 3]))]
        tensors = [(7 * torch.randn(shape)).to(dtype) for shape in shapes]
        options = {"process_set": chance.choice([ends, hvd.global_process_set]), "name": f"{i}"}
        kind = chance.choice([hvd.allreduce_async] * 8 + [hvd.allgather_async, hvd.broadcast_async])
        if kind is hvd.allreduce_async:
            options["op"] = chance.choice([hvd.Sum, hvd.Average, hvd.Min])
            if dtype.is_floating_point and options["op"] != hvd.Min:
                options["prescale_factor"] = chance.choice([1.0, 1 / 3])
            kind = hvd.grouped_allreduce_async if len(tensors) > 1 else kind
        if kind is hvd.broadcast_async:
            options["root_rank"] = size - 1
        given = tensors if kind is hvd.grouped_allreduce_async else tensors[0]
        if kind is hvd.allgather_async:
            given = given.reshape(-1)
        if options["process_set"].included():
            calls[i] = partial(kind, given, **options)
    alone = {i: bits(hvd.synchronize(start())) for i, start in calls.items()}
    together, run = [], OperationRunner.run

    def counted(runner, operations, message):
        together.append(len(operations))
        return run(runner, operations, message)

    chance = random.Random(rank)
    with patch.object(OperationRunner, "run", counted):
        for _ in range(3):
            handles = {i: calls[i]() for i in chance.sample(list(calls), len(calls))}
            found = {i: bits(hvd.synchronize(handles[i])) for i in chance.sample(list(calls), len(calls))}
            assert found == alone
    if size > 1 and hvd.engine_name() == "torch":
        assert max(together) > 1, together
    assert size < 3 or hvd.remove_process_set(ends)


def check_one_of_many_differs():
    for differs in (False, True, False):  # the others' requests are known by then
        sizes = [3 + (differs and i == 4) * hvd.rank() for i in range(9)]
        handles = [hvd.allreduce_async(torch.ones(n), op=hvd.Sum, name=f"{i}") for i, n in enumerate(sizes)]
        for i, handle in enumerate(handles):
            if differs and i == 4:
                raises(hvd.HorovodInternalError, partial(hvd.synchronize, handle), "shape")
            else:
                same(hvd.synchronize(handle), torch.full((3,), float(hvd.size())))


def check_an_operation_runs_although_its_rank_does_not_wait():
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="not waited for")
    store, last = carrier().meeting.store, hvd.rank() == hvd.size() - 1
    if last:
        hvd.synchronize(handle)
        store.set("the last rank has it", "yes")
    store.wait(["the last rank has it"])
    assert last or hvd.synchronize(handle).tolist() == [hvd.size()] * 2


def check_join_of_many_at_once():
    """Rank r has r + 1 batches of operations that are started together."""
    types = [torch.float32, torch.int64, torch.float64] * 3
    for step in range(hvd.rank() + 1):
        handles = {}
        for i in random.Random(hvd.rank()).sample(range(9), 9):
            mine = torch.full((i,), hvd.rank() + 1).to(types[i])
            handles[i] = hvd.allreduce_async(mine, op=hvd.Sum, name=f"{i}")
        for i, handle in handles.items():
            total = sum(r + 1 for r in range(hvd.size()) if r >= step)
            same(hvd.synchronize(handle), torch.full((i,), total).to(types[i]))
    assert hvd.join() == hvd.size() - 1


def check_objects_and_parameters():
    rank, size = hvd.rank(), hvd.size()
    assert hvd.allgather_object({"rank": rank, "pad": "x" * rank}) == [
        {"rank": r, "pad": "x" * r} for r in range(size)
    ]
    assert hvd.broadcast_object([1, "two"] if rank == size - 1 else None, size - 1) == [1, "two"]
    assert hvd.broadcast_object((lambda: 5) if rank == 0 else None, 0)() == 5
    assert hvd.allgather_object(rank, "named", process_set=hvd.global_process_set) == list(range(size))
    assert hvd.broadcast_object(rank, size - 1, "named") == size - 1
    # An object that one rank cannot pickle is an error on all of them: the others would wait for it.
    failing = rank == size - 1
    odd, error = (threading.Lock(), TypeError) if failing else (rank, ValueError)
    text = "pickle" if failing else f"rank {size - 1} could not pickle the lock"
    for share in (hvd.allgather_object, partial(hvd.broadcast_object, root_rank=size - 1)):
        raises(error, partial(share, odd), text)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
    model[0].weight.data = model[0].weight.data.to(memory_format=torch.channels_last)  # not contiguous
    for given in (
        model.state_dict(),
        list(model.named_parameters()),
        model.named_parameters(),
        list(model.parameters()),
    ):
        with torch.no_grad():
            model[0].weight.add_(rank)
        hvd.broadcast_parameters(given, root_rank=0)
        sums = hvd.allgather_object([p.sum().item() for p in model.parameters()])
        assert sums == [sums[0]] * size, sums
    raises(ValueError, lambda: hvd.broadcast_parameters(3, 0), "dict")
    raises(
        ValueError,
        lambda: hvd.broadcast_parameters({"epoch": 3}, 0),
        "'epoch' is a int; use broadcast_object",
    )


def check_optimizer_state():
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = make(model.parameters())
        before, steps = (
            [p.clone() for p in model.parameters()],
            json.dumps(optimizer.state_dict(), default=repr),
        )
        # Fresh: no step is taken and no state is made; as with Horovod there are gradients of zero.
        model.bias.requires_grad_(False)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert model.bias.grad is None
        if isinstance(optimizer, torch.optim.Adagrad):  # it has state from the beginning
            assert model.weight.grad is None
        else:
            assert torch.equal(model.weight.grad, torch.zeros(2, 3))
        model.bias.requires_grad_(True)
        assert json.dumps(optimizer.state_dict(), default=repr) == steps
        if hvd.rank() == 0:  # the root has trained, the others are fresh
            optimizer.param_groups[0]["lr"] = 0.25
            for _ in range(3):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        states = hvd.allgather_object(optimizer.state_dict())
        for state in states[1:]:
            assert repr(state) == repr(states[0]) and state["param_groups"][0]["lr"] == 0.25
    half = torch.nn.Linear(3, 2).half()
    optimizer = torch.optim.NAdam(half.parameters())  # its mu_product is float32, and was cast to float16
    for _ in range(3 if hvd.rank() == 0 else 0):
        half(torch.ones(1, 3).half()).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(repr(optimizer.state_dict()["state"]))
    assert "mu_product" in states[0] and set(states) == {states[0]}, states
    lbfgs = torch.optim.LBFGS(model.parameters())
    raises(ValueError, lambda: hvd.broadcast_optimizer_state(lbfgs, 0), "LBFGS")


def check_sync_batch_norm():
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    rows = [r + 1 for r in range(size)]  # every rank has another batch size
    whole = (torch.randn(sum(rows), 3, 4, dtype=torch.float64) * 3 + 5).requires_grad_()
    plain, sync = torch.nn.BatchNorm1d(3).double(), hvd.SyncBatchNorm(3).double()
    plain.weight.data.uniform_(), sync.weight.data.copy_(plain.weight.data)
    factor = torch.randn(whole.shape, dtype=torch.float64)
    mine = whole.detach().split(rows)[rank].clone().requires_grad_()
    for momentum in (0.1, None):
        plain.momentum = sync.momentum = momentum
        whole.grad, mine.grad, sync.weight.grad, plain.weight.grad = None, None, None, None
        expected, found = plain(whole), sync(mine)
        assert torch.allclose(found, expected.split(rows)[rank], rtol=1e-12, atol=1e-12)
        (expected * factor).sum().backward()
        (found * factor.split(rows)[rank]).sum().backward()
        assert torch.allclose(mine.grad, whole.grad.split(rows)[rank], rtol=1e-9, atol=1e-12)
        assert torch.allclose(hvd.allreduce(sync.weight.grad, op=hvd.Sum), plain.weight.grad)
        assert torch.allclose(sync.running_mean, plain.running_mean) and torch.allclose(
            sync.running_var, plain.running_var
        )
    assert torch.allclose(sync.eval()(mine), plain.eval()(whole).split(rows)[rank])
    before = sync.running_mean.clone()
    for norm in (sync, plain):  # as for a virtual adversarial loss
        norm.train()
        norm.track_running_stats = False
    assert torch.allclose(sync(mine), plain(whole).split(rows)[rank])
    assert torch.equal(sync.running_mean, before) and sync.num_batches_tracked == plain.num_batches_tracked
    assert torch.allclose(sync.eval()(mine), plain.eval()(whole).split(rows)[rank])
    if rank == 0:  # alone: evaluation is plain batch normalisation
        without = hvd.SyncBatchNorm(3, track_running_stats=False).double().eval()
        assert torch.allclose(
            without(mine), torch.nn.BatchNorm1d(3, track_running_stats=False).double()(mine)
        )
    (first,) = torch.autograd.grad(sync.train()(mine).square().sum(), mine, create_graph=True)
    if size > 1:
        raises(RuntimeError, lambda: first.sum().backward(), "once_differentiable")
    raises(ValueError, lambda: sync(torch.ones(3)), "2 dim")
    alone = [hvd.add_process_set([r]) for r in range(size)] if size > 1 else [hvd.global_process_set]
    own = hvd.SyncBatchNorm(3, process_set=alone[rank]).double()  # one rank: plain batch normalisation
    assert torch.allclose(own(mine), torch.nn.BatchNorm1d(3).double()(mine))
    for process_set in alone:
        assert hvd.remove_process_set(process_set) == (size > 1)


def check_data_group():
    group = hvd.data_group()
    assert group is hvd.data_group() and (group.rank(), group.size()) == (hvd.rank(), hvd.size())
    assert type(group).__name__ == "ProcessGroupGloo" and not torch.distributed.is_initialized()
    tensor = of_rank(hvd.rank(), 3)
    group.allreduce([tensor]).wait()
    same(tensor, everyone(3).sum(0))
    second = hvd.data_group(channel=1)
    assert second is not group
    second.barrier().wait()
    last = hvd.add_process_set([0, hvd.size() - 1]) if hvd.size() > 2 else hvd.global_process_set
    if last.included():
        pair = hvd.data_group(last)
        tensor = torch.tensor([float(hvd.rank())])
        pair.allreduce([tensor]).wait()
        assert pair.size() == min(2, hvd.size()) and tensor.item() == hvd.size() - 1
    else:
        raises(ValueError, lambda: hvd.data_group(last), "not in process set")


def check_timeline():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(2), name="recorded")
        if hvd.engine_name() == "torch":
            hvd.stop_timeline()
            if hvd.rank() == 0:
                text = path.read_text()
                names = {event["name"] for event in json.loads(text)}
                assert {
                    "ALLREDUCE",
                    "NEGOTIATE_ALLREDUCE",
                    "CYCLE_START",
                } <= names and "allreduce.recorded" in text
            assert hvd.rank() == 0 or not path.exists()
        else:
            hvd.stop_timeline()


def check_shutdown_and_init_again():
    for _ in range(3):
        mine = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.ProcessSet([0])
        hvd.shutdown()
        assert not hvd.is_initialized()
        assert mine.process_set_id is None, "an id of the engine that is gone"
        raises(ValueError, hvd.rank, "init()")
        raises(ValueError, lambda: hvd.allreduce(torch.ones(1)), "init()")
        hvd.init()
        hvd.init()  # a second call does nothing
        same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())))
        hvd.data_group().barrier().wait()
