"""No rank listens once the ranks are connected, but for the store in which the job meets."""

import pytest

from tests.support.launch import run_ranks

pytestmark = pytest.mark.dist


def program() -> None:
    import os

    import psutil
    import torch
    from torch import nn
    from torch.nn import functional as F

    import commsched as hvd
    from commsched import spatial
    from commsched.pipeline import Pipeline

    def listening() -> list[int]:
        connections = psutil.Process().net_connections("inet")
        return [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]

    def check(what: str) -> None:
        hvd.barrier()
        expected = [int(os.environ["MASTER_PORT"])] if hvd.rank() == 0 else []
        assert listening() == expected, f"{what}: rank {hvd.rank()} listens at {listening()}, not {expected}"
        print(what)

    hvd.init()
    check("job")
    for length in (1, 100_000):
        hvd.allreduce(torch.ones(length))
        hvd.allgather(torch.ones(length + hvd.rank()))
        hvd.broadcast(torch.ones(length), 1)
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    hvd.allreduce(torch.ones(3), process_set=alone[hvd.rank()])
    check("collectives")

    model = nn.Linear(30, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for _ in range(6):
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    check("optimizer")
    hvd.join()
    check("join")

    stages = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    pipeline = Pipeline(
        stages,
        schedule="1f1b",
        num_microbatches=2,
        mesh=(2, 1),
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
    )
    pipeline.step((torch.ones(8, 4), torch.ones(8, 2)))
    check("pipeline")
    pipeline.close()

    torch.manual_seed(0)
    tiled = spatial.shard(nn.Conv2d(1, 1, 3, padding=1), grid=(1, 2))
    tiled(spatial.scatter(torch.ones(1, 1, 8, 8))).local.sum().backward()
    check("tiles")


def test_no_rank_listens_once_the_ranks_are_connected() -> None:
    results = run_ranks(program, 2, check=True)
    for result in results:
        assert result.stdout.split() == ["job", "collectives", "optimizer", "join", "pipeline", "tiles"]
