"""Kernels on a GPU, against the same functions done with torch's operations and by the engine."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from comm_core.cuda import BlockCode, BucketCopy, Region, gpu_launcher, one_after_another
from comm_core.cuda.tables import COPIES, SHORT
from dnn_bench.gpu import tensors_of
from tests.support.checkout import ROOT
from tests.support.quantised import WIRES, check_codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
TYPES = {short: dtype for dtype, short in SHORT.items()}


@pytest.fixture(autouse=True)
def kernels() -> None:
    if gpu_launcher(0) is None:
        pytest.fail("neither the extension nor CuPy can start kernels here; reinstall with nvcc on PATH")


def sample(numel: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    storage = torch.empty(numel + start, dtype=dtype, device="cuda")
    storage[start:] = torch.randn(numel, dtype=torch.float64, device="cuda").to(dtype)
    return storage[start:]


@pytest.mark.parametrize("pair", sorted(COPIES))
@pytest.mark.parametrize("shift", [0, 1, 3, 8])
def test_pack_equals_torch(pair: str, shift: int) -> None:
    source, target = (TYPES[short] for short in pair.split("_"))
    numels = [90_000, 1, 0, 17, 4096, 33, 1_000_003]
    tensors = [sample(n, source, start=shift * (i % 2)) for i, n in enumerate(numels)]
    regions, at = [], shift
    for i, n in enumerate(numels):
        regions.append(Region(i, 0, at, n))
        at += n + 5
    buckets = [torch.full((at,), 7.0, dtype=target, device="cuda") for _ in range(2)]
    for bucket, launcher in zip(buckets, ("choose", None), strict=True):
        BucketCopy(regions, bucket, len(numels), source, launcher).pack(tensors, 1.5)
    assert torch.equal(*buckets)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("wire", WIRES.values())
def test_codes_of_blocks_are_the_engines(wire: torch.dtype, dtype: torch.dtype) -> None:
    """Kernels and torch's operations on the GPU make the bits of the CPU."""
    gpu = torch.device("cuda")
    codes = [BlockCode(wire, gpu), BlockCode(wire, gpu, None)]
    check_codes(codes, wire, dtype, 10_000_128, gpu)


def test_more_than_2_to_the_31_elements() -> None:
    numel = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 5 * numel:
        pytest.skip("needs 11 GB of GPU memory")
    values = torch.zeros(numel, dtype=torch.float16, device="cuda")
    values[-5:] = torch.arange(5)
    bucket = torch.ones(numel, dtype=torch.float16, device="cuda")
    BucketCopy([Region(0, 0, 0, numel)], bucket, 1, torch.float16).pack([values], 2.0)
    assert bucket[-6:].tolist() == [0, 0, 2, 4, 6, 8] and not bucket[:-5].any()


def test_addresses_may_change_while_earlier_launches_wait() -> None:
    """The host runs ahead: each launch must use the addresses of its own call."""
    bucket = torch.zeros(1000, device="cuda")
    copy = BucketCopy(one_after_another([1000]), bucket, 1, torch.float32)
    torch.cuda._sleep(200_000_000)
    seen = []
    for value in range(20):
        tensor = torch.full((1000,), float(value), device="cuda")
        copy.pack([tensor])
        seen.append(bucket.clone())
    assert [s[0].item() for s in seen] == list(range(20))


@pytest.mark.parametrize("model", ["resnet50", "gpt2"])
def test_real_tensor_lists(model: str) -> None:
    tensors = tensors_of(model, torch.device("cuda"))
    bucket = torch.zeros(sum(t.numel() for t in tensors), device="cuda")
    BucketCopy(one_after_another([t.numel() for t in tensors]), bucket, len(tensors), torch.float32).pack(
        tensors
    )
    assert torch.equal(bucket, torch.cat(tensors))


@pytest.mark.slow
def test_compute_sanitizer_finds_nothing() -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        __file__,
        "-k",
        "pack_equals or addresses",
    ]
    for tool in ("memcheck", "racecheck"):
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *tests]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
        assert result.returncode == 0, result.stdout[-3000:]


def test_a_table_follows_the_default_stream() -> None:
    """A launch on another stream waits for the default one, whose kernel still reads the addresses."""
    bucket = torch.zeros(1000, device="cuda")
    copy = BucketCopy(one_after_another([1000]), bucket, 1, torch.float32)
    first, second = (torch.full((1000,), float(value), device="cuda") for value in (1, 2))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    copy.pack([first])
    seen = bucket.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        copy.pack([second])
    torch.cuda.synchronize()
    assert seen.unique().tolist() == [1.0] and bucket.unique().tolist() == [2.0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_launch_leaves_the_current_device_as_it_was() -> None:
    tensors = [torch.ones(1000, device="cuda:1")]
    bucket = torch.zeros(1000, device="cuda:1")
    BucketCopy(one_after_another([1000]), bucket, 1, torch.float32).pack(tensors)
    assert torch.cuda.current_device() == 0 and torch.empty(1, device="cuda").device.index == 0
    assert torch.equal(bucket, tensors[0])


def test_kernels_that_do_not_fit_are_told_apart() -> None:
    from comm_core import CUDA_BUILT, _cuda

    if not CUDA_BUILT:
        pytest.skip("built without nvcc")
    assert _cuda.unfit(0) is None
    assert _cuda.unfit(torch.cuda.device_count())  # there is no such device
