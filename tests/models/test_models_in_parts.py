"""Models of other libraries that no rank holds whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commsched.pipeline import Pipeline
from commsched.pipeline.factory import Factory
from tests.models.held_memory import batch, loss_of, make
from tests.models.zoo import CUT
from tests.support.launch import run_ranks
from tests.support.pipeline_runs import on_threads, sgd

pytestmark = pytest.mark.models


@pytest.mark.parametrize("name", CUT)
def test_factories_make_the_parameters_of_one_process(name: str) -> None:
    def model() -> nn.Module:
        return CUT[name]()[0]

    torch.manual_seed(3)
    start = torch.get_rng_state()
    whole = model()
    end = torch.get_rng_state()
    names = [key for place, (key, _) in enumerate(whole.named_parameters()) if place % 3 == 0]
    factory = Factory(model)
    factory.outline()
    made = factory.partial(names, start)
    assert torch.equal(torch.get_rng_state(), end)
    values = dict(made.named_parameters())
    assert not [key for key in names if not torch.equal(values[key], whole.get_parameter(key))]
    assert sum(p.untyped_storage().nbytes() > 0 for p in values.values()) <= len(names) + 1
    for key, buffer in whole.named_buffers():
        assert torch.equal(buffer, made.get_buffer(key)), key


def test_each_rank_holds_its_part_of_the_memory() -> None:
    """GPT-2 with 48 layers in four processes: they measure, and train as one process does."""
    program = Path(__file__).with_name("held_memory.py")
    results = run_ranks(program, nprocs=4, timeout=300)
    assert [result.returncode for result in results] == [0] * 4, results
    losses = [float(x) for x in re.search(r"losses \[(.*), (.*)\]", results[0].stdout).groups()]  # type: ignore[union-attr]
    torch.manual_seed(0)
    model, ids = make(48, 640, 2048), batch(2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for loss in losses:
        expected = loss_of(model(input_ids=ids), ids)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()


@pytest.mark.parametrize("shard", ["10GB", "100KB"])
def test_checkpoints_of_transformers_are_read_and_written(shard: str, tmp_path: Path) -> None:
    """``save_pretrained`` writes what ``weights=`` reads; ``from_pretrained`` reads what ``save`` writes."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    model, ids = make(4, 64, 100), batch(100)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (shard == "100KB")

    def work(fabric: Any) -> Any:
        torch.manual_seed(9)
        pipeline = Pipeline(
            lambda: make(4, 64, 100),
            loss=loss_of,
            optimizer=sgd,
            fabric=fabric,
            weights=tmp_path / "theirs",
        )
        loss = pipeline.step(({"input_ids": ids}, ids))
        pipeline.save(tmp_path / "ours")
        return loss, pipeline.state_dict()

    loss, state = on_threads(3, work)[0]
    assert loss == pytest.approx(loss_of(model(input_ids=ids), ids).item(), rel=1e-6)
    (tmp_path / "ours" / "config.json").write_text(json.dumps(model.config.to_dict()))
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "ours").state_dict()
    assert again.keys() == state.keys()
    assert not [key for key in state if not torch.equal(state[key], again[key])]
