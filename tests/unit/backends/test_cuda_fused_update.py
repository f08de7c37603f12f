"""Shards updated by the kernels (run on the CPU) and by torch's own optimizers: the same weights and
state.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from commsched.backends.cuda_fused_update import FusedShards
from commsched.optimizer.bucket_layout import Buffers, build_layout
from commsched.optimizer.shards import Shards
from scheduler.ir.buckets import fuse_by_bytes
from tests.support.host_kernels import HostLauncher
from tests.support.oracle import assert_close

NUMELS = [300, 7, 1000, 64]
OPERATIONS = 4  # roundings of numbers as large as the largest weight, in one update


class OnTheCpu(FusedShards):
    launcher = HostLauncher()


def made(kind: type, rank: int, base: type, **options: Any) -> tuple[Shards, list[nn.Parameter], Buffers]:
    """Two parameter groups, three buckets, one tensor split over two of them."""
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(n, generator=generator)) for n in NUMELS]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]
    optimizer = base(groups, **{"lr": 0.1, "fused": True, **options})
    layout = build_layout(NUMELS, [4] * 4, fuse_by_bytes([4 * n for n in NUMELS], 2000, part=2000), 2)
    grads = Buffers(layout, {0: (torch.float32, torch.device("cpu"))})
    shards = kind(optimizer, base, params, grads, rank, 2)
    shards.keep = optimizer
    return shards, params, grads


def train(shards: Shards, grads: Buffers, used: list[list[int]]) -> None:
    for step, flags in enumerate(used):
        generator = torch.Generator().manual_seed(step)
        grads.flat[0].copy_(torch.randn(len(grads.flat[0]), generator=generator))
        for bucket in range(len(shards.parts)):
            shards.update(bucket, flags)


ALL = [1] * 4
CASES = [
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    (torch.optim.SGD, {}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"betas": (0.8, 0.9)}),
]


@pytest.mark.parametrize(("base", "options"), CASES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("used", [[ALL] * 4, [ALL, [1, 0, 1, 1], ALL, ALL], [[0, 0, 1, 1], ALL, ALL, ALL]])
def test_equal_to_torch(base: type, options: dict[str, Any], rank: int, used: list[list[int]]) -> None:
    OnTheCpu.launcher = HostLauncher()
    found, wanted = (made(kind, rank, base, **options) for kind in (OnTheCpu, Shards))
    for shards, _, grads in (found, wanted):
        train(shards, grads, used)
    assert_close([found[0].buffers.flat[0]], [wanted[0].buffers.flat[0]], OPERATIONS * len(used))
    for mine, theirs in zip(sum(found[0].parts, []), sum(wanted[0].parts, []), strict=True):
        state, other = found[0].state.get(mine.leaf, {}), wanted[0].state.get(theirs.leaf, {})
        state, other = ({k: v for k, v in s.items() if v is not None} for s in (state, other))
        assert set(state) == set(other)
        for key in state:
            assert state[key].dtype == other[key].dtype and state[key].shape == other[key].shape
            assert_close([state[key]], [other[key]], OPERATIONS * len(used), key)
    launches = OnTheCpu.launcher.launches
    assert launches and all(name.endswith("_f32_f32") for name, _ in launches)


@pytest.mark.parametrize("options", [{"fused": False}, {"amsgrad": True}])
def test_what_the_kernels_do_not_know_is_torchs(options: dict[str, Any]) -> None:
    OnTheCpu.launcher = HostLauncher()
    found, wanted = (made(kind, 0, torch.optim.Adam, **options) for kind in (OnTheCpu, Shards))
    for shards, _, grads in (found, wanted):
        train(shards, grads, [ALL] * 2)
    assert torch.equal(found[0].buffers.flat[0], wanted[0].buffers.flat[0])
    assert OnTheCpu.launcher.launches == []


def test_state_taken_over_is_gone_on_with() -> None:
    found, wanted = (made(kind, 0, torch.optim.Adam) for kind in (OnTheCpu, Shards))
    for shards, params, grads in (found, wanted):
        train(shards, grads, [ALL] * 2)
        shards.take_state({p: {"step": torch.tensor(7.0), "exp_avg": torch.ones_like(p.data),
                               "exp_avg_sq": torch.ones_like(p.data)} for p in params})  # fmt: skip
        train(shards, grads, [ALL])
    assert_close([found[0].buffers.flat[0]], [wanted[0].buffers.flat[0]], OPERATIONS * 3)
    assert {int(s["step"]) for s in found[0].state.values()} == {8}


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW])
def test_a_skipped_step_does_not_count(base: type) -> None:
    """The device skips a step that overflows; the host counted it all the same, so that every later bias
    correction was that of another step.
    """
    # In the second step only some parameters are used: later the parts of a bucket have different counts.
    overflows, used = [1.0, 0.0, 1.0, 0.0, 0.0], [ALL, [1, 0, 1, 0], [0, 1, 1, 1], ALL, ALL]
    found, wanted = (made(kind, 0, base, weight_decay=0.1) for kind in (OnTheCpu, Shards))
    for shards, _, grads in (found, wanted):
        shards.keep.grad_scale = torch.tensor(4.0)
        for step, (overflow, flags) in enumerate(zip(overflows, used, strict=True)):
            shards.keep.found_inf = torch.tensor(overflow)
            generator = torch.Generator().manual_seed(step)
            grads.flat[0].copy_(4.0 * torch.randn(len(grads.flat[0]), generator=generator))
            if overflow:
                grads.flat[0][::50] = float("inf")
            for bucket in range(len(shards.parts)):
                shards.update(bucket, flags)
    torch.testing.assert_close(found[0].buffers.flat[0], wanted[0].buffers.flat[0], rtol=1e-6, atol=1e-7)
    counts = []
    for mine, theirs in zip(sum(found[0].parts, []), sum(wanted[0].parts, []), strict=True):
        state, other = found[0].state[mine.leaf], wanted[0].state[theirs.leaf]
        assert torch.equal(state["step"], other["step"]), (state["step"], other["step"])
        torch.testing.assert_close(state, other, rtol=1e-6, atol=1e-7)
        counts.append(int(state["step"]))
    assert set(counts) == {2, 3}


def test_scale_and_skip_of_a_grad_scaler() -> None:
    shards, _, grads = made(OnTheCpu, 0, torch.optim.SGD)
    plain, _, plain_grads = made(OnTheCpu, 0, torch.optim.SGD)
    shards.keep.grad_scale, shards.keep.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    grads.flat[0].fill_(4.0)
    plain_grads.flat[0].fill_(1.0)
    for each in (shards, plain):
        for bucket in range(len(each.parts)):
            each.update(bucket, ALL)
    assert torch.equal(shards.buffers.flat[0], plain.buffers.flat[0])
    shards.keep.found_inf.fill_(1.0)
    for bucket in range(len(shards.parts)):
        shards.update(bucket, ALL)
    assert torch.equal(shards.buffers.flat[0], plain.buffers.flat[0])
