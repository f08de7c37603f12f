"""The kernels' arithmetic and indexing, run on the CPU, against torch and against float64."""

import ctypes

import numpy as np
import pytest
import torch

from comm_core.cuda import BucketCopy, Hyper, Part, Region, ShardUpdate, one_after_another
from comm_core.cuda.kernels import COPIES, SHORT, UPDATES
from tests.support.host_kernels import HostLauncher, library
from tests.support.oracle import assert_close

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
def test_pack_and_unpack_equal_torch(source: str, target: str, shift: int) -> None:
    """Aligned, misaligned, both misaligned alike, empty, smaller and larger than a chunk; gaps stay as
    they are.
    """
    numels = [9000, 1, 0, 17, 4096, 33]
    tensors = [sample(n, TYPES[source], start=shift * (i % 2)) for i, n in enumerate(numels)]
    regions, at = [], shift
    for i, n in enumerate(numels):
        regions.append(Region(i, 0, at, n))
        at += n + 5
    launcher = HostLauncher()
    bucket, expected = (torch.full((at,), 7.0, dtype=TYPES[target]) for _ in range(2))
    factor = torch.tensor(0.75)
    copy = BucketCopy(regions, bucket, len(numels), TYPES[source], launcher)
    reference = BucketCopy(regions, expected, len(numels), TYPES[source], None)
    found = copy.pack(tensors, 1.5, factor, stats=True)
    wanted = reference.pack(tensors, 1.5, factor, stats=True)
    assert torch.equal(bucket, expected)
    assert found is not None and wanted is not None
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert launcher.launches == [(f"pack_{source}_{target}", 3 + 1 + 1 + 1 + 1)]

    back, wanted_back = ([torch.zeros_like(t) for t in tensors] for _ in range(2))
    copy.unpack(back, 0.5)
    reference.unpack(wanted_back, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(back, wanted_back, strict=True))
    assert launcher.launches[1][0] == f"unpack_{target}_{source}"


def test_scale_one_moves_bits_unchanged() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38, 1.0])
    bucket = torch.zeros(7)
    copy = BucketCopy([Region(0, 0, 0, 7)], bucket, 1, torch.float32, HostLauncher())
    found = copy.pack([values], stats=True)
    assert torch.equal(bucket.view(torch.int32)[1:], values.view(torch.int32)[1:]) and bucket[0].isnan()
    assert found is not None and found[1] == 3


def test_tensors_that_are_not_there() -> None:
    bucket = torch.full((8,), 5.0)
    copy = BucketCopy([Region(0, 0, 0, 3), Region(1, 0, 4, 3)], bucket, 2, torch.float32, HostLauncher())
    found = copy.pack([None, torch.ones(3)], stats=True)
    assert bucket.tolist() == [0, 0, 0, 5, 1, 1, 1, 5]
    assert found is not None and found.tolist() == [3, 0]
    target = torch.zeros(3)
    copy.unpack([None, target])
    assert target.tolist() == [1, 1, 1]


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


# -- updates -------------------------------------------------------------------------------------------------

OPERATIONS = 4  # roundings of numbers as large as the largest weight, in one update
SGD = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True, "weight_decay": 0.02},
]
ADAM = [{}, {"weight_decay": 0.1, "betas": (0.8, 0.95)}, {"maximize": True, "lr": 0.03, "eps": 1e-3}]


def trained_by_torch(
    kind: type, options: dict, start: torch.Tensor, grads: list[torch.Tensor]
) -> torch.Tensor:
    weight = torch.nn.Parameter(start.clone())
    optimizer = kind([weight], **options)
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    return weight.detach()


def trained(
    rule: str,
    kind: type,
    options: dict,
    start: torch.Tensor,
    grads: list[torch.Tensor],
    launcher: HostLauncher | None,
    cuts: tuple[int, ...],
) -> torch.Tensor:
    """The same with ``ShardUpdate``, cut into parts at odd places."""
    weight, grad = start.clone(), torch.empty_like(grads[0])
    group = kind([torch.nn.Parameter(start.clone())], **options).param_groups[0]
    state = [torch.zeros(len(start)) for _ in range(2)]
    with_first = rule == "adam" or group["momentum"] != 0
    bounds = list(zip((0, *cuts), (*cuts, len(start)), strict=True))
    parts = [
        Part(
            grad[a:b],
            weight[a:b],
            state[0][a:b] if with_first else None,
            state[1][a:b] if rule == "adam" else None,
            steps=torch.zeros(()) if rule == "adam" else None,
            group=number % 2,
        )
        for number, (a, b) in enumerate(bounds)
    ]
    update = ShardUpdate(rule, parts, 2, launcher)  # type: ignore[arg-type]
    for step, values in enumerate(grads, 1):
        grad.copy_(values)
        if rule == "adam":
            hyper = Hyper.adam(group, decoupled=kind is torch.optim.AdamW)
        else:
            hyper = Hyper.sgd(group, first_step=step == 1)
        update([hyper, hyper])
    return weight


CASES = [("sgd", torch.optim.SGD, o) for o in SGD] + [
    ("adam", kind, o) for kind in (torch.optim.Adam, torch.optim.AdamW) for o in ADAM
]


@pytest.mark.parametrize(("rule", "kind", "options"), CASES)
@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_updates_equal_torch_optimizers(rule: str, kind: type, options: dict, backend: str) -> None:
    start = sample(5003, torch.float32)
    grads = [sample(5003, torch.float32, start=k) * 10.0 ** (k - 2) for k in range(1, 5)]
    launcher = HostLauncher() if backend == "kernel" else None
    found = trained(rule, kind, options, start, grads, launcher, cuts=(16, 16, 1000, 4099))
    assert_close([found], [trained_by_torch(kind, options, start, grads)], OPERATIONS * len(grads))
    if launcher is not None:
        assert len(launcher.launches) == len(grads)  # one per step, whatever the number of parts


@pytest.mark.parametrize(("grad", "weight"), sorted(tuple(name.split("_")) for name in UPDATES))
@pytest.mark.parametrize("master", [False, True])
def test_updates_of_every_type(grad: str, weight: str, master: bool) -> None:
    """The kernel and torch's operations, in float and rounded once, with and without master weights."""
    numel = 4101
    results = []
    for launcher in (HostLauncher(), None):
        start = sample(numel, TYPES[weight])
        part = Part(
            sample(numel, TYPES[grad], start=1),
            start,
            sample(numel, torch.float32, start=2),
            sample(numel, torch.float32, start=3).abs(),
            start.float() + 1e-4 if master else None,
            torch.tensor(2.0),
        )
        hyper = Hyper.adam(
            {"betas": (0.9, 0.99), "lr": 0.01, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}, True
        )
        ShardUpdate("adam", [part], 1, launcher)([hyper], factor=torch.tensor(0.25))
        results.append(part)
    for name in ("weight", "first", "second", "master"):
        found, wanted = (getattr(part, name) for part in results)
        if found is None:
            continue
        # A half is rounded once, from float32 values whose last bits may differ.
        assert_close([found], [wanted], OPERATIONS if found.dtype == torch.float32 else 1, name)
    if master:
        assert torch.equal(results[0].weight, results[0].master.to(TYPES[weight]))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_a_master_counts_where_it_rounds_to_the_weight(kind: str, backend: str) -> None:
    """Somebody has written every third weight since; with a rate of 0 the step shows what counted."""
    master = sample(1003, torch.float32)
    weight = master.to(TYPES[kind])
    weight[::3] = sample(1003, TYPES[kind], start=5)[::3]
    wanted = torch.where(master.to(TYPES[kind]) == weight, master, weight.float())
    assert not torch.equal(wanted, master) and not torch.equal(wanted, weight.float())
    part = Part(torch.ones_like(weight), weight.clone(), master=master)
    ShardUpdate("sgd", [part], 1, HostLauncher() if backend == "kernel" else None)([Hyper(lr=0.0)])
    assert torch.equal(part.master, wanted) and torch.equal(part.weight, weight)


def test_a_step_to_be_skipped_changes_nothing() -> None:
    for launcher in (HostLauncher(), None):
        tensors = [sample(100, torch.float32, start=k) for k in range(4)]
        before = [t.clone() for t in tensors]
        steps = torch.zeros(())
        update = ShardUpdate("adam", [Part(*tensors, steps=steps)], 1, launcher)
        hyper = Hyper(lr=0.1, eps=1e-8)
        update([hyper], skip=torch.tensor(1.0))
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        update([hyper], skip=torch.tensor(0.0))
        assert not torch.equal(tensors[1], before[1]) and steps == 1


def test_parts_that_do_not_fit_are_refused() -> None:
    five, six = torch.zeros(5), torch.zeros(6)
    with pytest.raises(ValueError, match="adam needs both means"):
        ShardUpdate("adam", [Part(five, five)])
    with pytest.raises(ValueError, match="adam needs a count of steps, one float32 on cpu, got none"):
        ShardUpdate("adam", [Part(five, five, five, five)])
    with pytest.raises(ValueError, match="grad must be flat with 5 elements"):
        ShardUpdate("sgd", [Part(six, five)])
    with pytest.raises(ValueError, match="first must be torch.float32 on cpu, got torch.float64"):
        ShardUpdate("sgd", [Part(five, five, five.double())])
    with pytest.raises(ValueError, match="of group 1; there are 1 groups"):
        ShardUpdate("sgd", [Part(five, five, group=1)])
    with pytest.raises(ValueError, match="no rule 'rprop'"):
        ShardUpdate("rprop", [Part(five, five)])  # type: ignore[arg-type]
    ShardUpdate("sgd", [])([])
