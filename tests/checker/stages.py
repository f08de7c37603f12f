"""Random pipelines of ordinary models, with what scripts do between steps, against one process.

    python -m tests.checker.stages --programs 1000 [--seed 1] [--show 5]
    python -m tests.checker.stages --programs 100 --ranks 2      # real ranks

A program is a model of blocks with habits (modes, checkpointing, writing in place, attributes that change),
a way to call it (a list, skips, tied weights, dicts), a schedule with its mesh and micro-batches, and actions
between steps. One process computes each micro-batch with the weight versions that the program names.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from commsched.pipeline import Pipeline
from commsched.pipeline.rows import border, cut
from commsched.pipeline.update import made_by
from scheduler.ir.program import Program
from tests.checker import command
from tests.support.pipeline_runs import adam, loss_of, momentum, on_threads, sgd, stage_of_parameters
from tests.support.rounding import rounding
from tests.support.version_map import version_map

WIDTH = 6


def by_dim(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [[p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]]
    return torch.optim.SGD(
        [{"params": members, "weight_decay": 0.1 * (members[0].dim() > 1)} for members in groups if members],
        lr=0.05,
        momentum=0.9,
    )


def by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [p], "lr": 0.01 if name.endswith("bias") else 0.05} for name, p in named_parameters]
    )


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
    "by dim": by_dim,
    "by name": by_name,
}


def weighted_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A sum over terms, of which rows have different numbers: see ``terms_of``."""
    return ((outputs - targets).square() * (1 + (targets > 0))).sum()


def terms_of(targets: Tensor) -> Tensor:
    return (1 + (targets > 0)).sum()


# -- models --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One of the things that blocks do."""

    tau = 1.0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        if kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif kind == "summed":
            self.summed = nn.Parameter(torch.ones(WIDTH))
        elif kind == "buffer":
            self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        kind = self.kind
        if kind == "no_grad":
            with torch.no_grad():
                return torch.tanh(self.linear(x))
        if kind == "part without gradient":
            y = self.linear(x)
            with torch.no_grad():
                size = y.abs().mean(1, keepdim=True)
            return y / (1 + size)
        if kind == "checkpoint":
            return checkpoint(self._inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        if kind == "begins in place":
            return torch.tanh(self.linear(F.leaky_relu_(x, 0.5)))
        if kind == "ends in place":
            return self.linear(x).mul_(0.5).tanh_()
        if kind == "norm":
            return self.linear(self.norm(x))
        if kind == "summed":
            return torch.tanh(self.linear(x)) + 0.1 * self.summed.sum()
        if kind == "buffer":
            self.calls.add_(1)
            return torch.tanh(self.linear(x))
        if kind == "detached":
            return self.linear(x) + x.detach()
        return torch.tanh(self.linear(x)) * self.tau

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


KINDS = [
    *["plain"] * 4, "no_grad", "part without gradient", "checkpoint", "begins in place", "ends in place",
    "norm", "summed", "buffer", "detached",
]  # fmt: skip


class Loop(nn.Module):
    """Blocks in a loop, with a habit of the whole: see ``STYLES``."""

    tau = 1.0

    def __init__(self, blocks: list[nn.Module], style: str) -> None:
        super().__init__()
        self.blocks, self.style = nn.ModuleList(blocks), style
        if style in ("scale", "early and late scale"):
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        if style == "constant":
            self.register_buffer("constant", torch.linspace(-0.1, 0.1, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        style = self.style
        if mask is not None:
            x = x * mask
        if style == "early and late scale":
            x = x * self.scale
        first = None
        for block in self.blocks:
            x = block(x)
            if style == "attribute":
                x = x * self.tau
            elif style == "constant":
                x = x + self.constant
            elif style == "trained or not" and self.training:
                x = x * 0.9
            first = x.clone() if first is None and style == "skip" else first
        if first is not None:
            x = x + first
        if style == "tied":
            x = F.linear(x, self.blocks[0].linear.weight)  # type: ignore[union-attr, arg-type]
        return x * self.scale if style in ("scale", "early and late scale") else x


STYLES = [
    "list", "attribute", "constant", "skip", "tied", "scale", "early and late scale", "trained or not",
]  # fmt: skip

# -- programs ------------------------------------------------------------------------------------------------

SYNCHRONOUS = ["gpipe", "1f1b", "1f1b", "interleaved", "zero_bubble"]
DELAYED = ["2bw", "pipedream", "wpipe"]
BETWEEN = ["attribute", "evaluate", "state", "load", "checkpoint", "drain", "change"]


@dataclass(frozen=True)
class Case:
    """``steps``: how many rows each has, and what happens before it. ``weighted``: the loss is a sum over
    terms instead of a mean over rows.
    """

    seed: int
    kinds: tuple[str, ...]
    style: str
    inputs: str
    optimizer: str
    options: dict[str, Any]
    size: int
    steps: tuple[tuple[int, str], ...] = field(default=())
    weighted: bool = False


def draw(seed: int) -> Case:
    dice = random.Random(seed)
    late = dice.random() < 0.3
    schedule = dice.choice(DELAYED if late else SYNCHRONOUS)
    stages = dice.choice([1, 2, 2, 2, 3, 4])
    replicas = dice.choice([n for n in (1, 1, 2, 2, 4) if n * stages <= 4])
    micro = dice.choice([1, 2, 3, 4]) if schedule != "pipedream" else dice.choice([1, 2])
    if schedule in ("2bw", "wpipe", "interleaved"):
        micro = max(micro, stages)
    options: dict[str, Any] = {"schedule": schedule, "num_microbatches": micro, "mesh": (stages, replicas)}
    count = stages * (2 if schedule in ("interleaved", "wpipe") else 1)
    kinds = [dice.choice(KINDS) for _ in range(max(count, dice.randint(2, 6)))]
    style = dice.choice(["sequential", "sequential", *STYLES])
    if late and style in ("tied", "early and late scale", "constant"):
        style = "skip"
    if dice.random() < 0.3:
        options["recompute"] = True
    options["placement"] = dice.choice(["bubble", "bubble", "eager", "aligned"])
    options["bucket_bytes"] = dice.choice([128, 1e9])
    if not late and dice.random() < 0.3:
        options["max_norm"] = 0.05
    inputs = "tensor" if style == "sequential" else dice.choice(["tensor", "tensor", "tuple", "dict"])
    least = replicas * micro
    rows = [dice.randint(least, least + 8) for _ in range(dice.randint(2, 6))]
    # A step's action before it; those that change the model need a pipeline that is empty.
    actions = [dice.choice([""] * 3 + BETWEEN) for _ in rows]
    if late:
        actions = [a if a in ("", "evaluate", "state", "checkpoint") else "" for a in actions]
    return Case(
        seed,
        tuple(kinds),
        style,
        inputs,
        dice.choice(list(OPTIMIZERS)),
        options,
        stages * replicas,
        tuple(zip(rows, actions)),
        dice.random() < 0.3,
    )


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(case.seed)
    blocks: list[nn.Module] = [Block(kind) for kind in case.kinds]
    return (nn.Sequential(*blocks) if case.style == "sequential" else Loop(blocks, case.style)).double()


def batches_of(case: Case) -> list[tuple[Any, Tensor]]:
    dice = torch.Generator().manual_seed(case.seed)
    found: list[tuple[Any, Tensor]] = []
    for rows, _ in case.steps:
        x, y = (torch.randn(rows, WIDTH, generator=dice).double() for _ in range(2))
        mask = (torch.rand(rows, 1, generator=dice) < 0.8).double()
        found.append(({"tensor": x, "tuple": (x, mask), "dict": {"x": x, "mask": mask}}[case.inputs], y))
    return found


def change(parameters: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.8)


def set_attribute(model: nn.Module, number: int) -> None:
    for part in model.modules():
        if isinstance(part, (Block, Loop)):
            part.tau = 1.0 + 0.1 * number


# -- both sides ----------------------------------------------------------------------------------------------


class Backward(nn.Module):
    """Forward and backward of a model in one call: a checkpoint computes a part again within the backward."""

    def __init__(self, model: nn.Module, names: list[str], loss: Any) -> None:
        super().__init__()
        self.model, self.names, self.loss = model, names, loss

    def forward(self, targets: Tensor, share: float, *placed: Any, **named: Any) -> Any:
        loss = self.loss(self.model(*placed, **named), targets) * share
        weights = dict(self.model.named_parameters())
        grads = torch.autograd.grad(loss, [weights[name] for name in self.names], allow_unused=True)
        return float(loss.detach()), dict(zip(self.names, grads))


class Plain:
    """One process. ``losses``: of the steps; ``seen``: what evaluations and states showed."""

    def __init__(self, case: Case, program: Program) -> None:
        self.case, self.model = case, model_of(case)
        layout = program.pipeline
        assert layout is not None
        self.parts = layout.microbatches
        self.versions = version_map(program, len(case.steps))
        example = batches_of(case)[0][0]
        self.owner = stage_of_parameters(layout.cuts, self.model, example)
        self.newest = {n: nn.Parameter(p.detach().clone()) for n, p in self.model.named_parameters()}
        self.history = [self._copied()]
        self.stepper = made_by(OPTIMIZERS[case.optimizer], self.newest, {})
        self.losses: list[float] = []

    def _copied(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.newest.items()}

    def run(self) -> dict[str, Tensor]:
        for period, ((rows, action), (inputs, targets)) in enumerate(
            zip(self.case.steps, batches_of(self.case))
        ):
            if action == "attribute":
                set_attribute(self.model, period)
            elif action == "change":
                change(self.newest.values())
                self.history[-1] = self._copied()
            self._step(period, rows, inputs, targets)
        return {**self.model.state_dict(), **self._copied()}

    def _step(self, period: int, rows: int, inputs: Any, targets: Tensor) -> None:
        total = 0.0
        grads: dict[str, Tensor | None] = dict.fromkeys(self.newest)
        for micro in range(self.parts):
            span = border(micro, rows, self.parts), border(micro + 1, rows, self.parts)
            used = {
                name: self.history[self.versions[self.owner.get(name, 0), micro, period]][name]
                .clone()
                .requires_grad_()
                for name in self.newest
            }
            mine = cut(inputs, span)
            named = mine if isinstance(mine, dict) else {}
            placed = () if named else mine if isinstance(mine, tuple) else (mine,)
            # What a stage writes in place is its own.
            placed = tuple(x.clone() for x in placed)
            weights = {f"model.{name}": value for name, value in used.items()}
            taken = {k: v.clone() for k, v in named.items()}
            weighted = self.case.weighted
            share = 1 / float(terms_of(targets)) if weighted else (span[1] - span[0]) / rows
            backward = Backward(self.model, list(used), weighted_loss if weighted else loss_of)
            loss, found = functional_call(backward, weights, (cut(targets, span), share, *placed), taken)
            total += loss
            for name, grad in found.items():
                before = grads[name]
                grads[name] = before if grad is None else grad if before is None else before + grad
        self.losses.append(total)
        for name, p in self.newest.items():
            grad = grads[name]
            p.grad = None if grad is None else grad.clone(memory_format=torch.contiguous_format)
        if "max_norm" in self.case.options:
            nn.utils.clip_grad_norm_(self.newest.values(), self.case.options["max_norm"])
        self.stepper.step()
        self.history.append(self._copied())


def train(case: Case) -> list[Any]:
    """By rank: the state, the losses, and the program."""
    data, made = batches_of(case), model_of(case)  # threads share torch's generator
    return on_threads(case.size, lambda fabric: train_rank(case, data, made, fabric), 60.0)


def train_rank(case: Case, data: list[tuple[Any, Tensor]], made: nn.Module, fabric: Any) -> Any:
    """The state, the losses, and the program of one rank."""
    model = copy.deepcopy(made)
    example = None if case.style == "sequential" else data[0][0]

    def make() -> Pipeline:
        return Pipeline(
            model,
            loss=weighted_loss if case.weighted else loss_of,
            count=terms_of if case.weighted else None,
            optimizer=OPTIMIZERS[case.optimizer],
            fabric=fabric,
            example=example,
            **case.options,
        )

    pipeline = make()
    losses: list[float | None] = []
    for period, ((_, action), batch) in enumerate(zip(case.steps, data)):
        if action == "attribute":
            set_attribute(model, period)
        elif action == "evaluate":
            pipeline.evaluate(batch)
        elif action == "state":
            pipeline.state_dict()
        elif action == "load" and not pipeline.in_flight:
            pipeline.load_state_dict(pipeline.state_dict())
        elif action == "change":
            change(pipeline.parameters())
        elif action == "drain":
            losses += pipeline.drain()
        elif action == "checkpoint":
            state = pipeline.checkpoint()
            pipeline.close()
            pipeline = make()
            pipeline.resume(state)
        losses.append(pipeline.step(batch))
    losses += pipeline.drain()
    program, state = pipeline.program, pipeline.state_dict()
    pipeline.close()
    return state, [value for value in losses if value is not None], program


def differs(case: Case, everyone: list[Any]) -> str:
    """How what these ranks have differs from one process; "" if it does not."""
    plain = Plain(case, everyone[0][2])
    wanted = plain.run()
    bound = rounding(torch.float64, 16 * WIDTH, 16 * (len(case.kinds) + 2) * len(case.steps))
    for rank, (state, losses, _) in enumerate(everyone):
        if losses != everyone[0][1] or len(losses) != len(plain.losses):
            return f"rank {rank} has the losses {losses}, rank 0 {everyone[0][1]}"
        for one, other in zip(losses, plain.losses):
            if abs(one - other) > bound * max(1.0, abs(other)):
                return f"rank {rank}: losses {losses}, one process has {plain.losses}"
        if state.keys() != wanted.keys():
            return f"rank {rank} has {sorted(state.keys() ^ wanted.keys())}"
        for name, value in state.items():
            if name.endswith("calls"):
                continue  # each replica counts its own
            off = float((value - wanted[name]).abs().max())
            if not off <= bound * max(1.0, float(wanted[name].abs().max())):
                return f"rank {rank}: {name} is off by {off:.3g} (rounding may make it {bound:.1g})"
    return ""


def is_refused(case: Case) -> bool:
    """Whether plain PyTorch refuses the model: one block writes over what another's backward reads, or its
    outputs have no graph.
    """
    model, (inputs, _) = model_of(case), batches_of(case)[0]
    placed = (inputs,) if isinstance(inputs, Tensor) else inputs if isinstance(inputs, tuple) else ()
    try:
        output = model(*(x.clone() for x in placed), **(inputs if isinstance(inputs, dict) else {}))
        output.sum().backward()
    except RuntimeError:
        return True
    return False


def failure(case: Case) -> str:
    try:
        return "" if is_refused(case) else differs(case, train(case))
    except Exception as error:
        return command.reason_of(error)


def failure_on_rank(case: Case, rank: int) -> str:
    """Return how a program fails on this rank, which is a process."""
    try:
        data, made = batches_of(case), model_of(case)
        return "" if is_refused(case) else differs(case, [train_rank(case, data, made, None)])
    except Exception as error:
        return command.reason_of(error)


def main() -> int:
    return command.main(__doc__, "tests.checker.stages", draw, failure)


if __name__ == "__main__":
    sys.exit(main())
