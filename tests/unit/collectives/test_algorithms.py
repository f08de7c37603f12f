"""The collectives' arithmetic over a group in memory: any number of ranks, no process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from comm_core import local_message_channels
from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.torch_carrier import algorithms
from commsched.collectives.torch_carrier.algorithms import ChannelGroup

REDUCE = {
    ReduceOp.AVERAGE: torch.sum,  # divided afterwards
    ReduceOp.SUM: torch.sum,
    ReduceOp.MIN: torch.amin,
    ReduceOp.MAX: torch.amax,
    ReduceOp.PRODUCT: torch.prod,
}


def on_ranks(size, work):
    """`work(group)` on every rank, which are threads with real channels; the results in rank order."""
    groups = [ChannelGroup(channel, rank, size) for rank, channel in enumerate(local_message_channels(size))]
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(work, groups))
    for group in groups:
        group.close()
    return results


def value(rank, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_allreduce_of_several_types_in_one_call(size, op):
    def work(group):
        inputs = [
            value(group.rank, 3),
            value(group.rank, 2, 2).int(),
            value(group.rank, 4).short(),
            value(group.rank, 5),
        ]
        outputs = [torch.empty_like(tensor) for tensor in inputs]
        algorithms.allreduce(group, inputs, outputs, Reduction(op))
        return outputs

    for outputs in on_ranks(size, work):
        for found, shape in zip(outputs, [(3,), (2, 2), (4,), (5,)], strict=True):
            stack = torch.stack([value(rank, *shape) for rank in range(size)]).to(found.dtype)
            assert torch.equal(found, REDUCE[op](stack, 0).to(found.dtype))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "length", [0, 1, 4, 9_000, 40_003]
)  # 9,000 are short for two ranks, and long for five
@pytest.mark.parametrize("op", REDUCE)
def test_every_rank_gets_the_same_sum_in_rank_order(size, length, op):
    def work(group):
        mine = torch.randn(length, generator=torch.Generator().manual_seed(group.rank))
        whole = mine.clone()
        group.reduce(whole, op)
        return mine, whole

    results = on_ranks(size, work)
    expected = results[0][0].clone()
    for mine, _ in results[1:]:
        expected = {
            ReduceOp.MIN: torch.minimum,
            ReduceOp.MAX: torch.maximum,
            ReduceOp.PRODUCT: torch.mul,
        }.get(op, torch.add)(expected, mine)
    assert all(torch.equal(whole, expected) for _, whole in results)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 9_000, 40_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_every_rank_gets_the_roots_tensor(size, length, dtype):
    def work(group):
        received = []
        for root in range(size):
            tensor = torch.randn(length, generator=torch.Generator().manual_seed(7 * group.rank + root)).to(
                dtype
            )
            kept = tensor.clone()
            group.broadcast(tensor, root)
            received.append((kept, tensor))
        return received

    results = on_ranks(size, work)
    for root in range(size):
        assert all(torch.equal(rows[root][1], results[root][root][0]) for rows in results)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_averages_of_whole_numbers_are_cut_off(dtype):
    def work(group):
        tensor = torch.tensor([group.rank, 1, 7]).to(dtype)
        algorithms.allreduce(group, [tensor], [tensor], Reduction(ReduceOp.AVERAGE))
        return tensor

    for found in on_ranks(3, work):
        assert found.tolist() == [1, 1, 7] and found.dtype is dtype


def test_negative_averages_are_cut_off_towards_zero():
    def work(group):
        tensor = torch.tensor([-group.rank, -4])
        algorithms.allreduce(group, [tensor], [tensor], Reduction(ReduceOp.AVERAGE))
        return tensor.tolist()

    assert on_ranks(2, work) == [[0, -4]] * 2


def test_factors_apply_before_and_after():
    def work(group):
        tensor = torch.tensor([5, -5], dtype=torch.int32)
        algorithms.allreduce(group, [tensor], [tensor], Reduction(ReduceOp.SUM, 0.5, 3.0))
        return tensor.tolist()

    assert on_ranks(2, work) == [[12, -12]] * 2  # 2 each, 4 together, times 3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_adasum_against_its_definition(size):
    def pair(a, b):
        dot = (a * b).sum()
        return a * (1 - dot / (2 * (a * a).sum())) + b * (1 - dot / (2 * (b * b).sum()))

    def tree(vectors):
        while len(vectors) > 1:
            vectors = [pair(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def work(group):
        result = torch.empty(6, dtype=torch.float64)
        algorithms.allreduce(group, [value(group.rank, 6)], [result], Reduction(ReduceOp.ADASUM))
        return result

    results = on_ranks(size, work)
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.allclose(results[0], tree([value(rank, 6) for rank in range(size)]))


def test_adasum_of_equal_vectors_is_that_vector_and_of_orthogonal_ones_their_sum():
    def work(group):
        tensors = [torch.tensor([3.0, 4.0]), torch.eye(2)[group.rank], torch.zeros(2)]
        algorithms.allreduce(group, tensors, tensors, Reduction(ReduceOp.ADASUM))
        return [tensor.tolist() for tensor in tensors]

    assert on_ranks(2, work) == [[[3.0, 4.0], [1.0, 1.0], [0.0, 0.0]]] * 2


@pytest.mark.parametrize("rows", [[0, 3, 1], [2, 0, 0], [0, 0, 0], [4, 4, 4]])
def test_allgather_with_uneven_and_empty_parts(rows):
    found = on_ranks(
        3, lambda group: algorithms.allgather(group, value(group.rank, rows[group.rank], 2), rows)
    )
    for result in found:
        assert torch.equal(result, torch.cat([value(rank, rows[rank], 2) for rank in range(3)]))


def test_alltoall_is_its_own_reverse():
    splits = [[1, 0, 2], [0, 3, 1], [2, 2, 0]]

    def work(group):
        sent = value(group.rank, sum(splits[group.rank]), 2)
        there, received = algorithms.alltoall(group, sent, splits)
        back, _ = algorithms.alltoall(group, there, [list(column) for column in zip(*splits, strict=True)])
        return sent, there, received, back

    results = on_ranks(3, work)
    for rank, (sent, there, received, back) in enumerate(results):
        assert torch.equal(back, sent) and received == [row[rank] for row in splits]
        parts = [value(r, sum(splits[r]), 2).split(splits[r])[rank] for r in range(3)]
        assert torch.equal(there, torch.cat(parts))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8])
def test_reducescatter_divides_all_rows(rows):
    found = on_ranks(
        3, lambda group: algorithms.reducescatter(group, value(group.rank, rows, 2), Reduction(ReduceOp.SUM))
    )
    assert torch.equal(torch.cat(found), sum(value(rank, rows, 2) for rank in range(3)))
    assert [len(part) for part in found] == algorithms.share_rows(rows, 3)


def test_sums_are_taken_in_rank_order():
    """Floating-point sums depend on the order; it must not depend on who receives."""
    big = [1e8, 1.0, -1e8]
    found = on_ranks(
        3, lambda w: algorithms.reducescatter(w, torch.full((3,), big[w.rank]), Reduction(ReduceOp.SUM))
    )
    expected = (torch.tensor(big[0]) + torch.tensor(big[1])) + torch.tensor(big[2])
    assert [part.item() for part in found] == [expected.item()] * 3


def test_share_rows():
    assert algorithms.share_rows(7, 3) == [3, 2, 2]
    assert algorithms.share_rows(2, 3) == [1, 1, 0]
