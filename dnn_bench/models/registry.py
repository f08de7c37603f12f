"""Which models there are, and how each is built, fed and judged.

The table is plain data: torch is imported only when a model is built or fed.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

UNITS = {
    "image": "img",
    "masked_lm": "sentence",
    "causal_lm": "sentence",
    "sentence": "sentence",
    "vector": "sample",
}
HEADS = ("pretraining", "classification")
_CLASSIFIER = "_classifier"


@dataclass(frozen=True)
class ModelSpec:
    """One entry of the registry.

    `builder` is "file.function" in this package, called with `options`; `task` says what a batch looks like
    and which loss belongs to it; `shape` holds the sizes a batch needs; `batch` is the default per worker.
    """

    builder: str
    task: str
    batch: int
    shape: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def _image(builder: str, batch: int, size: int = 224, classes: int = 1000, **options: Any) -> ModelSpec:
    return ModelSpec(
        builder,
        "image",
        batch,
        {"image_size": size, "num_classes": classes},
        {"num_classes": classes, **options},
    )


def _text(builder: str, task: str, batch: int, seq_len: int, vocab: int, **options: Any) -> ModelSpec:
    return ModelSpec(
        builder, task, batch, {"seq_len": seq_len, "vocab_size": vocab}, {"vocab_size": vocab, **options}
    )


def _vector(batch: int, width: int, depth: int) -> ModelSpec:
    return ModelSpec(
        "mlp.mlp",
        "vector",
        batch,
        {"features": width, "num_classes": 10},
        {"width": width, "depth": depth, "num_classes": 10},
    )


# Tiny variants keep the depth and the distribution of tensor sizes of their family and shrink widths and
# inputs, so that a schedule meets the same difficulties in a second of one core's time.
_MODELS: dict[str, ModelSpec] = {
    "mlp": _vector(batch=2048, width=1024, depth=8),
    "mlp_tiny": _vector(batch=512, width=256, depth=8),
    "resnet18": _image("resnet.resnet18", 32),
    "resnet50": _image("resnet.resnet50", 32),
    "resnet101": _image("resnet.resnet101", 32),
    "resnet152": _image("resnet.resnet152", 32),
    "resnet_tiny": _image("resnet.resnet50", 32, size=64, classes=500, width=32),
    "resnext50": _image("resnet.resnext50", 32),
    "resnext101": _image("resnet.resnext101", 32),
    "resnext_tiny": _image("resnet.resnext50", 32, size=64, classes=500, width=32),
    "vgg16": _image("vgg.vgg16", 32),
    "vgg_tiny": _image("vgg.vgg16", 16, size=112, classes=250, width=16),
    "alexnet": _image("alexnet.alexnet", 128),
    "alexnet_tiny": _image("alexnet.alexnet", 64, size=112, classes=250, width=16),
    "densenet121": _image("densenet.densenet121", 32),
    "densenet201": _image("densenet.densenet201", 32),
    "densenet_tiny": _image("densenet.densenet121", 32, size=64, classes=500, growth=16),
    "inception_v4": _image("inception.inception_v4", 32, size=299),
    "inception_tiny": _image("inception.inception_v4", 16, size=139, classes=250, width=8),
    "vit_b_16": _image("vit.vit", 32, image_size=224),
    "vit_tiny": _image("vit.vit", 32, size=64, classes=500, image_size=64, patch=8, dim=192, heads=3),
    "bert_base": _text("bert.bert", "masked_lm", 8, seq_len=64, vocab=30522),
    "bert_large": _text("bert.bert", "masked_lm", 8, seq_len=64, vocab=30522, dim=1024, depth=24, heads=16),
    "bert_tiny": _text("bert.bert", "masked_lm", 16, seq_len=64, vocab=7680, dim=256, depth=6, heads=4),
    "gpt2": _text("gpt2.gpt2", "causal_lm", 4, seq_len=128, vocab=50257),
    "gpt2_tiny": _text("gpt2.gpt2", "causal_lm", 16, seq_len=64, vocab=8192, dim=256, depth=6, heads=4),
}


# Each language model with a classification head for sentence pairs (two classes, as in MRPC and QQP).
_MODELS |= {
    name + _CLASSIFIER: replace(
        entry,
        builder=entry.builder + _CLASSIFIER,
        task="sentence",
        shape={**entry.shape, "num_classes": 2},
        options={**entry.options, "num_classes": 2},
    )
    for name, entry in _MODELS.items()
    if entry.task in ("masked_lm", "causal_lm")
}


def names() -> list[str]:
    """Every model's name."""
    return list(_MODELS)


def spec(name: str) -> ModelSpec:
    """The registry's entry; `ResNet-50` and `bert-base` are found too: case, `-` and `_` do not matter."""
    return _MODELS[spelt(name)]


def spelt(name: str) -> str:
    """The model's name as the registry spells it."""
    for known in _MODELS:
        if _bare(known) == _bare(name):
            return known
    raise ValueError(f"unknown model {name!r}; choose one of: {', '.join(_MODELS)}")


def with_head(name: str, head: str) -> str:
    """The name of the same model for pre-training or for classification."""
    base = spelt(name).removesuffix(_CLASSIFIER)
    if head == "classification":
        # A model without such a variant classifies anyway.
        return base + _CLASSIFIER if base + _CLASSIFIER in _MODELS else base
    if base + _CLASSIFIER not in _MODELS:
        raise ValueError(f"model {name!r} has no pre-training head, only a classification head")
    return base


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def build(name: str, **options: Any) -> nn.Module:
    """A new model with fresh weights from torch's global generator.

    `options` override the constructor's arguments (`num_classes=10`, `dropout=0.0`, …).
    """
    entry = spec(name)
    module, _, function = entry.builder.partition(".")
    builder = getattr(importlib.import_module(f"dnn_bench.models.{module}"), function)
    known = inspect.signature(builder).parameters
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"model {name!r} has no option {', '.join(unknown)}; it has: {', '.join(known)}")
    model: nn.Module = builder(**{**entry.options, **options})
    return model


def sample_batch(
    name: str,
    batch_size: int | None = None,
    device: str | torch.device = "cpu",
    generator: torch.Generator | None = None,
    *,
    data_dir: str = "",
    **shape: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A random `(inputs, targets)`: tensors whose first dimension is the batch, so that slices are shards.

    Synthetic unless `data_dir` names a folder of images (one subfolder per class) or a text file. `shape`
    overrides the model's usual sizes: `seq_len=128`, `image_size=96`, …
    """
    from dnn_bench.models import data, files

    entry = spec(name)
    size = entry.batch if batch_size is None else batch_size
    if size < 1:
        raise ValueError(f"the batch size must be at least 1, not {size}")
    unknown = sorted(set(shape) - set(entry.shape))
    if unknown:
        known = ", ".join(entry.shape)
        raise ValueError(f"model {name!r} has no input size {', '.join(unknown)}; it has: {known}")
    sizes = {**entry.shape, **shape}
    if not data_dir:
        inputs, targets = data.SAMPLERS[entry.task](size, generator, **sizes)
    elif entry.task in files.SAMPLERS:
        inputs, targets = files.SAMPLERS[entry.task](data_dir, size, generator, **sizes)
    else:
        raise ValueError(
            f"model {name!r} takes inputs that no folder holds ({entry.task}); use it without a data folder"
        )
    return inputs.to(device), targets.to(device)


def loss(name: str, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """The scalar loss (a mean over the batch) that belongs to the model."""
    from dnn_bench.models import data

    return data.LOSSES[spec(name).task](outputs, targets)


def unit(name: str) -> str:
    """What one element of a batch is called in a throughput: `img`, `sentence` or `sample`."""
    return UNITS[spec(name).task]
