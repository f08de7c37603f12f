"""Wide halos: one fetch for several operations gives the same bits, and what it saves."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commsched import spatial
from commsched.channels import Channel
from commsched.spatial import fetch
from commsched.spatial.intervals import Split, TransposedWindow, Window, spare_margin
from commsched.spatial.layout import recut
from commsched.spatial.mesh import Mesh, Rates
from commsched.spatial.shard import cost, dry_runner, find_fusion, name_hooks
from tests.support.spatial_cases import integers, on_threads
from tests.support.spatial_models import build, train


def chain(seed: int) -> nn.Sequential:
    """A few convolutions and poolings of random geometry, with integer weights and biases."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(rng.randint(2, 5)):
        kernel = rng.randint(1, 4)
        options = {"stride": rng.choice((1, 1, 1, 2)), "padding": rng.randint(0, kernel // 2)}
        layers.append(nn.Conv2d(2, 2, kernel, dilation=rng.randint(1, 2), **options))
        layers.append(nn.ReLU() if rng.random() < 0.5 else nn.MaxPool2d(2, 1, 1))
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(integers(generator, parameter.shape) % 3 - 1)
    return model


class Residual(nn.Module):
    """A block whose sum is taken in place, as in most published ResNets: margins of both sides differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.first(x).relu_())
        before = out[:, :1]  # a view of the same storage: it must see the sum, in its margin too
        out += x
        return self.second(out) + before


def residuals(seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(Residual(), Residual()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(integers(generator, parameter.shape) % 3 - 1)
    return model


class Cropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., 2:-1, 1:]


def paddings(seed: int) -> nn.Sequential:
    """Padding and cropping layers between convolutions."""
    generator = torch.Generator().manual_seed(seed)
    between = [
        nn.ReflectionPad2d((1, 2, 2, 1)),
        Cropped(),
        nn.ZeroPad2d((2, 1, 1, 0)),
        nn.ReplicationPad2d(1),
    ]
    layers = [layer for each in between for layer in (nn.Conv2d(2, 2, 3, padding=1), each)]
    model = nn.Sequential(*layers, nn.CircularPad2d(1), nn.Conv2d(2, 2, 3, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(integers(generator, parameter.shape) % 3 - 1)
    return model


def outcome(model: nn.Module, image: Tensor) -> list[Tensor]:
    x = image.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def compare(
    seed: int,
    grid: tuple[int, int],
    fuse: int,
    overlap: str,
    channel: Channel,
    make: Callable[[int], nn.Sequential] = chain,
) -> None:
    model, image = make(seed), integers(torch.Generator().manual_seed(seed), (1, 2, 22, 25))
    expected = outcome(copy.deepcopy(model), image)
    spatial.shard(model, grid=grid, channel=channel, fuse_halo=fuse, overlap=overlap)
    leaf = image.clone().requires_grad_()
    out = model(spatial.scatter(leaf))
    assert torch.equal(spatial.gather(out).local, expected[0]), f"output of chain {seed}"
    out.local.square().sum().backward()
    own = spatial.tile_bounds(image.shape)
    assert torch.equal(leaf.grad[own], expected[1][own]), f"input gradient of chain {seed}"
    spatial.sum_gradients(model.parameters())
    for parameter, reference in zip(model.parameters(), expected[2:]):
        assert torch.equal(parameter.grad, reference), f"weight gradient of chain {seed}"


@pytest.mark.few
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(
    ("grid", "fuse"), [((2, 2), 2), ((1, 3), 3), pytest.param((4, 1), 4, marks=pytest.mark.slow)]
)
def test_the_same_bits(grid: tuple[int, int], fuse: int, overlap: str) -> None:
    seeds = [seed for seed in range(40) if not _too_small(seed)][:12]
    on_threads(grid[0] * grid[1], lambda ch: [compare(seed, grid, fuse, overlap, ch) for seed in seeds])


@pytest.mark.parametrize(("grid", "fuse"), [((2, 2), 2), ((1, 3), 3), ((2, 2), 5)])
def test_residual_connections_in_place(grid: tuple[int, int], fuse: int) -> None:
    """``out += identity`` was refused where fused halos gave the two sides different margins."""
    on_threads(grid[0] * grid[1], lambda ch: compare(5, grid, fuse, "off", ch, residuals))


@pytest.mark.parametrize(("grid", "fuse"), [((2, 2), 2), ((1, 3), 3), ((4, 1), 4)])
def test_paddings_and_crops_keep_a_wide_halo(grid: tuple[int, int], fuse: int) -> None:
    on_threads(grid[0] * grid[1], lambda ch: compare(5, grid, fuse, "off", ch, paddings))
    report = spatial.explain(paddings(5), (1, 2, 22, 25), grid, dtype=torch.float64, fuse_halo=fuse)
    assert len(report.blocks[0]) == fuse  # the convolutions that share the first halo


def _too_small(seed: int) -> bool:
    try:
        return chain(seed)(torch.zeros(1, 2, 22, 25).double()).numel() == 0
    except RuntimeError:
        return True


def test_without_zeros_beyond_the_border_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations outside the image are zero again at every layer; here they are something else."""
    original = fetch.own_pixels
    monkeypatch.setattr(fetch, "own_pixels", lambda x, plan, fill: original(x, plan, 1.0))
    with pytest.raises(AssertionError, match="of chain"):
        seeds = [seed for seed in range(40) if not _too_small(seed)][:12]
        on_threads(3, lambda ch: [compare(seed, (1, 3), 3, "off", ch) for seed in seeds])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "fuse", "overlap", "grid"),
    [
        ("amoebanet", 2, "on", (1, 2)),
        ("unet", 4, "off", (1, 2)),
        *(
            pytest.param(name, *options, marks=pytest.mark.slow)
            for name in ("resnet18", "unet", "amoebanet")
            for options in ((2, "on", (2, 2)), (4, "off", (1, 2)))
            if (name, options[0]) != ("unet", 4)
        ),
    ],
)
def test_models_train_as_in_one_process(name: str, fuse: int, overlap: str, grid: tuple[int, int]) -> None:
    plain, images, target = build(name)
    fresh = copy.deepcopy(plain)
    expected = train(plain, images, target, steps=2)

    def run(channel: Channel) -> int:
        model = spatial.shard(copy.deepcopy(fresh), grid, channel=channel, fuse_halo=fuse, overlap=overlap)
        found = train(model, spatial.scatter(images), target, 2, spatial.current_mesh())
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        return len(spatial.current_mesh().fusion)

    assert all(on_threads(grid[0] * grid[1], run))  # something was fused


def test_no_user_sees_a_halo() -> None:
    """Hooks, and outputs in objects, had rows of the neighbours in ``.local``."""

    whole = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(3)))

    def run(channel: Channel) -> None:
        mesh, heights = spatial.Mesh(channel, (2, 1), (-2, -1)), []
        first = spatial.shard(copy.deepcopy(whole), (2, 1), channel=channel, fuse_halo=3)
        for layer in first:
            layer.register_forward_hook(lambda _, args, output: heights.append(output.local.shape[2]))
        tile = spatial.scatter(torch.zeros(1, 1, 16, 16), mesh)
        first(tile)
        assert heights[-3:] == [8, 8, 8] and spatial.current_mesh().fusion
        wide = recut(tile, {0: Split((0, 8, 16), margin=(1, 1))})
        assert wide.local.shape[2] == 8 and wide.held.shape[2] == 9
        wide.mul_(2).local.add_(1)
        with pytest.raises(ValueError, match=r"tile.local was changed in place while the tile holds a halo"):
            wide + 1

    on_threads(2, run)


class Checkpointed(nn.Module):
    """Functional windows, which the backward computes again outside of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 2, 2, 3, 3).double().unbind())

    def block(self, x: Tensor) -> Tensor:
        for weight in list(self.weights)[1:]:
            x = F.max_pool2d(F.conv2d(x, weight, padding=1).relu(), 3, 1, 1)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, F.conv2d(x, self.weights[0], padding=1), use_reentrant=False)


def test_checkpoints_compute_the_same_halos_again() -> None:
    """Sites were unknown in the recomputation, whose tensors were narrower than those of the forward."""
    torch.manual_seed(0)
    plain, image = Checkpointed(), torch.randn(1, 2, 20, 20).double()
    expected = outcome(plain, image)[2:]

    def run(channel: Channel) -> None:
        model = spatial.shard(copy.deepcopy(plain), (2, 1), channel=channel, fuse_halo=3)
        model.zero_grad()
        model(spatial.scatter(image)).square().sum().backward()
        spatial.sum_gradients(model.parameters())
        assert spatial.current_mesh().fusion
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)

    on_threads(2, run)


def test_a_group_fetches_once() -> None:
    model = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(6)))
    report = spatial.explain(model, (1, 1, 32, 32), (1, 2), fuse_halo=3)
    assert report.blocks == [[f"{i} (Conv2d)" for i in block] for block in ((0, 1, 2), (3, 4, 5))]
    column = 32 * 4  # bytes
    assert report.ranks[0].forward == {"0 (Conv2d)": 3 * column, "3 (Conv2d)": 3 * column}
    assert "one halo of 0 (Conv2d) for 1 (Conv2d), 2 (Conv2d)" in str(report)


@pytest.mark.parametrize("rates", [Rates(1.0, 1e-9, 1e-12), Rates(1e-9, 1e-9, 1.0)])
def test_the_cost_model_weighs_latency_against_computing(rates: Rates) -> None:
    model = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(4)))
    report = spatial.explain(model, (1, 1, 32, 32), (1, 2), fuse_halo="auto", rates=rates)
    assert bool(report.blocks) == (rates.latency == 1.0)


def test_cost_counts_fetches_bytes_and_work() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1))
    mesh = Mesh(spatial.SilentChannel(0, 2), (1, 2), (-2, -1))
    for path, module in model.named_modules():
        name_hooks(module, mesh, path, type(module).__name__)
    run = dry_runner(model, (spatial.from_local(torch.zeros(1, 1, 8, 4), (1, 1, 8, 8), mesh),), {}, mesh)
    assert cost(run({}), Rates(1.0, 0.0, 0.0)) == 2
    assert cost(run({}), Rates(0.0, 1.0, 0.0)) == 2 * 8 * 4
    assert cost(run({}), Rates(0.0, 0.0, 1.0)) == 2 * 8 * 4 * 9
    fused = find_fusion(run, 2)
    assert list(fused.values()) == [1]
    assert cost(run(fused), Rates(1.0, 0.0, 0.0)) == 1


def test_auto_measures_once_and_agrees() -> None:
    whole = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3))

    def run(channel: Channel) -> tuple:
        model = spatial.shard(copy.deepcopy(whole), (1, 2), channel=channel)
        for size in (8, 8, 12):
            model(spatial.scatter(torch.zeros(1, 1, size, size)))
        return spatial.current_mesh().rates

    first, second = on_threads(2, run)
    assert first == second and all(rate >= 0 for rate in first)


def test_auto_chooses_the_same_on_every_rank() -> None:
    """Each rank chose by its own cost: a tile between two others computes more margin than one at the border.

    Their messages then had different sizes. Here a fused pair saves 400 and costs 288 a neighbour.
    """
    model = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(4)))
    image = torch.ones(1, 1, 32, 48)
    expected = model(image)

    def run(channel: Channel) -> dict:
        mine = spatial.shard(copy.deepcopy(model), (1, 3), channel=channel)
        spatial.current_mesh().rates = Rates(400.0, 0.0, 1.0)
        torch.testing.assert_close(spatial.gather(mine(spatial.scatter(image))).local, expected)
        return spatial.current_mesh().fusion

    first, *others = on_threads(3, run)
    assert first and all(other == first for other in others)


@pytest.mark.parametrize("value", [0, "always", 1.5])
def test_fuse_halo_is_checked(value: object) -> None:
    with pytest.raises(ValueError, match="fuse_halo must be"):
        spatial.shard(nn.Conv2d(1, 1, 3), (1, 1), fuse_halo=value)


@pytest.mark.parametrize(
    ("window", "margin", "expected"),
    [
        (Window(3, before=1, after=1), (0, 0), None),
        (Window(1), (0, 0), (0, 0)),
        (Window(3, before=1, after=1), (3, 2), (2, 1)),
        (Window(2, stride=2), (4, 4), (2, 2)),
        (TransposedWindow(2, stride=2), (1, 1), (2, 2)),
    ],
)
def test_spare_margin(window: Window, margin: tuple[int, int], expected: object) -> None:
    split = Split.even(24, 3)
    out = window.split(split, window.outputs(24))
    assert spare_margin(window, split.with_margin(margin), out) == expected
