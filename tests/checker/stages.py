"""Random pipelines of ordinary models, with what scripts do between steps, against one process.

    python -m tests.checker.stages --programs 1000 [--seed 1] [--show 5]
    python -m tests.checker.stages --programs 100 --ranks 2      # real ranks

A program is a model of blocks with habits (modes, checkpointing, compiled blocks, random masks, statistics
of the batch, writing in place, attributes that change), a way to call it (a list, skips, tied weights,
dicts), types, a schedule with its mesh and micro-batches, and actions between steps. Ranks may be seeded
differently, get only their rows, meet a batch that is too short, or stop before the others.

One process computes each replica's rows of each micro-batch with the weight versions that the program names.
Four habits follow rules of pipelines, and the process does, too: each forward of a stage draws from a
generator of its own, batch statistics are those of a replica's rows, and stages begin with the weights of
their first rank. Ranks that are threads share torch's generator: there, nothing draws.

The fourth is for actions of a script while micro-batches are in flight. Each call of ``step()`` runs some
forwards of several steps' batches; ``Calls`` reads off the program which call runs which forward.

- A forward finds the attributes, modes and buffers that the script had left at its call; its backward, and a
  repeated forward within that, find those, too.
- A write through ``parameters()`` before a call changes the newest weights, those that the stage's last step
  made: for forwards of this version from that call on, and for the next step. Forwards before it, and of
  older versions, keep what they had.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from commsched.errors import CommError
from commsched.pipeline import Pipeline
from commsched.pipeline.factory import named_tensors
from commsched.pipeline.messages import ProcessFabric
from commsched.pipeline.random_state import drawing_at
from commsched.pipeline.rows import border, cut
from commsched.pipeline.update import made_by
from scheduler.ir.actions import Kind
from scheduler.ir.program import COMPUTE_LANE, Program, reach, unroll
from tests.checker import command
from tests.support.pipeline_runs import adam, loss_of, momentum, on_threads, sgd, stage_of_tensors
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
        elif kind == "unsaved buffer":
            self.register_buffer("shift", 0.1 * torch.randn(WIDTH), persistent=False)
        elif kind in NORMS:
            self.norm = nn.BatchNorm1d(WIDTH, momentum=NORMS[kind])
        elif kind in ("dropout", "checkpointed dropout"):
            self.drop = nn.Dropout(0.3)
        elif kind == "weight norm":
            weight_norm(self.linear)
        elif kind == "spectral norm":
            spectral_norm(self.linear)
        elif kind == "hooks":
            self.linear.register_forward_pre_hook(lambda module, args: (0.9 * args[0],))
            self.linear.register_forward_hook(scale_with_gradient)
        if kind.startswith("compiled"):
            self.compile(backend=kind.split()[1], fullgraph=kind == "compiled eager")

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
        if kind in ("checkpoint", "checkpointed dropout"):
            return checkpoint(self._inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        if kind == "reentrant":
            return checkpoint(self._inner, x, use_reentrant=True)  # type: ignore[no-any-return]
        if kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.tanh(self.linear(x)).float()
        if kind == "dropout":
            return self.drop(torch.tanh(self.linear(x)))  # type: ignore[no-any-return]
        if kind == "functional dropout":
            return F.dropout(self.linear(x), 0.2, self.training)
        if kind == "noise":
            y = self.linear(x)
            return y + 0.1 * torch.randn_like(y) if self.training else y
        if kind == "begins in place":
            return torch.tanh(self.linear(F.leaky_relu_(x, 0.5)))
        if kind == "ends in place":
            return self.linear(x).mul_(0.5).tanh_()
        if kind == "norm" or kind in NORMS:
            return self.linear(self.norm(x))
        if kind == "summed":
            return torch.tanh(self.linear(x)) + 0.1 * self.summed.sum()
        if kind == "unsaved buffer":
            return torch.tanh(self.linear(x) + self.shift)
        if kind == "buffer":
            self.calls.add_(1)
            return torch.tanh(self.linear(x))
        if kind == "functional call":
            other = {name: 0.9 * p for name, p in self.linear.named_parameters()}
            return torch.tanh(functional_call(self.linear, other, (x,)))  # type: ignore[no-any-return]
        if kind == "detached":
            return self.linear(x) + x.detach()
        return torch.tanh(self.linear(x)) * self.tau

    def _inner(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return self.drop(y) if self.kind == "checkpointed dropout" else y


def scale_with_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    if output.requires_grad:
        output.register_hook(lambda grad: 0.8 * grad)
    return 0.9 * output


NORMS = {"batch norm": 0.1, "batch norm by count": None}
DRAWS = ["dropout", "checkpointed dropout", "functional dropout", "noise"]
COMPILED = ["compiled eager", "compiled aot_eager"]
KINDS = [
    *["plain"] * 4, "no_grad", "part without gradient", "checkpoint", "begins in place", "ends in place",
    "norm", "summed", "buffer", "unsaved buffer", "detached", "reentrant", *NORMS, *DRAWS, *COMPILED,
    "weight norm", "spectral norm", "hooks", "functional call",
]  # fmt: skip


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", 0.1 * torch.randn(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.constant


class Loop(nn.Module):
    """Blocks in a loop, with a habit of the whole: see ``STYLES``."""

    tau = 1.0

    def __init__(self, blocks: list[nn.Module], style: str) -> None:
        super().__init__()
        self.blocks, self.style = nn.ModuleList(blocks), style
        if style in ("scale", "early and late scale"):
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        if style == "module of a constant":  # without a parameter, so that it is no layer
            self.offset = Offset()
        if style == "constant":
            self.register_buffer("constant", 0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.style == "autocast" else nullcontext():
            return self._run(x, mask)

    def _run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        style = self.style
        if mask is not None:
            x = x * mask
        if style == "early and late scale":
            x = x * self.scale
        first = None
        for block in self.blocks:
            inner = block is not self.blocks[0] and block is not self.blocks[-1]
            if style == "layer drop" and self.training and inner and torch.rand(()) < 0.3:
                continue
            if style == "checkpointed" and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            elif style == "checkpointed reentrant" and self.training:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
            if style == "attribute":
                x = x * self.tau
            elif style == "constant":
                x = x + self.constant
            elif style == "module of a constant":
                x = self.offset(x)
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
    "checkpointed", "checkpointed reentrant", "layer drop", "module of a constant",
]  # fmt: skip

# -- programs ------------------------------------------------------------------------------------------------

SYNCHRONOUS = ["gpipe", "1f1b", "1f1b", "interleaved", "zero_bubble"]
DELAYED = ["2bw", "pipedream", "wpipe"]
BETWEEN = [
    "attribute", "evaluate", "state", "load", "checkpoint", "drain", "change", "too short", "draw", "compile",
    "mode", "buffer", "hook", "freeze", "learning rate", "inference mode", "clear",
]  # fmt: skip
IN_FLIGHT = [
    *["attribute", "mode", "buffer", "change"] * 2, "evaluate", "state", "checkpoint", "drain", "too short",
    "hook", "inference mode",
]  # fmt: skip
TYPES = {
    "float64": torch.float64,
    "autocast": torch.float32,
    "bfloat16": torch.bfloat16,
    "bfloat16, masters": torch.bfloat16,
    "float16, masters": torch.float16,
}
STOPPED_TIMEOUT = 3.0  # seconds after which a rank gives up waiting for one that has stopped


@dataclass(frozen=True)
class Case:
    """``steps``: how many rows each has, and what happens before it. ``weighted``: the loss is a sum over
    terms instead of a mean over rows. ``types``: a key of ``TYPES``. ``apart``: ranks are not seeded alike.
    ``local``: ranks get only the rows that they read. ``stops``: a rank, and the step that it leaves out.
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
    types: str = "float64"
    apart: bool = False
    local: bool = False
    stops: tuple[int, int] | None = None

    @property
    def draws(self) -> bool:
        """Whether a forward draws random numbers."""
        return self.style == "layer drop" or any(kind in DRAWS for kind in self.kinds)

    @property
    def compiles(self) -> bool:
        return any(kind in COMPILED for kind in self.kinds) or any(
            what == "compile" for _, what in self.steps
        )

    @property
    def low(self) -> torch.dtype | None:
        """The type in which a part of the model computes, if it is shorter than that of the comparison."""
        return {"float64": None, "autocast": torch.bfloat16}.get(self.types, TYPES[self.types])


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
    options["placement"] = dice.choice(["bubble", "bubble", "eager"])
    options["bucket_bytes"] = dice.choice([128, 1e9])
    if not late and dice.random() < 0.3:
        options["max_norm"] = 0.05
    inputs = "tensor" if style == "sequential" else dice.choice(["tensor", "tensor", "tuple", "dict"])
    if style == "layer drop":  # plain PyTorch would refuse some of the models that are left
        kinds = ["plain" if "place" in kind or kind == "no_grad" else kind for kind in kinds]
        # What crosses a cut would have a gradient in some micro-batches only, which is refused.
        kinds[0] = "checkpoint" if kinds[0] == "reentrant" else kinds[0]
    types = "float64"
    if not late and dice.random() < 0.2:
        types = dice.choice([name for name in TYPES if name != "float64"])
        options.pop("max_norm", None)
        if types == "autocast":
            kinds = [dice.choice([kind, "autocast"]) for kind in kinds]
            style = dice.choice([style, "autocast"])
        if types.endswith("masters"):
            options["master_weights"] = True
    optimizers = [name for name in OPTIMIZERS if types == "float64" or name != "adam"]
    # Batch norm needs two rows.
    least = replicas * micro * (2 if any(kind in NORMS for kind in kinds) else 1)
    rows = [dice.randint(least, least + 8) for _ in range(dice.randint(2, 6))]
    # A step's action before it. "load" needs a pipeline that is empty.
    actions = [dice.choice([""] * 3 + (IN_FLIGHT if late else BETWEEN)) for _ in rows]
    if style == "layer drop" or style.startswith("checkpointed"):
        # What crosses a cut would have a gradient in some steps only, or the schedule moves the statistics.
        actions = ["attribute" if action == "mode" else action for action in actions]
        kinds = ["weight norm" if kind == "spectral norm" else kind for kind in kinds]
    if style == "tied" and kinds[0] == "spectral norm":  # two stages would write to its buffers
        kinds[0] = "weight norm"
    if "recompute" in options and "no_grad" in kinds:  # see the limits in docs/pipelines.md
        kinds = ["checkpoint" if kind == "reentrant" else kind for kind in kinds]
    if stages == 1 and count > 1:  # the stages of one rank share a parameter
        actions = ["attribute" if action == "freeze" else action for action in actions]
    if any(kind in COMPILED for kind in kinds) or "compile" in actions:
        actions = ["attribute" if action == "hook" else action for action in actions]
    stops = None
    if stages * replicas > 1 and dice.random() < 0.03:
        stops = dice.randrange(stages * replicas), dice.randrange(1, len(rows))
    case = Case(
        seed,
        tuple(kinds),
        style,
        inputs,
        dice.choice(optimizers),
        options,
        stages * replicas,
        tuple(zip(rows, actions)),
        dice.random() < 0.3,
        types,
        apart=dice.random() < 0.3,
        local=dice.random() < 0.2,
        stops=stops,
    )
    # One rank draws in the order in which it runs its stages.
    return without_draws(case) if stages * replicas == 1 and count > 1 else case


def model_of(case: Case, rank: int = 0) -> nn.Module:
    torch.manual_seed(case.seed + (rank * 1000 if case.apart else 0))
    blocks: list[nn.Module] = [Block(kind) for kind in case.kinds]
    model = nn.Sequential(*blocks) if case.style == "sequential" else Loop(blocks, case.style)
    return model.to(TYPES[case.types])


def batches_of(case: Case) -> list[tuple[Any, Tensor]]:
    dice = torch.Generator().manual_seed(case.seed)
    found: list[tuple[Any, Tensor]] = []
    for rows, _ in case.steps:
        x, y = (torch.randn(rows, WIDTH, generator=dice).to(TYPES[case.types]) for _ in range(2))
        mask = (torch.rand(rows, 1, generator=dice) < 0.8).to(TYPES[case.types])
        found.append(({"tensor": x, "tuple": (x, mask), "dict": {"x": x, "mask": mask}}[case.inputs], y))
    return found


def change(parameters: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.8)


def slow_down(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@dataclass(frozen=True)
class Setting:
    """What a script leaves in a model. ``shift``: of blocks that have such a buffer (None: as it began)."""

    tau: Any = 1.0
    shift: float | None = None
    training: bool = True
    hooked: bool = False
    frozen: bool = False

    def after(self, action: str, number: int, compiles: bool) -> Setting:
        """What an action before step ``number`` makes of it. Compiled code has few forms for attributes."""
        if action == "attribute":
            tau = 1.0 + 0.1 * number
            return replace(self, tau=tau if number % 2 or compiles else torch.tensor(tau))
        if action == "mode":
            return replace(self, training=not self.training)
        if action == "hook":
            return replace(self, hooked=not self.hooked)
        if action == "freeze":
            return replace(self, frozen=not self.frozen)
        return replace(self, shift=0.1 * number) if action == "buffer" else self

    def freezes(self, name: str) -> bool:
        """Whether a parameter is frozen: biases, for what crosses a cut keeps its gradient."""
        return self.frozen and name.endswith("bias")

    def freeze(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self.freezes(name))

    def leave_in(self, part: nn.Module, action: str = "", number: int = 0) -> None:
        """Leave it in a block or in the whole: all, or what an action has changed before step ``number``."""
        if action in ("", "attribute"):
            part.tau = self.tau
        if action in ("", "mode"):
            part.train(self.training)
        if action in ("", "hook") and isinstance(part, Block) and self.hooked != (part in HOOKS):
            if self.hooked:
                HOOKS[part] = part.register_forward_hook(lambda module, args, output: 0.9 * output)
            else:
                HOOKS.pop(part).remove()
        shift = getattr(part, "shift", None)
        if self.shift is not None and isinstance(shift, Tensor) and action in ("", "buffer"):
            if number % 2:
                shift.fill_(self.shift)
            else:
                part.shift = torch.full_like(shift, self.shift)


HOOKS = WeakKeyDictionary[nn.Module, RemovableHandle]()
"""The hooks of blocks that a script removes again."""


def settings_of(case: Case) -> list[Setting]:
    """What the script has left in the model when each step begins."""
    found = [Setting()]
    for number, (_, action) in enumerate(case.steps):
        found.append(found[-1].after(action, number, case.compiles))
    return found[1:]


# -- both sides ----------------------------------------------------------------------------------------------


class Backward(nn.Module):
    """Forward and backward of a model in one call: a checkpoint computes a part again within the backward."""

    def __init__(self, model: nn.Module, names: list[str], loss: Any) -> None:
        super().__init__()
        self.model, self.names, self.loss = model, names, loss

    def forward(self, targets: Tensor, share: float, *placed: Any, **named: Any) -> Any:
        loss = self.loss(self.model(*placed, **named), targets) * share
        weights = dict(self.model.named_parameters())
        loss.backward()
        return float(loss.detach()), {name: weights[name].grad for name in self.names}


class Draws:
    """The generators from which a replica's forward of a micro-batch draws in one process.

    Each stage has one, which starts as the pipeline's does in that stage. A block that a checkpoint computes
    again draws again what it has drawn.
    """

    def __init__(self, blocks: dict[nn.Module, int]) -> None:
        self.blocks, self.states, self.starts = blocks, dict[int, Tensor](), dict[nn.Module, Tensor]()
        for block in blocks:
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end, always_call=True)

    def restart(self, states: dict[int, Tensor]) -> None:
        self.states = states
        self.starts.clear()

    def _begin(self, block: nn.Module, args: Any) -> None:
        if not block.training:
            return
        self.outside = torch.get_rng_state()
        self.again = block in self.starts
        torch.set_rng_state(self.starts.setdefault(block, self.states[self.blocks[block]]))

    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        if not block.training:
            return
        if not self.again:
            self.states[self.blocks[block]] = torch.get_rng_state()
        torch.set_rng_state(self.outside)


class Calls:
    """Which call of ``step()`` runs a forward, which weights it has, and which weights a script can write to.

    Periods, versions and calls are numbers of steps of the whole run; a pipeline that has been drained counts
    from 0 again. Draining runs what is left, with what the script has left at the last call.
    """

    def __init__(self, program: Program, case: Case) -> None:
        starts = [0, *(n for n, (_, action) in enumerate(case.steps) if n and action == "drain")]
        self._runs = list(zip(starts, [*starts[1:], len(case.steps)], strict=True))
        self._versions = {start: version_map(program, end - start) for start, end in self._runs}
        _, self._ahead = reach(program.kernel)
        self._forward: dict[tuple[int, int], int] = {}
        self._step: dict[int, int] = {}
        for action in (action for lanes in program.kernel for action in lanes[COMPUTE_LANE]):
            assert action.stage is not None
            if action.kind is Kind.F:
                self._forward[action.stage, action.index] = action.shift
            elif action.kind is Kind.STEP:
                self._step[action.stage] = action.shift

    def run_of(self, number: int) -> tuple[int, int]:
        """The first step between two drains, and the one after the last."""
        return next((start, end) for start, end in self._runs if start <= number < end)

    def version(self, stage: int, micro: int, period: int) -> int:
        start, _ = self.run_of(period)
        return start + self._versions[start][stage, micro, period - start]

    def call(self, stage: int, micro: int, period: int) -> int:
        """An action of shift k belongs to iteration period - k, and the first call runs iteration -ahead."""
        _, end = self.run_of(period)
        return min(period - self._forward[stage, micro] + self._ahead, end - 1)

    def newest(self, stage: int, call: int) -> int:
        """The version that a stage's last step has made before a call."""
        start, _ = self.run_of(call)
        return max(start, call - self._ahead + self._step[stage])


class Plain:
    """One process. ``losses``: of the steps; ``evaluated``: the losses of evaluations.

    ``trail``: the weights that the pipeline had after each step, where types are short. Then each step
    starts from these, for a value on the other side of a rounding border would not stay small.
    """

    def __init__(self, case: Case, program: Program, trail: list[dict[str, Tensor]]) -> None:
        layout = program.pipeline
        assert layout is not None
        self.case, self.layout, self.trail = case, layout, trail
        self.parts, self.replicas = layout.microbatches, layout.replicas(0)
        self.calls, self.settings = Calls(program, case), settings_of(case)
        self.changes = [number for number, (_, action) in enumerate(case.steps) if action == "change"]
        self.order = summing_order(program, len(case.steps))
        first = model_of(case)
        self.owner = stage_of_tensors(layout.cuts, model_of(case), batches_of(case)[0][0])
        by_rank = [named_tensors(model_of(case, rank)) for rank in range(case.size)]
        with torch.no_grad():
            for name, tensor in named_tensors(first).items():
                tensor.copy_(by_rank[layout.members(self.owner.get(name, 0))[0]][name])
        self.models = [copy.deepcopy(first) for _ in range(self.replicas)]  # each has its own statistics
        self.newest = {name: nn.Parameter(p.detach().clone()) for name, p in first.named_parameters()}
        masters = case.types.endswith("masters")
        self.stepped = {n: nn.Parameter(p.detach().float()) if masters else p for n, p in self.newest.items()}
        self.stepper = made_by(OPTIMIZERS[case.optimizer], self.stepped, {})
        # By version and name: the weights, and the call from which on they hold.
        self.history: list[dict[str, list[tuple[int, Tensor]]]] = []
        self._keep()
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.generators = [
            torch.Generator().manual_seed(case.seed + (rank if case.apart else 0))
            for rank in range(case.size)
        ]
        self.drained = 0  # the period in which the pipeline was empty and began to count again
        self.forwards: Counter[tuple[int, int]] = Counter()
        self.blocks = [self._stages_of_blocks(model) for model in self.models]
        self.draws = [Draws(blocks) for blocks in self.blocks] if case.draws else []
        self.wrong = ""
        if case.style != "sequential":
            for model, blocks in zip(self.models, self.blocks, strict=True):
                for block in blocks:
                    block.register_forward_pre_hook(partial(as_in_stage, model))

    def _stages_of_blocks(self, model: nn.Module) -> dict[nn.Module, int]:
        names = {part: name for name, part in model.named_modules() if isinstance(part, Block)}
        return {part: self.owner[f"{name}.linear.bias"] for part, name in names.items()}

    def _keep(self) -> None:
        """Add the newest weights to the history, and what a script writes to them until the next step."""
        version, kept = len(self.history), {name: [(0, value)] for name, value in self._copied().items()}
        for call in self.changes:
            mine = [n for n in kept if self.calls.newest(self.owner.get(n, 0), call) == version]
            if mine:
                change(self.newest[name] for name in mine)
                if self.stepped.keys() and self.stepped is not self.newest:
                    self._take(self._copied())
                for name in mine:
                    kept[name].append((call, self.newest[name].detach().clone()))
        self.history.append(kept)

    def _weight(self, name: str, micro: int, period: int) -> Tensor:
        place = self.owner.get(name, 0), micro, period
        kept, call = self.history[self.calls.version(*place)][name], self.calls.call(*place)
        return [weight for since, weight in kept if since <= call][-1]

    def _copied(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.newest.items()}

    def run(self) -> dict[str, Tensor]:
        for period, ((rows, action), batch) in enumerate(zip(self.case.steps, batches_of(self.case))):
            if action in ("evaluate", "inference mode"):
                self.evaluated.append(self._evaluate(period, *batch))
            elif action == "load":
                self._share_statistics()
            elif action == "drain":
                self.drained = period
            elif action == "learning rate":
                slow_down(self.stepper)
            elif action == "draw":
                for generator in self.generators:
                    torch.rand(1, generator=generator)
            self._step(period, rows, *batch)
        return {**self.models[0].state_dict(), **self._copied()}

    def _parts(self, rows: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Micro-batch, replica, and its rows."""
        for micro in range(self.parts):
            low, high = border(micro, rows, self.parts), border(micro + 1, rows, self.parts)
            for replica in range(self.replicas):
                first, last = (border(n, high - low, self.replicas) for n in (replica, replica + 1))
                if first < last:
                    yield micro, replica, (low + first, low + last)

    def _share(self, span: tuple[int, int], rows: int, targets: Tensor) -> float:
        return 1 / float(terms_of(targets)) if self.case.weighted else (span[1] - span[0]) / rows

    def _share_statistics(self) -> None:
        with torch.no_grad():
            for model in self.models:
                for mine, theirs in zip(model.buffers(), self.models[0].buffers()):
                    mine.copy_(theirs)

    def _evaluate(self, period: int, inputs: Any, targets: Tensor) -> float:
        """The mean loss with the first replica's statistics; other replicas keep what they have."""
        total, loss = 0.0, weighted_loss if self.case.weighted else loss_of
        kept = [[buffer.clone() for buffer in model.buffers()] for model in self.models[1:]]
        for model, blocks in zip(self.models, self.blocks, strict=True):
            for block in blocks:
                replace(self.settings[period], training=False).leave_in(block)
            model.training = False
        self._share_statistics()
        # Not self.newest: it has what a script writes to this version before later calls, too.
        weights = {
            name: next(weight for since, weight in reversed(written) if since <= period)
            for name, written in self.history[-1].items()
        }
        for _, replica, span in self._parts(len(targets)):
            placed, named = arguments(cut(inputs, span))
            with torch.no_grad():
                output = functional_call(self.models[replica], weights, placed, named)
                total += float(loss(output, cut(targets, span))) * self._share(span, len(targets), targets)
        for model, values in zip(self.models[1:], kept, strict=True):
            for buffer, value in zip(model.buffers(), values, strict=True):
                buffer.copy_(value)
        for model in self.models:
            model.train(self.settings[period].training)
        return total

    @contextmanager
    def _drawing(self, period: int, micro: int, replica: int) -> Iterator[None]:
        """With the generators of the ranks of a replica. One rank alone draws as one process does."""
        if not self.draws:
            yield
            return
        states = {}
        for stage in range(self.layout.stages):
            generator = self.generators[self.layout.members(stage)[replica]]
            place = stage, replica, micro, period - self.drained, self.forwards[stage, replica]
            self.forwards[stage, replica] += 1
            with torch.random.fork_rng():
                torch.set_rng_state(generator.get_state())
                with drawing_at(torch.device("cpu"), *place) if self.case.size > 1 else nullcontext():
                    states[stage] = torch.get_rng_state()
        with torch.random.fork_rng():
            # The first stage draws a seed for all of them, if a block may be left out.
            if self.case.style == "layer drop" and len(self.case.kinds) > 2:
                torch.set_rng_state(states[0])
                shared = int(torch.randint(1 << 62, (1,)))
                states[0] = torch.get_rng_state()
                torch.manual_seed(shared)
            self.draws[replica].restart(states)
            yield
        if self.case.size == 1:
            self.generators[0].set_state(states[0])

    def _step(self, period: int, rows: int, inputs: Any, targets: Tensor) -> None:
        total, loss = 0.0, weighted_loss if self.case.weighted else loss_of
        found: dict[tuple[int, int], dict[str, Tensor | None]] = {}
        for micro, replica, span in self._parts(rows):
            used = {name: self._weight(name, micro, period).clone().requires_grad_() for name in self.newest}
            for block, stage in self.blocks[replica].items():
                self.settings[self.calls.call(stage, micro, period)].leave_in(block)
            placed, named = arguments(cut(inputs, span))
            weights = {f"model.{name}": value for name, value in used.items()}
            backward = Backward(self.models[replica], list(used), loss)
            given = cut(targets, span), self._share(span, rows, targets), *placed
            with self._drawing(period, micro, replica):
                part, found[micro, replica] = functional_call(backward, weights, given, named)
            total += part
        self.losses.append(total)
        for name, p in self.stepped.items():
            order = self.order[self.owner.get(name, 0), period]
            replicas = [summed([found[m, r][name] for m in order], p.dtype) for r in range(self.replicas)]
            p.grad = None if self.settings[period].freezes(name) else summed(replicas, p.dtype)
        if "max_norm" in self.case.options:
            nn.utils.clip_grad_norm_(self.newest.values(), self.case.options["max_norm"])
        before = self._copied()
        self.stepper.step()
        with torch.no_grad():
            for name, p in self.stepped.items():
                self.newest[name].copy_(p)
        if self.trail:
            self._compare(period, before, self.trail[period])
            self._take(self.trail[period])
        self._keep()

    def _compare(self, period: int, before: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
        """Note weights that differ by more than one rounding of the weights, and of values in the step.

        The sums of gradients are rounded otherwise. A value of the short type that falls on the other side of
        a rounding border changes by its last bit, in every layer that the gradient has passed.
        """
        assert self.case.low is not None
        depth = len(self.case.kinds) + 2
        for name, mine in self.newest.items():
            size = float((mine - before[name]).abs().max())
            bound = rounding(mine.dtype, 2) * float(mine.abs().max())
            bound += rounding(self.case.low, 2, depth) * size
            off = float((mine.detach() - theirs[name]).abs().max())
            if not off <= bound and not self.wrong:
                self.wrong = f"step {period}: {name} is off by {off:.3g} (rounding may make it {bound:.1g})"

    def _take(self, weights: dict[str, Tensor]) -> None:
        """Go on with these weights; a master that rounds to its weight stays."""
        with torch.no_grad():
            for name, p in self.newest.items():
                p.copy_(weights[name])
                master = self.stepped[name]
                if master is not p:
                    master.copy_(torch.where(master.to(p.dtype) == p, master, p.float()))


def as_in_stage(model: nn.Module, block: nn.Module, args: Any) -> None:
    """A forward pre-hook of a block: the code around it runs in its stage."""
    model.tau, model.training = block.tau, block.training


def summing_order(program: Program, periods: int) -> dict[tuple[int, int], list[int]]:
    """The micro-batches of a stage and period in the order in which their gradients are added up."""
    found: dict[tuple[int, int], list[int]] = {}
    for lanes in unroll(program, periods):
        splits = {action.stage for action in lanes[COMPUTE_LANE] if action.kind is Kind.W}
        mine: dict[tuple[int, int], list[int]] = {}
        for action in lanes[COMPUTE_LANE]:
            if action.stage is not None and action.kind is (Kind.W if action.stage in splits else Kind.B):
                mine.setdefault((action.stage, action.shift), []).append(action.index)
        found |= mine
    return found


def summed(grads: list[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            total = grad.to(dtype, copy=True) if total is None else total + grad.to(dtype)
    return None if total is None else total.contiguous()


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward; the forward may write to them."""
    if isinstance(inputs, dict):
        return (), {name: value.clone() for name, value in inputs.items()}
    return tuple(x.clone() for x in (inputs if isinstance(inputs, tuple) else (inputs,))), {}


@dataclass
class Outcome:
    """What one rank has at the end. ``trail``: the weights after each step, where types are short.
    ``error``: of a rank that has waited for one that had stopped.
    """

    program: Program
    state: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    trail: list[dict[str, Tensor]] = field(default_factory=list)
    error: str = ""


def train(case: Case, ranks: Callable[..., list[Any]] = on_threads) -> list[Outcome]:
    """What each rank has at the end. ``ranks`` runs them: see ``on_threads``."""
    timeout = 60.0 if case.stops is None else STOPPED_TIMEOUT
    if case.compiles:
        torch._dynamo.reset()  # it compiles a function a few times only
    models = [model_of(case, rank) for rank in range(case.size)]  # threads share torch's generator
    return ranks(
        case.size, lambda fabric: train_rank(case, models[fabric.rank], fabric.rank, lambda: fabric), timeout
    )


def train_rank(case: Case, model: nn.Module, rank: int, new_fabric: Callable[[], Any]) -> Outcome:
    # Of one function: blocks share its code, ranks that are threads too. Each thread has its own settings.
    torch._dynamo.config.recompile_limit = 64
    data = batches_of(case)
    example = None if case.style == "sequential" else data[0][0]

    def make() -> Pipeline:
        return Pipeline(
            model,
            loss=weighted_loss if case.weighted else loss_of,
            count=terms_of if case.weighted else None,
            optimizer=OPTIMIZERS[case.optimizer],
            fabric=new_fabric(),
            example=example,
            **case.options,
        )

    pipeline = make()
    outcome = Outcome(pipeline.program)
    if case.draws:
        torch.manual_seed(case.seed + (rank if case.apart else 0))
    settings = settings_of(case)

    def step(batch: tuple[Any, Tensor]) -> None:
        if case.local:
            rows = pipeline.rows(len(batch[1]))
            inputs = batch[0]
            if isinstance(inputs, dict):
                inputs = {name: value[rows] for name, value in inputs.items()}
            elif isinstance(inputs, tuple):
                inputs = tuple(value[rows] for value in inputs)
            else:
                inputs = inputs[rows]
            batch = inputs, batch[1][rows]
        outcome.losses.append(pipeline.step(batch, local=case.local))

    try:
        for period, ((_, action), batch) in enumerate(zip(case.steps, data)):
            if case.stops == (rank, period):
                pipeline.close()
                return outcome
            if action in ("attribute", "mode", "buffer", "hook"):
                for part in model.modules():
                    if isinstance(part, (Block, Loop)):
                        settings[period].leave_in(part, action, period)
            elif action == "freeze":
                settings[period].freeze(model)
            elif action == "learning rate":
                for optimizer in pipeline.optimizers:
                    slow_down(optimizer)
            elif action == "clear":
                for optimizer in pipeline.optimizers:
                    optimizer.zero_grad(set_to_none=period % 2 == 0)
            elif action in ("evaluate", "inference mode"):
                with torch.inference_mode(action == "inference mode"):
                    loss = pipeline.evaluate(batch)
                if not pipeline.in_flight:
                    outcome.evaluated.append(loss)
            elif action == "state":
                pipeline.state_dict()
            elif action == "load" and not pipeline.in_flight:
                pipeline.load_state_dict(pipeline.state_dict())
            elif action == "change":
                change(pipeline.parameters())
            elif action == "compile":
                for part in model.modules():
                    if isinstance(part, Block) and part.kind == "plain":
                        part.compile(backend="eager")
            elif action == "drain":
                outcome.losses += pipeline.drain()
            elif action == "draw" and case.draws:
                torch.rand(1)
            elif action == "too short":
                few = pipeline.program.layout.microbatches * pipeline.program.layout.replicas(0) - 1
                if few:
                    refused_step(step, (cut(batch[0], (0, few)), batch[1][:few]))
            elif action == "checkpoint":
                state = pipeline.checkpoint()
                pipeline.close()
                Setting().freeze(model)  # a pipeline resumes that is made as the first one was
                pipeline = make()
                pipeline.resume(state)
                settings[period].freeze(model)
            step(batch)
            if case.low is not None:
                outcome.trail.append(pipeline.state_dict())
        outcome.losses += pipeline.drain()
        outcome.state = pipeline.state_dict()
    except CommError as error:
        if case.stops is None:
            raise
        outcome.error = str(error)
    pipeline.close()
    return outcome


def refused_step(step: Callable[[Any], None], batch: tuple[Any, Tensor]) -> None:
    """A step of fewer rows than there are parts is refused, and the next one is as if it had not been."""
    try:
        step(batch)
    except ValueError as error:
        assert "needs at least 1 row of every micro-batch" in str(error), error
    else:
        raise AssertionError(f"a step of {len(batch[1])} rows was not refused")


def differs(case: Case, everyone: dict[int, Outcome]) -> str:
    """How what these ranks have differs from one process; "" if it does not."""
    if case.stops is not None:
        return goes_on_alone(case, everyone)
    first = next(iter(everyone.values()))
    for rank, outcome in everyone.items():
        if outcome.losses != first.losses or outcome.evaluated != first.evaluated:
            return f"rank {rank} has the losses {outcome.losses}, another {first.losses}"
        for mine, its in zip(outcome.trail, first.trail):
            if any(not torch.equal(mine[name], its[name]) for name in mine if not is_statistic(name)):
                return f"rank {rank} has other weights than another after a step"
    plain = Plain(case, first.program, first.trail)
    with torch.compiler.set_stance("force_eager"):
        wanted = plain.run()
    if plain.wrong:
        return plain.wrong
    bound = rounding(torch.float64, 16 * WIDTH, 16 * (len(case.kinds) + 2) * len(case.steps))
    if case.low is not None:  # from equal weights: see Plain._compare
        bound = rounding(case.low, 2, len(case.kinds) + 2)
    losses = [loss for loss in first.losses if loss is not None]
    if len(losses) != len(plain.losses):
        return f"there are the losses {losses}, in one process {plain.losses}"
    pairs = [*zip(losses, plain.losses)]
    # A checkpoint's second forward counts, too, and schedules order it differently.
    by_schedule = case.style.startswith("checkpointed")
    moved = by_schedule and any(kind in NORMS for kind in case.kinds)
    if len(first.evaluated) == len(plain.evaluated) and not moved:
        pairs += zip(first.evaluated, plain.evaluated)
    for one, other in pairs:
        if not abs(one - other) <= bound * max(1.0, abs(other)):
            return f"losses {losses}, {first.evaluated}; in one process {plain.losses}, {plain.evaluated}"
    for rank, outcome in everyone.items():
        state = outcome.state
        if state.keys() != wanted.keys():
            return f"rank {rank} has {sorted(state.keys() ^ wanted.keys())}"
        for name, value in state.items():
            if is_statistic(name) and by_schedule:
                continue
            off = float((value - wanted[name]).abs().max())
            if not off <= bound * max(1.0, float(wanted[name].abs().max())):
                return f"rank {rank}: {name} is off by {off:.3g} (rounding may make it {bound:.1g})"
    return ""


STATISTICS = ("calls", "running_mean", "running_var", "num_batches_tracked", "_u", "_v")


def is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in STATISTICS


def goes_on_alone(case: Case, everyone: dict[int, Outcome]) -> str:
    """Whether another rank did more steps than the one that stopped; they wait for it."""
    assert case.stops is not None
    stopped, at = case.stops
    for rank, outcome in everyone.items():
        if rank != stopped and not outcome.error:
            return f"rank {rank} had no error though rank {stopped} stopped before step {at}"
    return ""


def is_refused(case: Case) -> bool:
    """Whether plain PyTorch refuses the model: one block writes over what another's backward reads, or its
    outputs have no graph.
    """
    model, (inputs, targets) = model_of(case), batches_of(case)[0]
    placed, named = arguments(inputs)
    try:
        with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
            output = model(*placed, **named)
            loss_of(output, targets).backward()
    except RuntimeError:
        return True
    return False


def without_draws(case: Case) -> Case:
    """The program without random numbers."""
    kinds = tuple("plain" if kind in DRAWS else kind for kind in case.kinds)
    return replace(case, kinds=kinds, style="list" if case.style == "layer drop" else case.style)


def failure(case: Case, ranks: Callable[..., list[Any]] = on_threads) -> str:
    if case.size > 1:  # ranks are threads
        case = without_draws(case)
        if case.optimizer == "adam" and case.compiles:
            # torch.compiler.is_compiling() is true while any thread compiles; Adam then rounds otherwise.
            case = replace(case, optimizer="momentum")
    try:
        return "" if is_refused(case) else differs(case, dict(enumerate(train(case, ranks))))
    except Exception as error:
        return command.reason_of(error)


def failure_on_rank(case: Case, rank: int, meet: Callable[[], None]) -> str:
    """Return how a program fails on this rank, which is a process. ``meet`` waits for the other ranks."""
    try:
        if is_refused(case):
            return ""
        torch._dynamo.reset()
        meet()
        timeout = 60.0 if case.stops is None else STOPPED_TIMEOUT
        return differs(
            case, {rank: train_rank(case, model_of(case, rank), rank, lambda: ProcessFabric(timeout))}
        )
    except Exception as error:
        return command.reason_of(error)


def main() -> int:
    return command.main(__doc__, "tests.checker.stages", draw, failure)


if __name__ == "__main__":
    sys.exit(main())
