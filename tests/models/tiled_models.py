"""Sixty published networks for images: torchvision's, timm's and segmentation_models_pytorch's.

Small images and random weights. Windows of transformers are made smaller where the images are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.models.zoo import Made, from_timm, from_torchvision


def segmentation(name: str, encoder: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        import segmentation_models_pytorch

        build = getattr(segmentation_models_pytorch, name)
        model = build(encoder_name=encoder, encoder_weights=None, classes=3, **options)
        return model, lambda rows: torch.randn(rows, 3, size, size)

    return make


TORCHVISION: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("alexnet", "vgg11_bn"), {}),
    **dict.fromkeys(("resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "densenet121"), {}),
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False, "aux_logits": False, "size": 96},
    **dict.fromkeys(("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large"), {}),
    **dict.fromkeys(("shufflenet_v2_x1_0", "squeezenet1_0", "squeezenet1_1", "mnasnet0_5", "mnasnet1_0"), {}),
    **dict.fromkeys(("efficientnet_b0", "efficientnet_v2_s", "regnet_x_400mf", "regnet_y_400mf"), {}),
    **dict.fromkeys(("convnext_tiny", "swin_t", "swin_v2_t"), {}),
    "vit_b_16": {"image_size": 64},
    "maxvit_t": {"size": 224},
    **dict.fromkeys(
        (
            "fcn_resnet50",
            "deeplabv3_resnet50",
            "deeplabv3_mobilenet_v3_large",
            "lraspp_mobilenet_v3_large",
        ),
        {"weights_backbone": None},
    ),
}
SWIN = {"img_size": 64, "window_size": 4}
TIMM: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("resnet18", "resnet26d", "resnet50", "resnext50_32x4d", "seresnet50"), {}),
    **dict.fromkeys(("convnext_atto", "convnextv2_atto", "efficientnet_b0", "tf_efficientnetv2_b0"), {}),
    **dict.fromkeys(("mobilenetv3_small_100", "regnetx_002", "regnety_002", "hrnet_w18_small"), {}),
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN,
}
SEGMENTATION = {
    "Unet": ("resnet18", "vgg11", "mobilenet_v2", "timm-regnetx_002"),
    **dict.fromkeys(
        ("UnetPlusPlus", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "Linknet"), ("resnet18",)
    ),
    **dict.fromkeys(("MAnet", "PAN", "UPerNet"), ("resnet18",)),
    "Segformer": ("resnet18", "mit_b0"),
}

MODELS: dict[str, Callable[[], Made]] = {
    **{f"torchvision {name}": from_torchvision(name, **options) for name, options in TORCHVISION.items()},
    **{f"timm {name}": from_timm(name, **options) for name, options in TIMM.items()},
    **{
        f"smp {name} {encoder}": segmentation(
            name, encoder, 128 if name == "PAN" else 64
        )  # PAN halves its last feature map thrice
        for name, encoders in SEGMENTATION.items()
        for encoder in encoders
    },
}
