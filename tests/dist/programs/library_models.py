"""Models of libraries whose weights are tied: the head's part of a gradient is sent first, with the same bits."""

from __future__ import annotations

from typing import Any

from torch import nn, optim

import commsched as hvd
from tests.dist.programs.compiled_models import bert, gpt2, loss_of, words
from tests.support.cases import Me, case, main
from tests.support.oracle import assert_same_bits, release, seeded
from tests.support.reference_run import momentum

STEPS = 14


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), 1e-2)


def checkpointed() -> nn.Module:
    model: Any = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


@case(ranks=(2, 3))
def tied_weights(me: Me) -> None:
    for build, make in ((bert, adam), (gpt2, momentum), (checkpointed, momentum)):
        found = {}
        for choice in (True, False):
            model = seeded(build)
            optimizer: Any = hvd.DistributedOptimizer(make(model), model=model, row_sparse=choice)
            for step in range(STEPS):
                loss_of(model, words, me.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            tied = hvd.explain(optimizer, show=False).tied
            assert bool(tied) == choice, (build.__name__, tied)
            found[choice] = {name: p.detach().clone() for name, p in model.named_parameters()}
            release(optimizer)
        assert_same_bits(list(found[True].values()), list(found[False].values()), build.__name__)


main(__name__)
