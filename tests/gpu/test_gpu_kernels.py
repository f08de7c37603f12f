"""The kernels on a GPU, against float64 and against the same functions done with torch's operations."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from comm_core.cuda import BucketCopy, Hyper, Part, Region, ShardUpdate, gpu_launcher, one_after_another
from comm_core.cuda.kernels import COPIES, SHORT
from dnn_bench.gpu.kernels import tensors_of
from tests.support.checkout import ROOT

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
def test_pack_and_unpack(pair: str, shift: int) -> None:
    source, target = (TYPES[short] for short in pair.split("_"))
    numels = [90_000, 1, 0, 17, 4096, 33, 1_000_003]
    tensors = [sample(n, source, start=shift * (i % 2)) for i, n in enumerate(numels)]
    regions, at = [], shift
    for i, n in enumerate(numels):
        regions.append(Region(i, 0, at, n))
        at += n + 5
    buckets = [torch.full((at,), 7.0, dtype=target, device="cuda") for _ in range(2)]
    ways = [
        BucketCopy(regions, b, len(numels), source, *more)
        for b, more in zip(buckets, ((), (None,)), strict=True)
    ]
    factor = torch.tensor(0.75, device="cuda")
    stats = [way.pack(tensors, 1.5, factor, stats=True) for way in ways]
    assert torch.equal(*buckets)
    torch.testing.assert_close(stats[0], stats[1], rtol=1e-5, atol=0)
    backs = [[torch.zeros_like(t) for t in tensors] for _ in ways]
    for way, back in zip(ways, backs, strict=True):
        way.unpack(back, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(*backs, strict=True))


def test_nonfinite_values_are_counted() -> None:
    values = torch.ones(100_000, device="cuda")
    values[[3, 70_000]] = float("inf")
    values[99_999] = float("nan")
    bucket = torch.zeros(100_000, device="cuda", dtype=torch.float16)
    found = BucketCopy(one_after_another([100_000]), bucket, 1, torch.float32).pack([values], stats=True)
    assert found is not None and found[1].item() == 3


def test_more_than_2_to_the_31_elements() -> None:
    numel = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 5 * numel:
        pytest.skip("needs 11 GB of GPU memory")
    values = torch.zeros(numel, dtype=torch.float16, device="cuda")
    values[-5:] = torch.arange(5)
    bucket = torch.ones(numel, dtype=torch.float16, device="cuda")
    BucketCopy([Region(0, 0, 0, numel)], bucket, 1, torch.float16).pack([values], 2.0)
    assert bucket[-6:].tolist() == [0, 0, 2, 4, 6, 8] and not bucket[:-5].any()


@pytest.mark.parametrize(
    ("rule", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adam", torch.optim.AdamW)]
)
def test_updates_against_float64(rule: str, kind: type) -> None:
    numel, steps = 300_001, 4
    options = {"lr": 0.05, "weight_decay": 0.02} | (
        {"momentum": 0.9, "nesterov": True} if rule == "sgd" else {}
    )
    start, grads = sample(numel, torch.float32), [sample(numel, torch.float32, k) for k in range(steps)]
    wanted = torch.nn.Parameter(start.double())
    reference = kind([wanted], **options)
    weight, grad = start.clone(), torch.empty_like(start)
    state = [torch.zeros_like(start) for _ in range(2)]
    cut = 123_457
    parts = [
        Part(
            grad[s],
            weight[s],
            state[0][s],
            state[1][s] if rule == "adam" else None,
            steps=torch.zeros((), device="cuda") if rule == "adam" else None,
        )
        for s in (slice(0, cut), slice(cut, numel))
    ]
    update = ShardUpdate(rule, parts)  # type: ignore[arg-type]
    half, zero = torch.tensor(0.5, device="cuda"), torch.tensor(0.0, device="cuda")
    for step, values in enumerate(grads, 1):
        wanted.grad = values.double()
        reference.step()
        grad.copy_(values * 2)
        group = reference.param_groups[0]
        hyper = Hyper.sgd(group, step == 1) if rule == "sgd" else Hyper.adam(group, kind is torch.optim.AdamW)
        update([hyper], skip=1.0 - zero)  # an overflow does not count
        update([hyper], factor=half, skip=zero)
    torch.testing.assert_close(weight.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    before = weight.clone()
    update([hyper], skip=torch.tensor(1.0, device="cuda"))
    assert torch.equal(weight, before)


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
        "nonfinite or addresses or shift",
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
