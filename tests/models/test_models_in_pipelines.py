"""Models that nobody here wrote, cut into stages and trained: the same as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from commsched.pipeline.chain import Chain
from tests.models.zoo import CUT, TRAINED, loss_of, made
from tests.support.cases import check, parameters
from tests.support.pipeline_runs import replayed, sgd, train
from tests.support.stage_runs import in_stages

pytestmark = pytest.mark.models

# T5's encoder and decoder share their embedding, and asynchronous schedules refuse shared parameters. Four
# ranks with two stages each need eight layers, and a trace does not look into timm's stages of blocks.
RUNS = [
    (name, schedule, ranks)
    for name in TRAINED
    for schedule in ("gpipe", "1f1b", "zero_bubble", "2bw", "wpipe")
    for ranks in (2, 4)
    if not (name == "t5" and schedule in ("2bw", "wpipe"))
    and not (name in ("timm convnext_atto", "timm swin_tiny") and schedule == "wpipe" and ranks == 4)
]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", CUT)
def test_stages_give_the_models_loss_and_gradients(name: str, stages: int) -> None:
    model, inputs = made(CUT[name], 2)
    oracle = copy.deepcopy(model)
    whole = loss_of(oracle(**inputs) if isinstance(inputs, dict) else oracle(inputs))
    whole.backward()
    chain = Chain(model, example=inputs)
    cuts = chain.even_cuts(min(stages, len(chain)))
    loss = in_stages(chain, cuts, inputs, loss_of)
    assert torch.equal(loss, whole)
    wanted = dict(oracle.named_parameters())
    for key, parameter in model.named_parameters():
        expected = wanted[key].grad
        if expected is None:
            assert parameter.grad is None, key
            continue
        # A value that several stages read has its gradient summed in another order.
        worst, scale = (parameter.grad - expected).abs().max(), expected.abs().max().clamp(min=1e-6)
        assert worst <= 1e-5 * scale, (key, float(worst / scale))
    for one, other in zip(model.buffers(), oracle.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "schedule", "ranks"), RUNS)
def test_pipelines_train_like_one_process(name: str, schedule: str, ranks: int) -> None:
    """Losses of five steps; of asynchronous schedules as the replay of their delays says."""
    options: dict[str, Any] = {"tie_word_embeddings": False} if name == "gpt2" else {}
    if schedule == "wpipe" and name in ("bert", "roberta", "llama", "vit"):
        options["num_hidden_layers"] = 8
    make = TRAINED[name](**options)
    rows = 8 if schedule == "wpipe" else 4
    model, _ = made(make, rows)
    _, inputs = make()
    torch.manual_seed(1)
    data = [(inputs(rows), torch.zeros(rows)) for _ in range(5)]
    example = data[0][0]
    parts = 4 if schedule == "wpipe" or ranks == 4 else 2
    options = {"schedule": schedule, "num_microbatches": parts, "mesh": (ranks, 1)}
    _, losses, pipeline = train(model, data, ranks, sgd, loss_of, example=example, **options)
    _, expected = replayed(model, data, pipeline.program, sgd, loss_of, example=example)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("program, ranks, name", parameters("pipeline_language"))
def test_a_gpt2_trains_on_ranks_like_in_one_process(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
