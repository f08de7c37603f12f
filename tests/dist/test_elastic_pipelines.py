"""Elastic jobs of horovodrun with pipelines and tiles: a rank of three is killed, two go on, a host comes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.launch import elastic_hosts, start_ranks
from tests.support.needs import needs_horovod
from tests.support.pipeline_runs import ROUNDING, adam, batches, chain_model, train
from tests.support.rounding import rounding

PROGRAM = Path(__file__).with_name("programs") / "elastic_pipeline.py"
Result = tuple[list[float], dict[str, torch.Tensor]]


def one_rank() -> Result:
    """A pipeline of one stage."""
    weights, losses, _ = train(chain_model(4), batches(9), 1, adam, num_microbatches=2)
    return losses, weights


def whole_images() -> Result:
    def image(step: int) -> torch.Tensor:
        return torch.randn(2, 1, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))

    torch.manual_seed(1)
    layers = torch.nn.Conv2d(1, 3, 3, padding=1), torch.nn.Tanh(), torch.nn.Conv2d(3, 1, 5, padding=2)
    model, losses = torch.nn.Sequential(*layers).double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(9):
        optimizer.zero_grad()
        loss = F.mse_loss(model(image(step)), image(-step - 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.dist
@needs_horovod
@pytest.mark.parametrize(
    ("kind", "dies_in", "tolerance"),
    [
        ("stages", "step", 0.0),
        ("stages", "commit", 0.0),
        ("replicas", "step", ROUNDING),
        ("tiles", "step", rounding(torch.float64, terms=144, depth=9 * 6)),
    ],
)
def test_a_rank_is_lost_and_a_host_comes(tmp_path: Path, kind: str, dies_in: str, tolerance: float) -> None:
    hosts, launcher = elastic_hosts(tmp_path, "localhost:2", "127.0.0.1:1")
    env = {"COMMSCHED_TIMEOUT": "300"}
    with start_ranks(PROGRAM, 3, [hosts, kind, dies_in], env, launcher) as ranks:
        results = ranks.wait()
        shown = ranks.report()
    lines = [line for result in results for line in result.stdout.splitlines()]
    assert lines, shown
    first, *others = map(json.loads, lines)
    assert all(other[2:] == first[2:] for other in others), shown
    sizes, _, losses, weights = first
    assert sizes == [3, 3, 2, 2, 2, 2, 3, 3, 3], shown
    assert all(left <= 1 for _, left, *_ in (first, *others)), "pipelines of ended epochs stay in memory"
    wanted, expected = whole_images() if kind == "tiles" else one_rank()
    torch.testing.assert_close(losses, wanted, rtol=tolerance, atol=tolerance)
    for name, value in expected.items():
        torch.testing.assert_close(
            torch.tensor(weights[name], dtype=torch.float64), value, rtol=tolerance, atol=tolerance
        )
