"""Horovod itself as the carrier of the optimizer's buckets."""

import pytest

from tests.support.launch import run_ranks

pytestmark = pytest.mark.dist

PROGRAM = """
import torch
import commsched as hvd

hvd.init()
torch.set_num_threads(1)


def train(transport, gather, schedule):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5)).double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        inner, model.named_parameters(), transport=transport, gather=gather, schedule=schedule
    )
    torch.manual_seed(100 + hvd.rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 7, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    optimizer.state_dict()
    name = hvd.explain(optimizer, show=False).transport
    return name, torch.cat([p.detach().flatten() for p in model.parameters()])


for gather in ("gradients", "parameters"):
    for schedule in ("dear", "auto"):
        carrier, result = train("horovod", gather, schedule)
        _, expected = train("direct", gather, schedule)
        assert carrier == "horovod", carrier
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        everywhere = hvd.allgather(result[None])
        assert torch.equal(everywhere[0], everywhere[-1])
print("equal")
"""


def test_horovods_operations_carry_the_buckets():
    (result,) = run_ranks(
        PROGRAM, 2, launcher="horovodrun", env={"COMMSCHED_RUNTIME": "horovod", "COMMSCHED_TIMEOUT": "100"}
    )[:1]
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("equal") >= 1


def test_without_horovods_engine_it_is_refused():
    program = """
    import torch, commsched as hvd
    hvd.init()
    model = torch.nn.Linear(3, 3)
    try:
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), transport="horovod")
    except ValueError as error:
        print(error)
    """
    for result in run_ranks(program, 2, check=True):
        assert "start it with horovodrun or set COMMSCHED_RUNTIME=horovod" in result.stdout
