"""Models of torchvision, timm, transformers and segmentation_models_pytorch, with random weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

FORMS = "torchvision/NAME, timm/NAME, hf/TYPE-or-config, smp/ARCH-ENCODER"
# Heads of transformers, the first that a configuration can have, and their tasks here.
HEADS = {"MaskedLM": "masked_tokens", "CausalLM": "causal_lm", "ImageClassification": "image"}
TOKENS, PIXELS = 128, 256  # lengths of sequences, and sides of images where no default belongs to the model


@dataclass(frozen=True)
class ModelSpec:
    """One model: `builder`, a function or "file.function" in this package, is called with `options`.

    `task` says what a batch looks like and which loss belongs to it; `shape` holds the sizes a batch needs;
    `batch` is the default per worker.
    """

    builder: str | Callable[..., nn.Module]
    task: str
    batch: int
    shape: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def checked(name: str) -> str:
    """The name, if its library is known and installed; neither the library nor torch is imported."""
    library, _, model = name.partition("/")
    if library not in LIBRARIES or not model:
        raise ValueError(f"unknown model {name!r}: models of libraries are {FORMS}")
    package, _ = LIBRARIES[library]
    if find_spec(package) is None:
        raise ValueError(f"model {name!r} needs {package}: pip install commsched[models]")
    return name


@cache
def spec(name: str) -> ModelSpec:
    library, _, model = name.partition("/")
    package, make = LIBRARIES[library]
    try:
        return make(importlib.import_module(package), model)
    except (AttributeError, KeyError, ValueError, OSError, RuntimeError) as error:
        raise ValueError(f"{package} has no model {model!r} for this benchmark: {error}") from error


def _torchvision(torchvision: Any, model: str) -> ModelSpec:
    kind = torchvision.models.get_model_builder(model).__module__.removeprefix("torchvision.models.")
    if kind.startswith(("detection", "optical_flow", "video")):
        raise ValueError(f"its models of {kind.partition('.')[0]} take no batches of images with classes")
    build = partial(torchvision.models.get_model, model, weights=None)
    if kind.startswith("segmentation"):
        build = partial(build, weights_backbone=None)
        return ModelSpec(build, "pixels", 4, {"image_size": PIXELS, "num_classes": 21})
    best = torchvision.models.get_model_weights(model)
    size = best.DEFAULT.transforms().crop_size[0]
    return ModelSpec(build, "image", 32, {"image_size": size, "num_classes": 1000})


def _timm(timm: Any, model: str) -> ModelSpec:
    config = timm.get_pretrained_cfg(model, allow_unregistered=False)
    shape = {"image_size": config.input_size[-1], "num_classes": config.num_classes}
    return ModelSpec(partial(timm.create_model, model, pretrained=False), "image", 32, shape)


def _hf(transformers: Any, model: str) -> ModelSpec:
    """From a folder with a config.json, such a file, or the default configuration of a type of model."""
    if Path(model).exists():
        config = transformers.AutoConfig.from_pretrained(model, local_files_only=True)
    else:
        config = transformers.AutoConfig.for_model(model)
    autos = [(getattr(transformers, f"AutoModelFor{head}"), task) for head, task in HEADS.items()]
    fitting = [(auto, task) for auto, task in autos if type(config) in auto._model_mapping]
    if not fitting:
        raise ValueError(f"{type(config).__name__} has none of the heads {', '.join(HEADS)}")
    auto, task = fitting[0]
    build = partial(auto.from_config, config)
    if task == "image":
        return ModelSpec(build, task, 32, {"image_size": config.image_size, "num_classes": config.num_labels})
    text = config.get_text_config()
    length = min(TOKENS, getattr(text, "max_position_embeddings", TOKENS))
    return ModelSpec(build, task, 8, {"seq_len": length, "vocab_size": text.vocab_size})


def _smp(smp: Any, model: str) -> ModelSpec:
    arch, _, encoder = model.partition("-")
    smp.encoders.get_encoder(encoder, weights=None)
    build = partial(getattr(smp, arch), encoder_name=encoder, encoder_weights=None, classes=21)
    return ModelSpec(build, "pixels", 4, {"image_size": PIXELS, "num_classes": 21})


# By what stands before the slash of a name: the package, and the function that finds one of its models.
LIBRARIES: dict[str, tuple[str, Callable[[Any, str], ModelSpec]]] = {
    "torchvision": ("torchvision", _torchvision),
    "timm": ("timm", _timm),
    "hf": ("transformers", _hf),
    "smp": ("segmentation_models_pytorch", _smp),
}
