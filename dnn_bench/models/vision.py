"""What the convolutional families share."""

from __future__ import annotations

from torch import Tensor, nn


class ConvNormRelu(nn.Sequential):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(
            nn.Conv2d(c_in, c_out, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(c_out, eps=eps),
            nn.ReLU(inplace=True),
        )


def he_init(model: nn.Module) -> None:
    """Weights for ReLU networks, so that gradients of deep stacks neither vanish nor grow."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def global_average(x: Tensor) -> Tensor:
    return x.mean(dim=(2, 3))
