"""Arguments that are wrong whatever the other ranks do: ``ValueError`` before anything is sent."""

import numpy as np
import pytest
import torch

import commsched
from commsched.collectives.job import ProcessSet, registered_id
from commsched.collectives.torch_carrier.carrier import check_tensors, row_splits


def test_tensors_that_can_travel():
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.uint8):
        check_tensors("allreduce", [torch.ones(2, dtype=dtype)], reduces=True)
    check_tensors("broadcast", [torch.ones(2, dtype=torch.bool)])


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([], "at least one tensor"),
        ([torch.ones(2, dtype=torch.bool)], "torch.bool"),
        ([torch.ones(2, dtype=torch.complex64)], "torch.complex64"),
        ([torch.ones(2, 3).t()], "contiguous"),
        ([torch.ones(2).to_sparse()], "dense"),
        ([torch.ones(2), torch.ones(2, device="meta")], "one device"),
        ([torch.ones(2, device="meta")], "a tensor with memory of its own, but got a Tensor on meta"),
    ],
)
def test_tensors_that_can_not(tensors, text):
    with pytest.raises(ValueError, match=text):
        check_tensors("allreduce", tensors, reduces=True)


@pytest.mark.parametrize("given", [1.0, np.ones(2), [torch.ones(2), 1], "text"])
@pytest.mark.parametrize(
    "operation",
    ["allreduce", "allgather", "reducescatter", "alltoall", "allreduce_async", "grouped_allgather"],
)
def test_what_is_no_tensor(operation, given):
    with pytest.raises(
        ValueError, match="takes a tensor, or several as one group, but got a (float|int|str)"
    ):
        getattr(commsched, operation)(given)


def test_splits():
    assert row_splits(torch.ones(6, 2), None, 3) == [2, 2, 2]
    assert row_splits(torch.ones(6, 2), torch.tensor([1, 0, 5]), 3) == [1, 0, 5]
    assert row_splits(torch.ones(6), torch.tensor([1, 0, 2]), 3) == [1, 0, 2]


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        (torch.tensor([1.0, 1.0]), "32- or 64-bit"),
        (torch.tensor([1, 1, 1]), "each of 2 ranks"),
        (torch.tensor([[1, 1]]), "each of 2 ranks"),
        (torch.tensor([3, 2]), "at most"),
        (torch.tensor([-1, 2]), "at least 0"),
    ],
)
def test_splits_that_do_not_fit(splits, text):
    with pytest.raises(ValueError, match=text):
        row_splits(torch.ones(4), splits, 2)


def test_uneven_first_dimension_needs_splits():
    with pytest.raises(ValueError, match="it is 5"):
        row_splits(torch.ones(5), None, 2)


def test_process_set_arguments():
    assert ProcessSet(range(3)).ranks == [0, 1, 2] and ProcessSet((2, 0)).ranks == [0, 2]
    for wrong in (3, ["0"], [0.5], object()):
        with pytest.raises(ValueError, match="list of ranks"):
            ProcessSet(wrong)
    with pytest.raises(ValueError, match="not registered"):
        registered_id(ProcessSet([0]))
    assert ProcessSet([0]).size() is None and ProcessSet([0]).rank() is None
