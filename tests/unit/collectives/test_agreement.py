"""What must be equal on all ranks, per kind of operation."""

import pytest

from commsched.collectives.torch_carrier.coordinator import disagreement

BASE = {
    "name": "x",
    "dtypes": ["torch.float32"],
    "shapes": [[4, 2]],
    "device": "cpu",
    "op": 1,
    "prescale": 1.0,
    "postscale": 1.0,
    "root": 0,
    "splits": [2, 2],
    "ranks": [0, 1],
}
CHANGES = {
    "dtypes": ["torch.float64"],
    "shapes": [[5, 2]],
    "trailing": [[4, 3]],
    "dimensions": [[4, 2, 1]],
    "op": 3,
    "prescale": 0.5,
    "postscale": 2.0,
    "root": 1,
    "device": "cuda:node:0",
    "ranks": [1],
}
# What each kind of operation must agree about; everything else may differ.
MUST_AGREE = {
    "allreduce": {"dtypes", "shapes", "trailing", "dimensions", "op", "prescale", "postscale", "device"},
    "reducescatter": {"dtypes", "shapes", "trailing", "dimensions", "op", "prescale", "postscale", "device"},
    "broadcast": {"dtypes", "shapes", "trailing", "dimensions", "root", "device"},
    "allgather": {"dtypes", "trailing", "dimensions", "device"},
    "alltoall": {"dtypes", "trailing", "dimensions", "device"},
    "barrier": set(),
    "add_process_set": {"ranks"},
    "remove_process_set": {"ranks"},
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("kind", MUST_AGREE)
def test_each_aspect_of_each_kind(kind, what):
    first = BASE | {"kind": kind}
    field = "shapes" if what in ("trailing", "dimensions") else what
    complaint = disagreement({0: first, 1: first | {field: CHANGES[what]}}, [])
    if what in MUST_AGREE[kind]:
        assert complaint is not None and "rank 0 has" in complaint and "rank 1 has" in complaint
        assert complaint.startswith("x: ")
    else:
        assert complaint is None


def test_one_name_for_two_operations():
    complaint = disagreement({0: BASE | {"kind": "allreduce"}, 1: BASE | {"kind": "broadcast"}}, [])
    assert complaint is not None and "rank 0 has allreduce, rank 1 has broadcast" in complaint


@pytest.mark.parametrize("kind", ["allgather", "alltoall", "reducescatter"])
def test_scalars_can_not_be_divided_or_concatenated(kind):
    request = BASE | {"kind": kind, "shapes": [[]]}
    assert "scalar" in (disagreement({0: request, 1: request}, []) or "")
    assert disagreement({0: request | {"kind": "allreduce"}, 1: request | {"kind": "allreduce"}}, []) is None


@pytest.mark.parametrize(
    ("op", "fine"), [(0, True), (1, True), (2, True), (3, False), (4, False), (5, False)]
)
def test_joined_ranks_only_add(op, fine):
    request = BASE | {"kind": "allreduce", "op": op}
    assert (disagreement({0: request}, [1]) is None) == fine
