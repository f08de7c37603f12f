"""Models of libraries.

Compiled (AOTAutograd, no inductor): as many graphs as with DDP, and its results. With tied weights: the same
bits whether the head's part of a gradient is sent first or not.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.oracle import Oracle, assert_same_bits, release, seeded
from tests.support.reference_run import momentum, some_profile

STEPS, ROWS = 5, 2
Inputs = Callable[[torch.Generator], dict[str, torch.Tensor]]


def words(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(2000, (ROWS, 32), generator=generator)
    return {"input_ids": ids, "labels": ids}


def pixels(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, 3, 64, 64, generator=generator)}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 512}
    return BertForMaskedLM(BertConfig(vocab_size=2000, max_position_embeddings=32, **sizes, **none))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": 2000, "n_embd": 128, "n_layer": 4, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, use_cache=False))


def resnet50() -> nn.Module:
    from torchvision.models import resnet50 as build

    return build(weights=None)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: Any, inputs: Inputs, rank: int, step: int) -> torch.Tensor:
    given = inputs(torch.Generator().manual_seed(1000 * step + rank))
    out = model(**given)
    return out.square().mean() if isinstance(out, torch.Tensor) else out.loss


def graphs() -> tuple[int, int]:
    """Return how many graphs dynamo has made, and how many AOTAutograd has compiled."""
    return counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"]


def trained(model: Any, optimizer: Any, inputs: Inputs, rank: int) -> tuple[list[float], tuple[int, int]]:
    torch._dynamo.reset()
    counters.clear()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, graphs()


def compare(me: Me, build: Callable[[], nn.Module], inputs: Inputs, backend: str, bucket_mb: float) -> None:
    if not dist.is_initialized():
        store = dist.PrefixStore("ddp", me.store)
        dist.init_process_group(
            "gloo", store=store, rank=me.rank, world_size=me.size, timeout=datetime.timedelta(seconds=900)
        )
    ours, theirs, alone = seeded(build), seeded(build), seeded(build)
    options: Any = {"schedule": "dear", "bucket_mb": bucket_mb, "profile": some_profile(ours)}
    optimizer: Any = hvd.DistributedOptimizer(sgd(ours), ours.named_parameters(), **options)
    losses, made = trained(torch.compile(ours, backend=backend), optimizer, inputs, me.rank)
    assert not optimizer._session.synchronous
    ddp = DistributedDataParallel(theirs, bucket_cap_mb=bucket_mb, broadcast_buffers=False)
    their_losses, their_graphs = trained(torch.compile(ddp, backend=backend), sgd(theirs), inputs, me.rank)
    print(f"{me.name}: {made} graphs, DDP {their_graphs}; losses {losses}", flush=True)
    assert 1 < made[1] <= their_graphs[1] and made[0] <= their_graphs[0], (made, their_graphs)
    assert losses == their_losses
    assert_same_bits(list(ours.parameters()), list(theirs.parameters()), "beside DDP")
    release(optimizer)
    torch._dynamo.reset()
    compiled = torch.compile(alone, backend=backend)
    oracle = Oracle(alone, sgd(alone), me.size)
    for step in range(STEPS):
        own: list[float] = []

        def loss(_: nn.Module, rank: int, step: int = step, own: list[float] = own) -> torch.Tensor:
            value = loss_of(compiled, inputs, rank, step)
            own.append(value.item())
            return value

        oracle.step(loss)
        torch.testing.assert_close(own[me.rank], losses[step], rtol=1e-4, atol=1e-5)
    for mine, plain in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-5)


@case(ranks=(2,))
def bert_as_with_ddp(me: Me) -> None:
    compare(me, bert, words, "aot_eager", 1.0)


@case(ranks=(2,))
def gpt2_as_with_ddp(me: Me) -> None:
    compare(me, gpt2, words, "aot_eager", 1.0)


@case(ranks=(2,))
def resnet50_as_with_ddp(me: Me) -> None:
    compare(me, resnet50, pixels, "aot_eager", 25.0)


def checkpointed() -> nn.Module:
    model: Any = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


@case(ranks=(2, 3))
def tied_weights(me: Me) -> None:
    for build, make in ((bert, adam), (gpt2, momentum), (checkpointed, momentum)):
        weights = {}
        for choice in (True, False):
            model = seeded(build)
            optimizer: Any = hvd.DistributedOptimizer(make(model), model=model, row_sparse=choice)
            for step in range(14):
                loss_of(model, words, me.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            tied = hvd.explain(optimizer, show=False).tied
            assert bool(tied) == choice, (build.__name__, tied)
            weights[choice] = [p.detach().clone() for p in model.parameters()]
            release(optimizer)
        assert_same_bits(weights[True], weights[False], build.__name__)


main(__name__)
