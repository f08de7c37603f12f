"""Whole models: five steps over tiles are five steps of one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from commsched import spatial
from commsched.channels import Channel
from dnn_bench import models
from tests.support.oracle import assert_close, terms_of
from tests.support.spatial_cases import on_threads
from tests.support.spatial_models import build, train

GRIDS = [(1, 4), (4, 1), (2, 2), (3, 2)]
OFTEN = {("unet", (1, 4)), ("amoebanet", (2, 2)), ("resnet18", (3, 2))}


def every(names: Sequence[str], grids: Sequence[tuple[int, int]]) -> list:
    """Each model on each grid; the ordinary run takes a few of them."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(
            name, grid, id=f"{name}-{grid[0]}x{grid[1]}", marks=() if (name, grid) in OFTEN else slow
        )
        for name in names
        for grid in grids
    ]


@pytest.mark.parametrize(("name", "grid"), every(["resnet18", "unet", "amoebanet"], GRIDS))
def test_five_steps_equal_one_process(name: str, grid: tuple[int, int]) -> None:
    plain, images, target = build(name)
    fresh = copy.deepcopy(plain)
    expected = train(plain, images, target, steps=5)

    def run(channel: Channel) -> None:
        model = spatial.shard(copy.deepcopy(fresh), grid=grid, channel=channel)
        found = train(model, spatial.scatter(images), target, 5, spatial.current_mesh())
        for step, (a, b) in enumerate(zip(found, expected)):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=lambda m, s=step: f"step {s}: {m}")
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(
                state[key], value, rtol=0, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}"
            )

    on_threads(grid[0] * grid[1], run)


@pytest.mark.parametrize(
    "name",
    [
        "resnet_tiny",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("densenet_tiny", "inception_tiny", "vgg_tiny", "alexnet_tiny")
        ),
    ],
)
def test_benchmark_models_run_unedited(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name).double().eval()
    images, _ = models.sample_batch(name, 2)
    images = images.double()
    expected = model(images)
    expected.square().sum().backward()

    def run(channel: Channel) -> None:
        mine = copy.deepcopy(model)
        mine.zero_grad()
        spatial.shard(mine, grid=(2, 2), channel=channel)
        out = mine(spatial.scatter(images))
        assert_close([out.local], [expected], terms_of(model, 1), "output")
        out.square().sum().backward()
        spatial.sum_gradients(mine.parameters())
        for (key, p), q in zip(mine.named_parameters(), model.parameters()):
            assert_close([p.grad], [q.grad], terms_of(model, 1), key)

    on_threads(4, run)


def test_state_dict_goes_both_ways() -> None:
    plain, images, _ = build("unet")
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)

    def run(channel: Channel) -> None:
        model = spatial.shard(copy.deepcopy(plain), grid=(2, 2), channel=channel)
        model.load_state_dict(other.state_dict())
        model.eval()
        out = spatial.gather(model(spatial.scatter(images))).local
        torch.testing.assert_close(out, copy.deepcopy(other).eval()(images), rtol=0, atol=1e-10)

    on_threads(4, run)


def test_a_coarser_grid_in_the_middle() -> None:
    torch.manual_seed(0)
    front, back = nn.Conv2d(2, 4, 3, padding=1).double(), nn.Conv2d(4, 2, 5, padding=2).double()
    image = torch.randn(1, 2, 11, 14).double()
    expected = back(front(image))
    expected.square().sum().backward()
    references = [p.grad for p in (*front.parameters(), *back.parameters())]

    def run(channel: Channel) -> None:
        mesh = spatial.Mesh(channel, (2, 2), (-2, -1))
        layers = copy.deepcopy(nn.ModuleList([front, back]))
        layers.zero_grad()
        middle = spatial.regrid(layers[0](spatial.scatter(image, mesh)), (1, 2))
        assert middle.local.shape[-2:] == ((11, 7) if mesh.coord[0] == 0 else (0, 7))
        out = layers[1](middle)
        torch.testing.assert_close(spatial.gather(out).local, expected, rtol=0, atol=1e-12)
        out.local.square().sum().backward()
        spatial.sum_gradients(layers.parameters(), mesh)
        for parameter, reference in zip(layers.parameters(), references):
            torch.testing.assert_close(parameter.grad, reference, rtol=0, atol=1e-11)
        with pytest.raises(ValueError, match="no coarser grid"):
            spatial.regrid(middle, (3, 1))

    on_threads(4, run)


class DropPixels(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_empty(x.shape).bernoulli_(0.9)
        return x * mask * torch.bernoulli(torch.full_like(x, 0.95)) * torch.bernoulli(x[:, :1], 0.96)


def test_masks_do_not_depend_on_the_grid() -> None:
    model = nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.5), DropPixels()).double()
    image = torch.ones(3, 8, 9, 10).double()

    def run(channel: Channel, grid: tuple[int, int]) -> torch.Tensor:
        mine = spatial.shard(copy.deepcopy(model), grid=grid, channel=channel)
        if channel.rank == 0:  # whose numbers count
            torch.manual_seed(7)
        return spatial.gather(mine(spatial.scatter(image))).local

    one = on_threads(1, lambda channel: run(channel, (1, 1)))[0]
    assert 0.3 < (one == 0).double().mean() < 0.95
    kept = (one != 0).flatten(2)
    channels = kept.any(2)
    expected = 0.7 * 0.9 * 0.95 * 0.96
    assert abs(kept[channels].double().mean() - expected) < 0.05 and 0 < channels.sum() < channels.numel()
    for grid in ((2, 2), (3, 1), (1, 4)):
        for part in on_threads(grid[0] * grid[1], lambda channel, g=grid: run(channel, g)):
            assert torch.equal(part, one)


def test_drop_path_is_that_of_one_process() -> None:
    """One mask for all tiles of a sample, drawn as torch draws it."""

    def drop_path(x: torch.Tensor) -> torch.Tensor:
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.5)
        return x * mask.div_(0.5)

    image = torch.ones(16, 2, 6, 6).double()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = drop_path(image)
    assert 0 < expected.mean() < 2

    def run(channel: Channel) -> None:
        if channel.rank == 0:  # whose numbers count
            torch.manual_seed(7)
        tile = spatial.scatter(image, spatial.Mesh(channel, (2, 2), (-2, -1)))
        assert torch.equal(spatial.gather(drop_path(tile)).local, expected)

    on_threads(4, run)
