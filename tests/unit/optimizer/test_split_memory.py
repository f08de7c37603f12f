"""Weight gradients that wait hold no more than ``extra_memory``, counted by what torch allocates."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched.optimizer.bit_comparison import Digest, has_bits
from tests.support.split_memory import Training, peaks


def convolutions() -> nn.Module:
    """The first layers have the largest activations, the last one has the largest weight."""
    layers = [[nn.Conv2d(a, 24, 3, padding=1), nn.ReLU()] for a in (3, 24, 24)]
    shrunk = [nn.MaxPool2d(4), nn.Conv2d(24, 24, 3, padding=1), nn.MaxPool2d(4), nn.Flatten()]
    return nn.Sequential(*sum(layers, []), *shrunk, nn.Linear(24 * 4, 2000), nn.Linear(2000, 10))


class Words(nn.Module):
    """Three modules read one input; the last gradient is a large embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3000, 64)
        self.mixers = nn.ModuleList(nn.ModuleList(nn.Linear(64, 64) for _ in range(4)) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.last = nn.Linear(64, 40)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for norm, (query, key, value, out) in zip(self.norms, self.mixers, strict=True):
            y = norm(x)
            x = x + out(F.scaled_dot_product_attention(query(y), key(y), value(y)))
        return self.last(x)


class Heads(nn.Module):
    """A small split head, and then a large one that is not split: its weight is tied to the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.small = nn.Linear(2000, 64), nn.Linear(64, 50)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        large = F.linear(y, self.first.weight.t())
        return large.square().mean() + self.small(y).square().mean()


def wide(layers: int = 4) -> nn.Module:
    """Weights are larger than activations."""
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(300, 300), nn.ReLU())))


def of_pixels(model: nn.Module) -> Tensor:
    return model(torch.ones(4, 3, 32, 32)).square().mean()


def of_words(model: nn.Module) -> Tensor:
    return model(torch.arange(512).view(8, 64)).square().mean()


def of_heads(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(64, 2000))
    return loss


def of_rows(model: nn.Module) -> Tensor:
    return model(torch.ones(64, 300)).square().mean()


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("extra", [0, 100_000, None])
@pytest.mark.parametrize(
    "build, loss",
    [(convolutions, of_pixels), (Words, of_words), (wide, of_rows), (Heads, of_heads)],
    ids=["conv", "words", "wide", "heads"],
)
def test_no_step_takes_more_than_allowed(build, loss, extra: int | None, seed: int | None) -> None:
    """Four faults did: the node of a split module kept its input until the loss was gone; trying a module
    held two gradients of a large weight at once; gradients on their way were not counted; and waiting ones
    were not counted while a module that is not split computes a large gradient (16 bytes of a BERT's head).
    """
    found = peaks(build, loss, extra, seed)
    for name in ("tried", "measured", "split"):
        assert found[name] <= found["unsplit"] + found["extra"], (name, found)


def test_with_memory_enough_weight_gradients_wait() -> None:
    found = peaks(lambda: wide(12), lambda model: model(torch.ones(900, 300)).square().mean(), 1 << 40, None)
    assert found["split"] > found["unsplit"] + 1_000_000


def test_the_inputs_of_split_modules_are_free_after_the_backward() -> None:
    """Though the loss is still there."""
    training = Training(wide, of_rows, 0)
    training.step()
    training.split.try_modules()
    for _ in range(3):
        with training.allocated.watched():
            before = training.allocated.now
            loss = of_rows(training.model)
            loss.backward()
        assert training.allocated.now - before < 10_000
        with training.allocated.watched():
            del loss
        training.split.measure()


def test_a_graph_that_was_not_kept_says_so_the_second_time() -> None:
    training = Training(wide, of_rows, 0)
    training.split.try_modules()
    training.step()
    training.split.measure()
    loss = of_rows(training.model)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_checks_outlive_the_garbage_collector() -> None:
    """A check and its weight's node hold each other; the collector took both, and nothing was checked."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.two(self.one(x)), self.one.weight)

    training = Training(Twice, lambda model: model(torch.randn(4, 8)).sum(), None)
    training.split.try_modules()
    gc.collect()
    training.step()
    assert [part.passed for part in training.split.parts] == [False, True]


def test_digests_tell_bits_apart() -> None:
    one = torch.randn(3, 5)
    assert has_bits(one.clone(), Digest.of(one))
    for other in (one.t().contiguous().t(), one.view(5, 3), -one, torch.where(one == one[1, 1], -one, one)):
        assert not has_bits(other, Digest.of(one))
    assert not has_bits(torch.tensor(-0.0), Digest.of(torch.tensor(0.0)))
    assert not has_bits(None, Digest.of(one)) and has_bits(None, None) and not has_bits(one, None)
    assert has_bits(one.bfloat16(), Digest.of(one.bfloat16())) and has_bits(one[:0], Digest.of(one[:0]))
