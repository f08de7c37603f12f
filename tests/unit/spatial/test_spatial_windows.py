"""Windows, tokens and attention: what published networks do with reshaped images, also on uneven tiles."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched import spatial
from commsched.channels import Channel
from tests.support.spatial_cases import on_threads


class WindowAttention(nn.Module):
    """Shifted windows: padded to whole windows, rolled, partitioned, masked, attended, and back."""

    def __init__(self, window: int = 4, shift: int = 0, fused: bool = False) -> None:
        super().__init__()
        self.window, self.shift, self.fused = window, shift, fused
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.randn(2, window**2, window**2))

    def forward(self, x: Tensor) -> Tensor:
        shortcut, w = x.permute(0, 2, 3, 1), self.window
        b, h, width, c = shortcut.shape
        x = F.pad(self.norm(shortcut), (0, 0, 0, -width % w, 0, -h % w))
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        high, wide = x.shape[1] // w, x.shape[2] // w
        x = x.view(b, high, w, wide, w, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, c)
        qkv = self.qkv(x).reshape(x.size(0), w * w, 3, 2, 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mask = x.new_zeros((high * w, wide * w))
        mask[: -self.shift or None] += 1
        mask = mask.view(high, w, wide, w).permute(0, 2, 1, 3).reshape(high * wide, w * w)
        mask = (mask.unsqueeze(1) - mask.unsqueeze(2)).mul(3).abs().neg()
        if self.fused:
            bias = self.bias + mask.repeat(b, 1, 1).unsqueeze(1)
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            attn = q @ k.transpose(-2, -1) + self.bias
            attn = attn.view(b, high * wide, 2, w * w, w * w) + mask.unsqueeze(1).unsqueeze(0)
            x = attn.view(-1, 2, w * w, w * w).softmax(-1) @ v
        x = self.out(x.transpose(1, 2).reshape(-1, w * w, c))
        x = x.view(b, high, wide, w, w, c).permute(0, 1, 3, 2, 4, 5).reshape(b, high * w, wide * w, c)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        x = shortcut + x[:, :h, :width, :].contiguous()
        return x.permute(0, 3, 1, 2)


class GridAttention(nn.Module):
    """MaxViT's dilated windows: the pixels of a window come from all over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, 4, h // 4, 4, w // 4).permute(0, 3, 5, 2, 4, 1).reshape(b, -1, 16, c)
        q, k, v = torch.chunk(self.qkv(x), 3, dim=-1)
        scores = torch.einsum("B G I D, B G J D -> B G I J", q, k)
        x = torch.einsum("B G I J, B G J D -> B G I D", F.softmax(scores, dim=-1), v)
        x = x.reshape(b, h // 4, w // 4, 4, 4, c).permute(0, 5, 3, 1, 4, 2)
        return x.reshape(b, c, h, w)


class TokenAttention(nn.Module):
    """Tokens attend to a reduced image, as in Segformer; a convolution between them restores the image."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.q, self.kv, self.reduce, self.fused = (
            nn.Linear(4, 4),
            nn.Linear(4, 8),
            nn.Conv2d(4, 4, 2, 2),
            fused,
        )
        self.norm, self.depthwise = nn.LayerNorm(4), nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        q = self.q(self.norm(tokens)).reshape(b, h * w, 2, 2).permute(0, 2, 1, 3)
        few = self.reduce(tokens.permute(0, 2, 1).reshape(b, c, h, w)).reshape(b, c, -1).permute(0, 2, 1)
        k, v = self.kv(few).reshape(b, -1, 2, 2, 2).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = F.dropout(((q @ k.transpose(-2, -1)) * 0.5).softmax(dim=-1), 0.1, training=False) @ v
        mixed = mixed.transpose(1, 2).reshape(b, h * w, c) * 0.5
        mixed += tokens
        tokens = mixed + self.depthwise(mixed.transpose(1, 2).view(b, c, h, w)).flatten(2).transpose(1, 2)
        return tokens.transpose(1, 2).reshape(b, c, h, w) * tokens.mean(1)[:, :, None, None]


class ClassToken(nn.Module):
    """A vision transformer's token sequence, which begins with a token that is no pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.mix = (
            nn.Parameter(torch.randn(1, 1, 4)),
            nn.MultiheadAttention(4, 2, batch_first=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)], 1)
        return self.mix(tokens, tokens, tokens, need_weights=False)[0][:, 0]


class ImageProduct(nn.Module):
    """Matrix products of images themselves."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(-2, -1)) @ x + torch.bmm(x[:, 0], x[:, 1].transpose(1, 2)).unsqueeze(1) @ x


class Patches(nn.Module):
    """Overlapping patches as tokens (T2T), a linear layer, and an image again."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.mix(F.unfold(x, 3, padding=1, stride=(2, 1)).transpose(1, 2))
        return tokens.transpose(1, 2).reshape(x.shape[0], 4, x.shape[2] // 2, x.shape[3])


class Antialiased(nn.Module):
    """Interpolation with a smoothing filter, smaller and larger."""

    def forward(self, x: Tensor) -> Tensor:
        for size, mode, align in (((5, 9), "bilinear", False), ((8, 7), "bicubic", False)):
            x = F.interpolate(x, size=size, mode=mode, align_corners=align, antialias=True)
        x = F.interpolate(x, size=(4, 5), mode="bilinear", align_corners=True, antialias=True)
        return F.interpolate(x, scale_factor=0.7, mode="bicubic", antialias=True)


class Norms(nn.Module):
    """Global response normalization of ConvNeXt V2, and a maximum norm of the channels."""

    def forward(self, x: Tensor) -> Tensor:
        ratio = x.norm(p=2, dim=(2, 3), keepdim=True)
        return x * ratio / (ratio.mean(1, keepdim=True) + 1e-6) + x.norm(float("inf"), 1, keepdim=True)


MODELS = {
    "patches": Patches,
    "antialias": Antialiased,
    "norms": Norms,
    "windows": WindowAttention,
    "shifted": lambda: WindowAttention(4, 2),
    "fused": lambda: WindowAttention(4, 2, True),
    "one window": lambda: WindowAttention(16, 0),
    "grid": GridAttention,
    "tokens": lambda: TokenAttention(False),
    "fused tokens": lambda: TokenAttention(True),
    "class token": ClassToken,
    "image product": ImageProduct,
}


@pytest.mark.few
@pytest.mark.parametrize("grid", [(2, 2), (1, 4), (3, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_reshaped_images_are_those_of_one_process(name: str, grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), MODELS[name]()).double()
    image = torch.randn(2, 3, 12, 16).double()
    expected = model(image)
    expected.square().sum().backward()
    wanted = [p.grad for p in model.parameters()]

    def run(channel: Channel) -> None:
        mine = copy.deepcopy(model)
        mine.zero_grad()
        spatial.shard(mine, grid=grid, channel=channel)
        out = mine(spatial.scatter(image))
        part = expected[tuple(slice(*bound) for bound in out.bounds)]
        torch.testing.assert_close(out.local, part, rtol=0, atol=1e-11)
        out.square().sum().backward()
        spatial.sum_gradients(mine.parameters())
        for parameter, grad in zip(mine.parameters(), wanted):
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-11, atol=1e-11)

    on_threads(grid[0] * grid[1], run)


def test_a_stage_that_ends_with_a_reshape_is_whole() -> None:
    stages = [nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()), nn.Linear(72, 2)]
    with pytest.raises(ValueError, match="that every rank holds whole"):
        spatial.explain_stages(stages, [spatial.Tiles((1, 2)), spatial.Samples(1)], (2, 3, 8, 8))


def test_windows_gather_nothing_and_attention_its_keys_and_values() -> None:
    shape = (2, 4, 12, 16)
    for name in ("windows", "shifted", "fused"):
        report = spatial.explain(nn.Sequential(MODELS[name]()), shape)
        assert not any(rank.gathered for rank in report.ranks), name
        assert report.ranks[0].sent > 0
    report = spatial.explain(nn.Sequential(MODELS["fused tokens"]()), shape)
    few = 2 * (12 // 2) * (16 // 2) * 4 * 4  # two samples of 6x8 tokens of 4 channels in float32
    assert [rank.gathered["0 (TokenAttention)"] for rank in report.ranks] == [2 * few * 3 // 4] * 4
    assert f"0 (TokenAttention) gathers {4 * 2 * few * 3 // 4:,} bytes for all ranks" in str(report)
