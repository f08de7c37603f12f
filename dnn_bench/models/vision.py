"""Parts that convolutional models share."""

from __future__ import annotations

from torch import Tensor, nn


def conv_norm_relu(
    c_in: int,
    c_out: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    same: bool = True,
    eps: float = 1e-5,
) -> nn.Sequential:
    """Convolution without bias, batch norm, ReLU; `same` pads so that stride 1 keeps the image's size."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2) if same else 0
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, (height, width), stride, padding, bias=False),
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
