"""The collectives' arithmetic over a group in memory: any number of ranks, no process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.torch_carrier import algorithms
from commsched.collectives.torch_carrier.rank_group import RankGroup

REDUCE = {
    ReduceOp.AVERAGE: torch.sum,  # divided afterwards
    ReduceOp.SUM: torch.sum,
    ReduceOp.MIN: torch.amin,
    ReduceOp.MAX: torch.amax,
    ReduceOp.PRODUCT: torch.prod,
}


class MemoryGroup(RankGroup):
    """Ranks are threads that meet at a barrier and read each other's tensors."""

    def __init__(self, rank, size, barrier, board):
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board

    def _meet(self, value):
        self._barrier.wait(100)
        self._board[self.rank] = value
        self._barrier.wait(100)
        return list(self._board)

    def reduce(self, tensor, op):
        stack = torch.stack([t.clone() for t in self._meet(tensor.clone())])
        tensor.copy_(REDUCE[op](stack, 0).to(tensor.dtype))

    def broadcast(self, tensor, root):
        tensor.copy_(self._meet(tensor.clone())[root])

    def exchange(self, outgoing, incoming):
        sent = self._meet([tensor.clone() for tensor in outgoing])
        for source, target in enumerate(incoming):
            target.copy_(sent[source][self.rank])


def on_ranks(size, work):
    """`work(group)` on every rank; the results in rank order."""
    barrier, board = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(MemoryGroup(rank, size, barrier, board)), range(size)))


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
