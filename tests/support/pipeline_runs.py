"""Pipelines whose ranks are threads, and one-process references that know nothing of ranks.

``replayed`` trains a model with the weight version that a program names for each stage, micro-batch and
period; ``by_delays`` does it from a delay for every parameter, which is what the papers' formulas say.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from commsched.pipeline import Pipeline, ThreadWorld
from commsched.pipeline.rows import border, cut
from scheduler.ir.program import Program
from tests.support import one_process
from tests.support.rounding import rounding
from tests.support.thread_ranks import run_threads
from tests.support.version_map import version_map

Batch = tuple[Any, Any]
Weights = dict[str, Tensor]
RATE = 0.05
WIDTH = 6


def chain_model(layers: int = 4, seed: int = 0) -> nn.Sequential:
    """So many layers, in float64."""
    parts: list[nn.Module] = []
    with one_process.seed(seed):
        for _ in range(layers):
            parts += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*parts).double()


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1).mean()


def batches(count: int, rows: int = 12, seed: int = 100) -> list[Batch]:
    dice = torch.Generator().manual_seed(seed)
    shape = (rows, WIDTH)
    return [
        (torch.randn(shape, generator=dice).double(), torch.randn(shape, generator=dice).double())
        for _ in range(count)
    ]


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE, momentum=0.9, weight_decay=0.01)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A small eps would make an update of the rounding of a gradient that is nearly zero."""
    return torch.optim.Adam(params, lr=0.01, eps=1e-3)


# -- ranks as threads ----------------------------------------------------------------------------------------


def on_threads(size: int, work: Callable[[Any], Any], timeout: float = 200.0) -> list[Any]:
    """``work(fabric)`` on every rank; the first rank's error that is not another's fault is raised here."""
    world = ThreadWorld(size, timeout)
    return run_threads(size, lambda rank: work(world.fabric(rank)), timeout + 300.0, world.abort)


def trained(fabric: Any, model: Any, data: Any, **options: Any) -> tuple[Weights, list[float], Pipeline]:
    """One rank's weights, losses and pipeline, which is closed."""
    pipeline = Pipeline(copy.deepcopy(model), fabric=fabric, **options)
    losses = [pipeline.step(batch) for batch in data]
    found = [value for value in losses if value is not None] + pipeline.drain()
    weights = pipeline.state_dict()
    pipeline.close()
    return weights, found, pipeline


def train(
    model: nn.Module,
    data: Sequence[Batch],
    size: int,
    optimizer: Any = sgd,
    loss: Any = loss_of,
    **options: Any,
) -> tuple[Weights, list[float], Pipeline]:
    """The weights, the losses, and rank 0's pipeline; all ranks must agree on both."""
    options |= {"loss": loss, "optimizer": optimizer}
    everyone = on_threads(size, lambda fabric: trained(fabric, model, data, **options))
    for weights, losses, _ in everyone[1:]:
        assert losses == everyone[0][1]
        assert all(torch.equal(value, everyone[0][0][key]) for key, value in weights.items())
    assert len(everyone[0][1]) == len(data)
    return everyone[0]


# -- references ----------------------------------------------------------------------------------------------


def stage_of_tensors(pipeline_cuts: Sequence[int], model: nn.Module, example: Any = None) -> dict[str, int]:
    """The first stage that uses each parameter and buffer."""
    from commsched.pipeline import Chain

    chain = Chain(model, example=example)
    found: dict[str, int] = {}
    ends = [*pipeline_cuts[1:], len(chain)]
    for stage, (first, end) in enumerate(zip(pipeline_cuts, ends)):
        for layer in range(first, end):
            for name in chain._forward.tensors(layer):
                found.setdefault(name, stage)
    return found


def replayed(
    model: nn.Module,
    data: Sequence[Batch],
    program: Program,
    optimizer: Any = sgd,
    loss: Any = loss_of,
    example: Any = None,
    count: Any = None,
) -> tuple[Weights, list[float]]:
    """Every micro-batch with the versions that the program gives its stages. ``count``: of the terms of some
    targets, over which the loss is a sum.
    """
    layout = program.pipeline
    assert layout is not None
    seen = version_map(program, len(data))
    owner = stage_of_tensors(layout.cuts, model, example)
    return _trained(
        model,
        data,
        layout.microbatches,
        lambda name, micro, period: seen[owner[name], micro, period],
        optimizer,
        loss,
        count,
    )


def by_delays(
    model: nn.Module,
    data: Sequence[Batch],
    parts: int,
    delay: Callable[[str], int],
    optimizer: Any = sgd,
    loss: Any = loss_of,
) -> tuple[Weights, list[float]]:
    """``W(t+1) = W(t) - lr * grad f(W_i(t - delay_i))``, versions below 0 being 0."""
    return _trained(model, data, parts, lambda name, _, period: max(0, period - delay(name)), optimizer, loss)


def _trained(
    model: nn.Module,
    data: Sequence[Batch],
    parts: int,
    version: Callable[[str, int, int], int],
    optimizer: Any,
    loss: Any,
    count: Any = None,
) -> tuple[Weights, list[float]]:
    model = copy.deepcopy(model)
    newest = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    history = [{name: p.detach().clone() for name, p in newest.items()}]
    stepper, losses = optimizer(list(newest.values())), []
    for period, (inputs, targets) in enumerate(data):
        rows, total = len(targets), 0.0
        grads: dict[str, Tensor | None] = dict.fromkeys(newest)
        for micro in range(parts):
            span = border(micro, rows, parts), border(micro + 1, rows, parts)
            used = {n: history[version(n, micro, period)][n].clone().requires_grad_() for n in newest}
            mine = cut(inputs, span)
            takes = inspect.signature(model.forward).parameters
            named = mine if isinstance(mine, dict) and set(mine) <= set(takes) else {}
            output = functional_call(model, used, () if named else (mine,), named)
            share = (span[1] - span[0]) / rows if count is None else 1 / float(count(targets))
            part = loss(output, cut(targets, span)) * share
            for name, grad in zip(used, torch.autograd.grad(part, list(used.values()), allow_unused=True)):
                before = grads[name]
                grads[name] = before if grad is None else grad if before is None else before + grad
            total += float(part.detach())
        losses.append(total)
        for name, p in newest.items():
            p.grad = grads[name]
        stepper.step()
        history.append({name: p.detach().clone() for name, p in newest.items()})
    return history[-1], losses


# Sums over rows and width; layers forward and backward, and steps.
ROUNDING = rounding(torch.float64, 12 * WIDTH, 8 * 12)


def assert_close(found: Weights, wanted: Weights, tolerance: float = ROUNDING) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


def differ(one: Weights, other: Weights) -> bool:
    return any(not torch.allclose(one[name], other[name], rtol=1e-6, atol=1e-9) for name in one)
