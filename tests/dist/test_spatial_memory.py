"""Memory of real steps: a rank's share of the activations, and an image that one process has no room for."""

from __future__ import annotations

import json

import pytest

from tests.support.launch import run_ranks

pytestmark = pytest.mark.dist


def measure_the_peak() -> None:
    """Every rank's most bytes of activations in a step, beside one process's and what `explain` says."""
    import copy
    import json
    import os
    import sys

    import torch
    import torch.distributed as dist

    from commsched import spatial
    from commsched.spatial.meter import PeakMeter
    from dnn_bench.models.convolutional import ResNet

    size, grid = int(os.environ["SIZE"]), (2, 2)
    shape = (1, 3, size, size)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = ResNet(18, 3, 8)

    def peak(network: torch.nn.Module, image: torch.Tensor) -> int:
        with PeakMeter() as meter:
            meter.ignore(getattr(image, "local", image), *network.state_dict().values())
            network(image).sum().backward()
        return meter.peak

    explained = spatial.explain(model, shape, grid, overlap="on").ranks[rank].peak
    whole = peak(copy.deepcopy(model), torch.zeros(shape)) if rank == 0 else 0
    spatial.shard(model, grid=grid, timeout=120, fuse_halo="off", overlap="on")
    sizes = [b.stop - b.start for b in spatial.tile_bounds(shape)]
    own = peak(model, spatial.from_local(torch.zeros(sizes), shape))
    halo = spatial.current_mesh().traffic.total()
    sys.stdout.write(json.dumps({"whole": whole, "own": own, "halo": halo, "explained": explained}))
    dist.destroy_process_group()


@pytest.mark.slow
def test_each_rank_holds_its_share_of_the_activations_of_a_large_image() -> None:
    results = run_ranks(measure_the_peak, 4, env={"SIZE": "2048"}, check=True)
    found = [json.loads(result.stdout) for result in results]
    whole = found[0]["whole"]
    for rank in found:
        assert rank["own"] <= 1.15 * whole / 4 + rank["halo"], found
        assert rank["own"] == pytest.approx(rank["explained"], rel=0.05), found
    print(found)


def train_within_a_limit() -> None:
    import os
    import re
    import resource
    import sys

    import torch
    import torch.distributed as dist
    from torch import nn

    from commsched import spatial
    from tests.support.spatial_models import conv_norm_relu

    shape, limit = (1, 3, 4096, 4096), 640 << 20
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        conv_norm_relu(3, 8, 3, 2), conv_norm_relu(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tiles = dist.get_world_size()
    if tiles > 1:
        spatial.shard(model, grid=(2, 2), timeout=120)
        bounds = spatial.tile_bounds(shape)
        size = [b.stop - b.start for b in bounds]
    else:
        size = list(shape)
    with open("/proc/self/status") as status:
        used = int(re.search(r"VmData:\s+(\d+) kB", status.read()).group(1)) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
    try:
        losses = []
        for _ in range(2):
            tile = torch.randn(size, generator=torch.Generator().manual_seed(dist.get_rank()))
            image = spatial.from_local(tile, shape) if tiles > 1 else tile
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(image), torch.tensor([1]))
            loss.backward()
            if tiles > 1:
                spatial.sum_gradients(model.parameters())
            optimizer.step()
            losses.append(loss.item())
        sys.stdout.write(f"trained {losses[1] < losses[0]}")
    except (RuntimeError, MemoryError) as error:
        sys.stdout.write(f"failed {'allocate' in str(error)}")
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "expected"), [(1, "failed True"), (4, "trained True")])
def test_one_process_fails_and_four_train(ranks: int, expected: str) -> None:
    results = run_ranks(train_within_a_limit, ranks, check=True)
    assert [result.stdout for result in results] == [expected] * ranks
