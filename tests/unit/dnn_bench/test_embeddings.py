"""Which embeddings get sparse gradients, and what a model without any is told."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from dnn_bench import baselines, models
from dnn_bench.baselines import reference, require
from dnn_bench.baselines.trainer import Job, make_embeddings_sparse

SPARSE = replace(baselines.get("horovod_sparse"), needs="torch")


def test_only_trained_embeddings_with_a_weight_of_their_own_become_sparse() -> None:
    embeddings = {
        "own": nn.Embedding(5, 4),
        "bag": nn.EmbeddingBag(5, 4),
        "largest": nn.EmbeddingBag(5, 4, mode="max"),
        "scaled": nn.Embedding(5, 4, scale_grad_by_freq=True),
        "frozen": nn.Embedding.from_pretrained(torch.zeros(5, 4)),
        "tied": nn.Embedding(5, 4),
    }
    model = nn.ModuleDict({**embeddings, "head": nn.Linear(4, 5)})
    model["head"].weight = model["tied"].weight
    make_embeddings_sparse(model)
    assert [name for name, module in embeddings.items() if module.sparse] == ["own", "bag"]


def test_a_model_without_such_embeddings_is_refused_before_anything_starts() -> None:
    require(SPARSE, Job("dlrm_tiny"))
    require(baselines.get("ddp"), Job("mlp_tiny"))
    with pytest.raises(baselines.MissingPeer, match=r"no trained nn\.Embedding"):
        require(SPARSE, Job("mlp_tiny"))


@pytest.fixture
def click_job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Train a small click model as `horovod_sparse` does."""
    monkeypatch.setitem(models._MODELS, "dlrm_tiny", models._clicks(batch=64, fields=4, vocab=100))
    return SPARSE.adapt(Job("dlrm_tiny"))


@pytest.mark.parametrize("lost", [None, 0, 2])
def test_the_check_finds_one_lost_sparse_gradient(click_job: Job, lost: int | None) -> None:
    model = click_job.build_model()
    optimizer = click_job.build_optimizer(model.parameters())
    references = reference.train_alone(click_job, 2)
    right = []
    for step in range(reference.STEPS):
        optimizer.zero_grad()
        for rank, (inputs, targets) in enumerate(click_job.global_batch(step, 2)):
            before = copy.deepcopy(model.table.weight.grad)
            (click_job.loss(model(inputs), targets) / 2).backward()
            if (rank, step) == (1, lost):
                model.table.weight.grad = before
        assert model.table.weight.grad.is_sparse
        optimizer.step()
        actual = {name: value.detach() for name, value in model.named_parameters()}
        right += [alone.compare(actual).right for alone in references if alone.steps == step + 1]
    assert len(right) == 2 and all(right) == (lost is None)
