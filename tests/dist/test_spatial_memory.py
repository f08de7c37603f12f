"""Memory of real steps: a rank's share of the activations, and images that one process has no room for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dnn_bench.spatial.models import unet
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
    from commsched.spatial.explain import PeakMeter
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
    spatial.shard(model, grid=grid, timeout=120, overlap="on")
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
        conv_norm_relu(3, 8, 3, 2),
        conv_norm_relu(8, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
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


def infer_within_a_limit() -> None:
    """The whole image in one process, or each rank's blocks read from the file."""
    import os
    import re
    import resource
    import sys

    import numpy as np
    import torch
    import torch.distributed as dist

    from commsched import spatial
    from tests.dist.test_spatial_memory import input_of, net

    dist.init_process_group("gloo")
    image = np.load(os.environ["IMAGE"], mmap_mode="r")
    model, blocks = net(), int(os.environ["BLOCKS"])
    options = {"blocks": (blocks, blocks), "prepare": input_of}
    if dist.get_world_size() > 1:  # what is imported and connected does not count
        spatial.run(model, np.zeros((64, 64), np.uint8), (2, 2), **options)
    with open("/proc/self/status") as status:
        used = int(re.search(r"VmData:\s+(\d+) kB", status.read()).group(1)) << 10
    limit = used + (int(os.environ["LIMIT"]) << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        if dist.get_world_size() == 1:
            with torch.no_grad():
                model(input_of(torch.from_numpy(np.array(image))[None, None]))
        else:
            spatial.run(model, image, (2, 2), out=os.environ["OUT"], **options)
        sys.stdout.write("done")
    except (RuntimeError, MemoryError) as error:
        sys.stdout.write(f"failed {'allocate' in str(error)}")
    sys.stdout.flush()
    os._exit(0)


def net() -> nn.Module:
    """A U-Net with three channels in, one out, and statistics that are not those of a fresh model."""
    torch.manual_seed(0)
    model = nn.Sequential(*unet(2, 4, 1))
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    return model.eval()


def input_of(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels.float() / 255).expand(-1, 3, -1, -1)


SIZES = [  # of the image, blocks of a rank along each side, megabytes that a process may allocate
    (2048, 2, 208),
    pytest.param(16384, 8, 1024, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("size", "blocks", "limit"), SIZES)
def test_an_image_too_large_for_one_process(size: int, blocks: int, limit: int, tmp_path: Path) -> None:
    """Patches of the result, also across borders of tiles and blocks, are those of the image around them."""
    path, out, halo = tmp_path / "image.npy", tmp_path / "out.npy", 64
    image = np.lib.format.open_memmap(path, "w+", np.uint8, (size, size))  # sparse: zeros take no space
    places = [
        (0, 0),
        (size // 2 - 100, size // 2 - 100),
        (size // 4 - 80, size - 256),
        (size - 256, size // 8),
    ]
    for row, column in places:
        patch = np.random.default_rng(row + column).integers(0, 256, (256, 256), np.uint8)
        image[row : row + 256, column : column + 256] = patch
    image.flush()
    env = {"IMAGE": str(path), "OUT": str(out), "BLOCKS": str(blocks), "LIMIT": str(limit)}
    try:
        for ranks, expected in ((1, "failed True"), (4, "done")):
            results = run_ranks(infer_within_a_limit, ranks, env=env, check=True, timeout=550)
            assert [result.stdout for result in results] == [expected] * ranks
        result, model = np.load(out, mmap_mode="r"), net()
        assert result.shape == (1, 1, size, size)
        for row, column in places:
            rows, columns = (slice(max(0, at // 4 * 4 - halo), at + 256 + halo) for at in (row, column))
            with torch.no_grad():
                around = model(input_of(torch.from_numpy(np.array(image[rows, columns]))[None, None]))[0, 0]
            own = around[row - rows.start :, column - columns.start :][:256, :256]
            found = torch.from_numpy(np.array(result[0, 0, row : row + 256, column : column + 256]))
            torch.testing.assert_close(found, own, rtol=0, atol=1e-5 * float(own.abs().max()))
    finally:
        path.unlink()
        out.unlink(missing_ok=True)
