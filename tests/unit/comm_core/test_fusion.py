"""The fusion kernel against torch's own arithmetic, for every pair of types."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import comm_core

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = [(3,), (2, 5), (), (0,), (4, 1, 7), (1025,)]


def random_tensors(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def wide(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("target", TYPES, ids=str)
@pytest.mark.parametrize("source", TYPES, ids=str)
def test_pack_casts_and_scales_like_torch(source: torch.dtype, target: torch.dtype, scale: float) -> None:
    tensors = random_tensors(source)
    math = wide(source, target)
    expected = (flat(tensors).to(math) * torch.tensor(scale, dtype=math)).to(target)
    buffer = torch.full((expected.numel(),), float("nan"), dtype=target)
    comm_core.pack(tensors, buffer, scale)
    assert torch.equal(buffer, expected)


def test_pack_zeroes_the_padding() -> None:
    buffer = torch.full((8,), float("nan"))
    comm_core.pack([torch.ones(5)], buffer)
    assert buffer.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_non_contiguous_tensors_keep_their_logical_order() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    tensors = [torch.arange(6.0).reshape(2, 3).t(), image.to(memory_format=torch.channels_last)]
    buffer = torch.empty(30)
    comm_core.pack(tensors, buffer)
    assert buffer.tolist() == [0, 3, 1, 4, 2, 5, *range(24)]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3000), max_size=8), st.integers(0, 9), st.sampled_from(TYPES))
def test_any_lengths_and_padding(lengths: list[int], padding: int, dtype: torch.dtype) -> None:
    tensors = [torch.arange(n).to(dtype) for n in lengths]
    buffer = torch.full((sum(lengths) + padding,), 7, dtype=dtype)
    comm_core.pack(tensors, buffer)
    assert torch.equal(buffer[: sum(lengths)], flat([torch.empty(0, dtype=dtype), *tensors]))
    assert not buffer[sum(lengths) :].any()


def test_too_small_a_buffer_names_both_sizes() -> None:
    with pytest.raises(ValueError, match="5 elements.*room for 4"):
        comm_core.pack([torch.ones(5)], torch.empty(4))


def test_wrong_types_and_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="float32, float64, float16 or bfloat16.*Int"):
        comm_core.pack([torch.ones(2, dtype=torch.int32)], torch.empty(2))
    with pytest.raises(ValueError, match="one-dimensional and contiguous"):
        comm_core.pack([torch.ones(2)], torch.empty(2, 2))
    with pytest.raises(ValueError, match="on the CPU"):
        comm_core.pack([torch.ones(2, device="meta")], torch.empty(2))
    with pytest.raises(ValueError, match="must be dense"):
        comm_core.pack([torch.ones(2).to_sparse()], torch.empty(2))
