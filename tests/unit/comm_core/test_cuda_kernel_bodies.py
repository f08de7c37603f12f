"""The kernels' arithmetic and indexing, run on the CPU, against torch and against float64."""

import ctypes

import numpy as np
import pytest
import torch

from comm_core.cuda import BlockCode, BucketCopy, Region, one_after_another
from comm_core.cuda.tables import COPIES, SHORT, chunk_elements
from tests.support.host_kernels import HostLauncher, library
from tests.support.quantised import BLOCK, WIRES, check_codes

TYPES = {short: dtype for dtype, short in SHORT.items()}
PAIRS = sorted(tuple(name.split("_")) for name in COPIES)


def test_half_types_round_as_torch_does() -> None:
    code = library()
    code.to_half.restype = code.to_bfloat16.restype = ctypes.c_ushort
    code.from_half.restype = ctypes.c_float
    code.to_half.argtypes = code.to_bfloat16.argtypes = [ctypes.c_float]
    exact = torch.arange(-32768, 32768).to(torch.int16).view(torch.float16).float()
    # Around every half, exactly between two of them, and next to that.
    middle = (exact[1:] + exact[:-1]) / 2
    values = torch.cat(
        [exact, middle, middle.nextafter(torch.tensor(9e9)), middle.nextafter(torch.tensor(-9e9))]
    )
    values = torch.cat(
        [values[::7], torch.tensor([65519.9, 65520.0, -65520.0, 1e30, 1e-30, float("inf"), -0.0])]
    )
    values = values[values.isfinite() | values.isinf()]
    for value, half, brain in zip(values.tolist(), values.half(), values.bfloat16(), strict=True):
        assert np.uint16(code.to_half(value)) == half.view(torch.int16).numpy().view(np.uint16), value
        assert np.uint16(code.to_bfloat16(value)) == brain.view(torch.int16).numpy().view(np.uint16), value
        assert code.from_half(code.to_half(value)) == float(half)
    assert np.isnan(code.from_half(code.to_half(float("nan"))))
    assert code.to_bfloat16(float("nan")) & 0x7FFF > 0x7F80


def sample(numel: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Values that are not whole, at an address that is ``start`` elements from an aligned one."""
    generator = torch.Generator().manual_seed(numel + start)
    storage = torch.empty(numel + start, dtype=dtype)
    storage[start:] = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return storage[start:]


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("shift", [0, 1, 3, 8])
def test_pack_equals_torch(source: str, target: str, shift: int) -> None:
    """Aligned, misaligned, both misaligned alike, empty, smaller and larger than a chunk; gaps stay as
    they are.
    """
    numels = [40_000, 1, 0, 17, 4096, 33]
    tensors = [sample(n, TYPES[source], start=shift * (i % 2)) for i, n in enumerate(numels)]
    regions, at = [], shift
    for i, n in enumerate(numels):
        regions.append(Region(i, 0, at, n))
        at += n + 5
    launcher = HostLauncher()
    bucket, expected = (torch.full((at,), 7.0, dtype=TYPES[target]) for _ in range(2))
    copy = BucketCopy(regions, bucket, len(numels), TYPES[source], launcher)
    copy.pack(tensors, 1.5)
    BucketCopy(regions, expected, len(numels), TYPES[source], None).pack(tensors, 1.5)
    assert torch.equal(bucket, expected)
    chunk = chunk_elements(TYPES[source], TYPES[target])
    assert launcher.launches == [(f"pack_{source}_{target}", sum(-(-n // chunk) for n in numels))]


def test_scale_one_moves_bits_unchanged() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38, 1.0])
    bucket = torch.zeros(7)
    copy = BucketCopy([Region(0, 0, 0, 7)], bucket, 1, torch.float32, HostLauncher())
    copy.pack([values])
    assert torch.equal(bucket.view(torch.int32)[1:], values.view(torch.int32)[1:]) and bucket[0].isnan()


def test_tensors_that_are_not_there() -> None:
    bucket = torch.full((8,), 5.0)
    copy = BucketCopy([Region(0, 0, 0, 3), Region(1, 0, 4, 3)], bucket, 2, torch.float32, HostLauncher())
    copy.pack([None, torch.ones(3)])
    assert bucket.tolist() == [0, 0, 0, 5, 1, 1, 1, 5]


def test_a_part_of_a_tensor_and_other_memory_orders() -> None:
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    bucket = torch.zeros(10)
    copy = BucketCopy([Region(0, 5, 2, 8)], bucket, 1, torch.float32, HostLauncher())
    copy.pack([image])
    flat = image.as_strided((24,), (1,))
    assert torch.equal(bucket[2:], flat[5:13]) and bucket[:2].tolist() == [0, 0]


def test_what_does_not_fit_is_refused() -> None:
    bucket = torch.zeros(8)
    copy = BucketCopy([Region(0, 2, 0, 4)], bucket, 1, torch.float32, HostLauncher())
    with pytest.raises(ValueError, match="laid out for 1 tensors, got 2"):
        copy.pack([None, None])
    with pytest.raises(ValueError, match="at least 6 elements, got 5"):
        copy.pack([torch.zeros(5)])
    with pytest.raises(ValueError, match="must be torch.float32 on cpu, got torch.float64"):
        copy.pack([torch.zeros(6, dtype=torch.float64)])
    with pytest.raises(ValueError, match="not within 1 tensors and 8 elements"):
        BucketCopy([Region(0, 0, 6, 3)], bucket, 1, torch.float32)
    with pytest.raises(ValueError, match="flat and contiguous"):
        BucketCopy([], torch.zeros(4, 4).t(), 0, torch.float32)


def test_an_address_that_changes_is_followed() -> None:
    bucket = torch.zeros(4)
    copy = BucketCopy(one_after_another([4]), bucket, 1, torch.float32, HostLauncher())
    for value in (1.0, 2.0):
        copy.pack([torch.full((4,), value)])
        assert bucket.tolist() == [value] * 4


@pytest.mark.parametrize("count", [1 << 18, pytest.param(10_000_128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("wire", WIRES.values())
def test_codes_of_blocks_are_the_engines(wire: torch.dtype, dtype: torch.dtype, count: int) -> None:
    here, launcher = torch.device("cpu"), HostLauncher()
    check_codes([BlockCode(wire, here, each) for each in (launcher, None)], wire, dtype, count, here)
    assert {blocks for _, blocks in launcher.launches} == {-(-count // BLOCK // 8)}


def test_blocks_that_are_refused() -> None:
    code = BlockCode(torch.int8, torch.device("cpu"), HostLauncher())
    bytes_, values = torch.zeros(520, dtype=torch.uint8), torch.zeros(512)
    for call in (
        lambda: code.quantise(values[:511], None, bytes_),
        lambda: code.quantise(values, values[:256], bytes_),
        lambda: code.add_up(bytes_, 3, values),
    ):
        with pytest.raises(ValueError, match="expected blocks of 256 elements and . parts of 260 bytes"):
            call()
    with pytest.raises(ValueError, match="flat contiguous tensor of torch.float32, got torch.float64"):
        code.quantise(values.double(), None, bytes_)
