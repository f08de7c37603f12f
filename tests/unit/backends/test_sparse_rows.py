"""Rows of sparse gradients are added in the order in which they stand, on every processor."""

from __future__ import annotations

import pytest
import torch

from commsched.backends.ranks import add_rows, empty_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(("count", "shape"), [(5, (8,)), (400, (8,)), (3000, ()), (300, (3, 4))])
def test_rows_are_added_in_their_order(dtype: torch.dtype, count: int, shape: tuple[int, ...]) -> None:
    """With AVX-512 ``coalesce()`` adds them in another one: means of three ranks had not the dense bits."""
    drawn = torch.Generator().manual_seed(count)
    rows = torch.randint(9, (1, count), generator=drawn)
    values = torch.randn(count, *shape, generator=drawn).to(dtype)
    wanted = torch.zeros(9, *shape, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    for row, value in zip(rows[0].tolist(), values, strict=True):
        wanted[row] += value
    added = add_rows(torch.sparse_coo_tensor(rows, values, (9, *shape), check_invariants=True))
    assert added.is_coalesced() and added.dtype == dtype
    assert torch.equal(added.to_dense(), wanted.to(dtype))


def test_entries_with_two_numbers() -> None:
    drawn = torch.Generator().manual_seed(1)
    places, values = torch.randint(5, (2, 200), generator=drawn), torch.randn(200, 3, generator=drawn)
    wanted = torch.zeros(5, 6, 3)
    for row, column, value in zip(*places.tolist(), values, strict=True):
        wanted[row, column] += value
    added = add_rows(torch.sparse_coo_tensor(places, values, (5, 6, 3), check_invariants=True))
    assert added.is_coalesced() and torch.equal(added.to_dense(), wanted)
    assert torch.equal(added.indices(), added.detach().clone().coalesce().indices())


def test_no_rows() -> None:
    added = add_rows(empty_rows(torch.zeros(9, 8)))
    assert added.is_coalesced() and added.shape == (9, 8) and added._nnz() == 0
