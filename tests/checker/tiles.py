"""Random convolutional models on tiles, with what scripts do between steps, against one process.

    python -m tests.checker.tiles --programs 1000 [--seed 1] [--show 5]
    python -m tests.checker.tiles --programs 100 --ranks 4      # real ranks

A program is a model of layers with drawn options and habits, a grid and the options of ``spatial.shard``, an
optimizer, images of odd sizes, and actions between steps. One process runs the same program on whole images.
Losses, outputs, gradients, weights and buffers are equal up to rounding, or an error of ``ROWS`` is raised.
Ranks that are not seeded alike, and ranks that wait for one that has stopped, get an error.
"""

from __future__ import annotations

import copy
import io
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from commsched import spatial
from commsched.channels import Channel, ThreadHub
from commsched.errors import CommError
from commsched.spatial.shard import default_channel
from tests.checker import command
from tests.checker.layers import CHANNELS, CLASSES, HEADS, LAYERS, OFTEN, Layer, made
from tests.support import one_process
from tests.support.rounding import rounding
from tests.support.spatial_cases import on_threads

GRIDS = [(1, 2), (2, 1), (2, 2)]
LARGEST, MOST_ROWS = 24, 3  # pixels along a dimension, samples of a batch
ACTIONS = [
    "evaluate", "inference mode", "load", "save and load", "average", "go on with a copy", "freeze",
    "attribute", "forward without backward", "forward that raises", "shard again", "mode", "write weights",
    "write buffers", "learning rate", "hook", "hook that goes", "hook of a parameter", "functional call",
    "backward twice", "penalty", "half and back",
]  # fmt: skip
CLEARS = ["optimizer", "model", "zeros", "by hand"]
TIMEOUT, STOPPED_TIMEOUT = 60.0, 3.0  # seconds; the second of ranks that wait for one that has stopped


@dataclass(frozen=True)
class Step:
    """``before``: what the script does before the step. ``passes``: backwards that it accumulates."""

    rows: int
    before: str = ""
    passes: int = 1
    clear: str = "optimizer"


@dataclass(frozen=True)
class Case:
    """``layers``: the kind of each, and the seed of its options. ``apart``: ranks are not seeded alike when
    they make the model. ``stops``: a rank, and the step that it leaves out.
    """

    seed: int
    layers: tuple[tuple[str, int], ...]
    head: str
    image: tuple[int, int]
    grid: tuple[int, int]
    options: dict[str, Any]
    optimizer: str
    clip: bool
    input_gradient: bool
    channels_last: bool
    steps: tuple[Step, ...]
    apart: bool = False
    stops: tuple[int, int] | None = None

    @property
    def timeout(self) -> float:
        return TIMEOUT if self.stops is None else STOPPED_TIMEOUT

    @property
    def size(self) -> int:
        """How many ranks it runs on."""
        return self.grid[0] * self.grid[1]

    def __str__(self) -> str:
        return f"{self!r}\n{model_of(self)}"


def draw(seed: int) -> Case:
    """Return the program of this seed: its model is one that plain PyTorch runs on its smallest batch."""
    dice = random.Random(seed)
    while True:
        case = _draw(dice, seed)
        if _runs(case):
            return case


def _draw(dice: random.Random, seed: int) -> Case:
    kinds = [dice.choice([*LAYERS, *OFTEN]) for _ in range(dice.randint(1, 5))]
    steps = tuple(
        Step(
            dice.randint(1, MOST_ROWS),
            dice.choice([""] * 6 + ACTIONS),
            dice.choice([1, 1, 1, 2]),
            dice.choice(CLEARS),
        )
        for _ in range(dice.randint(2, 3))
    )
    grid = dice.choice(GRIDS)
    stops = dice.randrange(grid[0] * grid[1]), dice.randrange(1, len(steps))
    return Case(
        seed,
        tuple((kind, dice.randrange(10**6)) for kind in kinds),
        dice.choice(list(HEADS)),
        (dice.randint(5, 17), dice.randint(5, 17)),
        grid,
        {
            "overlap": dice.choice(["auto", "on", "off"]),
            "unsupported": dice.choice(["error", "gather"]),
        },
        dice.choice(list(OPTIMIZERS)),
        dice.random() < 0.3,
        dice.random() < 0.2,
        dice.random() < 0.2,
        steps,
        apart=dice.random() < 0.03,
        stops=stops if dice.random() < 0.03 else None,
    )


class Sizes:
    """A forward hook that notes the largest image and whether all values are finite."""

    largest, finite = 0, True

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.largest = max(self.largest, *output.shape[2:], 0)
        self.finite = self.finite and bool(output.isfinite().all()) and output.numel() > 0


def _runs(case: Case) -> bool:
    """Return whether plain PyTorch runs the model, with images that are neither empty nor large."""
    model, sizes = model_of(case), Sizes()
    for layer in model:
        layer.register_forward_hook(sizes)
    x = torch.ones(min(step.rows for step in case.steps), CHANNELS, *case.image).double().requires_grad_()
    try:
        with torch.compiler.set_stance("force_eager"):
            output = model(x * torch.linspace(0.5, 2, case.image[1]).double())
        # The backward of a max pool with an empty window (-inf) writes outside of its memory.
        if not sizes.finite or sizes.largest > LARGEST:
            return False
        output.sum().backward()
        if any(step.before == "penalty" for step in case.steps):  # some operations have no second derivative
            with torch.compiler.set_stance("force_eager"):
                (grad,) = torch.autograd.grad(model(x).square().mean(), [x], create_graph=True)
            if grad.requires_grad:
                grad.square().mean().backward()
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def model_of(case: Case, rank: int = 0) -> nn.Sequential:
    with one_process.ONE_MODEL, torch.random.fork_rng():
        torch.manual_seed(case.seed + (rank * 1000 if case.apart else 0))
        layers = [made(kind, seed) for kind, seed in case.layers]
        return nn.Sequential(*layers, HEADS[case.head]()).double()


def batches_of(case: Case) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the images and targets of every pass of every step."""
    dice = torch.Generator().manual_seed(case.seed)
    with torch.no_grad(), torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        shape = model_of(case).eval()(torch.ones(1, CHANNELS, *case.image).double()).shape[1:]

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        image = torch.randn(rows, CHANNELS, *case.image, generator=dice).double()
        if case.head == "image":
            return image, torch.randn(rows, *shape, generator=dice).double()
        return image, torch.randint(0, CLASSES, (rows, *shape[1:]), generator=dice)

    return [[batch(step.rows) for _ in range(step.passes)] for step in case.steps]


def loss_of(case: Case, output: Tensor, target: Tensor) -> Tensor:
    return (F.smooth_l1_loss if case.head == "image" else F.cross_entropy)(output, target)


def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    vectors = [p for p in params if p.ndim < 2]
    groups = [{"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1}]
    return torch.optim.SGD(groups + ([{"params": vectors, "lr": 0.01}] if vectors else []), lr=0.05)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    # lr / eps times the rounding of a gradient that is nearly zero is the update's: below 1 it shrinks.
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=0.1),
    "groups": two_groups,
}

# -- both sides ----------------------------------------------------------------------------------------------

Records = list[tuple[str, Tensor | None]]


def with_right_instance_norms(model: nn.Module) -> nn.Module:
    """Torch's backward is wrong where the image and its gradient have different memory formats."""
    for part in model.modules():
        if isinstance(part, nn.InstanceNorm2d):
            part.register_forward_pre_hook(lambda _, args: (args[0].contiguous(),))
            part.register_forward_hook(_contiguous_gradient)
    return model


def _contiguous_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: grad.contiguous())


class Script:
    """A training script, on whole images or (with a channel) on tiles; ``records`` is all that it shows."""

    def __init__(self, case: Case, model: nn.Module, grid: tuple[int, int], channel: Channel | None) -> None:
        self.case, self.fresh, self.grid, self.channel = case, model, grid, channel
        self.model = self.sharded(copy.deepcopy(model))
        self.stepper = self.made_stepper()
        self.averaged: Any = None
        self.records: Records = []

    def sharded(self, model: nn.Module) -> nn.Module:
        if self.channel is None:
            return with_right_instance_norms(model)
        if self.case.channels_last:  # not in one process: plain torch's norms crash there in some models
            model = model.to(memory_format=torch.channels_last)
        return spatial.shard(model, self.grid, channel=self.channel, **self.case.options)

    def made_stepper(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.case.optimizer](list(self.model.parameters()))

    def image(self, x: Tensor, gradient: bool = False) -> Tensor:
        x = x.clone()
        if self.channel is not None:
            layout = torch.channels_last if self.case.channels_last else torch.contiguous_format
            x = spatial.scatter(x.contiguous(memory_format=layout))
        return x.requires_grad_() if gradient else x

    def whole(self, value: Tensor | None) -> Tensor | None:
        if isinstance(value, spatial.Tile):
            value = spatial.gather(value.detach()).local  # type: ignore[attr-defined]
        return None if value is None else value.detach().clone()

    def show(self, what: str, value: Tensor | None) -> None:
        self.records.append((what, self.whole(value)))

    def run(self, batches: list[list[tuple[Tensor, Tensor]]]) -> Records:
        for number, (step, passes) in enumerate(zip(self.case.steps, batches)):
            if self.channel is not None and self.case.stops == (self.channel.rank, number):
                break
            where = f"step {number}"
            if step.before:
                self.before(step.before, f"{where}, {step.before}", number, passes[0][0])
            self.clear(step.clear)
            for x, target in passes:
                self.backward(where, x, target, len(passes))
            self.update(where)
        return self.records

    def backward(self, where: str, x: Tensor, target: Tensor, passes: int) -> None:
        image = self.image(x, self.case.input_gradient)
        output = self.model(image)
        self.show(f"{where}: the output", output)
        loss = loss_of(self.case, output, target) / passes
        self.show(f"{where}: the loss", loss)
        if loss.requires_grad:
            loss.backward()
        if self.case.input_gradient:
            self.show(f"{where}: the gradient of the image", image.grad)

    def update(self, where: str) -> None:
        self.show_gradients(where)
        if self.case.clip:
            self.show(f"{where}: the norm", nn.utils.clip_grad_norm_(self.model.parameters(), 0.1))
        self.stepper.step()
        for name, value in self.model.state_dict().items():
            self.show(f"{where}: {name}", value)

    def show_gradients(self, where: str) -> None:
        params = dict(self.model.named_parameters())
        if self.channel is not None:
            spatial.sum_gradients(params.values())
        for name, p in params.items():
            self.show(f"{where}: the gradient of {name}", p.grad)

    def clear(self, how: str) -> None:
        if how == "by hand":
            for p in self.model.parameters():
                p.grad = None
        elif how == "model":
            self.model.zero_grad()
        else:
            self.stepper.zero_grad(set_to_none=how != "zeros")

    def before(self, action: str, where: str, number: int, x: Tensor) -> None:
        if action in ("evaluate", "inference mode"):
            self.evaluate(self.model, where, x, action == "inference mode")
        elif action == "load":
            state = self.model.state_dict()
            self.model.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in state.items()})
        elif action == "save and load":
            file = io.BytesIO()
            torch.save([self.model.state_dict(), self.stepper.state_dict()], file)
            file.seek(0)
            self.replace(copy.deepcopy(self.fresh), *torch.load(file))
            self.model = self.sharded(self.model)
        elif action == "average":
            self.averaged = self.averaged or torch.optim.swa_utils.AveragedModel(self.model)
            self.averaged.update_parameters(self.model)
            self.evaluate(self.averaged, where, x)
        elif action == "go on with a copy":
            self.replace(copy.deepcopy(self.model), self.model.state_dict(), self.stepper.state_dict())
        elif action == "freeze":
            first = next(self.model.parameters())
            first.requires_grad_(not first.requires_grad)
        elif action == "attribute":
            for part in self.model.modules():
                if isinstance(part, Layer):
                    part.tau = 1.0 + 0.1 * number
        elif action == "mode":
            self.model.train(not self.model.training)
        elif action in ("write weights", "write buffers"):
            values = self.model.parameters() if action == "write weights" else self.model.buffers()
            with torch.no_grad():
                for value in values:
                    if value.is_floating_point():
                        value.mul_(0.8)
        elif action == "learning rate":
            for group in self.stepper.param_groups:
                group["lr"] *= 0.5
        elif action == "hook":
            next(self.model.children()).register_forward_hook(lambda module, args, output: output * 0.9)
        elif action == "hook that goes":
            handle = next(self.model.children()).register_forward_hook(lambda module, args, output: -output)
            self.evaluate(self.model, where, x)
            handle.remove()
        elif action == "hook of a parameter":
            last = list(self.model.parameters())[-1]
            last.register_post_accumulate_grad_hook(halve)
            last.register_hook(lambda grad: 0.9 * grad)
        elif action == "functional call":
            scaled = {name: 0.9 * p for name, p in self.model.named_parameters()}
            self.show(where, functional_call(self.model, scaled, (self.image(x),)))
        elif action == "backward twice":
            self.backward_twice(where, x)
        elif action == "penalty":
            self.penalise(where, x)
        elif action == "half and back":
            self.model.bfloat16().double()
        elif action == "forward without backward":
            self.show(where, self.model(self.image(x)))
        elif action == "forward that raises":
            self.raising(x)
        else:
            assert action == "shard again"
            self.model = self.sharded(self.model)

    def penalise(self, where: str, x: Tensor) -> None:
        """Train the gradient of the image to be small: a backward through a backward."""
        self.stepper.zero_grad()
        image = self.image(x, gradient=True)
        (grad,) = torch.autograd.grad(self.model(image).square().mean(), [image], create_graph=True)
        self.show(f"{where}: the gradient of the image", grad)
        penalty = grad.square().mean()
        self.show(where, penalty)
        if penalty.requires_grad:
            penalty.backward()
        self.show_gradients(where)

    def backward_twice(self, where: str, x: Tensor) -> None:
        self.stepper.zero_grad()
        loss = self.model(self.image(x)).square().mean()
        if loss.requires_grad:
            loss.backward(retain_graph=True)
            loss.backward()
        self.show_gradients(where)

    def replace(self, model: nn.Module, state: Any, stepper: Any) -> None:
        """Go on with another model; what is frozen stays so."""
        for p, before in zip(model.parameters(), self.model.parameters()):
            p.requires_grad_(before.requires_grad)
        self.model = model
        self.model.load_state_dict(state)
        self.stepper = self.made_stepper()
        self.stepper.load_state_dict(stepper)

    def evaluate(self, model: nn.Module, where: str, x: Tensor, inference: bool = False) -> None:
        model.eval()
        with torch.inference_mode() if inference else torch.no_grad():
            self.show(where, model(self.image(x)))
        model.train()

    def raising(self, x: Tensor) -> None:
        """Stop a forward before its last layer, as an interrupt or a failed check would."""

        def stop(module: nn.Module, args: Any) -> None:
            raise KeyError("stopped")

        hook = list(self.model.children())[-1].register_forward_pre_hook(stop)
        try:
            self.model(self.image(x))
        except KeyError:
            pass
        finally:
            hook.remove()


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def draws(case: Case) -> bool:
    """Return whether masks are drawn: these depend on the position, and equal those of a 1x1 grid."""
    return any("dropout" in kind for kind, _ in case.layers)


def expected(case: Case) -> Records:
    """Return what one process shows."""
    channel = ThreadHub(1).channel(0) if draws(case) else None
    torch.manual_seed(case.seed)
    return Script(case, model_of(case), (1, 1), channel).run(batches_of(case))


def on_tiles(case: Case, ranks: Callable[..., list[Any]] = on_threads) -> list[Records]:
    """Return what every rank shows; the ranks are threads, which share torch's generator."""
    batches, models = batches_of(case), [model_of(case, rank) for rank in range(case.size)]
    torch.manual_seed(case.seed)
    return ranks(
        case.size,
        lambda channel: run_on(case, models[channel.rank], channel, batches),
        case.timeout,
    )


def run_on(case: Case, model: nn.Module, channel: Channel, batches: Any) -> Records:
    """Return what a rank shows, or None as the last value of one that waits in vain for one that stopped."""
    script = Script(case, model, case.grid, channel)
    try:
        return script.run(batches)
    except CommError as error:
        if case.stops is None or "other weights" in str(error):
            raise
        return [*script.records, (STOPPED, None)]


def difference(case: Case, found: Records, wanted: Records) -> str:
    """Return the first difference beyond rounding between two runs; "" if there is none."""
    terms = LARGEST**2 * CHANNELS * MOST_ROWS
    bound = rounding(torch.float64, terms, 8 * (len(case.layers) + 2) * len(case.steps))
    if [what for what, _ in found] != [what for what, _ in wanted]:
        return f"shows {[what for what, _ in found]}, one process {[what for what, _ in wanted]}"
    for (what, value), (_, right) in zip(found, wanted):
        if value is None or right is None:
            if value is not right:
                return f"{what} is {value}, in one process {right}"
            continue
        if (value.shape, value.dtype) != (right.shape, right.dtype):
            return f"{what} is {value.shape} {value.dtype}, in one process {right.shape} {right.dtype}"
        off = float((value - right).abs().max())
        if not off <= bound * max(1.0, float(right.abs().max())):
            return f"{what} is off by {off:.3g} (rounding may make it {bound:.1g})"
    return ""


# -- listed errors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """An error of programs with one of these kinds of layers; ``says``: what its text contains."""

    kinds: tuple[str, ...]
    error: type[BaseException]
    says: tuple[str, ...]

    def permits(self, case: Case, error: BaseException) -> bool:
        return (
            any(kind in self.kinds for kind, _ in case.layers)
            and isinstance(error, self.error)
            and all(part in str(error) for part in self.says)
        )


STOPPED = "no answer from the rank that had stopped"
APART = ("ranks", "have other weights than rank 0", "call torch.manual_seed() alike on all ranks")
REFUSED = ("is not supported", "gather the tile first, or shard with unsupported='gather'")
ROWS = (
    Row(("excite",), ValueError, ("Tensor.amax", "the one that is split", *REFUSED)),
    Row(("excite",), ValueError, ("Tensor.var", "the one that is split", *REFUSED)),
    Row(("activation",), ValueError, ("Tensor.__setitem__", *REFUSED)),
    Row(("activation",), ValueError, ("Tensor.softmax", "the one that is split", *REFUSED)),
    Row(("borders",), ValueError, ("Tensor.flip", "the one that is split", *REFUSED)),
    Row(("borders",), ValueError, ("pad", " padding (", "-1", *REFUSED)),  # crops one side, pads the other
    Row(("habit",), ValueError, ("torch.compile", "cannot trace tiles")),
    Row(("habit",), ValueError, ("custom autograd.Function", "use_reentrant=False")),
)


def failure(case: Case, ranks: Callable[..., list[Any]] = on_threads) -> str:
    """Return how a program fails; "" if it does not. ``ranks`` runs them: see ``on_threads``."""
    # Ranks that are threads share the generator whose state a checkpoint keeps for its second forward.
    kinds = {"checkpointed dropout": "residual"}  # of the same size
    case = replace(case, layers=tuple((kinds.get(kind, kind), seed) for kind, seed in case.layers))
    return _failure(case, lambda case: on_tiles(case, ranks))


def failure_on_rank(case: Case, rank: int, meet: Callable[[], None]) -> str:
    """Return how a program fails on this rank, which is a process. ``meet`` waits for the other ranks."""

    def run(case: Case) -> list[Records]:
        meet()
        channel = default_channel("checker", case.grid, 1, case.timeout)
        torch.manual_seed(case.seed + rank)  # rank 0's numbers count
        return [run_on(case, model_of(case, rank), channel, batches_of(case))]

    return _failure(case, run)


def _failure(case: Case, run: Callable[[Case], list[Records]]) -> str:
    torch._dynamo.reset()  # it compiles a function a few times only
    with torch.compiler.set_stance("force_eager"):
        wanted = expected(case)
    try:
        everyone = run(case)
    except Exception as error:
        if case.apart and isinstance(error, CommError) and all(part in str(error) for part in APART):
            return ""
        return "" if any(row.permits(case, error) for row in ROWS) else command.reason_of(error)
    if case.apart:
        return "ranks trained models that differ, without an error"
    for rank, records in enumerate(everyone):
        if case.stops is None:
            if reason := difference(case, records, wanted):
                return f"rank {rank}: {reason}"
        elif reason := goes_on_alone(case, records, wanted):
            return reason
    return ""


def goes_on_alone(case: Case, records: Records, wanted: Records) -> str:
    """Return what a rank showed beyond the step that another one has left out; "" if it did not go on."""
    assert case.stops is not None
    shown = [record for record in records if record[0] != STOPPED]
    steps = [number for number in range(len(case.steps)) if any(f"step {number}" in w for w, _ in shown)]
    if any(f"step {case.stops[1]}: the loss" == what for what, _ in shown):
        return f"a rank has gone on without rank {case.stops[0]}: it shows steps {steps}"
    return difference(case, shown, wanted[: len(shown)])


def main() -> int:
    return command.main(__doc__, "tests.checker.tiles", draw, failure)


if __name__ == "__main__":
    sys.exit(main())
