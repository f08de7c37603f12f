"""Layers of ordinary convolutional models with drawn options, and what users do around them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

CHANNELS = 4
Dice = random.Random
Maker = Callable[[Dice], nn.Module]


class Layer(nn.Module):
    """A function of ``x`` and of the modules ``parts``; ``shown`` is what a failing program prints."""

    tau = 1.0  # scripts change it between steps

    def __init__(self, function: Callable[[Any, Tensor], Tensor], shown: str = "", **parts: Any) -> None:
        super().__init__()
        self.function, self.shown = function, shown
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def extra_repr(self) -> str:
        return self.shown


def pair(dice: Dice, least: int, most: int) -> tuple[int, int]:
    return dice.randint(least, most), dice.randint(least, most)


def conv(dice: Dice, strides: int = 2, inputs: int = CHANNELS, outputs: int = CHANNELS) -> nn.Module:
    kernel, dilation = pair(dice, 1, 4), pair(dice, 1, 2)
    stride: Any = pair(dice, 1, strides)
    mode = dice.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"])
    padding: Any = dice.choice([0, (kernel[0] // 2, kernel[1] // 2), pair(dice, 0, 3), "same"])
    if padding == "same":
        stride = 1
    groups = dice.choice([1, 1, 1, 2, 4])
    return nn.Conv2d(
        inputs, outputs, kernel, stride, padding, dilation, groups, dice.random() < 0.7, padding_mode=mode
    )


def same(dice: Dice, inputs: int = CHANNELS, outputs: int = CHANNELS) -> nn.Module:
    """A convolution that keeps the size of the image."""
    kernel = dice.choice([1, 3, 3, 5])
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=dice.random() < 0.7)


def transposed(dice: Dice) -> nn.Module:
    stride = dice.randint(1, 3)
    return nn.ConvTranspose2d(
        CHANNELS,
        CHANNELS,
        pair(dice, 1, 4),
        stride,
        pair(dice, 0, 2),
        output_padding=dice.randint(0, stride - 1),
        groups=dice.choice([1, 1, 2]),
        dilation=dice.choice([1, 1, 2]),
    )


def max_pool(dice: Dice) -> nn.Module:
    kernel = pair(dice, 1, 3)
    padding = tuple(dice.randint(0, size // 2) for size in kernel)
    dilation = dice.choice([1, 1, 2])
    return nn.MaxPool2d(kernel, pair(dice, 1, 2), padding, dilation, ceil_mode=dice.random() < 0.5)


def avg_pool(dice: Dice) -> nn.Module:
    kernel = pair(dice, 1, 3)
    padding = tuple(dice.randint(0, size // 2) for size in kernel)
    return nn.AvgPool2d(
        kernel,
        pair(dice, 1, 2),
        padding,
        ceil_mode=dice.random() < 0.5,
        count_include_pad=dice.random() < 0.5,
        divisor_override=dice.choice([None, None, 3]),
    )


def adaptive_pool(dice: Dice) -> nn.Module:
    size = (dice.choice([None, 1, 3, 5]), dice.choice([1, 2, 4, 7]))
    return nn.AdaptiveMaxPool2d(size) if dice.random() < 0.5 else nn.AdaptiveAvgPool2d(size)


def norm(dice: Dice) -> nn.Module:
    affine = dice.random() < 0.8
    return dice.choice(
        [
            lambda: nn.BatchNorm2d(CHANNELS, momentum=dice.choice([0.1, 0.3, None]), affine=affine),
            lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
            lambda: nn.GroupNorm(dice.choice([1, 2, 4]), CHANNELS, affine=affine),
            lambda: nn.InstanceNorm2d(CHANNELS, affine=affine, track_running_stats=dice.random() < 0.5),
            lambda: nn.LocalResponseNorm(2),
            lambda: Layer(
                lambda self, x: self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
                "layer norm over channels",
                norm=nn.LayerNorm(CHANNELS),
            ),
        ]
    )()


ACTIVATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tanh": lambda self, x: torch.tanh(x),
    "softplus": lambda self, x: F.softplus(x),
    "silu": lambda self, x: F.silu(x),
    "leaky_relu_": lambda self, x: F.leaky_relu_(self.conv(x), 0.3),
    "mul_, tanh_": lambda self, x: self.conv(x).mul_(0.5).tanh_(),
    "relu in place": lambda self, x: F.relu(self.conv(x), inplace=True),
    "add_ of the input": lambda self, x: self.conv(x).add_(x),
    "+= identity": lambda self, x: _added(self.conv(x), x),
    "masked": lambda self, x: x.masked_fill(x < 0, 0.1),
    "where": lambda self, x: torch.where(x > 0, x, 0.2 * x),
    "clamp": lambda self, x: x.clamp(-1, 1),
    "slice in place": lambda self, x: _halved(self.conv(x)),
    "assigned": lambda self, x: _assigned(self.conv(x), (slice(None), slice(1, 3)), 0.5 * x[:, 1:3]),
    "a row of zeros": lambda self, x: _assigned(self.conv(x), (..., 1, slice(None)), 0.0),
    "masked in place": lambda self, x: _assigned(y := self.conv(x), y < 0, 0.0),
    "softmax": lambda self, x: x.softmax(1),
    "normalize": lambda self, x: F.normalize(x + 2.0, dim=1),
    "softmax over pixels": lambda self, x: x.flatten(2).softmax(-1).view_as(x),
}


def _added(y: Tensor, x: Tensor) -> Tensor:
    y += x
    return y


def _assigned(y: Tensor, index: Any, value: Any) -> Tensor:
    y[index] = value
    return y


def _halved(y: Tensor) -> Tensor:
    y[:, 1:3] *= 0.5
    return y


def activation(dice: Dice) -> nn.Module:
    name = dice.choice(list(ACTIVATIONS))
    return Layer(ACTIVATIONS[name], name, conv=same(dice))


def dropout(dice: Dice) -> nn.Module:
    kind = dice.choice([nn.Dropout, nn.Dropout2d])
    if dice.random() < 0.3:
        return Layer(lambda self, x: self.drop(self.conv(x)), conv=same(dice), drop=kind(0.3, inplace=True))
    made: nn.Module = kind(0.3)
    return made


def residual(dice: Dice) -> nn.Module:
    return Layer(lambda self, x: torch.tanh(self.second(F.silu(self.first(x))) + x), "residual",
                 first=same(dice), second=same(dice))  # fmt: skip


def skip(dice: Dice) -> nn.Module:
    """A small U: down, up to the size before, and both concatenated."""

    def forward(self: Any, x: Tensor) -> Tensor:
        low = torch.tanh(self.down(x))
        high = self.up(low) if self.up is not None else F.interpolate(low, size=x.shape[-2:])
        rows, columns = (min(a, b) for a, b in zip(x.shape[-2:], high.shape[-2:]))
        made: Tensor = self.merge(torch.cat([x[..., :rows, :columns], high[..., :rows, :columns]], 1))
        return made

    up = nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2) if dice.random() < 0.5 else None
    down = nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1)
    return Layer(forward, "skip", down=down, up=up, merge=same(dice, 2 * CHANNELS))


def interpolation(dice: Dice) -> nn.Module:
    mode = dice.choice(["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
    options: dict[str, Any] = {"mode": mode}
    if mode in ("bilinear", "bicubic"):
        options["align_corners"] = dice.random() < 0.5
        if dice.random() < 0.3:
            options["antialias"] = True
    if dice.random() < 0.5:
        options["size"] = pair(dice, 3, 20)
    else:
        options["scale_factor"] = dice.choice([0.5, 0.7, 1.5, 2, (2, 0.5)])
        if mode not in ("nearest", "nearest-exact", "area") and "antialias" not in options:
            options["recompute_scale_factor"] = dice.choice([None, True])

    def forward(self: Any, x: Tensor) -> Tensor:
        # With antialias=True, torch makes all rows of a result of one column equal.
        one_column = "antialias" in options and x.shape[-1] < 4
        return x if one_column else F.interpolate(x, **options)

    return Layer(forward, f"interpolate {options}")


def shuffle(dice: Dice) -> nn.Module:
    if dice.random() < 0.5:
        return nn.Sequential(same(dice, CHANNELS, 4 * CHANNELS), nn.PixelShuffle(2))
    return nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * CHANNELS, CHANNELS, 1))


def excite(dice: Dice) -> nn.Module:
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
        "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 1),
        "mean": lambda x: x.mean((2, 3), keepdim=True),
        "norm": lambda x: x.norm(dim=(2, 3), keepdim=True),
        "amax": lambda x: x.amax((2, 3), keepdim=True),
        "var": lambda x: x.var((2, 3), keepdim=True),
    }
    name = dice.choice(list(ways))
    linear = dice.random() < 0.5

    def forward(self: Any, x: Tensor) -> Tensor:
        scale = ways[name](x)
        scale = self.gate(scale.flatten(1))[:, :, None, None] if linear else self.gate(scale)
        return x * torch.sigmoid(scale)

    gate = nn.Linear(CHANNELS, CHANNELS) if linear else nn.Conv2d(CHANNELS, CHANNELS, 1)
    return Layer(forward, f"excite by {name}", gate=gate)


def attention(dice: Dice) -> nn.Module:
    if dice.random() < 0.3:
        mixer = nn.MultiheadAttention(CHANNELS, 2, batch_first=True)
        return Layer(_tokens, "attention", mixer=mixer)
    fused = dice.random() < 0.5

    def forward(self: Any, x: Tensor) -> Tensor:
        batch, channels, rows, columns = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = (
            part.reshape(batch, -1, 2, channels // 2).transpose(1, 2)
            for part in self.qkv(tokens).chunk(3, -1)
        )
        if fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        mixed = mixed.transpose(1, 2).reshape(batch, rows * columns, channels)
        return x + self.out(mixed).transpose(1, 2).reshape(batch, channels, rows, columns)

    return Layer(forward, f"attention, fused={fused}", qkv=nn.Linear(CHANNELS, 3 * CHANNELS),
                 out=nn.Linear(CHANNELS, CHANNELS))  # fmt: skip


def _tokens(self: Any, x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    mixed = self.mixer(tokens, tokens, tokens, need_weights=False)[0]
    return x + mixed.transpose(1, 2).reshape(x.shape)


def borders(dice: Dice) -> nn.Module:
    """Padding, crops, shifts and strides."""
    amount = [dice.randint(-1, 3) for _ in range(4)]
    mode = dice.choice(["constant", "reflect", "replicate", "circular"])
    return dice.choice(
        [
            lambda: Layer(lambda self, x: F.pad(x, amount, mode=mode), f"pad {amount} {mode}"),
            lambda: Layer(lambda self, x: x[..., 1:-1, 1:], "crop"),
            lambda: Layer(lambda self, x: x[..., ::2, 1::2], "strided slice"),
            lambda: Layer(lambda self, x: torch.roll(x, (1, -2), (2, 3)), "roll"),
            lambda: Layer(lambda self, x: torch.cat([x, x[..., :2, :]], 2), "cat of rows"),
            lambda: Layer(lambda self, x: x.flip(3), "flip"),
            lambda: Layer(lambda self, x: x[:, :, 1:] - x[:, :, :-1], "differences of rows"),
            lambda: Layer(lambda self, x: x.transpose(2, 3).contiguous(), "transpose"),
        ]
    )()


def _positions(self: Any, x: Tensor) -> Tensor:
    added: Tensor = x + F.interpolate(self.table, size=x.shape[-2:], mode="bilinear", align_corners=False)
    return added


def _coordinates(self: Any, x: Tensor) -> Tensor:
    columns = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype).expand(x.shape[0], 1, *x.shape[-2:])
    made: Tensor = self.conv(torch.cat([x, columns], 1))
    return made


def _patches(self: Any, x: Tensor) -> Tensor:
    batch, channels, rows, columns = x.shape
    if rows % 2 or columns % 2:
        return x
    cells = x.reshape(batch, channels, rows // 2, 2, columns // 2, 2).permute(0, 1, 3, 5, 2, 4)
    made: Tensor = self.conv(cells.reshape(batch, 4 * channels, rows // 2, columns // 2))
    return made


def _gated(self: Any, x: Tensor) -> Tensor:
    value, gate = self.conv(x).chunk(2, 1)
    made: Tensor = value * torch.sigmoid(gate)
    return made


def _unfolded(self: Any, x: Tensor) -> Tensor:
    patches = F.unfold(x, 3, padding=1)
    return (self.conv.weight.flatten(1) @ patches).view(x.shape)


def shapes(dice: Dice) -> nn.Module:
    return dice.choice(
        [
            lambda: Layer(_positions, "positions", table=nn.Parameter(torch.randn(1, CHANNELS, 4, 5))),
            lambda: Layer(_coordinates, "coordinates", conv=same(dice, CHANNELS + 1)),
            lambda: Layer(_patches, "patches", conv=nn.Conv2d(4 * CHANNELS, CHANNELS, 1)),
            lambda: Layer(_gated, "gated", conv=same(dice, CHANNELS, 2 * CHANNELS)),
            lambda: Layer(_unfolded, "unfold", conv=nn.Conv2d(CHANNELS, CHANNELS, 3, bias=False)),
            lambda: nn.ChannelShuffle(2),
            lambda: Layer(lambda self, x: x - x.mean((2, 3), keepdim=True), "centred"),
            lambda: Layer(lambda self, x: x / (1 + x.abs().mean()), "divided by a mean"),
            lambda: nn.PReLU(dice.choice([1, CHANNELS])),
            lambda: nn.utils.parametrizations.weight_norm(same(dice)),
        ]
    )()


def _without_gradient(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.conv(x)
    with torch.no_grad():
        size = y.abs().mean((1, 2, 3), keepdim=True)
    return y / (1 + size)


def _no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.tanh(self.conv(x))


def _autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.tanh(self.conv(x))


def _half(self: Any, x: Tensor) -> Tensor:
    """Add a convolution of small integers: bfloat16 represents every sum exactly."""
    whole, weight = x.detach().clamp(-3, 3).round(), self.conv.weight.detach().sign()
    if self.automatic:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.conv2d(whole.float(), weight.float(), padding=weight.shape[-1] // 2)
    else:
        y = F.conv2d(whole.bfloat16(), weight.bfloat16(), padding=weight.shape[-1] // 2)
    return x + 0.1 * y.to(x.dtype)


def _checkpointed(self: Any, x: Tensor) -> Tensor:
    found = checkpoint(lambda y: torch.tanh(self.conv(y)), x, use_reentrant=False, preserve_rng_state=False)
    made: Tensor = found
    return made


def _reentrant(self: Any, x: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda y: torch.tanh(self.conv(y)), x, use_reentrant=True)
    return made


def checkpointed_dropout(dice: Dice) -> nn.Module:
    """The second forward draws what the first one has drawn."""

    def forward(self: Any, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(lambda y: self.drop(torch.tanh(self.conv(y))), x, use_reentrant=False)
        return made

    return Layer(forward, "checkpoint of dropout", conv=same(dice), drop=nn.Dropout(0.3))


def _twice(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(self.conv(torch.tanh(self.conv(x))))


def _counted(self: Any, x: Tensor) -> Tensor:
    self.calls.add_(1)
    self.seen = x.detach().mean() if self.training else None
    made: Tensor = self.conv(x)
    return made


def _scaled(self: Any, x: Tensor) -> Tensor:
    made: Tensor = self.conv(x) * self.tau
    return made


class Counter(Layer):
    """Counts its forwards in a buffer."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__(_counted, "counts its forwards", conv=conv)
        self.register_buffer("calls", torch.zeros(()))


def compiled(dice: Dice) -> Any:
    return torch.compile(same(dice), backend=dice.choice(["eager", "aot_eager"]))


def habit(dice: Dice) -> nn.Module:
    return dice.choice(
        [
            lambda: Layer(_no_grad, "no_grad", conv=conv(dice)),
            lambda: Layer(_without_gradient, "part without gradient", conv=same(dice)),
            lambda: Layer(_autocast, "autocast", conv=conv(dice)),
            lambda: Layer(_half, "half precision", conv=nn.Conv2d(4, 4, 3), automatic=dice.random() < 0.5),
            lambda: Layer(_checkpointed, "checkpoint", conv=conv(dice)),
            lambda: Layer(_checkpointed, "checkpoint of two", conv=nn.Sequential(conv(dice, 1), same(dice))),
            lambda: Layer(_reentrant, "reentrant checkpoint", conv=same(dice)),
            lambda: Layer(lambda self, x: self.conv(x), "compiled", conv=compiled(dice)),
            lambda: Layer(_twice, "the same module twice", conv=same(dice)),
            lambda: Layer(_scaled, "an attribute that changes", conv=same(dice)),
            lambda: Layer(lambda self, x: self.conv(x) + x.detach(), "detached", conv=same(dice)),
            lambda: Layer(lambda self, x: self.conv(x), "frozen", conv=same(dice).requires_grad_(False)),
            lambda: Counter(same(dice)),
        ]
    )()


def _standardised(self: Any, x: Tensor) -> Tensor:
    weight = self.conv.weight
    weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-3)
    return F.conv2d(x, weight, self.conv.bias, padding=self.conv.padding)


def _called(self: Any, x: Tensor) -> Tensor:
    """Call the convolution with other values of its parameters."""
    other = {name: 0.9 * p for name, p in self.conv.named_parameters()}
    made: Tensor = functional_call(self.conv, other, (x,))
    return made


def _adapted(self: Any, x: Tensor) -> Tensor:
    """A frozen convolution and a trained one of low rank."""
    made: Tensor = self.conv(x) + self.up(self.down(x))
    return made


def _hooked(layer: Layer) -> Layer:
    """Scale what enters and leaves the convolution, and the gradient that comes back to it."""
    layer.conv.register_forward_pre_hook(lambda module, args: (0.9 * args[0],))
    layer.conv.register_forward_hook(_scale_with_gradient)
    return layer


def _scale_with_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    if output.requires_grad:
        output.register_hook(lambda grad: 0.8 * grad)
    return 0.7 * output


def weights(dice: Dice) -> nn.Module:
    """Weights that are computed, shared or called from outside, and hooks around a module."""
    conv_of_four = partial(nn.Conv2d, CHANNELS, CHANNELS)
    return dice.choice(
        [
            lambda: nn.utils.parametrizations.spectral_norm(same(dice)),
            lambda: Layer(_standardised, "standardised weights", conv=conv_of_four(3, padding=1)),
            lambda: Layer(_called, "functional_call", conv=conv(dice)),
            lambda: Layer(
                _adapted, "adapted", conv=same(dice).requires_grad_(False),
                down=nn.Conv2d(CHANNELS, 1, 3, padding=1, bias=False), up=nn.Conv2d(1, CHANNELS, 1),
            ),
            lambda: _hooked(Layer(lambda self, x: self.conv(x), "hooks", conv=conv(dice))),
            lambda: Layer(
                lambda self, x: checkpoint_sequential(self.parts, 2, x, use_reentrant=False),
                "checkpoint_sequential", parts=nn.Sequential(same(dice), nn.Tanh(), conv(dice), nn.Tanh()),
            ),
        ]
    )()  # fmt: skip


LAYERS: dict[str, Maker] = {
    "conv": lambda dice: nn.Sequential(conv(dice), nn.Tanh()),
    "transposed": transposed,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "adaptive_pool": adaptive_pool,
    "norm": norm,
    "activation": activation,
    "dropout": dropout,
    "checkpointed dropout": checkpointed_dropout,
    "residual": residual,
    "skip": skip,
    "interpolation": interpolation,
    "shuffle": shuffle,
    "excite": excite,
    "attention": attention,
    "borders": borders,
    "shapes": shapes,
    "habit": habit,
    "weights": weights,
}
OFTEN = ["conv", "conv", "norm", "activation", "habit"]


def made(kind: str, seed: int) -> nn.Module:
    """Return the layer of this kind whose options this seed draws."""
    return LAYERS[kind](random.Random(seed))


# -- heads ---------------------------------------------------------------------------------------------------

CLASSES = 3
HEADS: dict[str, Callable[[], nn.Module]] = {
    "image": lambda: nn.Conv2d(CHANNELS, CLASSES, 1),
    "pixels": lambda: nn.Conv2d(CHANNELS, CLASSES, 1),
    "pool": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES)),
    "flatten": lambda: nn.Sequential(
        nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten(), nn.Linear(6 * CHANNELS, CLASSES)
    ),
    "mean": lambda: Layer(lambda self, x: self.out(x.mean((2, 3))), "mean", out=nn.Linear(CHANNELS, CLASSES)),
    "sum": lambda: Layer(lambda self, x: self.out(x).sum((2, 3)), "sum", out=nn.Conv2d(CHANNELS, CLASSES, 1)),
}
