"""What ordinary scripts do with a pipeline: as in one process, or an error that names the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched.pipeline import Pipeline
from tests.support.pipeline_runs import (
    ROUNDING,
    WIDTH,
    adam,
    assert_close,
    batches,
    by_delays,
    chain_model,
    loss_of,
    momentum,
    on_threads,
    sgd,
    train,
)
from tests.support.rounding import rounding
from tests.unit.pipeline.test_pipeline_training import TiedEnds


def in_one_process(model: nn.Module, data: Any, optimizer: Any = momentum, loss: Any = loss_of) -> Any:
    """The weights after training on whole batches, and the losses."""
    model, losses = copy.deepcopy(model), []
    stepper = optimizer(list(model.parameters()))
    for inputs, targets in data:
        stepper.zero_grad()
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        value = loss(model(**inputs) if isinstance(inputs, dict) else model(*given), targets)
        value.backward()
        stepper.step()
        losses.append(value.item())
    return model.state_dict(), losses


class Positions(nn.Module):
    """Autograd gives both tables the activation's gradient, and expands that of the last one."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(rows, WIDTH)),
            nn.Parameter(torch.ones(rows, WIDTH)),
        )
        self.summed = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.first + self.second) + 0.1 * self.summed.sum()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_parameters_may_get_one_tensor_as_their_gradients(schedule: str) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH), Positions(3), nn.Linear(WIDTH, WIDTH), Positions(3)]
    model, data = nn.Sequential(*parts).double(), batches(3)
    weights, _, _ = train(model, data, 2, schedule=schedule, num_microbatches=4, cuts=[0, 2])
    assert_close(weights, by_delays(model, data, 4, lambda name: 0)[0])


def assert_saved_as_evaluated(make: Callable[[int], nn.Module], mesh: tuple[int, int]) -> None:
    """What ``evaluate`` returns after some steps is the loss of the saved model. ``make``: of a rank."""
    data, models = batches(4), [make(rank).double() for rank in range(mesh[0] * mesh[1])]

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(models[fabric.rank], mesh=mesh, loss=loss_of, optimizer=sgd, fabric=fabric)
        for batch in data:
            pipeline.step(batch)
        return pipeline.state_dict(), pipeline.evaluate(data[0])

    for weights, loss in on_threads(len(models), work):
        saved = make(0).double().eval()
        saved.load_state_dict(weights)
        assert loss == pytest.approx(loss_of(saved(data[0][0]), data[0][1]).item(), rel=ROUNDING)


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def test_tied_weights_start_alike_on_ranks_that_are_not_seeded_alike() -> None:
    assert_saved_as_evaluated(lambda rank: seeded(rank, TiedEnds), (2, 1))


class Norms(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
        )


def test_an_evaluation_is_that_of_the_saved_model() -> None:
    """Replicas have seen other rows: their running statistics differ."""
    assert_saved_as_evaluated(lambda rank: seeded(0, Norms), (2, 2))


class PreActivation(nn.Module):
    """Begins with an operation in place, on what the stage before has sent."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x)) + 1.0


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda *parts: Called(nn.ModuleList(parts))])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_may_begin_with_an_operation_in_place(wrap: Any, recompute: bool) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH), PreActivation(torch.tanh_), PreActivation(nn.ReLU(inplace=True))]
    model, data = wrap(*parts).double(), batches(3)
    weights, losses, _ = train(model, data, 3, momentum, mesh=(3, 1), num_microbatches=2, recompute=recompute)
    wanted, expected = in_one_process(model, data)
    assert_close(weights, wanted)
    assert losses == pytest.approx(expected, rel=ROUNDING)


class Called(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Variadic(Called):
    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(inputs[0] * inputs[1] if len(inputs) > 1 else inputs[0])


class Named(Called):
    def forward(self, x: Tensor, *, scale: float = 1.0, **more: Tensor) -> Tensor:
        return super().forward(x * scale * more.get("mask", torch.ones(())))


class Placed(Called):
    def forward(self, x: Tensor, mask: Tensor, /, shift: float | None = 0.5) -> Tensor:
        return super().forward(x * mask) if shift is None else super().forward(x * mask + shift)


def linears(count: int = 2) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count)).double()


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Variadic, lambda x, mask: x),
        (Variadic, lambda x, mask: (x, mask)),
        (Named, lambda x, mask: x),
        (Named, lambda x, mask: {"x": x, "mask": mask, "scale": 2.0}),
        (Placed, lambda x, mask: (x, mask)),
        (Placed, lambda x, mask: (x, mask, None)),
    ],
)
def test_forwards_take_their_arguments_as_they_name_them(make: Any, inputs: Any) -> None:
    model, data = make(linears()), batches(2)
    given = [(inputs(x, torch.full_like(x, 0.5)), y) for x, y in data]
    weights, losses, _ = train(model, given, 2, momentum, mesh=(2, 1), num_microbatches=2)
    wanted, expected = in_one_process(model, given)
    assert_close(weights, wanted)
    assert losses == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="aot_eager"), nn.DataParallel])
def test_what_calls_a_model_as_a_whole_is_taken_off(wrap: Any) -> None:
    model, data = chain_model(2).float(), [(x.float(), y.float()) for x, y in batches(2)]

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            wrap(copy.deepcopy(model)), mesh=(2, 1), loss=loss_of, optimizer=sgd, fabric=fabric
        )
        for batch in data:
            pipeline.step(batch)
        return pipeline.state_dict()

    wanted, _ = in_one_process(model, data, sgd)
    said = nullcontext() if wrap is nn.DataParallel else pytest.warns(UserWarning, match="compile its blocks")
    with said:  # type: ignore[attr-defined]
        everyone = on_threads(2, work)
    for weights in everyone:
        assert_close(weights, wanted, rounding(torch.float32, 12 * WIDTH, 8 * 12))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_compiled_blocks_compute_the_same(schedule: str) -> None:
    model, data = Called(linears(4)), batches(2)
    weights, _, _ = train(compiled(model), data, 2, momentum, schedule=schedule, num_microbatches=2)
    wanted, _ = in_one_process(model, data)
    assert_close({name.replace("_orig_mod.", ""): value for name, value in weights.items()}, wanted)


def compiled(model: Called) -> Called:
    model = copy.deepcopy(model)
    for number in (0, 2):
        model.parts[number] = torch.compile(model.parts[number], backend="aot_eager")  # type: ignore[assignment]
    model.parts[1].compile(backend="aot_eager")
    return model


def attempt(**options: Any) -> Pipeline:
    """A pipeline of two layers on one rank."""
    given: dict[str, Any] = {"loss": loss_of, "optimizer": sgd, "model": chain_model(2)} | options
    (pipeline,) = on_threads(1, lambda fabric: Pipeline(mesh=(1, 1), fabric=fabric, **given))
    return pipeline  # type: ignore[no-any-return]


class Weighing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weight * F.mse_loss(outputs, targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": sgd(list(chain_model(1).parameters()))}, r"got a SGD .* lambda params: SGD\(params, "),
        ({"optimizer": "adam"}, "optimizer= must be a function, got 'adam'"),
        ({"loss": Weighing()}, r"loss= has parameters \(weight\) .* model's last layer"),
        ({"num_microbatch": 4}, "no option 'num_microbatch'; did you mean 'num_microbatches'?"),
        ({"schedule": "interleaved", "virtul": 2}, "no option 'virtul'; did you mean 'virtual'?"),
        ({"model": nn.parallel.DistributedDataParallel}, "without DistributedDataParallel"),
    ],
)
def test_mistakes_are_named_where_they_are_made(options: dict[str, Any], message: str) -> None:
    if options.get("model") is nn.parallel.DistributedDataParallel:
        wrapped: Any = object.__new__(nn.parallel.DistributedDataParallel)
        nn.Module.__init__(wrapped)
        options = {"model": wrapped}
    with pytest.raises(ValueError, match=message):
        attempt(**options)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.ones(2, WIDTH), r"a pair \(inputs, targets\), and this one is a Tensor"),
        ((1, 2, 3), r"this one is a tuple of 3; .* \(\(x, mask\), y\)"),
        ({"x": 1, "y": 2}, "this one is a dict"),
    ],
)
def test_batches_that_are_none_are_refused(batch: Any, message: str) -> None:
    pipeline = attempt()
    for use in (pipeline.step, pipeline.evaluate):
        with pytest.raises(ValueError, match=message):
            use(batch)


def test_arguments_that_a_forward_does_not_take_are_refused() -> None:
    x = torch.ones(2, WIDTH).double()
    with pytest.raises(ValueError, match="takes 'x', 'mask', 'shift', and the inputs have also 'token'"):
        attempt(model=Placed(linears())).step(({"x": x, "mask": x, "token": x}, x))
    with pytest.raises(ValueError, match="takes 'x', 'mask', 'shift', and the inputs are 4"):
        attempt(model=Placed(linears())).step(((x, x, x, x), x))


def test_a_checkpoint_is_for_a_new_pipeline() -> None:
    pipeline, batch = attempt(), batches(1)[0]
    state = pipeline.checkpoint()
    pipeline.step(batch)
    with pytest.raises(ValueError, match=r"resume\(\) is for a new pipeline, and this one has taken 1 steps"):
        pipeline.resume(state)


class Large(Called):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 3:
            raise torch.OutOfMemoryError("no memory left")
        return super().forward(x)


def test_a_script_can_catch_what_a_batch_too_large_raises() -> None:
    pipeline = attempt(model=Large(linears()))
    with pytest.raises(
        torch.OutOfMemoryError, match="stage 0 on rank 0 failed in the forward.*no memory left"
    ):
        pipeline.step(batches(1)[0])


def test_adam_steps_a_pipeline_of_one_layer() -> None:
    model, data = Called(linears(1)), batches(2)
    weights, _, _ = train(model, data, 1, adam, mesh=(1, 1), num_microbatches=2)
    assert_close(weights, in_one_process(model, data, adam)[0])
