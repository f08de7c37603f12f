"""The executor's parts alone: split backwards, versions, rows, sums, memory."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from commsched.pipeline import Chain, Pipeline, split
from commsched.pipeline.reduction import by_masters
from commsched.pipeline.rows import Share, common
from commsched.pipeline.stage import Versions, split_backward
from dnn_bench import models
from tests.support.pipeline_runs import WIDTH, batches, chain_model, loss_of, momentum, on_threads, train

# -- split backward ------------------------------------------------------------------------------------------


class Counted(torch.autograd.Function):
    """The identity; counts its backwards by name."""

    seen: list[str] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Counted.seen.append(ctx.name)
        return grads[0], None


def net(x: Tensor, w: Tensor, v: Tensor, again: bool) -> Tensor:
    y = torch.tanh(Counted.apply(x, "x") @ Counted.apply(w, "w"))
    z = Counted.apply(y, "y") @ Counted.apply(v, "v")
    return z @ w if again else z


@pytest.mark.parametrize("again", [False, True])
def test_two_halves_are_the_whole(again: bool) -> None:
    """Also where a parameter joins at two places."""
    torch.manual_seed(0)
    x, w, v = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grad = torch.randn(4, 4, dtype=torch.float64)
    wanted = torch.autograd.grad(net(x, w, v, again), [x, w, v], grad)
    halves = split_backward([net(x, w, v, again)], [grad], [x], [w, v])
    assert halves is not None
    found = [*halves[0], *halves[1]()]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(found, wanted))


def test_the_first_half_leaves_weights_and_the_second_the_rest() -> None:
    x, w, v = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    output = net(x, w, v, False)
    Counted.seen.clear()
    halves = split_backward([output], [torch.ones(4, 4)], [x], [w, v])
    assert sorted(Counted.seen) == ["x", "y"] and halves is not None
    Counted.seen.clear()
    halves[1]()
    assert sorted(Counted.seen) == ["v", "w"]


def test_hooks_of_tensors_change_a_gradient_once() -> None:
    """The second half began with what they had made of it, and they changed it again."""
    torch.manual_seed(0)
    x, w, v = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def hooked() -> Tensor:
        y = x @ w
        y.register_hook(lambda grad: 0.5 * grad)
        parts = torch.tanh(y).split(2, 1)
        parts[1].register_hook(lambda grad: 3 * grad)
        z = torch.cat(parts, 1) @ v
        z.register_hook(lambda grad: grad + 1)
        return z

    grad = torch.randn(4, 4, dtype=torch.float64)
    wanted = torch.autograd.grad(hooked(), [x, w, v], grad)
    halves = split_backward([hooked()], [grad], [x], [w, v])
    assert halves is not None
    found = [*halves[0], *halves[1]()]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(found, wanted, strict=True))


def test_unused_parameters_have_no_gradient() -> None:
    x, w = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    spare = torch.zeros(3, requires_grad=True)
    halves = split_backward([x @ w], [torch.ones(2, 2)], [x], [w, spare])
    assert halves is not None and halves[1]()[1] is None


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("frozen", [[0], [1], [0, 1]])
def test_parameters_that_a_script_has_frozen_have_no_gradient(again: bool, frozen: list[int]) -> None:
    """They ended a split backward with torch's error on gradient edges."""
    torch.manual_seed(0)
    x, *parameters = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grad = torch.ones(4, 4, dtype=torch.float64)
    wanted = torch.autograd.grad(net(x, *parameters, again), [x, *parameters], grad)
    for place in frozen:
        parameters[place].requires_grad_(False)
    halves = split_backward([net(x, *parameters, again)], [grad], [x], parameters)
    assert halves is not None
    for place, found in enumerate(halves[1]()):
        assert (
            found is None if place in frozen else torch.allclose(found, wanted[1 + place], rtol=0, atol=1e-10)
        )
    assert torch.allclose(halves[0][0], wanted[0], rtol=0, atol=1e-10)


# -- versions ------------------------------------------------------------------------------------------------


def test_a_version_in_use_is_never_written_to() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    versions = Versions([module])
    first = versions.newest
    before = [leaf.data.clone() for leaf in first.leaves]
    second = versions.advance(lambda number: True)
    for leaf in second.leaves:
        leaf.data.add_(1)
    assert all(torch.equal(a, b.data) for a, b in zip(before, first.leaves))
    third = versions.advance(lambda number: number == 1)  # the first one is free now, but not yet its memory
    assert {leaf.data_ptr() for leaf in third.leaves} == {leaf.data_ptr() for leaf in first.leaves}
    assert sorted(versions.live) == [1, 2]


def test_one_version_is_stepped_in_place() -> None:
    versions = Versions([nn.Linear(2, 2)])
    places = [leaf.data_ptr() for leaf in versions.newest.leaves]
    assert [leaf.data_ptr() for leaf in versions.advance(lambda number: False).leaves] == places
    assert versions.most == 1


@pytest.mark.parametrize(
    ("schedule", "count", "mesh"),
    [
        ("gpipe", 4, (3, 1)),
        ("1f1b", 4, (3, 1)),
        ("pipedream", 1, (4, 1)),
        ("2bw", 4, (3, 1)),
        ("wpipe", 4, (2, 1)),
    ],
)
def test_no_more_is_kept_than_the_layout_declares(schedule: str, count: int, mesh: Any) -> None:
    layers = mesh[0] * (2 if schedule == "wpipe" else 1)

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            chain_model(layers), schedule, count, mesh, loss=loss_of, optimizer=momentum, fabric=fabric
        )
        for batch in batches(8):
            pipeline.step(batch)
        return [(n, s.versions.most, s.most_saved) for n, s in pipeline.stages.items()], pipeline.layout

    for kept, layout in on_threads(mesh[0], work):
        for stage, versions, activations in kept:
            assert versions == layout.versions[stage]
            assert activations == layout.activations[stage]


# -- rows and sums -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("rows", [7, 12])
def test_replicas_and_micro_batches_share_all_rows_once(rows: int, replicas: int) -> None:
    share = Share(rows, 2, "")
    found = [r for m in range(2) for i in range(replicas) for r in range(*share.given(m, i, replicas))]
    assert found == list(range(rows))
    for index in range(2):
        sizes = [b - a for a, b in (share.within(index, i, replicas) for i in range(replicas))]
        assert sum(sizes) == share.size(index) and max(sizes) - min(sizes) <= 1


def test_common_rows_count_from_the_first_of_mine() -> None:
    assert common({0: (4, 8)}, {0: (6, 12)}) == ((0, 2, 4),)
    assert common({0: (0, 3)}, {0: (3, 6)}) == ((0, 3, 3),)
    assert common({0: (0, 3)}, {0: (5, 6)}) == ((0, 3, 3),)
    assert common({0: (0, 3), -1: (2, 5)}, {0: (0, 3), -1: (0, 4)}) == ((-1, 0, 2),)
    assert common({0: (0, 3)}, {0: (0, 6)}) == ()


def test_masters_sum_in_order_and_everybody_has_it() -> None:
    hosts = [[0, 1, 2], [3, 4, 5]]

    def work(fabric: Any) -> Tensor:
        value = torch.tensor([0.1 * (fabric.rank + 1), 1e16 if fabric.rank == 1 else 1.0])
        by_masters(fabric.lane("sums"), fabric.rank, hosts, [value])
        return value

    found = on_threads(6, work)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert float(found[0][0]) == pytest.approx(2.1)


def test_batches_may_be_overwritten_after_a_step() -> None:
    model, data = chain_model(3), batches(6)
    wanted, _, _ = train(model, data, 3, schedule="pipedream")

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(model),
            "pipedream",
            loss=loss_of,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
            fabric=fabric,
        )
        inputs, targets = torch.empty(12, WIDTH).double(), torch.empty(12, WIDTH).double()
        for x, y in data:
            inputs.copy_(x)
            targets.copy_(y)
            pipeline.step((inputs, targets))
            inputs.zero_()
            targets.zero_()
        pipeline.drain()
        return pipeline.state_dict()

    for weights in on_threads(3, work):
        assert all(torch.equal(weights[name], value) for name, value in wanted.items())


# -- tracing -------------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Waits in the middle of its forward, which is when it is traced."""

    def __init__(self, begun: threading.Event, go_on: threading.Event) -> None:
        super().__init__()
        self.layer, self.begun, self.go_on = nn.Linear(2, 2), begun, go_on

    def forward(self, x: Tensor) -> Tensor:
        self.begun.set()
        assert self.go_on.wait(100)
        return self.layer(x)


def test_modules_compute_in_a_thread_while_another_traces() -> None:
    """A rank that is a thread had its next forward fail when another rank made a new pipeline."""
    begun, go_on = threading.Event(), threading.Event()
    other, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), torch.ones(1, 2)
    wanted, chains = other(x), []
    tracing = threading.Thread(target=lambda: chains.append(Chain(Slow(begun, go_on))))
    tracing.start()
    assert begun.wait(100)
    try:
        found = other(x)
    finally:
        go_on.set()
        tracing.join(100)
    assert torch.equal(found, wanted)
    assert chains[0].names == ("layer",)


SLOW_TO_CUT = "densenet_tiny gpt2_deep_tiny gpt2_deep_tiny_classifier inception_tiny resnext_tiny".split()


@pytest.mark.few
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if name in SLOW_TO_CUT else [])
        for name in models.names()
        if "_tiny" in name
    ],
)
def test_the_models_of_the_benchmarks_can_be_cut(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name)
        inputs, _ = models.sample_batch(name, 2, device="meta")
        value: Any = (inputs,)
        for stage in split(model, 4):
            value = stage(*value)
        whole = model(inputs)
    assert tree_map(lambda leaf: leaf.shape, value) == tree_map(lambda leaf: leaf.shape, whole)
