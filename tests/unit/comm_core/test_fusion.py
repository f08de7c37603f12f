"""The fusion kernels against torch's own arithmetic, for every pair of types."""

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


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("target", TYPES, ids=str)
@pytest.mark.parametrize("source", TYPES, ids=str)
def test_unpack_casts_and_scales_like_torch(source: torch.dtype, target: torch.dtype, scale: float) -> None:
    tensors = [torch.full(shape, float("nan"), dtype=target) for shape in SHAPES]
    buffer = flat(random_tensors(source))
    math = wide(source, target)
    comm_core.unpack(buffer, tensors, scale)
    assert torch.equal(flat(tensors), (buffer.to(math) * torch.tensor(scale, dtype=math)).to(target))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_round_trip_keeps_every_bit(dtype: torch.dtype) -> None:
    tensors = random_tensors(dtype)
    buffer = torch.empty(flat(tensors).numel(), dtype=dtype)
    copies = [torch.empty_like(tensor) for tensor in tensors]
    comm_core.pack(tensors, buffer)
    comm_core.unpack(buffer, copies)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


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

    targets = [torch.zeros(2, 3).t(), torch.zeros_like(tensors[1])]
    strides = [target.stride() for target in targets]
    comm_core.unpack(buffer, targets)
    assert all(torch.equal(target, tensor) for target, tensor in zip(targets, tensors, strict=True))
    assert [target.stride() for target in targets] == strides


def test_unpack_into_parameters_is_not_recorded_by_autograd() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(3, 2).t())]
    comm_core.unpack(torch.arange(12.0), parameters)
    assert [p.tolist() for p in parameters] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert all(p.is_leaf for p in parameters)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sum_in_order_adds_from_first_to_last(dtype: torch.dtype) -> None:
    parts = [flat(random_tensors(dtype, seed)) for seed in range(4)]
    math = wide(dtype)
    expected = parts[0].to(math)
    for part in parts[1:]:
        expected = expected + part.to(math)
    expected = (expected * torch.tensor(0.25, dtype=math)).to(dtype)
    comm_core.sum_in_order(parts, parts[2], 0.25)
    assert torch.equal(parts[2], expected)


def test_sum_in_order_rounds_half_types_once() -> None:
    # 2048 + 1 is 2048 in float16: adding in float16 would lose both ones.
    parts = [torch.tensor([value], dtype=torch.float16) for value in (2048, 1, 1)]
    out = torch.empty(1, dtype=torch.float16)
    comm_core.sum_in_order(parts, out)
    assert out.item() == 2050


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_scale_in_place(dtype: torch.dtype) -> None:
    values = flat(random_tensors(dtype))
    math = wide(dtype)
    expected = (values.to(math) * torch.tensor(0.1, dtype=math)).to(dtype)
    comm_core.scale_(values, 0.1)
    assert torch.equal(values, expected)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3000), max_size=8), st.integers(0, 9), st.sampled_from(TYPES))
def test_any_lengths_round_trip(lengths: list[int], padding: int, dtype: torch.dtype) -> None:
    tensors = [torch.arange(n).to(dtype) for n in lengths]
    buffer = torch.full((sum(lengths) + padding,), 7, dtype=dtype)
    copies = [torch.empty_like(tensor) for tensor in tensors]
    comm_core.pack(tensors, buffer)
    comm_core.unpack(buffer, copies)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    assert not buffer[sum(lengths) :].any()


def test_too_small_a_buffer_names_both_sizes() -> None:
    with pytest.raises(ValueError, match="5 elements.*room for 4"):
        comm_core.pack([torch.ones(5)], torch.empty(4))
    with pytest.raises(ValueError, match="5 elements.*room for 4"):
        comm_core.unpack(torch.ones(4), [torch.empty(5)])


def test_wrong_types_and_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="float32, float64, float16 or bfloat16.*Int"):
        comm_core.pack([torch.ones(2, dtype=torch.int32)], torch.empty(2))
    with pytest.raises(ValueError, match="one-dimensional and contiguous"):
        comm_core.pack([torch.ones(2)], torch.empty(2, 2))
    with pytest.raises(ValueError, match="on the CPU"):
        comm_core.pack([torch.ones(2, device="meta")], torch.empty(2))
    with pytest.raises(ValueError, match="must be dense"):
        comm_core.pack([torch.ones(2).to_sparse()], torch.empty(2))
    with pytest.raises(ValueError, match="one has 3"):
        comm_core.sum_in_order([torch.ones(2), torch.ones(3)], torch.empty(2))
    with pytest.raises(ValueError, match="at least one part"):
        comm_core.sum_in_order([], torch.empty(2))
