"""What a tile refuses, and how it behaves in ordinary code."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commsched import spatial
from commsched.channels import Channel
from commsched.spatial.intervals import Split
from commsched.spatial.layout import recut
from tests.support.oracle import assert_close
from tests.support.spatial_cases import integers, on_threads


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "fold": lambda x: F.fold(x.reshape(1, 8, 8), (3, 5), 2),
    "fft": lambda x: torch.fft.fft2(x),
    "softmax": lambda x: x.softmax(-1),
    "matmul": lambda x: x @ torch.ones(8),
    "sort": lambda x: x.sort(-1),
    "max_pool2d": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "rand_like": lambda x: torch.rand_like(x),
    "item": lambda x: x.item(),
    "__bool__": lambda x: bool(x),
    "__float__": lambda x: float(x),
    "numpy": lambda x: x.numpy(),
    "__getitem__": lambda x: x[..., torch.tensor([3])],
    "__setitem__": lambda x: x.__setitem__((..., 0), 1.0),
    "Function": lambda x: Square.apply(x) * 2,
    "einsum": lambda x: torch.einsum("...w,wk->...k", x, torch.ones(8, 2)),
    "cumsum": lambda x: x.cumsum(-1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_pixels_is_refused_by_name(name: str) -> None:
    mesh = spatial.Mesh(spatial.SilentChannel(0, 2), (1, 2), (-2, -1))
    mesh.names.append("block.3 (Attention)")
    tile = spatial.from_local(torch.zeros(1, 1, 8, 4, requires_grad=name == "Function"), (1, 1, 8, 8), mesh)
    with pytest.raises(ValueError, match=rf"block\.3 \(Attention\): .*{name}.*"):
        REFUSED[name](tile)


def test_gathered_when_asked() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(2).transpose(1, 2)
            mixed, _ = self.mix(tokens, tokens, tokens)
            return mixed.transpose(1, 2).reshape(x.shape)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Softmax(-1), Attention()).double()
    image = torch.randn(2, 3, 6, 7).double()
    expected = model(image)
    expected.square().sum().backward()
    references = [p.grad for p in model.parameters()]

    def run(channel: Channel) -> None:
        mine = copy.deepcopy(model)
        mine.zero_grad()
        spatial.shard(mine, (2, 2), channel=channel, unsupported="gather")
        out = mine(spatial.scatter(image))
        torch.testing.assert_close(spatial.gather(out).local, expected, rtol=0, atol=1e-12)
        out.square().sum().backward()
        spatial.sum_gradients(mine.parameters())
        for parameter, reference in zip(mine.parameters(), references):
            torch.testing.assert_close(parameter.grad, reference, rtol=0, atol=1e-11)

    on_threads(4, run)


def ints(*shape: int, seed: int = 0) -> Tensor:
    return integers(torch.Generator().manual_seed(seed), shape)


def same_gradient(function: Callable[[Tensor, Tensor], Tensor], channel: Channel) -> None:
    """``function(image, weight)`` on tiles of uneven bounds against the whole."""
    image, weight = ints(2, 2, 6, 9).requires_grad_(), ints(2, 2, 3, 3, seed=1).requires_grad_()
    expected = function(image, weight)
    expected.square().sum().backward()
    mesh = spatial.Mesh(channel, (1, 3), (-2, -1))
    leaf, parameter = image.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    tile = recut(spatial.scatter(leaf, mesh), {1: Split((0, 2, 7, 9))})
    out = function(tile, parameter)
    assert torch.equal(spatial.gather(out).local, expected)
    out.square().sum().backward()
    spatial.sum_gradients([parameter], mesh)
    own = spatial.tile_bounds(image.shape, mesh)
    assert torch.equal(leaf.grad[own], image.grad[own])
    assert torch.equal(parameter.grad, weight.grad)


def test_a_parameter_that_no_tile_used_has_no_gradient() -> None:
    """It got zeros, so momentum and weight decay moved it, as they do not in one process."""

    def run(channel: Channel) -> None:
        mesh = spatial.Mesh(channel, (1, 2), (-2, -1))
        everywhere, once, never = (nn.Parameter(torch.ones(3)) for _ in range(3))
        everywhere.grad = torch.full((3,), 2.0)
        if channel.rank == 1:
            once.grad = torch.full((3,), 5.0)
        spatial.sum_gradients([never, everywhere, once], mesh)
        assert everywhere.grad.tolist() == [4.0] * 3
        assert once.grad is not None and once.grad.tolist() == [5.0] * 3
        assert never.grad is None

    on_threads(2, run)


def backward(parameter: nn.Parameter) -> None:
    (parameter * 2).sum().backward()


def clears_to_none(parameter: nn.Parameter) -> None:
    parameter.grad = None
    backward(parameter)


def clears_to_zeros(parameter: nn.Parameter) -> None:
    parameter.grad.zero_()
    backward(parameter)


def clears_after_a_backward(parameter: nn.Parameter) -> None:
    backward(parameter)
    clears_to_zeros(parameter)


def assigns(parameter: nn.Parameter) -> None:
    (parameter.grad,) = torch.autograd.grad((parameter * 2).sum(), parameter)


@pytest.mark.parametrize("between", [clears_to_none, clears_to_zeros, clears_after_a_backward, assigns])
def test_cleared_gradients_are_summed_again(between: Callable[..., None]) -> None:
    def run(channel: Channel) -> None:
        mesh, parameter = spatial.Mesh(channel, (1, 2), (-2, -1)), nn.Parameter(torch.ones(3))
        backward(parameter)
        for _ in range(2):
            spatial.sum_gradients([parameter], mesh)
            assert parameter.grad.tolist() == [4.0] * 3
            between(parameter)

    on_threads(2, run)


@pytest.mark.parametrize("between", [backward, lambda _: None])
def test_a_sum_of_gradients_is_not_summed_again(between: Callable[..., None]) -> None:
    """A sum in every micro-step of an accumulation counted the first gradients once more for each rank."""

    def run(channel: Channel) -> None:
        mesh = spatial.Mesh(channel, (1, 2), (-2, -1))
        other, parameter = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
        backward(parameter)
        spatial.sum_gradients([other, parameter], mesh)
        if channel.rank == 1:
            between(parameter)
        said = r"ranks \[0, 1\], the gradient of parameter 1 .*\(3,\).* counted 2 times; .*zero_grad"
        with pytest.raises(ValueError, match=said):
            spatial.sum_gradients([other, parameter], mesh)
        clears_to_none(parameter)
        spatial.sum_gradients([other, parameter], mesh)
        assert parameter.grad.tolist() == [4.0] * 3

    on_threads(2, run)


def test_a_summed_gradient_keeps_no_parameter_and_may_be_saved() -> None:
    def run(channel: Channel) -> None:
        mesh, model = spatial.Mesh(channel, (1, 2), (-2, -1)), nn.Linear(2, 2)
        model(torch.ones(1, 2)).sum().backward()
        spatial.sum_gradients(model.parameters(), mesh)
        torch.save(model, io.BytesIO())
        kept = weakref.ref(copy.deepcopy(model).weight), weakref.ref(model.weight)
        del model
        gc.collect()
        assert [ref() for ref in kept] == [None, None]

    on_threads(2, run)


def _views(x: Tensor, w: Tensor) -> Tensor:
    y = F.conv2d(x, w, padding=1)
    y[:, :1].mul_(3)
    y += 1
    return y


def _two_cuts(x: Tensor, w: Tensor) -> Tensor:
    """Operands whose tiles end at different pixels."""
    a, b = F.conv2d(x, w, padding=1), F.conv2d(F.pad(x, (2, 0, 0, 0))[..., :9], w, padding=1)
    return a * b + torch.maximum(b, a)


def _added_in_place(x: Tensor, w: Tensor) -> Tensor:
    """Both sides end at different pixels; a view taken before sees the sum."""
    a, b = F.conv2d(x, w, padding=1), F.conv2d(F.pad(x, (2, 0, 0, 0))[..., :9], w, padding=1)
    first = a[:, :1]
    a += b
    a.mul_(b[:, 1:])
    return a * first


def _into_the_whole(x: Tensor, w: Tensor) -> Tensor:
    """The target is on every rank, what is added to it is split."""
    whole = x.flatten().view(x.shape) * 2
    whole += F.conv2d(x, w, padding=1)
    return F.conv2d(whole, w, padding=1)


def _cut_otherwise(x: Tensor, w: Tensor) -> Tensor:
    """The target is cut along columns, what is added along rows."""
    y = x[..., :6] * 3
    y += F.conv2d(x, w, padding=1)[..., 2:8].transpose(-1, -2)
    return F.conv2d(y, w, padding=1)


def _windows(x: Tensor, w: Tensor) -> Tensor:
    """Shifted windows that exchange pixels, as in Swin."""
    shifted = torch.roll(x.permute(0, 2, 3, 1), shifts=(-1, -2), dims=(1, 2))
    mixed = F.conv2d(shifted.permute(0, 3, 1, 2), w, stride=3)
    grown = F.interpolate(mixed, scale_factor=3).permute(0, 2, 3, 1)
    return (torch.roll(grown, shifts=(1, 2), dims=(1, 2)) * shifted).permute(0, 3, 1, 2)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "views and in-place": _views,
    "different cuts": _two_cuts,
    "different cuts in place": _added_in_place,
    "split into whole in place": _into_the_whole,
    "rows into columns in place": _cut_otherwise,
    "shifted windows": _windows,
    "checkpoint": lambda x, w: checkpoint(lambda y: F.conv2d(y.relu(), w, padding=1), x, use_reentrant=False),
    "plain operand": lambda x, w: F.conv2d(x * torch.arange(9.0).double(), w) - torch.ones(1, 2, 4, 7),
    "scalar loss inside": lambda x, w: F.conv2d(x, w, padding=1) * x.sum(),
    "row sums": lambda x, w: F.conv2d(x, w, padding=1) * x.sum(3, keepdim=True) + x.sum(2, keepdim=True),
    "weights from the image": lambda x, w: F.conv2d(x, w + x.sum((0, 2, 3)).view(2, 1, 1, 1), padding=1),
    "one column left": lambda x, w: F.conv2d(x, w[:, :, :1, :1], stride=(1, 9)) * x,
}


@pytest.mark.parametrize("name", USES)
def test_ordinary_code(name: str) -> None:
    on_threads(3, lambda channel: same_gradient(USES[name], channel))


def test_what_the_backward_needs_must_not_be_changed_in_place() -> None:
    """Also where the other side is fetched: the sum lands in the storage that autograd watches."""

    def overwrites(x: Tensor, w: Tensor, saved: Callable[[Tensor], Tensor]) -> Tensor:
        if isinstance(x, spatial.Tile):
            x = recut(x, {1: Split((0, 2, 7, 9), margin=(1, 1))})
        y = saved(x)
        out = F.conv2d(y, w, padding=1) if saved is torch.relu else y
        y += F.pad(x, (2, 0, 0, 0))[..., :9]
        return out.sum()

    def run(channel: Channel) -> None:
        mesh = spatial.Mesh(channel, (1, 3), (-2, -1))
        for saved in (torch.sigmoid, torch.relu):
            for split in (False, True):
                image, weight = ints(1, 1, 6, 9).requires_grad_(), ints(1, 1, 3, 3).requires_grad_()
                loss = overwrites(spatial.scatter(image, mesh) if split else image, weight, saved)
                with pytest.raises(RuntimeError, match="in ?place"):
                    loss.backward()

    on_threads(3, run)


def _differentiated(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Gradients of a leaf and of what is made from it, in every way to ask for them."""
    inner = x * 2
    if isinstance(inner, spatial.Tile):
        inner = recut(inner, {1: Split((0, 2, 7, 9))})
    inner.retain_grad()
    seen: list[Tensor] = []
    inner.register_hook(lambda grad: seen.append(grad))
    out = F.conv2d(inner, weight, padding=1)
    found = torch.autograd.grad(out.square().sum(), [x, inner], retain_graph=True)
    out.square().sum().backward(retain_graph=True)
    out.backward(torch.ones(out.shape, dtype=out.dtype))
    return [*found, *seen, inner.grad, x.grad]


def test_the_gradient_of_a_tile_is_a_tile() -> None:
    """It was the local part, which `gather` cannot take."""
    image, weight = ints(1, 2, 6, 9), ints(2, 2, 3, 3, seed=1)
    expected = _differentiated(image.clone().requires_grad_(), weight)

    def run(channel: Channel) -> None:
        tile = spatial.scatter(image, spatial.Mesh(channel, (1, 3), (-2, -1))).requires_grad_()
        assert tile.grad is None
        found = _differentiated(tile, weight)
        for grad, whole in zip(found, expected, strict=True):
            assert grad.shape == whole.shape and torch.equal(spatial.gather(grad).local, whole)
        tile.grad = tile.grad * 2
        assert torch.equal(spatial.gather(tile.grad).local, 2 * expected[-1])
        tile.grad = None
        assert tile.grad is None and tile.local.grad is None

    on_threads(3, run)


def test_a_hook_replaces_the_gradient_of_a_tile() -> None:
    image, weight = ints(1, 1, 6, 9), ints(1, 1, 3, 3, seed=1)

    def loss(x: Tensor) -> Tensor:
        y = x * 2
        if isinstance(y, spatial.Tile):
            y = recut(y, {1: Split((0, 2, 7, 9))})
        y.register_hook(lambda grad: grad.clamp(max=3) - 1)
        return F.conv2d(y, weight, padding=1).square().sum()

    plain = image.clone().requires_grad_()
    loss(plain).backward()

    def run(channel: Channel) -> None:
        tile = spatial.scatter(image, spatial.Mesh(channel, (1, 3), (-2, -1))).requires_grad_()
        loss(tile).backward()
        assert torch.equal(spatial.gather(tile.grad).local, plain.grad)

    on_threads(3, run)


def test_torch_before_2_7_cannot_say_who_decides_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 does not have the function, and every convolution of a tile failed there."""
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    on_threads(3, lambda channel: same_gradient(USES["views and in-place"], channel))


def test_shape_is_that_of_the_whole_and_repr_shows_the_part() -> None:
    mesh = spatial.Mesh(spatial.SilentChannel(1, 2), (1, 2), (-2, -1))
    tile = spatial.scatter(torch.zeros(2, 3, 4, 7), mesh)
    assert (tile.shape, tile.size(-1), tile.numel(), tile.dim()) == ((2, 3, 4, 7), 7, 168, 4)
    assert tile.local.shape == (2, 3, 4, 4) and tile.bounds == ((0, 2), (0, 3), (0, 4), (3, 7))
    assert "Tile(shape=(2, 3, 4, 7), bounds=((0, 2), (0, 3), (0, 4), (3, 7))" in repr(tile)
    assert not tile.requires_grad and tile.half().dtype == torch.float16 and tile.device.type == "cpu"
    assert copy.deepcopy(tile).shape == tile.shape


def test_a_backward_can_be_repeated_and_needs_no_graph_without_grad() -> None:
    def run(channel: Channel) -> None:
        mesh = spatial.Mesh(channel, (1, 2), (-2, -1), overlap="on")
        leaf = ints(1, 1, 6, 16).requires_grad_()
        weight = ints(1, 1, 3, 3, seed=1).requires_grad_()
        out = F.conv2d(spatial.scatter(leaf, mesh), weight, padding=1).local
        out.sum().backward(retain_graph=True)
        once = leaf.grad.clone()
        out.sum().backward()
        assert torch.equal(leaf.grad, 2 * once)
        with torch.no_grad():
            assert not F.conv2d(spatial.scatter(leaf, mesh), weight).local.requires_grad

    on_threads(2, run)


def test_mixed_precision() -> None:
    conv = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2))
    image = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        reference = copy.deepcopy(conv)
        expected = reference(image)

    def run(channel: Channel) -> None:
        mesh = spatial.Mesh(channel, (2, 2), (-2, -1))
        with torch.autocast("cpu", torch.bfloat16):
            mine = copy.deepcopy(conv)
            out = mine(spatial.scatter(image, mesh))
        assert out.dtype == torch.bfloat16
        pair = ([net[1].running_var.bfloat16()] for net in (mine, reference))
        assert_close(*pair, 2, "variance of rounded numbers")
        out.local.float().square().sum().backward()
        assert mine[1].weight.grad.dtype == torch.float32
        assert_close([spatial.gather(out).local], [expected], 4, "output")

    on_threads(4, run)


@pytest.mark.parametrize(
    ("grid", "dims", "expected"),
    [
        ((2, 2), (-2, -1), r"2x2 needs 4 ranks, and there are 2"),
        ((2,), (-2, -1), r"grid \(2,\) and dims \(-2, -1\)"),
        ((2, 1), (2, 3), r"counted from the end"),
        ((2, 1), (-1, -1), r"different"),
    ],
)
def test_meshes_that_cannot_be(grid: tuple[int, ...], dims: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        spatial.Mesh(spatial.SilentChannel(0, 2), grid, dims)


def test_a_part_of_the_wrong_shape_names_both() -> None:
    mesh = spatial.Mesh(spatial.SilentChannel(1, 2), (1, 2), (-2, -1))
    with pytest.raises(
        ValueError, match=r"rank 1 .* \(1, 1, 4, 4\) .* \(1, 1, 4, 7\), and got .* \(1, 1, 4, 3\)"
    ):
        spatial.from_local(torch.zeros(1, 1, 4, 3), (1, 1, 4, 7), mesh)


def test_every_way_to_differentiate_reaches_the_local_part() -> None:
    def run(channel: Channel) -> None:
        mesh = spatial.Mesh(channel, (1, 2), (-2, -1))
        leaf = ints(1, 1, 4, 6).requires_grad_()
        loss = spatial.scatter(leaf, mesh).square().sum()
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(ValueError, match="a gradient reached"):
            torch.autograd.backward([loss], [torch.ones(())])
        torch.autograd.backward(loss, retain_graph=True)
        first, leaf.grad = leaf.grad, None
        (grad,) = torch.autograd.grad(loss, [leaf], retain_graph=True)
        loss.backward()
        assert torch.equal(grad, leaf.grad) and torch.equal(first, grad) and grad.abs().sum() > 0

    on_threads(2, run)


def test_a_model_returns_its_own_class_of_output() -> None:
    """Dicts with attributes, as published models return them, came out as plain dicts."""

    class Output(dict):
        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            self.__dict__[key] = value

    class Model(nn.Conv2d):
        def forward(self, x: Tensor) -> Output:
            output = Output()
            output["logits"] = super().forward(x)
            return output

    whole = Model(1, 1, 3, padding=1)

    def run(channel: Channel) -> None:
        model = spatial.shard(copy.deepcopy(whole), (1, 2), channel=channel)
        output = model(spatial.scatter(torch.zeros(1, 1, 4, 6)))
        assert type(output) is Output and output.logits is output["logits"]

    on_threads(2, run)
