"""Chunk tables and the choice of the kernel: the launch logic, without any kernel."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core.cuda.tables import (
    BLOCK,
    BLOCK_BYTES,
    CODES,
    COPIES,
    SOURCE,
    THREADS,
    Region,
    chunk_elements,
    chunk_table,
    one_after_another,
    pack_kernel,
)


def covered(table: np.ndarray) -> list[tuple[int, int, int]]:
    """Every element that the table moves: tensor, element, place."""
    return [(t, o + k, a + k) for t, o, a, n in table.tolist() for k in range(n)]


def test_a_table_as_it_looks() -> None:
    table = chunk_table([Region(0, 0, 0, 5), Region(2, 7, 16, 4), Region(1, 0, 32, 1)], elements=2)
    assert table.tolist() == [
        [0, 0, 0, 2],
        [0, 2, 2, 2],
        [0, 4, 4, 1],
        [2, 7, 16, 2],
        [2, 9, 18, 2],
        [1, 0, 32, 1],
    ]


@settings(max_examples=60, deadline=None)
@given(
    numels=st.lists(st.integers(0, 50), max_size=8),
    offsets=st.integers(0, 9),
    elements=st.integers(1, 20),
)
def test_every_element_is_moved_once(numels: list[int], offsets: int, elements: int) -> None:
    regions = [Region(i, offsets, 100 * i, n) for i, n in enumerate(numels)]
    table = chunk_table(regions, elements)
    expected = [(i, offsets + k, 100 * i + k) for i, n in enumerate(numels) for k in range(n)]
    assert covered(table) == expected
    assert (table[:, 3] <= elements).all() and (table[:, 3] > 0).all()


def test_more_than_2_to_the_31_elements() -> None:
    large = 5 * 2**31
    table = chunk_table([Region(0, 3, 64, large)], 8192)
    assert table[:, 3].sum() == large
    assert table[-1, 1] + table[-1, 3] == 3 + large and table[-1, 2] + table[-1, 3] == 64 + large
    assert (np.diff(table[:, 1]) == table[0, 3]).all()


def test_more_blocks_than_a_launch_may_have() -> None:
    with pytest.raises(ValueError, match="more than 2147483647 blocks"):
        chunk_table([Region(0, 0, 0, 2**33)], elements=1)


def test_no_negative_numbers() -> None:
    with pytest.raises(ValueError, match="no negative numbers, got Region"):
        chunk_table([Region(0, -1, 0, 4)], 8192)


def test_a_chunk_is_one_round_of_all_threads() -> None:
    assert chunk_elements(torch.float32, torch.float32) == THREADS * 8 * 4  # 8 loads of 4 floats
    assert chunk_elements(torch.float32, torch.bfloat16) == THREADS * 8 * 4
    assert chunk_elements(torch.bfloat16, torch.bfloat16) == THREADS * 8 * 8


def test_one_after_another_is_what_cat_does() -> None:
    assert one_after_another([3, 0, 2]) == [Region(0, 0, 0, 3), Region(2, 0, 3, 2)]


def test_kernels_by_type() -> None:
    assert pack_kernel(torch.float32, torch.bfloat16) == "pack_f32_bf16"
    with pytest.raises(ValueError, match=r"no kernel that packs torch.int64 into torch.int64; there are"):
        pack_kernel(torch.int64, torch.int64)


def test_python_and_the_sources_know_the_same_kernels() -> None:
    kernels = (SOURCE.parent / "list.h").read_text()
    assert set(re.findall(r"DO\((\w+),", kernels)) == COPIES
    assert set(re.findall(r"CODE\((\w+),", kernels)) == set(CODES.values())
    assert f"kThreads = {THREADS};" in SOURCE.read_text() and BLOCK_BYTES == BLOCK + 4
    assert f"kBlock = {BLOCK};" in (SOURCE.parent / "block_codes.h").read_text()
