"""What ordinary scripts do with sharded models."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from commsched import spatial
from commsched.channels import Channel
from commsched.errors import CommError
from tests.support import one_process
from tests.support.rounding import rounding
from tests.support.spatial_cases import on_threads

GRID = (2, 1)


def net(seed: int = 0, channels: int = 2) -> nn.Sequential:
    with one_process.seed(seed):
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, channels, 3, padding=1)
        ).double()


def image() -> Tensor:
    return torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(1)).double()


HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean((2, 3)),
    "sum": lambda x: (x[..., :40] * 0.01).sum(),
    "norm": lambda x: x.norm(),
    "global pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (1, 3)),
    "mse": lambda x: F.mse_loss(x, x * 0.5),
    "variance": lambda x: x.var(),
    "variance of rows": lambda x: x.var((2, 3), correction=0),
    "deviation": lambda x: x.std(),
    "average": lambda x: F.avg_pool2d(x, 300),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(1, 300, 300, dtype=torch.int64)),
}


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_added_up_in_float32(name: str, dtype: torch.dtype) -> None:
    """300 x 300 numbers of 8: their sum is no number of float16, their mean is."""
    function = HALVES[name]
    x = (torch.rand(1, 2, 300, 300, generator=torch.Generator().manual_seed(0)) + 7.5).to(dtype)
    wanted = function(x.float()).to(dtype)

    def work(channel: Channel) -> Tensor:
        model = spatial.shard(Calls(function), GRID, channel=channel)
        return spatial.gather(model(spatial.scatter(x)))

    for found in on_threads(2, work):
        assert found.dtype == wanted.dtype
        # One rounding each, of the result and of the elements before it.
        torch.testing.assert_close(found, wanted, rtol=4 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_half_precision_is_interpolated_as_exactly_as_torch_does(mode: str, dtype: torch.dtype) -> None:
    """Each weighted pixel and each dimension was rounded on its own."""

    def function(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(23, 45), mode=mode)

    x = torch.randn(1, 2, 30, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = function(x.double())
    torchs = (function(x).double() - exact).abs().max()

    def work(channel: Channel) -> Tensor:
        model = spatial.shard(Calls(function), GRID, channel=channel)
        return spatial.gather(model(spatial.scatter(x))).local

    for found in on_threads(2, work):
        # Both round one sum in float32, of which the last bits may differ.
        assert (found.double() - exact).abs().max() <= torchs + rounding(torch.float32, 64)


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


VARIANCES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x.var(),
    "of a population": lambda x: x.std(False),
    "rows": lambda x: torch.var(x, (0, 2), correction=0, keepdim=True),
    "columns": lambda x: x.std(-1),
    "channels": lambda x: x.var(1),
    "a norm by hand": lambda x: (x - x.mean((2, 3), True)) / (x.var((2, 3), False, True) + 1e-5).sqrt() * x,
    "zeros": lambda x: (x * 0).std(),
}


@pytest.mark.parametrize("name", VARIANCES)
def test_variances_and_their_gradients_are_those_of_the_whole(name: str) -> None:
    function, x = VARIANCES[name], image()
    whole = x.clone().requires_grad_()
    wanted = function(whole)
    wanted.square().sum().backward()

    def work(channel: Channel) -> Any:
        model, leaf = spatial.shard(Calls(function), (2, 2), channel=channel), x.clone().requires_grad_()
        result = model(spatial.scatter(leaf))
        result.square().sum().backward()
        part = spatial.tile_bounds(x.shape)
        return spatial.gather(result), leaf.grad[part], whole.grad[part]

    # A sum over the image for the mean, one for the variance, and both again in the backward.
    exact = rounding(torch.float64, x.numel(), 4)
    for result, found, grad in on_threads(4, work):
        torch.testing.assert_close(result, wanted.detach(), rtol=exact, atol=exact)
        torch.testing.assert_close(found, grad, rtol=exact, atol=exact)


def assigned(y: Tensor, index: Any, value: Any = 0.0) -> Tensor:
    y[index] = value
    return y


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "channels": lambda x: assigned(x * 1, (slice(None), slice(1, 3)), 0.5 * x[:, :2]),
    "rows": lambda x: assigned(x * 1, (..., slice(1, 3), slice(None))),
    "mask": lambda x: assigned(x * 1, x < 0),
    "reshaped": lambda x: assigned((x * 1).flatten(2), (..., 3)).view(x.shape),
    "cumsum_": lambda x: (x * 1).cumsum_(2),
    "index_fill_": lambda x: (x * 1).index_fill_(2, torch.tensor([1]), 0.0),
    "out=": lambda x: torch.cumsum(x, 2, out=torch.ones_like(x)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_writes_to_a_gathered_image_reach_the_tile(name: str) -> None:
    """What was written to the gathered image was lost."""
    function = IN_PLACE[name]
    x = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0)).double()
    plain = x.clone().requires_grad_(name != "out=")
    wanted = function(plain)
    if name != "out=":
        wanted.square().sum().backward()

    def work(channel: Channel) -> None:
        model = spatial.shard(Calls(function), GRID, channel=channel, unsupported="gather")
        tile = spatial.scatter(x).requires_grad_(name != "out=")
        found = model(tile)
        assert torch.equal(spatial.gather(found).local, wanted)
        if name != "out=":
            found.square().sum().backward()
            torch.testing.assert_close(spatial.gather(tile.grad).local, plain.grad)

    on_threads(2, work)


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "channels": (lambda y: y[:, 1:3], ""),
    "a crop": (lambda y: y[..., 1:3, 2:7], ""),
    "tokens": (lambda y: y.flatten(2).transpose(1, 2), ""),
    "rows and columns": (lambda y: y.transpose(2, 3), ""),
    "windows": (lambda y: y.view(2, 4, 2, 3, 4, 2), ""),
    "what torch copies": (lambda y: y.transpose(2, 3).reshape(2, 4, -1), ""),
    "padded by nothing": (lambda y: F.pad(y, (0, 0)), ""),
    "rolled by nothing": (lambda y: y.roll(8, 3), ""),
    "of its own size": (lambda y: F.interpolate(y, scale_factor=1.0, mode="bilinear"), ""),
    "a column": (lambda y: y[..., 0], r"y\[...\]"),
    "a token": (lambda y: y.flatten(2)[..., 3], r"y\[...\]"),
    "windows across the cut": (lambda y: y.view(2, 4, 6, 1, 8)[:, 1:].view(2, 3, 3, 2, 8), r"y.view\(...\)"),
    "half of the image": (lambda y: y.chunk(2, 3)[1], r"y.chunk\(...\)"),
    "a view of a copy": (lambda y: y[..., 0][:, 1:].unsqueeze(0), r"y\[...\]"),
    "all pixels": (lambda y: y.ravel(), r"y.ravel\(...\)"),
    "the diagonal": (lambda y: y.diagonal(0, 2, 3), r"y.diagonal\(...\)"),
}


@pytest.mark.few
@pytest.mark.parametrize("order", ["write to the view", "write to the viewed", "write to the view alone"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory_as_in_one_process_or_refuse_writes(name: str, order: str) -> None:
    view, refused = VIEWS[name]

    def function(x: Tensor) -> Tensor:
        y = x * 1
        part = view(y)
        if order == "write to the view alone":
            del y
            part += 3
            return part.sum()
        (part if order == "write to the view" else y).mul_(2)
        return (y if order == "write to the view" else part).square().sum()

    x = torch.arange(2.0 * 4 * 6 * 8).double().view(2, 4, 6, 8)
    wanted = function(x)

    def work(channel: Channel) -> None:
        model = spatial.shard(Calls(function), (2, 2), channel=channel, unsupported="gather")
        if refused and order != "write to the view alone":
            with pytest.raises(ValueError, match=rf"Calls: {refused} is a copy on a grid of \(2, 2\)"):
                model(spatial.scatter(x))
        else:
            assert torch.equal(spatial.gather(model(spatial.scatter(x))).local, wanted)

    on_threads(4, work)


def changed_between(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    first = function(x)
    x.mul_(2)
    return first + function(x)


CLASSES = torch.arange(2.0 * 4 * 6 * 8).double().sin().view(2, 4, 6, 8)
WITH_ARGUMENTS: dict[str, Callable[[Tensor], Any]] = {
    "indices": lambda x: F.max_pool2d(x, 3, 2, padding=1, return_indices=True)[1],
    "adaptive": lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)[1],
    "kernel": lambda x: F.conv2d(torch.ones(1, 4, 12, 16).double(), x, stride=2, padding=1),
    "kernel of the transposed": lambda x: F.conv_transpose2d(torch.ones(1, 2, 4, 4).double(), x, stride=2),
    "sum": lambda x: F.mse_loss(x, 2 * x, size_average=False),
    "classes": lambda x: F.cross_entropy(CLASSES, (x[:, 0] > 0).long(), ignore_index=0),
    "both": lambda x: F.conv2d(x, x, padding=(1, 2)),
    "flip of two": lambda x: x.flip(0, 2),
    "unbind": lambda x: x.unbind(axis=2)[1],
    "pixels": lambda x: torch.where(x > 0)[3],
    "index": lambda x: x[True] + x[:, None, 0],
    "tuple": lambda x: torch.sort(x, 2, out=(y := x * 0, (x * 0).long())).values + y,
    "changed tokens": lambda x: changed_between((x * 1).flatten(2), lambda y: y.cumsum(-1)),
    "scale": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.1),
    "weighted": lambda x: F.mse_loss(x, 2 * x, weight=x.abs()),
    "sum over classes": lambda x: F.cross_entropy(x, (x[:, 0] > 0).long(), size_average=False),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_a_gathered_call_keeps_its_arguments(name: str) -> None:
    """Arguments after the first two were dropped: strides became 1, sums became means."""
    function = WITH_ARGUMENTS[name]
    x = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0)).double()
    wanted = function(x.clone())

    def work(channel: Channel) -> None:
        model = spatial.shard(Calls(function), (1, 2), channel=channel, unsupported="gather")
        found = spatial.gather(model(spatial.scatter(x))).local
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)

    on_threads(2, work)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a hook of tokens": lambda x: x.flatten(2).transpose(1, 2).register_hook(print),
    "the storage": lambda x: setattr(x, "data", x * 2),
    "numbers of each rank": lambda x: torch.bernoulli(x.sigmoid(), generator=torch.Generator()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_the_gathered_image_cannot_answer_is_refused(name: str) -> None:
    """Hooks of the gathered copy were never called, and what was set on it was lost."""
    x = image().requires_grad_()

    def work(channel: Channel) -> None:
        spatial.shard(net(), (1, 2), channel=channel, unsupported="gather")
        with pytest.raises(ValueError, match=r"is not supported: .*; gather the tile first$"):
            REFUSED[name](spatial.scatter(x))

    on_threads(2, work)


def test_copies_are_sharded_and_pickles_are_plain() -> None:
    plain, x = net(), image()
    wanted = plain(x)

    def work(channel: Channel) -> None:
        model = spatial.shard(copy.deepcopy(plain), GRID, channel=channel)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        for one in (copy.deepcopy(model), averaged, model):
            assert torch.equal(spatial.gather(one(spatial.scatter(x))), wanted)
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(loaded(x), wanted)
        copied = copy.deepcopy(model)
        spatial.unshard(copied)
        assert torch.equal(copied(x), wanted)
        with pytest.raises(ValueError, match="takes tiles, and got none"):
            model(x)

    on_threads(2, work)


def test_a_model_takes_the_tiles_of_another() -> None:
    """A generator and a discriminator."""
    makes, judges, x = net(0), net(1, 1), image()
    loss = judges(makes(x)).square().mean() + F.l1_loss(makes(x), x)
    loss.backward()

    def work(channel: Channel) -> Any:
        first = spatial.shard(copy.deepcopy(makes), GRID, channel=channel)
        second = spatial.shard(copy.deepcopy(judges), GRID, channel=channel)
        tiles = spatial.scatter(x)
        made = first(tiles)
        mine = second(made).square().mean() + F.l1_loss(made, tiles)
        first.zero_grad(), second.zero_grad()
        mine.backward()
        for model in (first, second):
            spatial.sum_gradients(model.parameters())
        return spatial.gather(mine), [p.grad for m in (first, second) for p in m.parameters()]

    expected = [p.grad for m in (makes, judges) for p in m.parameters()]
    for found, grads in on_threads(2, work):
        torch.testing.assert_close(found, loss)
        for one, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_tiles_of_another_grid_are_refused() -> None:
    def work(channel: Channel) -> None:
        model = spatial.shard(net(), (2, 1), channel=channel)
        spatial.shard(net(), (1, 2), channel=channel)
        with pytest.raises(ValueError, match=r"grid \(1, 2\) .* and this model is sharded over \(2, 1\)"):
            model(spatial.scatter(image()))

    on_threads(2, work)


def test_ranks_with_other_weights_are_told() -> None:
    """Each tile was computed by another model."""

    def work(channel: Channel) -> None:
        model = spatial.shard(net(seed=channel.rank), GRID, channel=channel)
        with pytest.raises(CommError, match=r"ranks \[1\] of the grid have other weights than rank 0"):
            model(spatial.scatter(image()))

    on_threads(2, work)


def test_tiles_of_two_grids_do_not_meet() -> None:
    """Shapes fitted: a loss compared each rank's columns with other ones."""

    def work(channel: Channel) -> None:
        tile = spatial.shard(net(), (2, 1), channel=channel)(spatial.scatter(image()))
        spatial.shard(net(), (1, 2), channel=channel)
        with pytest.raises(ValueError, match=r"cut by different grids, \(1, 2\) and \(2, 1\)"):
            F.mse_loss(tile, spatial.scatter(image()))

    on_threads(2, work)


def _typed(x: Tensor) -> Tensor:
    window = torch.ones(1, 1, 5, 5).type_as(x)
    return x * (window / window.sum()).sum() + torch.arange(3).to(x).sum()


ON_BOTH_AXES: dict[str, Callable[[Tensor], Tensor]] = {
    "a step, and a number": lambda x: x[..., ::2, 3],
    "a number, and a step": lambda x: x[..., 3, ::2],
    "a crop, a step, and a number": lambda x: x[:, 1, 1:, 2:7:3][..., 4, :],
    "plain tensors typed as a tile": _typed,
    "norm of complex numbers": lambda x: (x + 2j * x).norm(dim=(2, 3)),
    "rows and columns in one": lambda x: torch.cat(
        [x.mean(3, keepdim=True), x.mean(2, keepdim=True).transpose(2, 3)], 2
    ),
    "rows plus columns": lambda x: x.mean(3, keepdim=True) + x.mean(2, keepdim=True).transpose(2, 3),
    "rows times columns": lambda x: torch.einsum("ncy,ncy->nc", x.mean(3), x.mean(2)),
}


@pytest.mark.parametrize("name", ON_BOTH_AXES)
def test_both_axes_of_the_grid(name: str) -> None:
    function = ON_BOTH_AXES[name]
    x = image().requires_grad_()
    wanted = function(x)
    wanted.square().sum().backward()

    def work(channel: Channel) -> tuple[Tensor, Tensor]:
        model = spatial.shard(Calls(function), (2, 2), channel=channel)
        own = x.detach()[spatial.tile_bounds(x.shape)].requires_grad_()
        result = spatial.gather(model(spatial.from_local(own, x.shape)))
        result.square().sum().backward()
        assert own.grad is not None
        return result.local.detach(), own.grad - x.grad[spatial.tile_bounds(x.shape)]

    for result, difference in on_threads(4, work):
        torch.testing.assert_close(result, wanted.detach())
        torch.testing.assert_close(difference, torch.zeros_like(difference))


def test_one_pixel_is_not_widened_on_its_owner_alone() -> None:
    position = torch.arange(64.0).view(8, 8).double()
    wanted = F.avg_pool2d(image(), 8) * position

    def work(channel: Channel) -> Tensor:
        def function(x: Tensor) -> Tensor:
            return F.avg_pool2d(x, 8) * position

        with pytest.raises(ValueError, match="it widens a split dimension of one pixel"):
            spatial.shard(Calls(function), (2, 2), channel=channel)(spatial.scatter(image()))
        model = spatial.shard(Calls(function), (2, 2), channel=channel, unsupported="gather")
        return spatial.gather(model(spatial.scatter(image()))).local

    for result in on_threads(4, work):
        torch.testing.assert_close(result, wanted)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize("how", ["method", "attribute"])
def test_a_function_on_a_leaf_tile_is_refused(how: str) -> None:
    """Its result had no graph, so what came before it was not trained, as under reentrant checkpoints."""

    def work(channel: Channel) -> None:
        model = spatial.shard(net(), GRID, channel=channel)
        tile = spatial.scatter(image())
        if how == "method":
            tile.requires_grad_()
        else:
            tile.requires_grad = True
        with pytest.raises(ValueError, match="custom autograd.Function.*use_reentrant=False"):
            model(Doubled.apply(tile))
        model(tile).square().mean().backward()
        assert tile.requires_grad and tile.grad is not None
        assert not tile.detach().requires_grad_(False).requires_grad

    on_threads(2, work)


def test_what_comes_in_and_goes_out_is_checked() -> None:
    def work(channel: Channel) -> None:
        spatial.shard(net(), GRID, channel=channel)
        tile = spatial.scatter(image())
        with pytest.raises(ValueError, match="the image is a tile already"):
            spatial.scatter(tile)
        with pytest.raises(ValueError, match="gather takes a tile, not a tuple; gather each tile"):
            spatial.gather((tile, tile))  # type: ignore[arg-type]

    on_threads(2, work)


def test_types_and_channels_are_those_of_one_process() -> None:
    whole = nn.Sequential(nn.ConvTranspose2d(2, 3, 2, 2), nn.ReLU())

    def work(channel: Channel) -> None:
        model = spatial.shard(copy.deepcopy(whole), GRID, channel=channel)
        x = image().float()
        with torch.autocast("cpu", torch.bfloat16):
            assert model(spatial.scatter(x)).dtype == torch.bfloat16
        tile = spatial.scatter(torch.ones(5, 2, 8, 8))  # one sample of five channels
        dropped = spatial.gather(F.dropout3d(tile, 0.5)).local.flatten(1)
        assert all(len(set(of_channel.tolist())) == 1 for of_channel in dropped)
        norm = spatial.shard(nn.BatchNorm2d(2), GRID, channel=channel)
        assert norm(spatial.scatter(torch.empty(0, 2, 8, 8))).shape == (0, 2, 8, 8)
        assert norm.running_mean.tolist() == [0.0, 0.0]

    on_threads(2, work)


# -- what dry runs leave in a model --------------------------------------------------------------------------


class Keeps(nn.Module):
    """Counts its forwards, keeps a grid for the input's device, and collects losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))
        self.count, self.grid, self.losses, self.seen = 0, None, [], {}

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.grid is None:
            self.grid = torch.linspace(-1, 1, 2, dtype=x.dtype, device=x.device).view(1, 2, 1, 1)
        self.losses.append(self.count)
        self.seen[self.count] = True
        x = self.first(x * self.grid)
        return self.second(x) / self.count


def test_dry_runs_leave_a_model_as_it_was() -> None:
    """What forwards without data left in the model (counts, grids, lists) spoiled the real ones."""
    torch.manual_seed(0)
    model, x = Keeps().double().eval(), image()
    wanted = copy.deepcopy(model)(x)  # divided by 1, as the first block is; the second one by 2
    spatial.explain(model, x.shape, GRID, dtype=torch.float64)
    assert (model.count, model.grid, model.losses, model.seen) == (0, None, [], {})
    found = spatial.run(model, x.detach(), (1, 1), blocks=(2, 1))
    assert (model.count, model.losses, len(model.seen)) == (2, [1, 2], 2)
    exact = rounding(torch.float64, 18, 4)
    for rows, divisor in ((slice(4), 1), (slice(4, 8), 2)):
        part = wanted[:, :, rows] / divisor
        torch.testing.assert_close(found.local[:, :, rows], part, rtol=exact, atol=exact)


@pytest.mark.parametrize("inside", [False, True])
def test_compiling_a_sharded_model_is_refused(inside: bool) -> None:
    model = spatial.shard(net(), (1, 1), channel=spatial.SilentChannel(0, 1))
    if inside:
        model[0] = torch.compile(model[0], backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.raises(
        ValueError, match="torch.compile cannot trace tiles, .*; call the model and its modules"
    ):
        model(spatial.scatter(image()))


def test_class_weights_with_any_index_to_ignore() -> None:
    torch.manual_seed(0)
    scores, wanted = torch.randn(2, 3, 8, 8).double(), torch.randint(3, (2, 8, 8))
    wanted[:, :3] = 255
    weight = torch.tensor([0.5, 1.0, 2.0]).double()
    loss = F.cross_entropy(scores, wanted, weight, ignore_index=255)

    def work(channel: Channel) -> Any:
        def function(x: Tensor) -> Tensor:
            return F.cross_entropy(x, spatial.scatter(wanted), weight, ignore_index=255)

        return spatial.gather(spatial.shard(Calls(function), GRID, channel=channel)(spatial.scatter(scores)))

    for found in on_threads(2, work):
        torch.testing.assert_close(found, loss, rtol=rounding(torch.float64, 128), atol=0.0)


def test_gradients_of_two_types_are_summed() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1).double())

    def work(channel: Channel) -> Any:
        mine = spatial.shard(Casts(copy.deepcopy(model)), GRID, channel=channel)
        mine(spatial.scatter(image().float())).sum().backward()
        spatial.sum_gradients(mine.parameters())
        return [p.grad.dtype for p in mine.parameters()]

    assert on_threads(2, work) == [[torch.float32] * 2 + [torch.float64] * 2] * 2


class Casts(nn.Module):
    def __init__(self, parts: nn.Sequential) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x.to(part.weight.dtype))
        return x


class Passes(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [nullcontext, Passes])
@pytest.mark.parametrize("function", [F.l1_loss, F.mse_loss, F.huber_loss])
def test_losses_with_a_weight_for_each_pixel(
    function: Callable[..., Tensor], mode: Callable[[], Any]
) -> None:
    """Torch's l1_loss does not pass its weight on to subclasses of tensors: it was ignored."""
    x = image()

    def losses(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [function(x, 2 * x, reduction=how, weight=weight) for how in ("none", "sum", "mean")]

    weight = x.cos().abs()
    wanted = losses(x, weight)

    def work(channel: Channel) -> None:
        mesh = spatial.Mesh(channel, GRID, (-2, -1))
        tile = spatial.scatter(x, mesh)
        for one in (tile, spatial.gather(tile)):
            for given in (weight, spatial.scatter(weight, mesh)):
                with mode():
                    results = losses(one, given)
                for loss, right in zip(results, wanted):
                    torch.testing.assert_close(spatial.gather(loss).local, right, rtol=1e-14, atol=0.0)

    on_threads(2, work)


# -- training scripts ----------------------------------------------------------------------------------------

Summed = Callable[[nn.Module], None]
TARGET = torch.randint(3, (2, 8, 8), generator=torch.Generator().manual_seed(2))


def trained(model: nn.Module, x: Tensor, target: Tensor, summed: Summed) -> list[Any]:
    """Scaled losses of crops, clipped gradients, an average of the weights, evaluations between the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    found: list[Any] = []
    for _ in range(2):
        loss = F.cross_entropy(model(x)[..., 1:-2, 2:-1], target[..., 1:-2, 2:-1])
        scaler.scale(loss).backward()
        summed(model)
        scaler.unscale_(optimizer)
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(model)
        found += [loss.item(), *measured(model, x, target, summed)]
    return [*found, *measured(average, x, target, summed), *average.state_dict().values()]


def measured(model: nn.Module, x: Tensor, target: Tensor, summed: Summed) -> list[Any]:
    """Accuracy, overlap by class and a confusion matrix."""
    model.eval()
    with torch.no_grad():
        chosen = model(x).argmax(1)
    model.train()
    pairs = [(chosen == c, target == c) for c in range(3)]
    overlaps = [(a & b).sum() / (a | b).sum().clamp(min=1) for a, b in pairs]
    confusion = torch.bincount((target * 3 + chosen).flatten(), minlength=9)
    return [(chosen == target).double().mean().item(), *overlaps, confusion]


def restored(model: nn.Module, x: Tensor, target: Tensor, summed: Summed) -> list[Any]:
    """A state goes through a plain model and back."""
    trained(model, x, target, summed)
    plain = copy.deepcopy(model)
    spatial.unshard(plain)
    nn.init.zeros_(plain[0].weight)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    return [*plain.state_dict().values(), model(x)]


def searched(model: nn.Module, x: Tensor, target: Tensor, summed: Summed) -> list[Any]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        summed(model)
        return loss

    optimizer.step(closure)
    return list(model.state_dict().values())


def batch_normed() -> nn.Sequential:
    first, relu, second = net(channels=3)
    return nn.Sequential(first, nn.BatchNorm2d(4).double(), relu, second)


@pytest.mark.parametrize("script", [trained, restored, searched])
def test_training_scripts_do_what_they_do_in_one_process(script: Callable[..., list[Any]]) -> None:
    plain = batch_normed()  # not in the threads, which share one generator
    wanted = script(copy.deepcopy(plain), image(), TARGET, lambda model: None)

    def work(channel: Channel) -> None:
        model = copy.deepcopy(plain)
        spatial.shard(model, (2, 2), channel=channel, unsupported="gather")
        found = script(
            model,
            spatial.scatter(image()),
            spatial.scatter(TARGET),
            lambda model: spatial.sum_gradients(model.parameters()),
        )
        for one, other in zip(found, wanted, strict=True):
            one = spatial.gather(one).local if isinstance(one, spatial.Tile) else one
            torch.testing.assert_close(one, other, check_dtype=False)

    on_threads(4, work)
