"""Checks of single collectives: results, gradients, and what is said where ranks disagree."""

import warnings

import torch

import commsched as hvd
from tests.support.collectives_checks import everyone, of_rank, raises, same


def check_allreduce_operations():
    stack = everyone(4, 3, dtype=torch.float64)
    mine = stack[hvd.rank()].clone()
    same(hvd.allreduce(mine), stack.mean(0))
    same(hvd.allreduce(mine, op=hvd.Sum), stack.sum(0))
    same(hvd.allreduce(mine, op=hvd.Min), stack.amin(0))
    same(hvd.allreduce(mine, op=hvd.Max), stack.amax(0))
    same(hvd.allreduce(mine, op=hvd.Product), stack.prod(0))
    same(mine, stack[hvd.rank()])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        same(hvd.allreduce(mine, average=False), stack.sum(0))
    assert any(w.category is DeprecationWarning for w in seen)
    raises(ValueError, lambda: hvd.allreduce(mine, average=True, op=hvd.Sum), "not both")


def check_allreduce_types():
    types = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]
    if hvd.engine_name() == "torch":
        types += [torch.uint8, torch.int8, torch.int16, torch.bfloat16]
    for dtype in types:
        stack = everyone(7, dtype=dtype)
        same(hvd.allreduce(stack[hvd.rank()], op=hvd.Sum), stack.sum(0, dtype=dtype))
    same(hvd.allreduce(torch.tensor(2.5), op=hvd.Sum), torch.tensor(2.5 * hvd.size()))
    same(hvd.allreduce(torch.full((3,), 7, dtype=torch.int32)), torch.full((3,), 7, dtype=torch.int32))
    raises(ValueError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)))
    raises(ValueError, lambda: hvd.allreduce(torch.ones(2, 3).t()), "contiguous")


def check_factors():
    stack = everyone(5, dtype=torch.float64)
    mine = stack[hvd.rank()]
    expected = (stack * 0.5).sum(0) * 4.0
    assert torch.allclose(
        hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), expected
    )
    assert torch.allclose(hvd.allreduce(mine, prescale_factor=0.5), (stack * 0.5).mean(0))
    whole = torch.tensor([3, -3, 10], dtype=torch.int32)  # whole numbers are cut off, not rounded
    same(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5), torch.tensor([1, -1, 5]).int() * hvd.size())


def check_in_place_and_grouped():
    stack = everyone(6)
    mine = stack[hvd.rank()].clone()
    result = hvd.allreduce_(mine, op=hvd.Sum)
    assert result is mine
    same(mine, stack.sum(0))
    handle = hvd.allreduce_async_(torch.ones(2), op=hvd.Sum)
    same(hvd.synchronize(handle), torch.full((2,), float(hvd.size())))
    shapes = [(3,), (2, 2), (), (0, 4), (5,)]
    tensors = [of_rank(hvd.rank(), *shape) for shape in shapes]
    tensors[1] = tensors[1].double()
    sums = [everyone(*shape).sum(0) for shape in shapes]
    sums[1] = sums[1].double()
    for found, expected in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), sums, strict=True):
        same(found, expected)
    results = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    for found, tensor, expected in zip(results, tensors, sums, strict=True):
        assert found is tensor
        same(tensor, expected)
    parameter = torch.nn.Parameter(stack[hvd.rank()].clone())  # a leaf that needs gradients, in place
    same(hvd.allreduce_(parameter, op=hvd.Sum).detach(), stack.sum(0))


def check_allgather_uneven():
    rows = [r for r in range(hvd.size())]  # rank 0 has none
    gathered = hvd.allgather(of_rank(hvd.rank(), rows[hvd.rank()], 3))
    same(gathered, torch.cat([of_rank(r, rows[r], 3) for r in range(hvd.size())]))
    if hvd.engine_name() == "torch":  # Horovod has no booleans
        flags = hvd.allgather(torch.tensor([hvd.rank() % 2 == 0]))
        same(flags, torch.tensor([r % 2 == 0 for r in range(hvd.size())]))
    first, second = hvd.grouped_allgather([of_rank(hvd.rank(), 2), of_rank(hvd.rank(), hvd.rank() + 1, 2)])
    same(first, torch.cat([of_rank(r, 2) for r in range(hvd.size())]))
    same(second, torch.cat([of_rank(r, r + 1, 2) for r in range(hvd.size())]))


def check_broadcast():
    root = hvd.size() - 1
    types = [torch.float32, torch.int16, torch.uint8, torch.float16]
    for dtype in types + ([torch.bool] if hvd.engine_name() == "torch" else []):
        mine = of_rank(hvd.rank(), 5).to(dtype)
        same(hvd.broadcast(mine, root), of_rank(root, 5).to(dtype))
        same(mine, of_rank(hvd.rank(), 5).to(dtype))
    mine = of_rank(hvd.rank(), 5)
    assert hvd.broadcast_(mine, root, name="in place") is mine
    same(mine, of_rank(root, 5))
    raises((ValueError, hvd.CommError), lambda: hvd.broadcast(mine, hvd.size()))


def check_alltoall():
    size, rank = hvd.size(), hvd.rank()
    same(
        hvd.alltoall(of_rank(rank, size * 2)),
        torch.cat([of_rank(r, size * 2)[2 * rank : 2 * rank + 2] for r in range(size)]),
    )
    splits = [[(r + other) % size for other in range(size)] for r in range(size)]  # some are zero
    total = sum(range(size))
    found, received = hvd.alltoall(
        of_rank(rank, total, 2), splits=torch.tensor(splits[rank], dtype=torch.int32)
    )
    expected = [of_rank(r, total, 2).split(splits[r])[rank] for r in range(size)]
    same(found, torch.cat(expected))
    same(received, torch.tensor([row[rank] for row in splits], dtype=torch.int32))
    raises(
        ValueError,
        lambda: hvd.alltoall(torch.ones(size), splits=torch.ones(size)),
    )
    raises(ValueError, lambda: hvd.alltoall(torch.ones(size - 1), splits=[1] * size))


def check_reducescatter():
    size, rank = hvd.size(), hvd.rank()
    rows = 2 * size + 1  # the first rank keeps one row more
    start, stop = (0, 3) if rank == 0 else (2 * rank + 1, 2 * rank + 3)
    stack = everyone(rows, 2, dtype=torch.float64)
    same(hvd.reducescatter(stack[rank]), stack.mean(0)[start:stop])
    same(hvd.reducescatter(stack[rank], op=hvd.Sum), stack.sum(0)[start:stop])
    scaled = hvd.reducescatter(stack[rank], op=hvd.Sum, prescale_factor=0.5, postscale_factor=6.0)
    same(scaled, stack.sum(0)[start:stop] * 3.0)
    first, second = hvd.grouped_reducescatter([stack[rank], of_rank(rank, size)], op=hvd.Sum)
    same(first, stack.sum(0)[start:stop])
    same(second, everyone(size).sum(0)[rank : rank + 1])
    raises((hvd.CommError, ValueError), lambda: hvd.reducescatter(torch.tensor(1.0)))
    if hvd.engine_name() == "torch":
        raises(hvd.CommError, lambda: hvd.reducescatter(stack[rank], op=hvd.Adasum), "Adasum")


def gradient(run, *shape):
    x = of_rank(hvd.rank(), *shape, dtype=torch.float64).requires_grad_()
    result = run(x)
    weights = torch.arange(1.0, result.numel() + 1, dtype=torch.float64).view(result.shape)
    (result * weights * (hvd.rank() + 1)).sum().backward()
    return x.grad, weights


def check_gradients():
    size, rank = hvd.size(), hvd.rank()
    factors = sum(range(1, size + 1))  # every rank's loss weighs rank + 1
    grad, weights = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 4)
    same(grad, weights * factors)
    grad, weights = gradient(hvd.allreduce, 4)
    assert torch.allclose(grad, weights * factors / size)
    grad, weights = gradient(lambda x: hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)[1], 4)
    same(grad, 2 * weights * factors)
    grad, weights = gradient(hvd.allgather, rank + 1, 2)
    start = sum(range(1, rank + 1))
    assert torch.allclose(grad, weights[start : start + rank + 1] * factors / size)
    grad, weights = gradient(lambda x: hvd.broadcast(x, size - 1), 3)
    assert torch.allclose(grad, weights * factors / size if rank == size - 1 else torch.zeros(3).double())
    grad, _ = gradient(hvd.alltoall, size)
    same(grad, torch.tensor([(rank + 1.0) * (other + 1) for other in range(size)], dtype=torch.float64))
    grad, weights = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), size, 2)
    same(grad, torch.stack([weights[0] * (r + 1) * size for r in range(size)]))
    x = torch.ones(2, requires_grad=True)
    raises(NotImplementedError, lambda: hvd.allreduce(x, op=hvd.Max).sum().backward(), "Max")


def check_second_gradients_are_an_error():
    """A penalty on gradients lost its term without a word."""
    x = torch.ones(hvd.size(), requires_grad=True)
    for run in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.alltoall, hvd.reducescatter):
        (first,) = torch.autograd.grad(run(x * x).square().sum(), x, create_graph=True)
        raises(RuntimeError, lambda first=first: first.sum().backward(), "once_differentiable")


def check_rows_that_alltoall_leaves_out():
    """Their gradient is zero; the backward raised."""
    x = torch.ones(2 * hvd.size() + 1, 2, requires_grad=True)
    hvd.alltoall(x, splits=torch.full((hvd.size(),), 2, dtype=torch.int32))[0].sum().backward()
    same(x.grad, torch.tensor([1.0] * 2 * hvd.size() + [0.0]).view(-1, 1).expand(-1, 2))


def check_inference_mode():
    """Its tensors cannot be written elsewhere: the operations' thread could not, and no rank went on."""
    if hvd.engine_name() != "torch":
        return
    with torch.inference_mode():
        mine, root = torch.arange(4.0) + hvd.rank(), hvd.size() - 1
        every = torch.stack([torch.arange(4.0) + rank for rank in range(hvd.size())])
        same(hvd.allreduce(mine, op=hvd.Sum), every.sum(0))
        same(hvd.allgather(mine), every.flatten())
        same(hvd.grouped_allreduce([mine, mine.int()], op=hvd.Sum)[1], every.int().sum(0, dtype=torch.int32))
        same(hvd.broadcast(mine, root), every[root])
        same(hvd.broadcast_(mine.clone(), root), every[root])
        assert hvd.broadcast_object({"rank": hvd.rank()}, root) == {"rank": root}
        made = hvd.allgather(torch.ones(1))
    assert made.sum() == hvd.size()


def check_means_of_small_numbers():
    """The sum of 200 and 200 is no uint8; their mean is."""
    if hvd.engine_name() == "torch":
        for dtype, value in ((torch.uint8, 200), (torch.int8, 100), (torch.int8, -100), (torch.int16, 30000)):
            whole = torch.full((hvd.size(),), value, dtype=dtype)
            same(hvd.allreduce(whole), whole)
            same(hvd.reducescatter(whole), whole[:1])
    # Horovod truncates the product of the sum, and not the mean before it is multiplied.
    mine = torch.tensor([1 + (hvd.rank() == 0)], dtype=torch.int32)
    total = hvd.size() + 1
    same(hvd.allreduce(mine, postscale_factor=2.0), torch.tensor([int(total * (2.0 / hvd.size()))]).int())


def check_order_and_handles():
    """Named operations in another order on every rank; poll and a second synchronize."""
    names = [f"order.{i}" for i in range(5)]
    turned = names[hvd.rank() :] + names[: hvd.rank()]
    handles = {
        name: hvd.allreduce_async(torch.full((2,), float(int(name[-1]))), name=name, op=hvd.Sum)
        for name in turned
    }
    for name in names:
        same(hvd.synchronize(handles[name]), torch.full((2,), float(int(name[-1]) * hvd.size())))
        assert hvd.synchronize(handles[name]) is None
    handle = hvd.allgather_async(torch.ones(1), name="polled")
    while not hvd.poll(handle):
        pass
    same(hvd.synchronize(handle), torch.ones(hvd.size()))
    raises(ValueError, lambda: hvd.poll(handle))


def check_sparse_and_compression():
    rank, size = hvd.rank(), hvd.size()
    dense = torch.zeros(6, 2)
    dense[rank], dense[5] = rank + 1.0, 1.0
    handle = hvd.sparse_allreduce_async(dense.to_sparse(1), name="sparse", op=hvd.Sum)
    expected = torch.zeros(6, 2)
    for r in range(size):
        expected[r], expected[5] = r + 1.0, size
    same(handle().to_dense(), expected)
    average = hvd.sparse_allreduce_async(dense.to_sparse(1), name="sparse", op=hvd.Average)
    assert torch.allclose(hvd.synchronize(average).to_dense(), expected / size)
    found = hvd.allreduce(torch.full((4,), 1.0 + 2**-14), op=hvd.Sum, compression=hvd.Compression.fp16)
    same(found, torch.full((4,), float(size)))  # 16 bits can not hold the rest
    same(
        hvd.allreduce(torch.tensor([7]), op=hvd.Sum, compression=hvd.Compression.fp16),
        torch.tensor([7 * size]),
    )


def check_adasum():
    if hvd.size() & (hvd.size() - 1):
        raises(NotImplementedError, lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum), "power of")
        return
    if hvd.engine_name() != "torch" or hvd.size() != 2:
        return
    a, b = everyone(6, dtype=torch.float64)
    dot = torch.dot(a, b)
    expected = a * (1 - dot / (2 * a.dot(a))) + b * (1 - dot / (2 * b.dot(b)))
    assert torch.allclose(hvd.allreduce(of_rank(hvd.rank(), 6, dtype=torch.float64), op=hvd.Adasum), expected)


def check_disagreements():
    """Each is an error on every rank, and the next operation works."""
    rank, torch_carries = hvd.rank(), hvd.engine_name() == "torch"

    def fails(call, *parts):
        raises(hvd.CommError, call, *(parts if torch_carries else ()))
        same(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([float(hvd.size())]))

    fails(
        lambda: hvd.allreduce(torch.ones(2 + rank), name="a"), "shape", "rank 0 has [[2]]", "rank 1 has [[3]]"
    )
    fails(lambda: hvd.allreduce(torch.ones(2, 2) if rank else torch.ones(4), name="a"), "shape")
    fails(
        lambda: hvd.allreduce(torch.ones(2).to(torch.int32 if rank else torch.float32), name="a"),
        "data type",
        "torch.float32",
        "torch.int32",
    )
    fails(
        lambda: hvd.allreduce(torch.ones(2), name="a", op=hvd.Min if rank else hvd.Max),
        "reduction",
        "Min",
        "Max",
    )
    fails(lambda: hvd.allreduce(torch.ones(2), name="a", prescale_factor=1.0 + rank), "prescale")
    fails(lambda: hvd.broadcast(torch.ones(2), rank % 2, name="b"), "root rank")
    fails(lambda: hvd.broadcast(torch.ones(2 + rank), 0, name="b"), "shape")
    fails(lambda: hvd.allgather(torch.ones(1, 2 + rank), name="g"), "first dimension")
    fails(lambda: hvd.allgather(torch.ones(*[1] * (1 + rank % 2)), name="g"), "dimensions")
    fails(lambda: hvd.reducescatter(torch.ones(2 + rank), name="r"), "shape")
    fails(lambda: hvd.alltoall(torch.ones(hvd.size(), 1 + rank), name="t"), "first dimension")
    if torch_carries:
        fails(lambda: hvd.add_process_set([rank]), "process set")
        fails(lambda: hvd.allgather(torch.tensor(1.0)), "dimension")


def check_duplicate_name():
    """Only the rank that repeats a name sees the error; the operation itself goes on."""
    handle = None
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        raises(ValueError, lambda: hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum), "name")
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    same(hvd.synchronize(handle), torch.full((2,), float(hvd.size())))
