"""Parameters that a step does not use: no gradient, no weight decay, no momentum, as in one process.

Replicas of a stage summed zeros where no replica had a gradient, and the optimizer then moved the parameter
by momentum and weight decay.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from commsched.pipeline import Pipeline
from commsched.pipeline.update import Stepped
from scheduler.ir.layout import Placement, Samples, Tiles
from tests.support.cases import Me, case, main
from tests.support.pipeline_runs import RATE, ROUNDING, WIDTH, assert_close, batches, momentum, replayed

# By step the rows that use the branches: none, one replica's, all, and the first step none.
MARKED: list[Sequence[int]] = [(), (0,), (), range(12), (), (11,), (), (3, 4), ()]
Share = tuple[int, slice, dict[str, Any]]
"""A parameter's place, the range of its elements that a rank steps, and the state of them."""


class Branch(nn.Module):
    """``sometimes`` for rows whose last column holds a mark, and only where there are any."""

    def __init__(self, sometimes: nn.Module | None = None) -> None:
        super().__init__()
        self.always, self.never = nn.Linear(WIDTH - 1, WIDTH - 1), nn.Linear(WIDTH - 1, WIDTH - 1)
        self.sometimes = nn.Linear(WIDTH - 1, WIDTH - 1) if sometimes is None else sometimes

    def forward(self, x: Tensor) -> Tensor:
        values, marks = x[:, :-1], x[:, -1:]
        out = torch.tanh(self.always(values))
        if marks.any():
            out = out + marks * self.sometimes(values)
        return torch.cat([out, marks], 1)


class Fork(nn.Module):
    """Two outputs; a later stage uses the second one for marked rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH - 1, WIDTH - 1), nn.Linear(WIDTH - 1, WIDTH - 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, marks = x[:, :-1], x[:, -1:]
        return torch.cat([torch.tanh(self.left(values)), marks], 1), self.right(values)


class Through(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH - 1, WIDTH - 1)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        values, marks = pair[0][:, :-1], pair[0][:, -1:]
        return torch.cat([torch.tanh(self.own(values)), marks], 1), pair[1]


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH - 1, WIDTH - 1)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        values, marks = pair[0][:, :-1], pair[0][:, -1:]
        if marks.any():
            values = values + marks * pair[1]
        return torch.cat([self.own(values), marks], 1)


class PixelBranch(nn.Module):
    """A branch that all samples of a step take, or none."""

    on = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.always(x))
        return out + self.sometimes(x) if PixelBranch.on else out


class Unknown(torch.optim.SGD):
    """Not known to update every element by itself, so it gets whole parameters."""


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1)


def unknown(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Unknown(params, lr=RATE, momentum=0.9, weight_decay=0.01)


def branches(tied: bool = False) -> nn.Sequential:
    """Two layers. ``tied``: their branches have one linear layer."""
    torch.manual_seed(0)
    first = Branch()
    return nn.Sequential(first, Branch(first.sometimes if tied else None)).double()


def marked() -> list[Any]:
    data = batches(len(MARKED))
    for (inputs, _), rows in zip(data, MARKED):
        inputs[:, -1] = 0
        inputs[list(rows), -1] = 1
    return data


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets)[:, :-1].square().sum(1).mean()


def shares(update: Stepped) -> Iterator[Share]:
    """Everything that a rank steps of a stage."""
    assert update.optimizer is not None
    for part in update.parts():
        assert update.shards is not None
        yield part.gradient.number, slice(part.start, part.stop), update.shards.state.get(part.leaf, {})
    for place, parameter in enumerate(() if update.shards else update.parameters):
        yield place, slice(0, None), update.optimizer.state.get(parameter, {})


def check_states(pipeline: Pipeline, model: nn.Module, expected: torch.optim.Optimizer) -> None:
    """Each rank's optimizers hold what one process's holds of the same elements, and nothing else."""
    order = {id(p): number for number, p in enumerate(model.parameters())}
    stepped = expected.param_groups[0]["params"]
    every = dict(model.named_parameters(remove_duplicate=False))
    for number, update in pipeline._updates.items():
        names = pipeline.stages[number].versions.names
        assert isinstance(update, Stepped)
        for place, elements, state in shares(update):
            wanted = expected.state.get(stepped[order[id(every[names[place]])]], {})
            assert state.keys() == wanted.keys(), (names[place], state, wanted)
            for key, value in wanted.items():
                one = value if key == "step" else value.view(-1)[elements]
                found = state[key].view(one.shape)
                torch.testing.assert_close(found, one, rtol=ROUNDING, atol=ROUNDING, msg=names[place])


def trains_like_one_process(
    me: Me, model: nn.Module, optimizer: Any, schedule: str, count: int, mesh: Any, **options: Any
) -> None:
    data, made = marked(), []

    def kept(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(optimizer(params))
        return made[-1]

    pipeline = Pipeline(
        copy.deepcopy(model), schedule, count, mesh, loss=loss_of, optimizer=optimizer, **options
    )
    for stage in pipeline.stages.values():
        me.shake(stage.module)
    for batch in data:
        pipeline.step(batch)
    pipeline.drain()
    wanted, _ = replayed(model, data, pipeline.program, kept, loss_of)
    assert_close(pipeline.state_dict(), wanted)
    check_states(pipeline, model, made[-1])
    pipeline.close()


@case(ranks=(2, 4))
def replicas_leave_unused_parameters_alone(me: Me) -> None:
    one, several = {"bucket_bytes": 1e9}, {"bucket_bytes": 120}
    eager = {"bucket_bytes": 120, "placement": "eager"}
    cases = [("1f1b", 2, (1, me.size), several, optimizer) for optimizer in (momentum, adamw, unknown)]
    if me.size == 4:
        cases += [
            ("1f1b", 2, (2, 2), one, momentum),
            ("1f1b", 2, (2, 2), eager, adamw),
            ("2bw", 2, (2, 2), several, momentum),
            ("2bw", 2, (2, 2), several, adamw),
            ("zero_bubble", 2, (2, 2), several, momentum),
            ("zero_bubble", 2, (2, 2), several, unknown),
            ("pipedream", 1, (2, [1, 3]), several, momentum),
            ("bundle", 1, (2, 2), {}, adamw),
        ]
    for schedule, count, mesh, options, optimizer in cases:
        trains_like_one_process(me, branches(), optimizer, schedule, count, mesh, **options)


@case(ranks=(2, 4))
def tied_parameters_are_left_alone_too(me: Me) -> None:
    for optimizer, size in product((momentum, adamw), (1e9, 120)):
        model, mesh = branches(tied=True), (2, me.size // 2)
        trains_like_one_process(me, model, optimizer, "1f1b", 2, mesh, bucket_bytes=size)


@case(ranks=(2, 4))
def gradients_that_are_none_stay_none_between_stages(me: Me) -> None:
    """Zeros were sent instead, and the stage before computed gradients of zeros for its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(Fork(), *([Through()] if me.size == 4 else []), Join()).double()
    meshes = [(2, 1)] if me.size == 2 else [(3, [1, 2, 1]), (3, [2, 1, 1]), (3, [1, 1, 2])]
    for mesh, (schedule, count) in product(meshes, [("1f1b", 2), ("zero_bubble", 3), ("2bw", 2)]):
        trains_like_one_process(me, model, momentum, schedule, count, mesh)
    trains_like_one_process(me, model, adamw, "1f1b", 2, meshes[0], recompute=True)


@case(ranks=(4,))
def callers_optimizers_get_no_gradients(me: Me) -> None:
    """Bucket by bucket, and all at once: parameters of several types have no buckets."""
    for tied, types in ((False, 1), (True, 1), (False, 2)):
        model, data, made = branches(tied=tied), marked(), []
        if types == 2:
            for layer in model:
                layer.never.float()

        def kept(params: list[nn.Parameter], made: list[Any] = made) -> torch.optim.Optimizer:
            made.append(momentum(params))
            return made[-1]

        pipeline = Pipeline(
            copy.deepcopy(model), "1f1b", 2, (2, 2), loss=loss_of, optimizer=None, bucket_bytes=120
        )
        optimizer = momentum(list(pipeline.parameters()))
        for batch in data:
            pipeline.step(batch)
            optimizer.step()
            optimizer.zero_grad()
        wanted, _ = replayed(model, data, pipeline.program, kept, loss_of)
        assert_close(pipeline.state_dict(), wanted)
        assert len(optimizer.state) < len(list(pipeline.parameters()))
        pipeline.close()


@case(ranks=(4,))
def tiles_and_mirrored_replicas_leave_unused_parameters_alone(me: Me) -> None:
    placements: list[Placement] = [Tiles((1, 2)), Samples(2)]
    steps = [False, True, False, True, False]
    for mirrored, optimizer, size in product((False, True), (momentum, adamw), (1e9, 120)):
        torch.manual_seed(0)
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
        model = nn.Sequential(PixelBranch(3), nn.Sequential(PixelBranch(3), head)).double()
        data = [(torch.randn(8, 3, 6, 8).double(), torch.randn(8, 2).double()) for _ in steps]
        whole = copy.deepcopy(model)
        pipeline = Pipeline(
            copy.deepcopy(model), "1f1b", 2, (2, 1), loss=nn.functional.mse_loss, optimizer=optimizer,
            cuts=(0, 1), placements=placements, mirrored=mirrored, bucket_bytes=size,
        )  # fmt: skip
        expected = optimizer(list(whole.parameters()))
        for PixelBranch.on, batch in zip(steps, data):
            pipeline.step(batch)
            expected.zero_grad()
            nn.functional.mse_loss(whole(batch[0]), batch[1]).backward()
            expected.step()
        assert_close(pipeline.state_dict(), whole.state_dict(), 1e-10)
        check_states(pipeline, whole, expected)
        pipeline.close()


main(__name__)
