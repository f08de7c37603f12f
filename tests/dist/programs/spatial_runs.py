"""Tiles over real processes: random integer cases, destinations of `gather`, replicas, stages, bad input."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import commsched as hvd
from commsched import spatial
from tests.support import spatial_stages
from tests.support.cases import Me, case, main
from tests.support.spatial_cases import RANDOM_OVER_PROCESSES, check, integers, process_cases
from tests.support.spatial_models import build, conv_norm_relu


@case(ranks=(2, 3, 4))
def random_integers_bit_for_bit(me: Me) -> None:
    warnings.simplefilter("ignore")
    channel = spatial.channel(timeout=60)
    for one, overlap in process_cases(me.size, RANDOM_OVER_PROCESSES[me.size]):
        check(one, channel, overlap)


def small_integers(model: nn.Module, generator: torch.Generator) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(integers(generator, parameter.shape))
    return model.double()


@case(ranks=(4,))
def gather_to_every_destination_has_no_factor_of_the_ranks(me: Me) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1, stride=2)]
    model = small_integers(nn.Sequential(*layers), generator)
    image = integers(generator, (4, 3, 10, 9))
    plain = model(image)
    plain.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    keys = list(model.state_dict())

    spatial.shard(model, grid=(2, 2), timeout=60)
    assert list(model.state_dict()) == keys
    for to in ("replicate", "rank0", "batch"):
        model.zero_grad()
        out = spatial.gather(model(spatial.scatter(image)), to=to)
        if to == "replicate":
            assert torch.equal(out.local, plain)
        elif to == "rank0":
            assert torch.equal(out, plain) if me.rank == 0 else out.numel() == 0
        else:
            assert torch.equal(out, plain[me.rank : me.rank + 1])
        out.square().sum().backward()
        spatial.sum_gradients(model.parameters())
        for parameter, reference in zip(model.parameters(), expected):
            assert torch.equal(parameter.grad, reference), to


def said_by(attempt: Any) -> str:
    try:
        attempt()
    except (ValueError, spatial.CommError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@case(ranks=(4,))
def bad_input_is_an_error_on_every_rank(me: Me) -> None:
    expected = {
        "image sizes": ("CommError: Sequential: forward", "(1, 3, 16, 16)", "rank 3: image (1, 3, 22, 16)"),
        "grids": ("CommError: Sequential: shard", "rank 2: grid (1, 4)", "rank 0: grid (2, 2)"),
        "too few ranks": ("ValueError: Sequential: a grid of 3x2", "needs 6 ranks", "there are 4"),
        "more tiles than pixels": ("ValueError", "scatter", "1 pixels into 2 tiles", "(1, 3, 1, 16)"),
        "operation": ("ValueError: 1 (Softmax): softmax", "(1, 4, 16, 16)", "grid of (2, 2)", "gather"),
        "plain image": ("ValueError: Sequential", "takes tiles", "scatter"),
    }

    def attempt(name: str) -> None:
        torch.manual_seed(0)
        mix = nn.Softmax(-1) if name == "operation" else nn.ReLU()
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), mix)
        shape = (1, 3, 1 if name == "more tiles than pixels" else 16, 16)
        if name == "image sizes":
            shape = (1, 3, 16 + 2 * me.rank, 16)
        grid = {"too few ranks": (3, 2), "grids": (1, 4) if me.rank == 2 else (2, 2)}.get(name, (2, 2))
        spatial.shard(model, grid=grid, timeout=60)
        image = torch.zeros(shape)
        model(image if name == "plain image" else spatial.scatter(image))

    for name, texts in expected.items():
        said = said_by(lambda name=name: attempt(name))
        assert all(text in said for text in texts), (name, said)


@case(ranks=(4,))
def dtensors_become_tiles_and_tiles_dtensors(me: Me) -> None:
    """Uneven shards, there and back through a convolution, with both gradients."""
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(0)
    conv = small_integers(nn.Conv2d(2, 3, 3, padding=1), generator)
    image = integers(generator, (2, 2, 9, 7)).requires_grad_()
    expected = conv(image)
    expected.square().sum().backward()
    reference, conv.weight.grad = conv.weight.grad, None

    spatial.shard(conv, grid=(2, 2), timeout=60)
    sharded = distribute_tensor(image.detach(), mesh, [Shard(2), Shard(3)]).requires_grad_()
    tile = spatial.from_dtensor(sharded)
    sizes = {0: (5, 4), 1: (5, 3), 2: (4, 4), 3: (4, 3)}
    assert tile.shape == image.shape and tile.local.shape[-2:] == sizes[me.rank]
    out = conv(tile).to_dtensor()
    assert out.device_mesh is mesh and out.placements == (Shard(2), Shard(3))
    assert torch.equal(out.full_tensor(), expected)
    out.to_local().square().sum().backward()
    assert torch.equal(sharded.grad.full_tensor(), image.grad)
    spatial.sum_gradients([conv.weight])
    assert torch.equal(conv.weight.grad, reference)

    rows = distribute_tensor(image.detach(), mesh, [Shard(2), Replicate()])
    assert torch.equal(conv(spatial.from_dtensor(rows)).to_dtensor().full_tensor(), expected)
    said = said_by(
        lambda: spatial.from_dtensor(distribute_tensor(image.detach(), mesh, [Shard(1), Shard(3)]))
    )
    assert "mesh dimension 0 must be Shard(2) or Replicate(), got" in said, said
    said = said_by(lambda: spatial.scatter(image.detach()).to_dtensor())
    assert "cut at (0, 5, 9), and this tile has it cut at (0, 4, 9)" in said, said
    line = distribute_tensor(image.detach(), init_device_mesh("cpu", (4,)), [Shard(2)])
    said = said_by(lambda: spatial.from_dtensor(line))
    assert "device mesh of shape (4,)" in said and "grid is (2, 2)" in said, said


@case(ranks=(4,))
def dtensors_of_replicas_become_tiles(me: Me) -> None:
    """Those of the second replica were refused: their ranks are not the first ones."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "y", "x"))["y", "x"]
    generator = torch.Generator().manual_seed(0)
    conv, image = small_integers(nn.Conv2d(2, 3, 3, padding=1), generator), integers(generator, (2, 2, 6, 8))
    expected = conv(image)
    spatial.shard(conv, grid=(1, 2), replicas=2, timeout=60)
    said = said_by(lambda: spatial.scatter(image).to_dtensor())
    first = me.rank // 2 * 2
    assert f"the tiles lie on ranks {[first, first + 1]} of 4" in said, said
    tile = spatial.from_dtensor(distribute_tensor(image, mesh, [Shard(2), Shard(3)]))
    assert torch.equal(conv(tile).to_dtensor().full_tensor(), expected)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.gauss(0, 1), np.random.normal()


class StochasticDepth(nn.Module):
    """Draws into a plain tensor, which no rank can tell from its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device)
        return x * noise.bernoulli_(0.5).div_(0.5)


@case(ranks=(4,))
def stochastic_depth_drops_what_one_process_drops(me: Me) -> None:
    """Whatever the ranks' seeds are, and again when a checkpoint computes its part a second time."""
    generator = torch.Generator().manual_seed(0)
    conv, depth = small_integers(nn.Conv2d(2, 2, 3, padding=1), generator), StochasticDepth()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if random.random() < 0.5:
                x = self.conv(x) * random.randint(1, 3)
            if np.random.random() < 0.5:
                x = self.conv(x) * np.random.randint(4, 9)
            return depth(checkpoint(lambda y: depth(self.conv(depth(y))), x, use_reentrant=False))

    model, image = Checkpointed(), integers(generator, (16, 2, 8, 8))
    seed_all(3)
    expected = [model(image) for _ in range(4)]
    sum(out.square().sum() for out in expected).backward()
    reference, after = conv.weight.grad, drawn()
    assert all(out.any() and (out == 0).any() for out in expected)

    spatial.shard(model, grid=(2, 2), timeout=60)
    for alike in (True, False):
        conv.weight.grad = None
        seed_all(3 if alike or me.rank == 0 else 100 + me.rank)
        outputs = [model(spatial.scatter(image)) for _ in range(4)]
        for out, whole in zip(outputs, expected):
            assert torch.equal(spatial.gather(out).local, whole), alike
        found = drawn()
        if not (alike or me.rank == 0):  # a rank that draws its own numbers goes on with them
            seed_all(100 + me.rank)
            after = drawn()
        assert found == after, alike
        sum(out.square().sum() for out in outputs).backward()
        spatial.sum_gradients([conv.weight])
        assert torch.equal(conv.weight.grad, reference), alike


# -- replicas ------------------------------------------------------------------------------------------------


@case(ranks=(4,))
def tiles_and_replicas_in_one_optimizer(me: Me) -> None:
    """Two replicas of two tiles each: sums over tiles and means over replicas in one reduction."""
    tiles_and_replicas("unet", me)


@case(ranks=(), slow=(4,))
def tiles_and_replicas_of_a_resnet_in_one_optimizer(me: Me) -> None:
    tiles_and_replicas("resnet18", me)


def tiles_and_replicas(name: str, me: Me) -> None:
    replicas, tiles = 2, 2
    model, images, target = build(name)
    plain = copy.deepcopy(model)
    # Each replica has one of the two images, so batch statistics are those of its own image.
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        for replica in range(replicas):
            loss = F.cross_entropy(plain(images[replica : replica + 1]), target[replica : replica + 1])
            (loss / replicas).backward()
        optimizer.step()
    spatial.shard(model, grid=(1, tiles), replicas=replicas, timeout=60)
    mine = me.rank // tiles
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Sum)
    for _ in range(5):
        wrapped.zero_grad()
        loss = F.cross_entropy(model(spatial.scatter(images[mine : mine + 1])), target[mine : mine + 1])
        (loss / replicas).backward()
        wrapped.step()
    state = model.state_dict()
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(state[key], parameter, rtol=0, atol=1e-10, msg=lambda m, k=key: f"{k} {m}")


@case(ranks=(3,))
def mirrored_replicas_share_the_ranks(me: Me) -> None:
    """GEMS: two replicas of the model on the same ranks in opposite order, their gradients combined."""
    ranks = list(range(me.size))
    model, images, target = build("unet")
    plain = copy.deepcopy(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    replicas, meshes = [copy.deepcopy(model) for _ in range(2)], []
    for replica, order in zip(replicas, (ranks, ranks[::-1])):
        channel = spatial.channel(order, timeout=60)
        spatial.shard(replica, grid=(1, 3), channel=channel)
        meshes.append(spatial.current_mesh())
    optimizer = torch.optim.SGD(replicas[0].parameters(), lr=0.05)
    for _ in range(2):
        reference.zero_grad()
        optimizer.zero_grad()
        replicas[1].zero_grad()
        for half, (replica, mesh) in enumerate(zip(replicas, meshes)):
            own = slice(half, half + 1)
            (F.cross_entropy(plain(images[own]), target[own]) / 2).backward()
            (F.cross_entropy(replica(spatial.scatter(images[own], mesh)), target[own]) / 2).backward()
        reference.step()
        for first, second in zip(replicas[0].parameters(), replicas[1].parameters()):
            first.grad += second.grad
        spatial.sum_gradients(replicas[0].parameters(), meshes[0])
        optimizer.step()
        with torch.no_grad():
            for first, second in zip(replicas[0].parameters(), replicas[1].parameters()):
                second.copy_(first)
    for parameter, expected in zip(replicas[0].parameters(), plain.parameters()):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-10)


# -- stages --------------------------------------------------------------------------------------------------


@case(ranks=(4,))
def the_rest_on_one_rank_on_batch_shards_or_replicated(me: Me) -> None:
    """The first layers on tiles, the rest elsewhere; the sum of the ranks' gradients is the whole."""
    torch.manual_seed(0)
    front = nn.Sequential(conv_norm_relu(3, 4, 3), nn.MaxPool2d(3, 2, 1), conv_norm_relu(4, 4, 3)).double()
    layers = [nn.Conv2d(4, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)]
    rest = nn.Sequential(*layers).double()
    images, target = torch.randn(4, 3, 17, 19).double(), torch.tensor([0, 1, 2, 1])
    whole = nn.Sequential(front, rest)
    plain = copy.deepcopy(whole)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    spatial.shard(front, grid=(2, 2), timeout=60)
    share = len(images) // 4
    for to in ("rank0", "batch", "replicate"):
        for _ in range(2):
            reference.zero_grad()
            F.cross_entropy(plain(images), target).backward()
            reference.step()
            optimizer.zero_grad()
            received = spatial.gather(front(spatial.scatter(images)), to=to)
            if to == "rank0":
                mine = rest(received) if received.numel() else None
                loss = received.sum() if mine is None else F.cross_entropy(mine, target)
            elif to == "batch":
                own = slice(me.rank * share, (me.rank + 1) * share)
                loss = F.cross_entropy(rest(received), target[own], reduction="sum") / len(images)
            else:
                loss = F.cross_entropy(rest(received), target)
            loss.backward()
            spatial.sum_gradients(whole.parameters())
            optimizer.step()
        for parameter, expected in zip(whole.parameters(), plain.parameters()):
            torch.testing.assert_close(
                parameter, expected, rtol=0, atol=1e-10, msg=lambda m, t=to: f"{t}: {m}"
            )


@case(ranks=(3,))
def pipelines_and_mirrored_replicas_are_one_process(me: Me) -> None:
    for one in spatial_stages.PIPELINES[::2]:  # as 1F1B; tests/dist/test_spatial_stages.py takes every case
        spatial_stages.check(one)


@case(ranks=(4,))
def shares_of_the_samples_and_replicas_are_one_process(me: Me) -> None:
    for one in spatial_stages.SHARES[1::2]:  # as GPipe
        spatial_stages.check(one)


@case(ranks=(3,))
def stages_that_cannot_be_are_an_error_on_every_rank(me: Me) -> None:
    conv, pool = nn.Conv2d(3, 3, 3, padding=1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    tiles, one, two = spatial.Tiles((1, 2)), spatial.Samples(1), spatial.Samples(2)
    images, target = torch.zeros(3, 3, 8, 8), torch.zeros(3, dtype=torch.int64)

    def refused(expected: str, stages: list, placements: list, **options: Any) -> None:
        def attempt() -> None:
            trainer = spatial.Hybrid(stages, placements, loss=F.cross_entropy, timeout=60, **options)
            trainer.step(images, target)

        said = said_by(attempt)
        assert expected in said, said

    refused("1 stages, 2 placements", [conv], [tiles, one])
    refused("stages on 2 + 2 ranks need 4 ranks, and there are 3", [conv, pool], [two, tiles])
    refused("3 rows in 4 micro-batches leave 0 for 1 replicas", [conv, pool], [tiles, one], microbatches=4)
    whole = "stage 0 runs on tiles and returns a tensor of shape (3, 3) that every rank holds whole"
    stages = [nn.Sequential(conv, pool), nn.Linear(3, 2)]
    refused(whole if me.rank < 2 else "look for the first error on rank", stages, [tiles, one])


main(__name__)
