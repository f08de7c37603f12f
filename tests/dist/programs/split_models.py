"""Models of libraries whose weight gradients stand at random places: the bits of an unsplit backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import commsched as hvd
from tests.dist.programs.compiled_models import Inputs, bert, gpt2, loss_of, pixels, resnet50, words
from tests.dist.programs.optimizer_split import adam, same
from tests.support.cases import Me, case, main
from tests.support.oracle import assert_same_bits, release, seeded
from tests.support.reference_run import momentum

STEPS = 14

Train = Callable[[nn.Module, Any, int], None]


def on(me: Me, inputs: Inputs) -> Train:
    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        loss_of(model, inputs, me.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


@case(ranks=(2, 3))
def models_of_libraries(me: Me) -> None:
    same(me, bert, on(me, words), adam, at_least=10, tries=2)
    same(me, gpt2, on(me, words), momentum, at_least=10, tries=2, gather="parameters")
    same(me, resnet50, on(me, pixels), momentum, at_least=10, tries=1)


def checkpointed() -> nn.Module:
    model: Any = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


@case(ranks=(2, 3))
def tied_weights(me: Me) -> None:
    """Their heads' parts are sent first."""
    for build, make in ((bert, adam), (gpt2, momentum), (checkpointed, momentum)):
        found = {}
        for choice in (True, False):
            model = seeded(build)
            optimizer: Any = hvd.DistributedOptimizer(make(model), model=model, row_sparse=choice)
            for step in range(STEPS):
                on(me, words)(model, optimizer, step)
            tied = hvd.explain(optimizer, show=False).tied
            assert bool(tied) == choice, (build.__name__, tied)
            found[choice] = {name: p.detach().clone() for name, p in model.named_parameters()}
            release(optimizer)
        assert_same_bits(list(found[True].values()), list(found[False].values()), build.__name__)


@case(ranks=(2,))
def in_checkpoints(me: Me) -> None:
    same(me, checkpointed, on(me, words), adam, at_least=0, tries=1)


@case(ranks=(2,))
def a_model_of_timm(me: Me) -> None:
    from timm import create_model

    def build() -> nn.Module:
        return create_model("resnet50", num_classes=10)

    def train(model: nn.Module, optimizer: Any, step: int) -> None:
        x = pixels(torch.Generator().manual_seed(1000 * step + me.rank))["x"]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    same(me, build, train, momentum, at_least=10, tries=1)


main(__name__)
