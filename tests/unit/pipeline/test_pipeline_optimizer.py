"""Optimizers of pipelines see and do what one in a plain process does, on every mesh."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commsched import register_elementwise
from commsched.pipeline import Pipeline, reduction
from tests.support.pipeline_runs import (
    WIDTH,
    adam,
    assert_close,
    batches,
    chain_model,
    loss_of,
    momentum,
    on_threads,
    sgd,
)
from tests.support.rounding import rounding
from tests.unit.pipeline.test_pipeline_training import TiedEnds

Between = Callable[[list[nn.Parameter]], None]
MESHES = [(1, 1), (1, 2), (2, 2)]


def plain(
    model: nn.Module,
    data: Any,
    factory: Any,
    between: Between | None = None,
    clip: Callable[[list[nn.Parameter]], None] | None = None,
) -> dict[str, Tensor]:
    """The weights of one process. ``clip``: before each step; ``between``: after it."""
    model = copy.deepcopy(model)
    parameters, stepper = list(model.parameters()), factory(list(model.named_parameters()))
    for inputs, targets in data:
        stepper.zero_grad()
        loss_of(model(inputs), targets).backward()
        if clip is not None:
            clip(parameters)
        stepper.step()
        if between is not None:
            between(parameters)
    return model.state_dict()


def piped(
    model: nn.Module,
    data: Any,
    mesh: tuple[int, int],
    factory: Any,
    between: Between | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The weights of a pipeline. The factory takes pairs of name and parameter."""

    def make(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return factory(named_parameters)  # type: ignore[no-any-return]

    def work(fabric: Any) -> Any:
        given = {"loss": loss_of, "optimizer": make, "num_microbatches": 2, "bucket_bytes": 200} | options
        pipeline = Pipeline(copy.deepcopy(model), mesh=mesh, fabric=fabric, **given)
        for batch in data:
            pipeline.step(batch)
            if between is not None:
                between(list(pipeline.parameters()))
        state = pipeline.state_dict()
        pipeline.close()
        return state

    everyone = on_threads(mesh[0] * mesh[1], work)
    for state in everyone[1:]:
        assert all(torch.equal(value, everyone[0][name]) for name, value in state.items())
    return everyone[0]  # type: ignore[no-any-return]


def of_pairs(make: Any) -> Any:
    return lambda named: make([parameter for _, parameter in named])


class Normed(nn.Sequential):
    def __init__(self, layers: int = 2) -> None:
        torch.manual_seed(0)
        super().__init__(
            *(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)))
        )
        self.double()


def by_dim(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """No weight decay for norms and biases, as most training scripts have it."""
    parameters = [parameter for _, parameter in named]
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.05, momentum=0.9)


def by_name(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups = [
        {"params": [parameter], "weight_decay": 0.0 if name.endswith("bias") else 0.5, "lr": 0.01 * number}
        for number, (name, parameter) in enumerate(sorted(named), start=1)
    ]
    return torch.optim.SGD(groups, lr=0.05)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_groups_by_shape_mean_the_models_parameters(mesh: tuple[int, int], schedule: str) -> None:
    """Replicas gave the function flat shards: all had one dimension."""
    model, data = Normed(), batches(3)
    assert_close(piped(model, data, mesh, by_dim, schedule=schedule), plain(model, data, by_dim))


@pytest.mark.parametrize("options", [{"mesh": (1, 2)}, {"mesh": (2, 2)}, {"mesh": (2, 1), "mirrored": True}])
@pytest.mark.parametrize("make", [Normed, TiedEnds])
def test_groups_by_identity(make: Any, options: Any) -> None:
    """Scripts look up the model's own parameters, before the pipeline is made or in the function. It was
    given copies, so their group was empty. Adagrad makes its state in the function.
    """
    torch.manual_seed(0)
    model, data = make().double(), batches(3)
    options = {"schedule": "gpipe", "num_microbatches": 2, "bucket_bytes": 200} | options

    def weights(named: Any) -> set[int]:
        return {id(parameter) for name, parameter in named if name.endswith("weight")}

    def work(fabric: Any) -> Any:
        own = copy.deepcopy(model)
        before = weights(own.named_parameters()) if fabric.rank == 0 else None

        def factory(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            return weights_alone(params, before or weights(own.named_parameters()))

        pipeline = Pipeline(own, loss=loss_of, optimizer=factory, fabric=fabric, **options)
        for batch in data:
            pipeline.step(batch)
        state = pipeline.state_dict()
        pipeline.close()
        return state

    wanted = plain(model, data, lambda named: weights_alone([p for _, p in named], weights(named)))
    for found in on_threads(options["mesh"][0] * options["mesh"][1], work):
        assert_close(found, wanted)


class Keeping(torch.optim.SGD):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=0.05)
        self.rates = [{parameter: 0.05 for parameter in params}]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter, rate in self.rates[0].items():
                parameter -= rate * parameter.grad  # type: ignore[operator]


class Within(torch.optim.Optimizer):
    """Steps by an optimizer within, and keeps a tuple of the parameters that it halves."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.SGD(params, lr=0.05)
        self.halved = (params[0], params[-1])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for parameter in self.halved:
            parameter *= 0.5


def clipped_by_a_hook(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.05)
    matrices = [parameter for parameter in params if parameter.dim() > 1]

    def clip(*_: Any) -> None:
        assert nn.utils.clip_grad_norm_(params, 1e-3) > 1e-3
        nn.utils.clip_grad_value_(matrices, 1e-5)

    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.parametrize("make", [Keeping, Within, clipped_by_a_hook])
def test_optimizers_may_keep_parameters_elsewhere(make: Any) -> None:
    """They are the pipeline's there, too."""
    model, data, factory = Normed(), batches(3), of_pairs(make)
    mesh = (1, 1) if make is clipped_by_a_hook else (1, 2)  # gradients on shards cannot be read
    assert_close(piped(model, data, mesh, factory), plain(model, data, factory))


def weights_alone(params: list[nn.Parameter], weights: set[int]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in params if (id(p) in weights) == mine], "lr": 0.05 * mine} for mine in (1, 0)
    ]
    return torch.optim.Adagrad(groups, eps=1e-3)


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)])
@pytest.mark.parametrize("make", [Normed, TiedEnds])
def test_the_function_gets_each_stages_parameters_once(mesh: tuple[int, int], make: Any) -> None:
    model = make().double()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def work(fabric: Any) -> Any:
        calls: list[list[str]] = []

        def factory(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            for name, parameter in named_parameters:
                assert type(parameter) is nn.Parameter and parameter.requires_grad
                assert parameter.shape == shapes[name]
            calls.append([name for name, _ in named_parameters])
            return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)

        Pipeline(copy.deepcopy(model), mesh=mesh, loss=loss_of, optimizer=factory, fabric=fabric).close()
        (names,) = calls
        assert names == sorted(names, key=list(shapes).index)
        return names

    everyone = on_threads(mesh[0] * mesh[1], work)
    assert {name for names in everyone for name in names} == set(shapes)


@pytest.mark.parametrize("mesh", MESHES)
def test_optimizers_that_take_matrices_only_are_never_probed(mesh: tuple[int, int]) -> None:
    """torch.optim.Muon refuses vectors, and was tried with one."""

    class Matrices(torch.optim.SGD):
        def __init__(self, params: list[nn.Parameter]) -> None:
            assert all(parameter.dim() == 2 for parameter in params)
            super().__init__(params, lr=0.05, momentum=0.9)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))).double()
    data, factory = batches(3), of_pairs(Matrices)
    assert_close(piped(model, data, mesh, factory), plain(model, data, factory))


def test_sums_are_brought_to_where_a_stage_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose memory no message reaches: here to other memory of the host."""
    monkeypatch.setattr(reduction, "_HOST", torch.device("cpu", 0))
    model, data, factory = Normed(), batches(3), of_pairs(momentum)
    found = piped(model, data, (1, 2), factory, max_norm=0.05)
    assert_close(found, plain(model, data, factory, clip=clipping(0.05)))


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.AdamW])
def test_optimizers_with_and_without_a_first_state(make: Any) -> None:
    """Adagrad makes its state before the first step."""
    model, data = Normed(), batches(3)
    factory = of_pairs(lambda params: make(params, lr=0.01, eps=1e-3))
    assert_close(piped(model, data, (1, 2), factory), plain(model, data, factory))


def test_schedulers_and_hooks_see_the_whole_optimizer() -> None:
    model, data = Normed(), batches(3)

    def work(fabric: Any) -> Any:
        called: list[list[int]] = []
        pipeline = Pipeline(
            copy.deepcopy(model), mesh=(1, 2), loss=loss_of, optimizer=sgd, fabric=fabric, bucket_bytes=200
        )
        (optimizer,) = pipeline.optimizers
        optimizer.register_step_post_hook(
            lambda *_: called.append([p.dim() for p in optimizer.param_groups[0]["params"]])
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for batch in data:
                pipeline.step(batch)
                scheduler.step()
        assert called == [[p.dim() for p in model.parameters()]] * 3
        for shown, kept in zip(pipeline.optimizers[0].param_groups[0]["params"], pipeline.parameters()):
            assert torch.equal(shown, kept)
        return pipeline.state_dict()

    expected = copy.deepcopy(model)
    optimizer = sgd(list(expected.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for inputs, targets in data:
        optimizer.zero_grad()
        loss_of(expected(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    for state in on_threads(2, work):
        assert_close(state, expected.state_dict())


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_on_shards_cannot_be_read_before_a_step(hooked: bool) -> None:
    """They read as None, and clipping them did nothing."""

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        clipping(1e-3)(optimizer.param_groups[0]["params"])

    def work(fabric: Any) -> Any:
        given: dict[str, Any] = {} if hooked else {"on_step": clip}
        pipeline = Pipeline(
            chain_model(2), mesh=(1, fabric.size), loss=loss_of, optimizer=sgd, fabric=fabric, **given
        )
        if hooked:
            pipeline.optimizers[0].register_step_pre_hook(clip)
        pipeline.step(batches(1)[0])
        return pipeline.state_dict()

    wanted = plain(chain_model(2), batches(1), of_pairs(sgd), clip=clipping(1e-3))
    assert_close(on_threads(1, work)[0], wanted)
    with pytest.raises(ValueError, match=r"cannot read or set the gradient of 0.weight: .*max_norm="):
        on_threads(2, work)


def clamp(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.clamp_(-0.2, 0.2)


def shrink(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.7)


def replace(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = (0.7 * parameter.data).t().contiguous().t()


@pytest.mark.parametrize("change", [clamp, shrink, replace])
@pytest.mark.parametrize("mesh", MESHES)
def test_weights_that_a_script_changes_between_steps_count(change: Between, mesh: tuple[int, int]) -> None:
    """Replicas stepped copies in their buckets, and the change was lost."""
    model, data = chain_model(2), batches(3)
    factory = of_pairs(momentum)
    assert_close(piped(model, data, mesh, factory, change), plain(model, data, factory, change))


class Scaled(nn.Module):
    """Parameters of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH).double(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale.double()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("bucket_bytes", [100, 1e9])
@pytest.mark.parametrize("steps", [True, False])
def test_parameters_of_several_types(mesh: tuple[int, int], bucket_bytes: float, steps: bool) -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(Scaled(), Scaled()), batches(2)
    factory = of_pairs(sgd)
    if steps:
        found = piped(model, data, mesh, factory, bucket_bytes=bucket_bytes)
    else:
        found = piped(model, data, mesh, None, by_hand, bucket_bytes=bucket_bytes, optimizer=None)
    assert_close(found, plain(model, data, factory), rounding(torch.float32, 12 * WIDTH, 8 * 12))


def by_hand(parameters: list[nn.Parameter]) -> None:
    """A step of ``sgd`` by the caller of a pipeline without an optimizer."""
    stepper = sgd(parameters)
    stepper.step()
    stepper.zero_grad()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).mean(1)  # type: ignore[no-any-return]


def words(count: int) -> list[Any]:
    dice = torch.Generator().manual_seed(5)
    return [(torch.randint(0, 10, (len(y), 3), generator=dice), y) for _, y in batches(count)]


def sparse_adam(named: Any) -> torch.optim.Optimizer:
    """For the stage of the table alone."""
    parameters = [parameter for _, parameter in named]
    if [parameter.shape[0] for parameter in parameters] == [10]:
        return torch.optim.SparseAdam(parameters, lr=0.01, eps=1e-3)
    return momentum(parameters)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_sparse_gradients(mesh: tuple[int, int], schedule: str) -> None:
    torch.manual_seed(0)
    model, data, factory = nn.Sequential(Words(), *chain_model(1)).double(), words(3), of_pairs(sgd)
    wanted = plain(model, data, factory)
    assert_close(piped(model, data, mesh, factory, schedule=schedule), wanted)
    assert_close(piped(model, data, mesh, None, by_hand, schedule=schedule, optimizer=None), wanted)


def test_sparse_adam_steps_a_table_on_replicas() -> None:
    torch.manual_seed(0)
    table, rest = Words().double(), chain_model(1)
    model, data = nn.Sequential(table, *rest), words(3)
    expected = copy.deepcopy(model)
    steppers = [sparse_adam(list(part.named_parameters())) for part in (expected[0], expected[1])]
    for inputs, targets in data:
        for stepper in steppers:
            stepper.zero_grad()
        loss_of(expected(inputs), targets).backward()
        for stepper in steppers:
            stepper.step()
    assert_close(piped(model, data, (2, 2), sparse_adam), expected.state_dict())


class Unnamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(10, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.table, sparse=True).mean(1)


def test_sparse_gradients_of_other_modules_are_refused_on_replicas() -> None:
    model = nn.Sequential(Unnamed(), *chain_model(1)).double()
    with pytest.raises(ValueError, match=r"got a sparse gradient, and no nn\.Embedding .* use such a module"):
        piped(model, words(1), (1, 2), of_pairs(sgd))


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.to(torch.bfloat16))).double()


class Steady(torch.optim.SGD):
    """Its steps depend on no gradient, and are less than what bfloat16 can add to most weights."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    assert parameter.dtype == parameter.grad.dtype == torch.float32
                    parameter.data.sub_(2.0**-14)


@register_elementwise
class SteadyOnShards(Steady):
    pass


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [Steady, SteadyOnShards])
def test_masters_add_up_what_half_precision_cannot(mesh: tuple[int, int], make: Any) -> None:
    """A checkpoint keeps the masters, and weights that a script changes replace theirs."""
    torch.manual_seed(0)
    model, data = nn.Sequential(Halved(), Halved()), batches(16)

    def work(fabric: Any) -> Any:
        def made() -> Pipeline:
            return Pipeline(
                copy.deepcopy(model), mesh=mesh, loss=loss_of, fabric=fabric, master_weights=True,
                optimizer=lambda params: make(params, lr=0.1), bucket_bytes=64,
            )  # fmt: skip

        pipeline = made()
        for batch in data[:3]:
            pipeline.step(batch)
        shrink(list(pipeline.parameters()))
        for batch in data[3:7]:
            pipeline.step(batch)
        state = copy.deepcopy(pipeline.checkpoint())
        pipeline.close()
        pipeline = made()
        pipeline.resume(state)
        for batch in data[7:]:
            pipeline.step(batch)
        found = pipeline.state_dict()
        pipeline.close()
        return found

    for found in on_threads(mesh[0] * mesh[1], work):
        for name, value in model.state_dict().items():
            wide = value.float()
            for _ in range(3):
                wide -= 2.0**-14
            wide = (wide.bfloat16() * 0.7).float()
            for _ in range(13):
                wide -= 2.0**-14
            assert torch.equal(found[name], wide.bfloat16()), name


def summed_in_float32(model: nn.Module, data: Any, replicas: int, make: Any) -> dict[str, Tensor]:
    """The weights of one process that adds up what the replicas of a stage compute of two micro-batches."""
    model = copy.deepcopy(model)
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    stepper = make(list(masters.values()))
    for inputs, targets in data:
        stepper.zero_grad()
        rows = len(targets) // (2 * replicas)
        sums = [dict.fromkeys(masters, 0.0) for _ in range(replicas)]
        for number, (x, y) in enumerate(zip(inputs.split(rows), targets.split(rows), strict=True)):
            (loss_of(model(x), y) / (2 * replicas)).backward()
            for p in masters:
                sums[number % replicas][p] = sums[number % replicas][p] + p.grad.float()
                p.grad = None
        for p, master in masters.items():
            master.grad = sum(its[p] for its in sums)
        stepper.step()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
    return model.state_dict()


@pytest.mark.parametrize("mesh", [*MESHES, (2, 1)])
@pytest.mark.parametrize("options", [{"schedule": "zero_bubble"}, {"placement": "eager"}], ids=str)
@pytest.mark.parametrize("make", [momentum, lambda params: Whole(params, lr=0.05)])
def test_gradients_of_masters_are_summed_in_float32(mesh: Any, options: dict[str, Any], make: Any) -> None:
    """Half-precision sums gave weights that depended on the mesh."""
    torch.manual_seed(0)
    model, data = nn.Sequential(Halved(), Halved()), batches(4)
    found = piped(model, data, mesh, of_pairs(make), master_weights=True, **options)
    wanted = summed_in_float32(model, data, mesh[1], make)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


class Whole(torch.optim.SGD):
    """A class of its own: replicas step whole parameters."""


def clipping(max_norm: float, norm_type: float = 2.0) -> Callable[[list[nn.Parameter]], None]:
    def clip(parameters: list[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    return clip


@pytest.mark.few
@pytest.mark.parametrize("mesh", [*MESHES, (2, 1)])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("norm_type", [2.0, torch.inf])
def test_max_norm_is_of_all_stages(mesh: tuple[int, int], schedule: str, norm_type: float) -> None:
    """The norm is far above: in one process too, all gradients get smaller."""
    model, data, factory = Normed(4), batches(3), of_pairs(momentum)
    options = {"schedule": schedule, "max_norm": 0.05, "norm_type": norm_type}
    found = piped(model, data, mesh, factory, **options)
    assert_close(found, plain(model, data, factory, clip=clipping(0.05, norm_type)))


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_max_norm_counts_tied_parameters_once(mesh: tuple[int, int], schedule: str) -> None:
    torch.manual_seed(0)
    model, data, factory = TiedEnds().double(), batches(3), of_pairs(momentum)
    found = piped(model, data, mesh, factory, schedule=schedule, max_norm=0.05)
    assert_close(found, plain(model, data, factory, clip=clipping(0.05)))


def test_max_norm_of_mirrored_replicas() -> None:
    model, data = Normed(), batches(3)
    for make in (torch.optim.SGD, Whole):
        factory = of_pairs(lambda params, make=make: make(params, lr=0.05))
        for clip in (None, 0.05):
            found = piped(model, data, (2, 1), factory, mirrored=True, schedule="gpipe", max_norm=clip)
            wanted = plain(model, data, factory, clip=None if clip is None else clipping(clip))
            assert_close(found, wanted)


def test_max_norm_of_sparse_gradients_and_masters() -> None:
    torch.manual_seed(0)
    model, data, factory = nn.Sequential(Words(), *chain_model(1)).double(), words(3), of_pairs(sgd)
    for mesh in MESHES:
        found = piped(model, data, mesh, factory, max_norm=0.05, master_weights=True)
        assert_close(found, plain(model, data, factory, clip=clip_dense))


def clip_dense(parameters: list[nn.Parameter]) -> None:
    """torch.nn.utils takes no norm of sparse gradients."""
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    nn.utils.clip_grad_norm_(parameters, 0.05)


@pytest.mark.parametrize("mesh", [*MESHES, (2, 1)])
@pytest.mark.parametrize("make", [Normed, TiedEnds])
def test_gradients_that_are_left_are_clipped_over_all_stages(mesh: tuple[int, int], make: Any) -> None:
    torch.manual_seed(0)
    model, ((inputs, targets),) = make().double(), batches(1)
    expected = copy.deepcopy(model)
    loss_of(expected(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
    wanted = {name: p.grad for name, p in expected.named_parameters()}

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(model), mesh=mesh, loss=loss_of, optimizer=None, fabric=fabric, bucket_bytes=200
        )
        pipeline.step((inputs, targets))
        total = pipeline.clip_grad_norm_(0.05)
        names = [name for stage in pipeline.stages.values() for name in stage.versions.names]
        grads = dict(zip(names, (p.grad for p in pipeline.parameters())))
        pipeline.close()
        return total, grads

    everyone = on_threads(mesh[0] * mesh[1], work)
    for total, grads in everyone:
        assert torch.equal(total, everyone[0][0])
        assert_close({"norm": total}, {"norm": norm})
        assert_close(grads, {name: grad for name, grad in wanted.items() if name in grads})


def test_a_norm_that_is_no_number_is_an_error_if_asked_for() -> None:
    def work(fabric: Any) -> None:
        pipeline = Pipeline(chain_model(2), mesh=(2, 1), loss=loss_of, optimizer=None, fabric=fabric)
        x, y = batches(1)[0]
        pipeline.step((x * torch.inf, y))
        with pytest.raises(RuntimeError, match="total norm of the gradients is nan"):
            pipeline.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert pipeline.clip_grad_norm_(1.0).isnan()

    on_threads(2, work)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "2bw", "max_norm": 1.0}, "'2bw' is asynchronous.*use a synchronous schedule"),
        ({"schedule": "pipedream", "skip_nonfinite": True}, "'pipedream' is asynchronous"),
        ({"optimizer": None, "max_norm": 1.0}, r"call pipeline.clip_grad_norm_\(\) before each"),
    ],
)
def test_norms_that_do_not_exist_are_refused(options: dict[str, Any], message: str) -> None:
    def work(fabric: Any) -> None:
        with pytest.raises(ValueError, match=message):
            Pipeline(chain_model(2), fabric=fabric, **{"loss": loss_of, "optimizer": sgd, **options})

    on_threads(2, work)


@pytest.mark.parametrize("mesh", [*MESHES, (2, 1)])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_all_stages_skip_a_step_with_a_gradient_that_is_infinite(
    mesh: tuple[int, int], max_norm: float | None
) -> None:
    """Only the first stage has one."""
    torch.manual_seed(0)
    model, data, factory = nn.Sequential(Overflowing(), *chain_model(2)).double(), batches(4), of_pairs(adam)
    data[1][0][-1] = 1e200
    clip = None if max_norm is None else clipping(max_norm)
    wanted = plain(model, [data[0], *data[2:]], factory, clip=clip)
    assert_close(piped(model, data, mesh, factory, max_norm=max_norm, skip_nonfinite=True), wanted)
    numbers: list[int] = []
    options = {"on_step": lambda _, number: numbers.append(number), "skip_nonfinite": True}
    piped(model, data, (1, 1), factory, **options)
    assert numbers == [0, 2, 3]


class Overflowing(nn.Module):
    """Finite values, and a gradient that is no number where the input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale + torch.sqrt(self.scale * (x.abs() < 1e100))
