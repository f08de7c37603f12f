"""What ordinary scripts do with a pipeline: as in one process, or an error that names the way out."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched.pipeline import Chain, Pipeline
from commsched.pipeline.factory import save_shard
from commsched.pipeline.random_state import ONE_AT_A_TIME
from commsched.pipeline.reduction import ReplicaBuckets
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


# -- what a forward returns, and how autograd sees a cut -----------------------------------------------------


class Returns(Called):
    """Its output has an input, or what was made of inputs alone, beside what the layers computed."""

    def __init__(self, kind: str) -> None:
        super().__init__(linears(4))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, x) if self.kind == "input" else {"out": y, "mask": (x > 0).to(x.dtype)}


def loss_of_both(outputs: Any, targets: Tensor) -> Tensor:
    first, second = outputs.values() if isinstance(outputs, dict) else outputs
    return ((first - second).square() * second.abs() + (first - targets).square()).mean()


@pytest.mark.parametrize("kind", ["input", "mask"])
def test_outputs_may_be_made_of_inputs_alone(kind: str) -> None:
    """The last stage had only the shape of such an input, and its loss took zeros for it."""
    model, data = Returns(kind), batches(3)
    weights, losses, _ = train(model, data, 2, momentum, loss_of_both, mesh=(2, 1), num_microbatches=2)
    wanted, expected = in_one_process(model, data, loss=loss_of_both)
    assert losses == pytest.approx(expected, rel=ROUNDING)
    assert_close(weights, wanted)


class Reversed(torch.autograd.Function):
    """Gives back its own input, whose gradient changes its sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * grad


class Adversary(Called):
    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            x = torch.tanh(part(Reversed.apply(x) if number == 2 else x))
        return x


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_autograd_function_at_a_cut_gets_a_gradient(ranks: int) -> None:
    """Autograd detached the value that had come from the stage before, which got no gradient."""
    model, data = Adversary(linears(4)), batches(3)
    options: dict[str, Any] = {"schedule": "interleaved", "virtual": 2} if ranks == 1 else {}
    weights, _, _ = train(
        model, data, ranks, momentum, mesh=(ranks, 1), num_microbatches=2, cuts=[0, 2], **options
    )
    assert_close(weights, in_one_process(model, data)[0])


class Spectrum(nn.Module):
    """Complex numbers cross the cut before its second part."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.linear = part, nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.linear(x)) if self.part == "to" else self.linear(torch.fft.ifft(x).real)


@pytest.mark.parametrize("recompute", [False, True])
def test_complex_numbers_cross_a_cut(recompute: bool) -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(Spectrum("to"), Spectrum("from")), batches(3)
    weights, _, _ = train(
        model, data, 2, momentum, mesh=(2, 1), num_microbatches=2, cuts=[0, 1], recompute=recompute
    )
    assert_close(weights, in_one_process(model, data)[0])


class Recurrent(nn.Module):
    """Reads a sequence, and hands on all of its states."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class LastState(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, -1])


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind: type[nn.Module], mesh: tuple[int, int]) -> None:
    """They keep a list of their weights, of which they know whether it lies in one piece."""
    torch.manual_seed(0)
    model = nn.Sequential(Recurrent(kind), Recurrent(kind), LastState(WIDTH, WIDTH)).double()
    steps = torch.arange(1.0, 4.0, dtype=torch.float64)[:, None]
    data = [(torch.sin(x[:, None] * steps), y) for x, y in batches(3)]
    weights, losses, _ = train(
        model, data, mesh[0] * mesh[1], momentum, mesh=mesh, num_microbatches=2, bucket_bytes=200
    )
    wanted, expected = in_one_process(model, data)
    assert_close(weights, wanted)
    assert losses == pytest.approx(expected, rel=ROUNDING)


def test_a_required_argument_may_be_none() -> None:
    class Masks(Called):
        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return super().forward(x if mask is None else x * mask)

    model, data = Masks(linears(4)), [((x, None), y) for x, y in batches(2)]
    weights, _, _ = train(model, data, 2, momentum, mesh=(2, 1), num_microbatches=2)
    assert_close(weights, in_one_process(model, data)[0])


class Weighted(Called):
    """Weighs each row by the length of its text."""

    def forward(self, x: Tensor, texts: Any, scale: float = 1.0) -> Tensor:
        lengths = torch.tensor([len(text) for text in texts], dtype=x.dtype)
        return super().forward(x) * lengths[:, None] * scale


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2)])
def test_rows_of_lists_are_cut_and_numbers_may_change_from_step_to_step(mesh: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Weighted(linears(4)).double()
    texts = [["a" * ((row + step) % 5) for row in range(12)] for step in range(3)]
    data = [((x, texts[step], 1.0 - 0.1 * step), y) for step, (x, y) in enumerate(batches(3))]
    weights, losses, _ = train(model, data, mesh[0] * mesh[1], momentum, mesh=mesh, num_microbatches=3)
    wanted, expected = in_one_process(model, data)
    assert_close(weights, wanted)
    assert losses == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize(
    ("given", "message"),
    [(tuple(range(12)), "a tuple of as many numbers"), (["a"] * 12, "rows of tensors only: pass a tensor")],
)
def test_lists_whose_rows_cannot_be_told_are_refused(given: Any, message: str) -> None:
    (x, y), mesh = batches(1)[0], (1, 1) if type(given) is tuple else (2, [2, 1])
    with pytest.raises(ValueError, match=message):
        model, size = Weighted(linears(4)).double(), 1 if mesh == (1, 1) else 3
        train(model, [((x, given), y)], size, mesh=mesh, num_microbatches=2)


class Aliased(Called):
    """A tensor and a view of it cross a cut, and one is written to after that."""

    writes_view = False

    def forward(self, x: Tensor) -> Tensor:
        whole = self.parts[0](x) * 1.5
        part = whole.view(-1, 2, WIDTH // 2)
        y = self.parts[1](x)
        (part if self.writes_view else whole).mul_(2.0)
        return self.parts[2](whole + y) * part.flatten(1).sum(1, keepdim=True)


@pytest.mark.parametrize("view", [False, True])
def test_memory_that_two_values_share_is_not_written_to_after_a_cut(view: bool) -> None:
    model, data = Aliased(linears(3)).double(), batches(2)
    model.writes_view = view
    weights, _, _ = train(model, data, 2, momentum, mesh=(2, 1), cuts=[0, 2])
    assert_close(weights, in_one_process(model, data)[0])
    with pytest.raises(ValueError, match=r"before layer 1.*\(part if self.writes_view.*write to a copy"):
        train(model, data, 2, momentum, mesh=(2, 1), cuts=[0, 1])


# -- forwards that do more than compute -------------------------------------------------------------------


class Counted(Called):
    """Scales by how often it has run."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Looked(nn.Module):
    """Writes to its table in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(90, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.table((10 * x.abs()).long()).sum(1))


def spectral() -> nn.Module:
    return nn.Sequential(*(torch.nn.utils.parametrizations.spectral_norm(part) for part in linears()))


@pytest.mark.parametrize("make", [lambda: Counted(linears()), Looked, spectral])
def test_forwards_may_count_and_change_weights_and_buffers(make: Callable[[], nn.Module]) -> None:
    """Dry runs and recomputation do not count, and replicas may not write to weights."""
    torch.manual_seed(0)
    model, data = make().double(), batches(3)
    weights, losses, _ = train(model, data, 2, momentum, mesh=(2, 1), recompute=make is spectral)
    wanted, expected = in_one_process(model, data)
    assert_close(weights, wanted)
    assert losses == pytest.approx(expected, rel=ROUNDING)
    if make is Looked:
        with pytest.raises(ValueError, match="forward writes to table.weight .* each replica"):
            train(model, data, 2, mesh=(1, 2))


class Listed(Called):
    """Has its weights in a list, too."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.weights = [part.weight for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.weights[-1])


@pytest.mark.parametrize("make", [Called, Listed])
def test_parameters_that_no_stage_trains_are_refused(make: Any) -> None:
    def work(fabric: Any) -> None:
        model = make(linears())
        every = list(model.parameters()) if make is Called else []

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return loss_of(outputs, targets) + 0.1 * sum(p.norm() for p in every)

        Pipeline(model, mesh=(2, 1), loss=loss, optimizer=sgd, fabric=fabric).step(batches(1)[0])

    with pytest.raises(ValueError, match="it does not train.*weight_decay="):
        on_threads(2, work)


class Keeping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return torch.tanh(self.kept)


class Reading(nn.Linear):
    def __init__(self, read: nn.Module) -> None:
        super().__init__(WIDTH, WIDTH)
        self.read = [read]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.read[0].kept


class Net(nn.Sequential):
    pass


def test_activations_that_a_module_keeps_for_a_later_one() -> None:
    torch.manual_seed(0)
    first = Keeping(WIDTH, WIDTH)
    parts, data = [first, nn.Linear(WIDTH, WIDTH), Reading(first)], batches(2)
    weights, _, _ = train(Net(*parts).double(), data, 3, momentum, mesh=(3, 1))
    assert_close(weights, in_one_process(Net(*parts), data)[0])
    assert not hasattr(first, "kept") or isinstance(first.kept, Tensor)
    with pytest.raises(ValueError, match=r"no attribute 'kept'.*class Net\(nn.Sequential\)"):
        train(nn.Sequential(*parts), data, 3, mesh=(3, 1))


def test_an_optimizer_may_train_nothing_of_a_stage() -> None:
    def of_first(named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [p for n, p in named_parameters if n.startswith("parts.0")]}], lr=0.1
        )

    model, data = Called(linears()).double(), batches(2)
    weights, _, _ = train(model, data, 4, of_first, mesh=(2, 2))
    assert torch.equal(weights["parts.1.weight"], model.parts[1].weight)
    assert not torch.equal(weights["parts.0.weight"], model.parts[0].weight)
    with pytest.raises(ValueError, match=r"parts.*\[{'params': chosen}\]"):
        train(model, data, 2, lambda params: torch.optim.SGD(params[2:]), mesh=(2, 1))


class Unrowed(Called):
    """A value without rows crosses a cut."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.tanh()
        return super().forward(x * scale) + scale


@pytest.mark.parametrize("counts", [[2, 1], [1, 2]])
def test_stages_with_other_numbers_of_replicas_refuse_values_without_rows(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rows, and a tensor has the shape \[1, 6\]: expand it"):
        train(Unrowed(linears(4)).double(), batches(1), 3, mesh=(2, counts))


# -- modes, checkpoints in memory, and states ----------------------------------------------------------------


class Drops(Called):
    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


@pytest.mark.parametrize("trains", [True, False])
def test_modes_set_before_an_evaluation_last(trains: bool) -> None:
    """The end of the evaluation undid them for good: a model made for evaluation was trained as such."""
    model = Drops(linears(4))
    model.train(not trains)
    batch = batches(1)[0]
    wanted = loss_of(copy.deepcopy(model).eval()(batch[0]), batch[1]).item()
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(fabric: Any) -> Any:
        mine = models[fabric.rank]
        pipeline = Pipeline(mine, mesh=(2, 1), loss=loss_of, optimizer=sgd, fabric=fabric, num_microbatches=2)
        mine.train(trains)
        losses = [pipeline.evaluate(batch) for _ in range(2)]
        pipeline.step(batch)
        parts = [part for stage in pipeline.stages.values() for part in stage.module.modules()]
        return losses, {part.training for part in parts if isinstance(part, nn.Dropout | nn.Linear)}

    for losses, modes in on_threads(2, work):
        assert losses == pytest.approx([wanted] * 2, rel=ROUNDING) and modes == {trains}


@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_a_checkpoint_in_memory_stays_as_it_was(optimizer: Any) -> None:
    """Training went on in the tensors of the optimizer's state that were kept."""
    model, data = Called(linears(4)), batches(6)
    wanted, _ = in_one_process(model, data, optimizer)

    def work(fabric: Any) -> Any:
        def made() -> Pipeline:
            return Pipeline(
                copy.deepcopy(model), mesh=(2, 1), loss=loss_of, optimizer=optimizer, fabric=fabric
            )

        first, found = made(), []
        for batch in data[:3]:
            first.step(batch)
        kept = first.checkpoint()
        for batch in data[3:]:
            first.step(batch)
        for _ in range(2):
            again = made()
            again.resume(kept)
            for batch in data[3:]:
                again.step(batch)
            found.append(again.state_dict())
        return found

    for found in on_threads(2, work):
        for weights in found:
            assert_close(weights, wanted)


def test_a_state_of_other_shapes_is_refused() -> None:
    """(1, 4) filled (4, 4) without a word."""
    pipeline = attempt()
    state = pipeline.state_dict()
    name = next(key for key, value in state.items() if value.dim() == 2)
    with pytest.raises(ValueError, match=rf"{name} has the shape \(1, {WIDTH}\), and the model's has"):
        pipeline.load_state_dict({**state, name: state[name][:1]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: None, "must return an optimizer, but returned NoneType"),
        (lambda params: (sgd(params), "schedule"), "must return an optimizer, but returned tuple"),
        (lambda params: sgd(list(chain_model(2).parameters())), "of the parameters that it is given"),
    ],
)
def test_factories_that_make_no_optimizer_of_a_stage_are_refused(make: Any, message: str) -> None:
    """The first and the last never trained."""
    with pytest.raises(ValueError, match=message):
        attempt(optimizer=make)


def test_groups_may_be_chosen_by_attributes_of_parameters() -> None:
    """As in state space models; all parameters were decayed."""

    def grouped(params: Any) -> torch.optim.Optimizer:
        kept = [p for p in params if getattr(p, "_no_weight_decay", False)]
        rest = [p for p in params if not getattr(p, "_no_weight_decay", False)]
        groups = [{"params": rest, "weight_decay": 0.5}, {"params": kept}]
        return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)

    model, data = Called(linears(4)), batches(2)

    def marked(model: nn.Module) -> nn.Module:
        for part in model.parts:
            part.bias._no_weight_decay = True
        return model

    stepper = grouped(list(marked(plain := copy.deepcopy(model)).parameters()))
    for inputs, targets in data:
        stepper.zero_grad()
        loss_of(plain(inputs), targets).backward()
        stepper.step()

    def work(fabric: Any) -> Any:
        mine = marked(copy.deepcopy(model))
        pipeline = Pipeline(
            mine, mesh=(2, 1), loss=loss_of, optimizer=grouped, fabric=fabric, num_microbatches=2
        )
        for batch in data:
            pipeline.step(batch)
        return pipeline.state_dict()

    for weights in on_threads(2, work):
        assert_close(weights, plain.state_dict())


def test_hooks_of_parameters_that_are_not_called_are_told() -> None:
    model = chain_model(2)
    name, parameter = next(iter(model.named_parameters()))
    parameter.register_hook(lambda grad: grad.clamp(-1, 1))
    with pytest.warns(UserWarning, match=f"the hooks of {name} are not called: .* optimizer=None"):
        attempt(model=model)


def test_an_evaluation_in_inference_mode() -> None:
    pipeline, batch = attempt(), batches(1)[0]
    wanted = pipeline.evaluate(batch)
    fresh = attempt()
    with torch.inference_mode():
        assert fresh.evaluate(batch) == wanted
    fresh.step(batch)


def test_a_saved_buffer_may_be_a_part_of_another(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    table = torch.arange(4.0).view(2, 2)
    save_shard(tmp_path, {"table": table, "first": table[:1], "again": table}, 0, 1)
    found = safetensors.load_file(str(tmp_path / "model-00001-of-00001.safetensors"))
    assert torch.equal(found["first"], table[:1]) and torch.equal(found["table"], table) and len(found) == 2


# -- what scripts change in a model after its pipeline is made -----------------------------------------------


class Scaled(Called):
    """A buffer and a mode of its own; ``gain`` adds an operation once it is set."""

    gain: float | None = None

    def __init__(self, tied: bool = False) -> None:
        super().__init__(linears(4))
        self.register_buffer("scale", torch.ones(WIDTH).double())
        if tied:
            self.parts[3].weight = self.parts[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x)) * (1.0 if self.training else 0.5)
            x = x if self.gain is None else x * self.gain
        return x * self.scale


class Rate(nn.Module):
    rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * (self.rate if self.training else 2.0)


def tied_list() -> nn.Sequential:
    parts = linears(4)
    parts[3].weight = parts[0].weight
    return nn.Sequential(*(part for linear in parts for part in (linear, Rate())))


def with_change(model: nn.Module, change: Any, **options: Any) -> tuple[Any, Any]:
    """The weights after four steps with a change before the third, of a pipeline and of one process."""
    data = batches(4)

    def work(fabric: Any) -> Any:
        mine = copy.deepcopy(model)
        pipeline = Pipeline(mine, loss=loss_of, optimizer=momentum, fabric=fabric, **options)
        for number, batch in enumerate(data):
            if number == 2:
                change(mine)
            pipeline.step(batch)
        return pipeline.state_dict()

    found, plain = on_threads(1 if "virtual" in options else 2, work)[0], copy.deepcopy(model)
    stepper = momentum(list(plain.parameters()))
    for number, (inputs, targets) in enumerate(data):
        if number == 2:
            change(plain)
        stepper.zero_grad()
        loss_of(plain(inputs), targets).backward()
        stepper.step()
    return found, plain.state_dict()


TWO_STAGES_ON_A_RANK = {"schedule": "interleaved", "virtual": 2, "mesh": (1, 1), "num_microbatches": 2}


def skips(model: Any) -> None:
    kept: dict[str, Tensor] = {}
    model.parts[0].register_forward_hook(lambda _, inputs, output: kept.update(x=output))
    model.parts[2].register_forward_hook(lambda _, inputs, output: output + kept["x"])


def halved_by_hook(model: Any) -> None:
    model.parts[2].register_forward_hook(lambda _, inputs, output: output * 0.5)


@pytest.mark.few
@pytest.mark.parametrize("options", [{"mesh": (2, 1), "num_microbatches": 2}, TWO_STAGES_ON_A_RANK])
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: Scaled(tied=True), lambda model: model.eval()),
        (lambda: Scaled(tied=True), lambda model: setattr(model, "gain", 0.5)),
        (lambda: Scaled(tied=True), halved_by_hook),
        (Scaled, lambda model: model.register_buffer("scale", torch.full((WIDTH,), 0.5).double())),
        (Scaled, lambda model: model.scale.fill_(0.5)),
        (Scaled, lambda model: model.parts[1].weight.requires_grad_(False)),
        (tied_list, lambda model: model.eval()),
        (tied_list, lambda model: [setattr(part, "rate", 0.1) for part in model[1::2]]),
    ],
)
def test_what_changes_in_the_model_reaches_every_stage(make: Any, change: Any, options: Any) -> None:
    assert_close(*with_change(make(), change, **options))


def with_frozen(model: Any) -> Any:
    model[2].bias.requires_grad_(False)
    return model


@torch.no_grad()
def doubled(model: Any) -> None:
    model.parts[3].weight.mul_(2)


@pytest.mark.few
@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (Scaled, skips, "what crosses a cut .* make a new Pipeline"),
        (Scaled, lambda model: model.parts[:2].requires_grad_(False), "what crosses a cut .* a frozen stage"),
        (Scaled, lambda model: setattr(model, "parts", linears(4)), "parts of the model has been"),
        (
            Scaled,
            lambda model: model.parts.__setitem__(1, linears(1)[0]),
            r"parts.1 of .* make a new Pipeline",
        ),
        (Scaled, lambda model: model.parts.append(linears(1)[0]), "parts.4 of the model has been added"),
        (Scaled, lambda model: setattr(model.parts[1], "bias", None), "parts.1.bias of the model"),
        (
            Scaled,
            lambda model: setattr(model.parts[1].bias, "data", torch.ones(WIDTH).double()),
            "parts.1.bias",
        ),
        (
            Scaled,
            lambda model: model.register_buffer("more", torch.ones(1)),
            "more of the model has been added",
        ),
        (
            lambda: chain_model(4),
            lambda model: model.__setitem__(2, linears(1)[0]),
            "2 of the model has been",
        ),
        (
            lambda: chain_model(4),
            lambda model: setattr(model[2], "bias", nn.Parameter(torch.ones(WIDTH).double())),
            "2.bias of the model has been",
        ),
        (
            lambda: with_frozen(chain_model(4)),
            lambda model: model[2].bias.requires_grad_(True),
            "2.bias was frozen when the pipeline was made",
        ),
        (
            Scaled,
            lambda model: model.parts[1].register_full_backward_hook(lambda *_: None),
            r"parts.1 has backward hooks .* x.register_hook",
        ),
    ],
)
def test_what_stages_cannot_take_over_is_refused(make: Any, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_change(make(), change, mesh=(2, 1), num_microbatches=2)


def test_a_tied_copy_that_does_not_follow_its_parameter_is_told() -> None:
    with pytest.raises(ValueError, match="change the values in place|make a new Pipeline"):
        with_change(Scaled(tied=True), doubled, **TWO_STAGES_ON_A_RANK)


def test_a_parameter_with_several_versions_cannot_be_frozen() -> None:
    """The error said that it had been replaced."""
    options = {"schedule": "2bw", "mesh": (2, 1), "num_microbatches": 2}
    with pytest.raises(ValueError, match="parts.1.weight has been frozen.* make a new Pipeline"):
        with_change(Scaled(), lambda model: model.parts[1].weight.requires_grad_(False), **options)


class Averages(Called):
    """A running mean, which one stage writes and another or the same one reads."""

    def __init__(self, how: str) -> None:
        super().__init__(linears(4))
        self.how = how
        self.register_buffer("mean", torch.zeros(WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        if self.how != "assigned back":
            self._keep(x)
        if self.how == "assigned here":
            x = x - self.mean
        elif self.how == "assigned back":
            x = x - self.mean.clone()
        for part in self.parts[1:]:
            x = torch.tanh(part(x))
        if self.how == "assigned back":
            self._keep(x)
        return x + self.mean if self.how in ("in place", "a part") else x

    def _keep(self, x: Tensor) -> None:
        now = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.how == "in place":
            self.mean.copy_(now)
        elif self.how == "a part":
            self.mean[1:].copy_(now[1:])
        else:
            self.mean = now


@pytest.mark.parametrize("how", ["in place", "a part", "assigned back", "assigned here"])
def test_a_buffer_that_several_stages_have_is_written_by_none(how: str) -> None:
    """Each stage has a copy of its own."""
    model, data = Averages(how), batches(3)
    options: dict[str, Any] = {"mesh": (2, 1), "example": data[0][0]}
    if how == "assigned here":
        weights, _, _ = train(model, data, 2, momentum, **options)
        assert_close(weights, in_one_process(model, data)[0])
    else:
        with pytest.raises(ValueError, match="writes to mean, and several stages have it.*cuts="):
            train(model, data, 2, momentum, **options)


def test_a_module_in_two_stages_writes_no_buffer() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm).double()
    with pytest.raises(ValueError, match="writes to 1.num_batches_tracked, and several stages have it"):
        train(model, batches(1), 2, mesh=(2, 1))


class Noted(nn.Linear):
    note = "none"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
@pytest.mark.parametrize("wrap", [Called, lambda parts: nn.Sequential(*parts)])
def test_modules_may_have_extra_state(wrap: Any, mesh: Any) -> None:
    model, data = wrap(nn.ModuleList([*linears(3), Noted(WIDTH, WIDTH).double()])), batches(2)

    def work(fabric: Any) -> Any:
        mine = copy.deepcopy(model)
        pipeline = Pipeline(mine, mesh=mesh, loss=loss_of, optimizer=momentum, fabric=fabric)
        next(part for part in mine.modules() if isinstance(part, Noted)).note = "set"
        pipeline.step(data[0])
        state, kept = pipeline.state_dict(), pipeline.checkpoint()
        again = Pipeline(copy.deepcopy(model), mesh=mesh, loss=loss_of, optimizer=momentum, fabric=fabric)
        again.load_state_dict(state)
        again.resume(kept)
        return state, again.state_dict()

    wanted, _ = in_one_process(model, data[:1])
    for states in on_threads(2, work):
        for state in states:
            (extra,) = (value for value in state.values() if isinstance(value, dict))
            assert extra == {"note": "set"} and state.keys() == wanted.keys()


def test_batches_may_be_mappings_of_any_class() -> None:
    class Given(dict[str, Any]):
        pass

    model, data = Named(linears(4)), batches(2)
    plain = [({"x": x, "mask": x.sign()}, y) for x, y in data]
    wanted, _ = in_one_process(model, plain)
    for kind in (UserDict, Given, MappingProxyType):
        given = [(kind(inputs), y) for inputs, y in plain]
        weights, _, _ = train(model, given, 2, momentum, mesh=(2, 1), num_microbatches=2)
        assert_close(weights, wanted)


def test_a_model_that_cannot_be_copied_is_told_with_the_attribute() -> None:
    model = Called(linears())
    model.parts[1].lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"parts.1.lock cannot be copied .*after the pipeline is made"):
        attempt(model=model)


def test_hooks_of_tensors_run_where_the_tensor_is_computed() -> None:
    class Halved(Called):
        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
                if x.requires_grad:
                    x.register_hook(lambda grad: grad * 0.5)
            return x

    model, data = Halved(linears(4)), batches(2)
    weights, _, _ = train(model, data, 2, momentum, mesh=(2, 1), num_microbatches=2)
    assert_close(weights, in_one_process(model, data)[0])


def test_no_rank_waits_for_weights_while_it_holds_the_lock_of_dry_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that are threads share the lock: one that waits for it cannot send the weights."""
    took, holding = ReplicaBuckets.take_in, []

    def take_in(buckets: ReplicaBuckets, *given: Any) -> None:
        holding.append(ONE_AT_A_TIME._is_owned())  # type: ignore[attr-defined]
        took(buckets, *given)

    monkeypatch.setattr(ReplicaBuckets, "take_in", take_in)
    torch.manual_seed(0)
    model = Called(linears()).double()
    # Another number of rows in each step: each begins with a dry run, and weights on their way.
    data = [batches(1, rows)[0] for rows in (8, 12, 10)]
    weights, _, _ = train(model, data, 2, momentum, mesh=(1, 2), bucket_bytes=128)
    assert_close(weights, in_one_process(model, data)[0])
    assert len(holding) > 4 and not any(holding)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_may_stand_around_all_steps(schedule: str, recompute: bool) -> None:
    """Its cache has casts of weights that have changed since, or that have no graph."""

    def weights(cached: bool) -> Any:
        model = chain_model(4).float()

        def work(fabric: Any) -> Any:
            pipeline = Pipeline(
                copy.deepcopy(model), schedule, 2, (2, 1), loss=F.mse_loss, optimizer=sgd, fabric=fabric,
                recompute=recompute,
            )  # fmt: skip
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                for x, y in batches(5):
                    pipeline.evaluate((x.float(), y.float()))
                    pipeline.step((x.float(), y.float()))
                pipeline.drain()
            return pipeline.state_dict()

        return on_threads(2, work)[0]

    found, wanted = weights(True), weights(False)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


class Detached(Called):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"schedule": "zero_bubble"}])
def test_a_loss_without_a_graph_is_refused(options: dict[str, Any]) -> None:
    """As ``backward()`` does; the step would train nothing."""
    frozen = chain_model(4).requires_grad_(False)
    for model in (Detached(linears()), frozen):
        with pytest.raises(ValueError, match="depends on no trained parameter .* without detach"):
            train(model, batches(1), 2, num_microbatches=2, mesh=(2, 1), **options)
    with pytest.raises(ValueError, match="depends on no trained parameter"), torch.no_grad():
        attempt(model=chain_model(2)).step(batches(1)[0])


@pytest.mark.parametrize("make", [lambda: chain_model(2), lambda: Called(linears()).double()])
def test_the_model_has_no_state_of_layers_that_other_ranks_train(make: Callable[[], nn.Module]) -> None:
    data, own, models = batches(3), ("0", "2"), [make() for _ in range(2)]

    def refused(model: nn.Module) -> None:
        with pytest.raises(ValueError, match="state_dict.. of the model on rank . has old values of "):
            model.state_dict()

    def work(fabric: Any) -> None:
        model = models[fabric.rank]
        forward = type(Chain(model)._forward)

        def pipeline() -> Pipeline:
            return Pipeline(model, mesh=(2, 1), loss=loss_of, optimizer=sgd, fabric=fabric)

        first = pipeline()
        kept = copy.deepcopy(model)
        model.state_dict()  # still what all ranks have
        first.step(data[0])
        refused(model)
        refused(pickle.loads(pickle.dumps(model)))
        kept.state_dict()
        weights = first.state_dict()
        if isinstance(model, nn.Sequential):
            part = model.get_submodule(own[fabric.rank])
            assert_close(weights, part.state_dict(prefix=f"{own[fabric.rank]}."))
        model.load_state_dict(weights)
        assert_close(dict(model.state_dict()), weights)
        first.step(data[1])
        refused(model)
        model.load_state_dict(first.state_dict())
        first.close()
        assert type(Chain(model)._forward) is forward
        second = pipeline()  # from the same model
        model.state_dict()
        second.step(data[2])
        refused(model)
        second.close()
        third = Pipeline(copy.deepcopy(model), mesh=(2, 1), loss=loss_of, optimizer=sgd, fabric=fabric)
        third.close()
        del first, second
        refused(model)

    on_threads(2, work)
    alone = attempt(model=models[0])
    alone.step(data[0])
    assert_close(dict(models[0].state_dict()), alone.state_dict())  # this rank trains all of it
    layer = linears()[0]
    layer.register_buffer("graph", torch.eye(8).to_sparse())
    attempt(model=nn.Sequential(layer, nn.Tanh()).double())
