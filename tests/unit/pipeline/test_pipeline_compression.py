"""Gradients of a stage's replicas in fewer bytes: rounded, and made up for, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commsched import Compression
from commsched.optimizer.gradient import RESIDUAL
from commsched.optimizer.planner import travels_quantised
from commsched.pipeline import Pipeline
from tests.support.pipeline_runs import chain_model, loss_of, on_threads, sgd
from tests.support.quantised import LARGEST, exchanged
from tests.support.rounding import rounding
from tests.unit.pipeline.test_pipeline_checkpoint import through_a_file
from tests.unit.pipeline.test_pipeline_optimizer import Whole

WIDE = 70  # matrices of 4900 elements are quantised; they are no whole blocks


def wide_model(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(WIDE, WIDE), nn.Tanh())))


def rows(count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, WIDE, generator=dice), torch.randn(size, WIDE, generator=dice))
        for _ in range(count)
    ]


def momentum(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def quantised_alone(model: nn.Module, data: Any, parts: int, code: str) -> dict[str, Tensor]:
    """One process that adds up what two replicas compute of so many micro-batches each and send."""
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    stepper = momentum(parameters)
    lost = {p: [torch.zeros(p.numel()).numpy() for _ in range(2)] for p in parameters}
    for inputs, targets in data:
        sums: list[list[Any]] = [[None] * len(parameters) for _ in range(2)]
        each = len(targets) // (2 * parts)
        for number, (x, y) in enumerate(zip(inputs.split(each), targets.split(each), strict=True)):
            model.zero_grad()
            (loss_of(model(x), y) / (2 * parts)).backward()
            mine = sums[number % 2]
            for place, p in enumerate(parameters):
                mine[place] = p.grad if mine[place] is None else mine[place] + p.grad
        for place, p in enumerate(parameters):
            one, other = (mine[place] for mine in sums)
            p.grad = one + other
            if travels_quantised(p):
                given = [grad.flatten().numpy() for grad in (one, other)]
                total = exchanged(given, lost[p], None, [p.numel()], 1.0, code=code)
                p.grad = torch.from_numpy(total).view_as(p)
        stepper.step()
    return model.state_dict()


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)])
@pytest.mark.parametrize("options", [{}, {"placement": "eager"}, {"schedule": "zero_bubble"}], ids=str)
@pytest.mark.parametrize("code", LARGEST)
def test_quantised_sums_are_those_of_one_process(
    code: str, options: dict[str, Any], mesh: tuple[int, int]
) -> None:
    model, data = wide_model(), rows(4)

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(model), num_microbatches=2, mesh=mesh, loss=loss_of, optimizer=momentum,
            fabric=fabric, compression=getattr(Compression, code), bucket_bytes=7000, **options,
        )  # fmt: skip
        for batch in data:
            pipeline.step(batch)
        state = pipeline.state_dict()
        pipeline.close()
        return state

    wanted = quantised_alone(model, data, 2, code)
    for state in on_threads(mesh[0] * mesh[1], work):
        assert all(torch.equal(state[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "wpipe"])
def test_a_checkpoint_keeps_what_rounding_has_lost(schedule: str) -> None:
    """Also where a checkpoint repeats sums that are under way, and have changed it already."""
    model, data = wide_model(4), rows(8)

    def work(fabric: Any) -> Any:
        def new() -> Pipeline:
            return Pipeline(
                copy.deepcopy(model), schedule, 2, (2, 2), loss=loss_of, optimizer=momentum, fabric=fabric,
                compression=Compression.int8,
            )  # fmt: skip

        found, straight = [], new()
        for batch in data:
            straight.step(batch)
        straight.drain()
        found.append(straight.state_dict())
        straight.close()
        for stop in (1, 4):
            first = new()
            for batch in data[:stop]:
                first.step(batch)
            state = through_a_file(first.checkpoint())
            first.close()
            second = new()
            second.resume(state)
            for batch in data[stop:]:
                second.step(batch)
            second.drain()
            found.append(second.state_dict())
            second.close()
        return found

    for wanted, *others in on_threads(4, work):
        for weights in others:
            assert all(torch.equal(weights[name], value) for name, value in wanted.items())


class Either(nn.Module):
    """Linear in its weights, so gradients do not depend on them. A step uses one of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x[0, 0] > 0 else self.other(x)  # type: ignore[no-any-return]


def product(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).sum(1).mean()


@pytest.mark.parametrize(("steps", "reloads"), [(True, False), (True, True), (False, False)])
def test_nothing_is_lost_in_the_end(steps: bool, reloads: bool) -> None:
    """What was delivered and what the state dict says is lacking are all gradients, also of steps in which no
    replica used a parameter, and across a state dict.
    """
    torch.manual_seed(0)
    model, data = nn.Sequential(Either()), rows(6)
    for number, (x, _) in enumerate(data):
        x[:, 0] = 1.0 if number % 3 else -1.0
    exact = copy.deepcopy(model)
    for x, y in data:
        product(exact(x), y).backward()

    def work(fabric: Any) -> Any:
        def new() -> Pipeline:
            return Pipeline(
                copy.deepcopy(model), mesh=(1, 2), loss=product, fabric=fabric, compression=Compression.int8,
                optimizer=(lambda params: torch.optim.SGD(params, lr=1.0)) if steps else None,
            )  # fmt: skip

        pipeline = new()
        for number, batch in enumerate(data):
            pipeline.step(batch)
            if reloads and number == 3:
                weights, kept = pipeline.state_dict(), through_a_file(pipeline.optimizers[0].state_dict())
                pipeline.close()
                pipeline = new()
                pipeline.load_state_dict(weights)
                pipeline.optimizers[0].load_state_dict(kept)
        names = pipeline.stages[0].versions.names
        grads = dict(zip(names, (p.grad for p in pipeline.parameters()), strict=True))
        lacking = pipeline.optimizers[0].state_dict()["state"] if steps else {}
        result = pipeline.state_dict(), grads, {n: lacking.get(i, {}) for i, n in enumerate(names)}
        buckets = pipeline._updates[0].buckets
        assert buckets is not None
        here = buckets.residuals.added_to({})
        pipeline.close()
        return *result, [entry[RESIDUAL] for entry in here.values()]

    for weights, grads, lacking, here in on_threads(2, work):
        assert len(here) == 2
        for (name, parameter), mine in zip(exact.named_parameters(), here, strict=True):
            before = model.state_dict()[name]
            if steps:
                assert torch.equal(lacking[name][RESIDUAL], mine)
                delivered = before - weights[name]
            else:
                delivered = grads[name]
            assert mine.abs().max() > 1e-3 * parameter.grad.abs().max()
            tolerance = rounding(torch.float32, 8 * 6, 4) * parameter.grad.abs().max().item()
            torch.testing.assert_close(delivered + mine, parameter.grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "int8"}, "must be Compression.none, fp16, bf16, int8 or fp8, got 'int8'"),
        ({"schedule": "bundle"}, "schedule 'bundle' needs those of stage . whole on every replica: leave it"),
        ({"optimizer": lambda params: Whole(params, lr=0.1)}, "and Whole needs those of stage . whole"),
    ],
)
def test_gradients_without_buckets_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"loss": loss_of, "optimizer": sgd, "compression": Compression.int8, "mesh": (2, 2), **options}
    with pytest.raises(ValueError, match=message):
        on_threads(4, lambda fabric: Pipeline(chain_model(2), fabric=fabric, **given))
