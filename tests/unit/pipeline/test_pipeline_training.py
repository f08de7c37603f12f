"""Synchronous training is plain training; placements, replicas and recomputation change no result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commsched.pipeline import Chain, Pipeline, split
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
    replayed,
    sgd,
    train,
)


@pytest.mark.few
@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_synchronous_schedules_accumulate_like_one_process(schedule: str, optimizer: Any) -> None:
    model, data = chain_model(4), batches(4, rows=13)
    weights, losses, _ = train(model, data, 4, optimizer, schedule=schedule, num_microbatches=3, mesh=(2, 2))
    wanted, expected = by_delays(model, data, 3, lambda name: 0, optimizer)
    assert_close(weights, wanted)
    assert losses == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("2bw", 1)])
def test_running_two_ahead_changes_no_result(schedule: str, delay: int) -> None:
    model, data = chain_model(3), batches(5)
    weights, _, _ = train(model, data, 3, momentum, schedule=schedule, num_microbatches=6, hop=2)
    assert_close(weights, by_delays(model, data, 6, lambda name: delay, momentum)[0])


@pytest.mark.few
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "zero_bubble", "wpipe"])
def test_placements_and_buckets_give_the_same_bits(schedule: str) -> None:
    model, data = chain_model(4), batches(5)
    found = [
        train(
            model,
            data,
            6,
            adam,
            schedule=schedule,
            num_microbatches=4,
            mesh=(2, 3),
            placement=placement,
            bucket_bytes=size,
        )[0]
        for placement, size in (
            ("eager", 1e9),
            ("eager", 128),
            ("bubble", 128),
            ("bubble", 1e9),
        )
    ]
    for weights in found[1:]:
        assert all(torch.equal(weights[name], value) for name, value in found[0].items())


@pytest.mark.few
@pytest.mark.parametrize("schedule", ["1f1b", "ashpipe", "pipedream", "gpipe"])
@pytest.mark.parametrize("counts", [[4, 3, 1], [1, 2, 3], [2, 2, 1]])
def test_unequal_replicas_equal_none(schedule: str, counts: list[int]) -> None:
    model, data = chain_model(3), batches(6, rows=11)
    parts = 1 if schedule in ("ashpipe", "pipedream") else 2
    options: dict[str, Any] = {"schedule": schedule, "num_microbatches": parts}
    one, first, _ = train(model, data, 3, momentum, mesh=(3, 1), **options)
    many, second, _ = train(model, data, sum(counts), momentum, mesh=(3, counts), **options)
    assert_close(many, one)
    assert second == pytest.approx(first, rel=ROUNDING)


@pytest.mark.parametrize("shape", [(1, 1), (4, 2), (1,)])
def test_bundles_are_large_batch_training(shape: tuple[int, ...]) -> None:
    from scheduler.pipelines.schedules import bundle_ranks

    model, data, hosts = chain_model(2), batches(4), 2
    ranks = bundle_ranks(hosts, shape)
    each = sum(shape)
    grouped = [list(range(host * each, (host + 1) * each)) for host in range(hosts)]
    weights, _, pipeline = train(
        model, data, hosts * each, momentum, schedule="bundle", ranks=ranks, hosts=grouped
    )
    assert pipeline.layout.reduction == "masters"
    assert_close(weights, by_delays(model, data, 1, lambda name: 0, momentum)[0])


def test_bundles_with_fronts_and_rears_on_different_hosts() -> None:
    from scheduler.pipelines.schedules import bundle_ranks_across

    model, data = chain_model(2), batches(4)
    options: dict[str, Any] = {"schedule": "bundle", "ranks": bundle_ranks_across(2, 2)}
    weights, _, pipeline = train(model, data, 4, momentum, hosts=[[0, 1], [2, 3]], **options)
    assert pipeline.layout.ranks == ((0, 1), (2, 3))
    assert_close(weights, by_delays(model, data, 1, lambda name: 0, momentum)[0])
    with pytest.raises(ValueError, match="an even number of hosts; got 3 hosts of 2 ranks"):
        bundle_ranks_across(3, 2)


class NotElementwise(torch.optim.SGD):
    """Not known to step every element by itself, so shards of it must not be stepped."""


def test_other_optimizers_step_whole_parameters() -> None:
    model, data = chain_model(2), batches(4)

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return NotElementwise(params, lr=0.05, momentum=0.9)

    weights, _, _ = train(model, data, 4, optimizer, schedule="2bw", num_microbatches=2, mesh=(2, 2))
    _, _, pipeline = train(model, data, 2, optimizer, schedule="2bw", num_microbatches=2, mesh=(2, 1))
    assert_close(weights, replayed(model, data, pipeline.program, optimizer)[0])


def test_learning_rates_follow_the_number_of_the_step() -> None:
    model, data = chain_model(3), batches(6)

    def rate(optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)

    class Decaying(torch.optim.SGD):
        taken = 0

        def step(self, closure: Any = None) -> Any:
            rate(self, self.taken)
            self.taken += 1
            return super().step(closure)

    weights, _, pipeline = train(model, data, 3, schedule="pipedream", on_step=rate)
    wanted, _ = replayed(model, data, pipeline.program, lambda params: Decaying(params, lr=0.1))
    assert_close(weights, wanted)


# -- models --------------------------------------------------------------------------------------------------


class Skips(nn.Module):
    """Several inputs, skip connections over several layers, a tuple between layers, dropout, batch norm."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        a = torch.tanh(self.first(x))
        b = self.norm(self.second(a) * mask)
        c = self.drop(self.third(b)) * self.scale
        return self.last(torch.cat([c + a, x * mask], 1))


def masked(data: list[Any], how: type) -> list[Any]:
    dice = torch.Generator().manual_seed(1)
    found = []
    for x, y in data:
        mask = (torch.rand(x.shape, generator=dice) < 0.8).double()
        found.append(({"x": x, "mask": mask} if how is dict else (x, mask), y))
    return found


class Spread(nn.Module):
    """Calls a model with a batch's inputs as arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Tensor:
        return self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)


@pytest.mark.parametrize("how", [tuple, dict])
@pytest.mark.parametrize(("schedule", "mesh"), [("1f1b", (4, 1)), ("zero_bubble", (2, 2)), ("2bw", (4, 1))])
def test_skips_and_several_inputs(schedule: str, mesh: Any, how: type) -> None:
    """Without the norm, whose statistics are those of a micro-batch's rows on one replica."""
    torch.manual_seed(0)
    model = Skips().double()
    model.norm = nn.LayerNorm(WIDTH).double()
    data = masked(batches(4), how)
    weights, losses, pipeline = train(
        model, data, mesh[0] * mesh[1], schedule=schedule, num_microbatches=2, mesh=mesh
    )
    spread = Spread(model)
    late = max(pipeline.delays)
    wanted, expected = by_delays(spread, data, 2, lambda name: late)
    assert_close(weights, {name.removeprefix("model."): value for name, value in wanted.items()})
    assert losses == pytest.approx(expected, rel=ROUNDING)


def test_split_carries_along_what_is_alive() -> None:
    torch.manual_seed(0)
    model = Skips().double().eval()
    x, mask = torch.randn(5, WIDTH).double(), torch.ones(5, WIDTH).double()
    parts = split(model, 4)
    state: Any = (x, mask)
    for part in parts:
        state = part(*state)
    assert torch.equal(state, model(x, mask))


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_changes_neither_dropout_nor_statistics(recompute: bool) -> None:
    """One rank with two stages: threads would share the random numbers."""

    def run(again: bool) -> Any:
        torch.manual_seed(3)
        model = Skips(dropout=0.4).double()
        torch.manual_seed(4)
        weights, losses, _ = train(
            model,
            masked(batches(4), tuple),
            1,
            schedule="interleaved",
            num_microbatches=3,
            mesh=(1, 1),
            recompute=again,
        )
        return weights, losses

    (plain, first), (found, second) = run(False), run(recompute)
    assert first == second
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    assert int(found["norm.num_batches_tracked"]) == 12


class Scaled(nn.Module):
    """Divides by a buffer: the largest value so far, which most forwards only read, or a running mean."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.linear, self.writes, self.factor = nn.Linear(WIDTH, WIDTH), writes, 1.0
        self.register_buffer("scale", torch.full((), 0.1))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.checkpointed else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        size = y.detach().abs().max()
        if self.writes == "data":
            self.scale.data.mul_(0.5).add_(size, alpha=0.5)
        elif self.writes == "sometimes" and size > self.scale:
            self.scale.copy_(size)
        y = y / self.scale.clone() * self.factor
        return torch.tanh(y) if self.training else y


@pytest.mark.parametrize(
    ("writes", "schedule", "count"),
    [
        ("sometimes", "gpipe", 4),
        ("data", "gpipe", 4),
        ("script", "2bw", 2),
        ("attributes", "2bw", 2),
        ("attributes", "checkpoint", 1),
    ],
)
def test_recomputation_finds_the_modules_as_its_forward(writes: str, schedule: str, count: int) -> None:
    """Later forwards have written to buffers meanwhile, or a script has changed them, modes or numbers."""
    torch.manual_seed(0)
    model, data = nn.Sequential(Scaled(writes), nn.Tanh(), Scaled(writes)).double(), batches(4)

    def run(again: bool) -> Any:
        def work(fabric: Any) -> Any:
            mine = copy.deepcopy(model)
            blocks: Any = (mine[0], mine[2])
            options: Any = {"loss": loss_of, "optimizer": momentum, "fabric": fabric}
            if schedule == "checkpoint":
                blocks[0].checkpointed = blocks[1].checkpointed = again
                pipeline = Pipeline(mine, "pipedream", count, (2, 1), **options)
            else:
                pipeline = Pipeline(mine, schedule, count, (2, 1), **options, recompute=again)
            losses = []
            for number, batch in enumerate(data):
                losses.append(pipeline.step(batch))
                for block in blocks:
                    if writes == "script":
                        block.scale.fill_(1.0 + number)
                    elif writes == "attributes":
                        block.factor = 1.0 + number
                        block.train(number != 1)
            losses += pipeline.drain()
            return losses, pipeline.state_dict()

        return on_threads(2, work)[0]

    (losses, plain), (again, found) = run(False), run(True)
    assert losses == again
    assert all(torch.equal(found[name], value) for name, value in plain.items())


class Counting(nn.Module):
    """Counts its backwards in a hook, which also scales the gradient by the number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.backwards, self.norm = nn.Linear(WIDTH, WIDTH), 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if y.requires_grad:
            y.register_hook(self._note)
        return y

    def _note(self, grad: Tensor) -> Tensor:
        self.backwards += 1
        self.norm = float(grad.norm())
        return grad / self.backwards


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("schedule", "count"), [("pipedream", 1), ("2bw", 2)])
def test_what_hooks_of_a_backward_count_stays(schedule: str, count: int, recompute: bool) -> None:
    """A backward in a later step than its forward forgot it."""
    torch.manual_seed(0)
    model, data = nn.Sequential(Counting(), Counting()).double(), batches(5)

    def work(fabric: Any) -> Any:
        options: Any = {"loss": loss_of, "optimizer": momentum, "fabric": fabric, "recompute": recompute}
        pipeline = Pipeline(copy.deepcopy(model), schedule, count, (2, 1), **options)
        for batch in data:
            pipeline.step(batch)
        pipeline.drain()
        blocks = [part for stage in pipeline.stages.values() for part in stage.module.modules()]
        return [(part.backwards, part.norm) for part in blocks if isinstance(part, Counting)]

    for counts in on_threads(2, work):
        assert [number for number, _ in counts] == [len(data) * count]
        assert all(norm > 0 for _, norm in counts)


class Started(nn.Module):
    """Adds its buffer in its first forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("start", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.start is not None:
            y, self.start = y + self.start, None
        return torch.tanh(y)


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 2), ("2bw", 2)])
def test_recomputation_finds_a_buffer_that_its_forward_has_taken_away(schedule: str, count: int) -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(Started(), Started()).double(), batches(3)

    def run(again: bool) -> Any:
        def work(fabric: Any) -> Any:
            options: Any = {"loss": loss_of, "optimizer": momentum, "fabric": fabric, "recompute": again}
            pipeline = Pipeline(copy.deepcopy(model), schedule, count, (2, 1), **options)
            losses = [pipeline.step(batch) for batch in data] + pipeline.drain()
            return losses, [value.tolist() for value in pipeline.state_dict().values()]

        return on_threads(2, work)[0]

    assert run(True) == run(False)


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 2), ("bundle", 1)])
def test_frozen_and_unused_parameters(schedule: str, count: int) -> None:
    """As in one process, weight decay moves no parameter that no replica has used, in buckets or whole."""
    model = chain_model(4)
    model[2].weight.requires_grad_(False)
    for module in (model, model[0]):
        module.register_parameter("spare", nn.Parameter(torch.ones(3)))
    data = batches(3)
    weights, _, _ = train(model, data, 4, momentum, schedule=schedule, num_microbatches=count, mesh=(2, 2))
    trained = copy.deepcopy(model)
    stepper = momentum([p for p in trained.parameters() if p.requires_grad])
    for x, y in data:
        stepper.zero_grad()
        loss_of(trained(x), y).backward()
        stepper.step()
    assert_close(weights, trained.state_dict())


class TiedEnds(nn.Module):
    """The first layer's matrix is also the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.body(self.embed(x)), self.embed.weight, self.bias)


class TiedModules(nn.Sequential):
    """Two modules have one matrix. Stages exchange their parameters, which once hid the tie."""

    def __init__(self) -> None:
        parts = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        parts[2].weight = parts[1].weight  # inside one stage, or not
        parts[3].weight = parts[0].weight
        super().__init__(parts[0], nn.Tanh(), *parts[1:])


@pytest.mark.few
@pytest.mark.parametrize("make", [TiedEnds, TiedModules])
@pytest.mark.parametrize(
    ("schedule", "mesh"),
    [("1f1b", (2, 1)), ("1f1b", (2, 2)), ("gpipe", (3, [2, 1, 1])), ("zero_bubble", (2, 1))]
    + [("interleaved", (2, 2)), ("interleaved", (1, 1)), ("bundle", (2, 2))],
)
def test_tied_embeddings_in_synchronous_schedules(make: Any, schedule: str, mesh: Any) -> None:
    torch.manual_seed(0)
    model, data = make().double(), batches(4)
    size = mesh[0] * mesh[1] if isinstance(mesh[1], int) else sum(mesh[1])
    parts = 1 if schedule == "bundle" else 2
    weights, _, pipeline = train(
        model, data, size, adam, schedule=schedule, num_microbatches=parts, mesh=mesh
    )
    assert Chain(model).tied(pipeline.layout.cuts)
    assert_close(weights, by_delays(model, data, 1, lambda name: 0, adam)[0])


@pytest.mark.parametrize("make", [TiedEnds, TiedModules])
@pytest.mark.parametrize("schedule", ["pipedream", "2bw", "wpipe"])
def test_tied_embeddings_are_refused_by_asynchronous_schedules(make: Any, schedule: str) -> None:
    def work(fabric: Any) -> None:
        Pipeline(make(), schedule, mesh=(2, 1), loss=loss_of, optimizer=sgd, fabric=fabric)

    with pytest.raises(ValueError, match=r"(embed|0).weight.* is used by stages \[0, .*\].*asynchronous"):
        on_threads(2, work)


def test_a_tie_inside_one_stage_is_nothing_special() -> None:
    torch.manual_seed(0)
    model, data = TiedEnds().double(), batches(5)
    first, second = copy.deepcopy(model), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    whole = nn.Sequential(first, second)
    weights, _, _ = train(whole, data, 2, schedule="pipedream", mesh=(2, 1))
    assert_close(weights, by_delays(whole, data, 1, lambda name: 1 if name.startswith("0") else 0)[0])
