"""Models that torch.fx cannot trace, cut everywhere: a stage runs the model's own forward in part.

Each pattern stands in a model that people train. The oracle is the whole model: same loss, same gradients.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commsched.pipeline.chain import Chain, ModuleForward, split
from commsched.pipeline.forward_mode import Absent, ForwardMode, uncompiled
from tests.support.pipeline_runs import ROUNDING, assert_close, momentum, replayed, train
from tests.support.stage_runs import in_stages
from tests.support.thread_ranks import run_threads

WIDTH = 6


def untraceable(x: Tensor) -> Tensor:
    """The same; Python's control flow that depends on a tensor ends a trace by torch.fx."""
    return x if x.dim() else x + 1


def tokens(rows: int = 3) -> Tensor:
    return torch.randn(rows, 5, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        for other in beside:
            y = y + other
        return x + F.gelu(y)


class Blocks(nn.Module):
    """Blocks called one after the other."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(untraceable(x))
        return self.head(x)


@dataclass
class Output:
    logits: Tensor
    steps: int


class MaskedBlocks(Blocks):
    """A mask that is left out where nothing is masked: the operations depend on the batch's values."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = untraceable(x) * scale
        weights = None if mask is None or bool(mask.all()) else mask[..., None].to(x.dtype)
        for block in self.blocks:
            hidden = block(hidden)
            if weights is not None:
                hidden = hidden * weights
        return {"logits": self.head(hidden), "weights": weights}


class EncoderDecoder(nn.Module):
    """What the encoder puts out is read by every layer of the decoder; its norm is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.encoder = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory, y = untraceable(x), x.roll(1, 1)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return self.norm(y)


class TiedHead(Blocks):
    """The embedding's weight is the head, without a module; and every block reads one table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(untraceable(x))
        for block in self.blocks:
            x = block(x, self.table)
        return F.linear(x, self.embed.weight)


class Writes(Blocks):
    """Writes in place: into values of earlier stages, through views, and into a fresh buffer."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](untraceable(x))
        kept = first.clone()
        y = self.blocks[1](first)
        y[:, 0] = kept[:, 1]
        y += kept
        z = self.blocks[2](y)
        part = z[:, 1:3]
        part.mul_(0.5)
        F.relu(z, inplace=True)
        padded = torch.zeros(z.shape[0], z.shape[1] + 1, WIDTH, dtype=z.dtype)
        padded[:, : z.shape[1]] = z
        return self.head(self.blocks[3](padded) + kept[:, :1].tanh())


class Statistics(nn.Module):
    """Batch norms with and without parameters, and a module without any that has a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(3))
        self.plain = nn.BatchNorm1d(5, affine=False)
        self.drop = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(untraceable(x)))
        return self.plain(x)


class Caches(Blocks):
    """Layers leave their results in a list, and a later one reads an earlier one's."""

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        x = untraceable(x)
        for block in self.blocks:
            x = self._one(block, x, seen)
        return self.head(x) + torch.stack(seen).sum(0).mean()

    def _one(self, block: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
        x = block(x, *seen[-2:-1])
        seen.append(x.tanh())
        return x


class KeyValueBlock(Block):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:  # type: ignore[override]
        cache.append(self.norm(x))
        return x + self.linear(cache[-1]) + cache[0]


class CachesInside(Blocks):
    """Layers write into an argument, which others read: no call of a layer stands alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeyValueBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        x = untraceable(x)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x + cache[-2])


class Checkpointed(Blocks):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, untraceable(x), use_reentrant=False)
        return Output(self.head(x), len(self.blocks))


class Contexts(Blocks):
    """What a trace of the forward cannot see: modes, checkpointing, and an attribute that changes."""

    tau = 2.0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.blocks[1](x)
        x = checkpoint(self.blocks[2], x.float(), use_reentrant=False)
        return self.head(self.blocks[3](x)) * self.tau


class Remembers(Blocks):
    """Keeps a result of one forward for the next."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(untraceable(x))
        before, self.last = self.last, x.detach()
        return self.head(x if before is None else x + 0.0)


class Transposed(Blocks):
    """Attributes that are operations, chunks, and tensors made on a value's device and like a value."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            left, right = block(untraceable(x)).mT.mT.chunk(2, dim=-1)
            x = torch.cat([right, left], -1) + torch.ones(WIDTH, device=right.device, dtype=right.dtype)
            values, _ = x.max(dim=1, keepdim=True)
            x = x - values * torch.zeros_like(values) + x.new_zeros(x.shape[0], 1, WIDTH)
        return self.head(x)


class RandomOrder(Blocks):
    """Shuffles tokens at the beginning, puts them back at the end, and sometimes leaves a layer out."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.rand(untraceable(x).shape[:2]).argsort(1)
        x = x.gather(1, order[..., None].expand_as(x))
        for block in self.blocks:
            y = block(x)
            x = x if torch.rand([]) < 0.3 else y
        back = order.argsort(1)
        return x.gather(1, back[..., None].expand_as(x)), self.head(x)


class Experts(nn.Module):
    """Each half of the rows has an expert, as in Mixtral: one grouped product, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.experts = nn.Parameter(torch.randn(2, 8, 8))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = untraceable(self.before(x)).flatten(0, 1)
        ends = torch.tensor([len(rows) // 2, len(rows)], dtype=torch.int32)
        mixed = torch._grouped_mm(rows, self.experts, offs=ends)
        result: Tensor = self.head(self.after(mixed))
        return result


def loss_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        output = output["logits"]
    output = getattr(output, "logits", output)
    return output.square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "loops": (Blocks, tokens),
    "encoder and decoder": (EncoderDecoder, tokens),
    "tied head and shared table": (TiedHead, tokens),
    "writes": (Writes, tokens),
    "statistics": (Statistics, lambda: torch.randn(4, 5)),
    "results in a list": (Caches, tokens),
    "layers write into an argument": (CachesInside, tokens),
    "checkpointed": (Checkpointed, tokens),
    "contexts": (Contexts, tokens),
    "remembers": (Remembers, tokens),
    "attributes and chunks": (Transposed, tokens),
    "masked": (MaskedBlocks, lambda: {"x": tokens(), "mask": torch.rand(3, 5) > 0.3, "scale": 2.0}),
    "nothing masked": (MaskedBlocks, lambda: {"x": tokens(), "mask": torch.ones(3, 5) > 0}),
    "no mask": (MaskedBlocks, lambda: {"x": tokens()}),
}
try:
    Experts()(tokens())
    MODELS["experts"] = Experts, tokens
except (AttributeError, NotImplementedError):
    pass  # torch before 2.9 has no grouped product on CPUs


@pytest.mark.few
@pytest.mark.parametrize("name", MODELS)
def test_every_cut_gives_the_whole_models_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, inputs = make(), batch()
    oracle = copy.deepcopy(model)
    chain = Chain(copy.deepcopy(model), example=inputs)
    layers = len(chain)
    assert layers >= 4 and isinstance(chain._forward, ModuleForward)
    whole = loss_of(oracle(**inputs) if isinstance(inputs, dict) else oracle(inputs))
    whole.backward()
    for cuts in [tuple(range(layers)), *((0, cut) for cut in range(1, layers))]:
        mine = copy.deepcopy(model)
        loss = in_stages(Chain(mine, example=inputs), cuts, inputs, loss_of)
        assert torch.equal(loss, whole), cuts
        expected = gradients(oracle)
        for key, grad in gradients(mine).items():
            # A value that several stages read has its gradient summed in another order.
            torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-6, msg=f"{cuts} {key}")
        for one, other in zip(mine.buffers(), oracle.buffers(), strict=True):
            assert torch.equal(one, other), cuts


def test_what_is_assigned_to_the_model_reaches_its_stages() -> None:
    """Attributes of the model and of layers, and hooks, also where a stage was made before."""
    model, x = Contexts(), tokens()
    stages, seen = split(model, cuts=[0, 3]), []
    whole = copy.deepcopy(model)
    for other in (model, whole):
        other.tau = 0.5
        other.blocks[1].norm.eps = 0.1
        other.blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
        other.register_forward_hook(lambda module, inputs, output: output + 1.0)
    state = (x,)
    for stage in stages:
        state = stage(*state)
    (mine,) = (output for output in seen if not isinstance(output, Absent))
    assert torch.equal(state, whole(x))
    assert torch.equal(mine, seen[-1])


def test_operations_may_differ_from_batch_to_batch() -> None:
    """A mask of ones does fewer operations than another one of the same shape: stages notice it alike."""
    torch.manual_seed(0)
    model = MaskedBlocks()
    oracle, chain = copy.deepcopy(model), Chain(model)
    for masked in (False, True, True, False, True):
        inputs = {"x": tokens(), "mask": torch.rand(3, 5) > 0.5 if masked else torch.ones(3, 5) > 0}
        loss = in_stages(chain, (0, 2, 4), inputs, loss_of)
        whole = loss_of(oracle(**inputs))
        whole.backward()
        assert torch.equal(loss, whole)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, gradients(oracle)[name], rtol=1e-5, atol=1e-6)


def test_all_stages_draw_the_same_random_numbers() -> None:
    torch.manual_seed(0)
    model, x = RandomOrder(), tokens(4)
    chain = Chain(model)
    for block in model.blocks:  # then only the order can change anything
        block.linear.weight.data.zero_(), block.linear.bias.data.zero_()
    first, second = chain.stage(0, 3), chain.stage(3, len(chain))
    seeds = set()
    for _ in range(30):
        state = first(*chain.arguments(x))
        seeds.add(int(state[2][0][0]))
        assert torch.equal(second(*state)[0], x)
    assert len(seeds) == 30


class Noisy(nn.Module):
    """Adds noise in one stage and takes it away in the next."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.noise = noise
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        noise = self.noise(torch.ones(4, WIDTH))
        value = 0 * self.first(x) + noise
        return 0 * self.second(value) + value - noise


@pytest.mark.parametrize(
    "noise",
    [
        lambda one: torch.distributions.Beta(one, one).sample(),
        lambda one: torch.distributions.Gamma(one, one).rsample(),
        lambda one: torch.binomial(100 * one, one / 2),
        lambda one: one.log_normal_(),
        lambda one: F.rrelu(-one, training=True),
        lambda one: F.gumbel_softmax(one),
        lambda one: nn.init.normal_(one),
        lambda one: torch.ops.aten.rand_like(one),
    ],
)
def test_all_stages_draw_the_same_with_every_operation_of_torch(noise: Callable[[Tensor], Tensor]) -> None:
    chain, x = Chain(Noisy(noise)), tokens(4)[:, 0]
    first, second = chain.stage(0, 1), chain.stage(1, 2)
    states = [first(*chain.arguments(x)) for _ in range(2)]
    assert not torch.equal(states[0][0][0], states[1][0][0])
    assert not any(second(*state).any() for state in states)


@pytest.mark.thorough
def test_layers_are_left_out_alike_in_all_stages() -> None:
    """LayerDrop: whether a layer counts depends on random numbers, so another value crosses each time."""
    torch.manual_seed(0)
    model, x = RandomOrder(), tokens(4)
    chain = Chain(model)
    for cut in (1, 2, 3):
        first, second = chain.stage(0, cut), chain.stage(cut, len(chain))
        for _ in range(20):
            state = first(*chain.arguments(x))
            outputs = second(*state)
            mode = ForwardMode({}, range(0), torch.device("cpu"), seed=int(state[2][0][0]))
            with mode:
                wanted = model(x)
            assert all(map(torch.equal, outputs, wanted))


def test_calls_of_other_stages_are_skipped_only_where_nothing_else_of_them_is_seen() -> None:
    for model, alone in ((Blocks(), True), (CachesInside(), False)):
        chain = Chain(model)
        stage = chain.stage(0, 1)
        stage(tokens())
        (whole,) = stage._stage_whole  # type: ignore[misc, union-attr]
        (known,) = whole._known.values()
        calls = [call.alone for found in known[0].calls.values() for call in found]
        assert any(calls) == alone


def test_only_shapes_travel_of_inputs_that_no_later_stage_reads() -> None:
    chain = Chain(Blocks())
    (value,), inputs, _ = chain.stage(0, 2)(*chain.arguments(tokens(3)))
    assert value.shape == (3, 5, WIDTH) and inputs["x"].shape == (3, 0, 5, WIDTH)
    chain = Chain(MaskedBlocks())
    mask = torch.rand(3, 5) > 0.5
    _, inputs, _ = chain.stage(0, 2)(*chain.arguments({"x": tokens(3), "mask": mask}))
    assert inputs["x"].shape == (3, 0, 5, WIDTH) and torch.equal(inputs["mask"], mask)


class Traceable(EncoderDecoder):
    def forward(self, x: Tensor) -> Tensor:
        memory, y = x, x.roll(1, 1)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return self.norm(y)


def test_layers_stand_in_the_order_in_which_the_forward_runs_them() -> None:
    """An example tells it, or a trace."""
    assert Chain(EncoderDecoder()).names[0] == "norm"
    assert Chain(Traceable()).names == Chain(EncoderDecoder(), example=tokens()).names
    names = Chain(EncoderDecoder(), example=tokens()).names
    assert names == (*(f"encoder.{n}" for n in range(3)), *(f"decoder.{n}" for n in range(3)), "norm")
    chain = Chain(EncoderDecoder())
    with pytest.raises(
        ValueError, match=r"forward \(.*self.linear.*\) reads a parameter of layer .* pass example="
    ):
        in_stages(chain, (0, 4), tokens(), loss_of)


class AsksForValue(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum().item() > 1e9:
                return x
        return self.head(x)


class WritesIntoPart(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros_like(untraceable(x))
        for block in self.blocks:
            x = block(x)
            kept[:, 0][:] = x[:, 0]
        return self.head(x + kept)


class EachTimeOther(Blocks):
    times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        for block in self.blocks:
            x = block(untraceable(x))
            if self.times % 2 == 0:
                x = x + 0.0
        return self.head(x)


class CheckpointsPairs(Blocks):
    """In a reentrant checkpoint no value has a gradient: blocks before a cut in there trained nothing."""

    def forward(self, x: Tensor) -> Tensor:
        def pair(x: Tensor, first: int) -> Tensor:
            return self.blocks[first + 1](self.blocks[first](x))  # type: ignore[no-any-return]

        for first in (1, 3):
            x = checkpoint(
                pair, self.blocks[0](untraceable(x)) if first == 1 else x, first, use_reentrant=True
            )
        return self.head(x)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_reentrant_checkpoints_between_two_cuts(cut: int) -> None:
    torch.manual_seed(0)
    model, x = CheckpointsPairs(5), tokens()
    wanted = copy.deepcopy(model)
    loss_of(wanted(x)).backward()
    in_stages(Chain(model), (0, cut), x, loss_of)
    for found, own in zip(model.parameters(), wanted.parameters(), strict=True):
        assert found.grad is not None and torch.equal(found.grad, own.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: CheckpointsPairs(5),
            "layer 2: layers 1 to 2 run inside of one autograd .* use_reentrant=False",
        ),
        (AsksForValue, r"item\(\) > 1e9.*reads the value of a tensor that another stage computes"),
        (WritesIntoPart, r"kept\[:, 0\].*writes a value of another stage into a part of a tensor"),
        (EachTimeOther, "is not the same every time"),
    ],
)
def test_what_cannot_be_cut_is_said_with_the_line(make: type[nn.Module], message: str) -> None:
    chain = Chain(make())
    first, second = chain.stage(0, 2), chain.stage(2, len(chain))
    with pytest.raises(ValueError, match=message):
        for _ in range(2):
            second(*first(*chain.arguments(tokens())))


# Asynchronous schedules refuse parameters that several stages share.
TRAINED = [
    (make, schedule)
    for make in (MaskedBlocks, EncoderDecoder, TiedHead, Writes)
    for schedule in ("gpipe", "1f1b", "zero_bubble", *(() if make is TiedHead else ("2bw", "wpipe")))
]


@pytest.mark.few
@pytest.mark.parametrize(("make", "schedule"), TRAINED)
def test_pipelines_train_them_like_one_process(make: type[nn.Module], schedule: str) -> None:
    torch.manual_seed(0)
    model, dice = make().double(), torch.Generator().manual_seed(1)
    data = []
    for number in range(4):
        x = torch.randn(8, 5, WIDTH, generator=dice, dtype=torch.float64)
        mask = torch.rand(8, 5, generator=dice) > (0.5 if number % 2 else -1.0)
        data.append(({"x": x, "mask": mask} if make is MaskedBlocks else x, torch.zeros(8)))
    options: dict[str, Any] = {"num_microbatches": 4, "example": data[0][0]}
    weights, losses, pipeline = train(
        model, data, 4, momentum, lambda output, _: loss_of(output), schedule=schedule, mesh=(2, 2), **options
    )
    wanted, expected = replayed(
        model, data, pipeline.program, momentum, lambda output, _: loss_of(output), example=data[0][0]
    )
    assert_close(weights, wanted)
    assert losses == pytest.approx(expected, rel=ROUNDING)


def test_a_stage_keeps_its_own_parameters_only() -> None:
    model = Statistics()
    chain = Chain(model, example=torch.randn(4, 5))
    stage, own = chain.stage(1, 3), chain.names[1:3]
    tensors = {name: weakref.ref(x) for name, x in model.state_dict(keep_vars=True).items()}
    del model, chain
    gc.collect()
    kept = {name for name, reference in tensors.items() if reference() is not None}
    assert kept == {name for name in tensors if name.rpartition(".")[0] in own} == set(stage.state_dict())


def test_cuts_by_name() -> None:
    chain = Chain(Blocks())
    assert chain.cuts(["blocks.1", "head"]) == (0, 1, 4) == chain.cuts([0, "blocks.1", 4])
    assert chain.cuts(["blocks.0", "blocks.2"]) == (0, 2)
    with pytest.raises(ValueError, match=r"no layer is named 'block.2'.*blocks.0, blocks.1"):
        chain.cuts(["block.2"])
    with pytest.raises(ValueError, match="must start with 0, rise"):
        chain.cuts(["blocks.2", "blocks.1"])


def test_torch_compile_is_on_again_after_threads_that_overlapped() -> None:
    both, first_left = threading.Barrier(2), threading.Event()

    def work(rank: int) -> None:
        with uncompiled():
            both.wait(30)
            assert rank == 0 or first_left.wait(30)
        first_left.set()

    run_threads(2, work, 60.0)
    seen: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert seen
