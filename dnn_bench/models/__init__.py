"""The benchmark's models: real architectures, small ones of the same shape, and those of libraries.

>>> from dnn_bench import models
>>> model = models.build("resnet50")
>>> inputs, targets = models.sample_batch("resnet50", batch_size=8)
>>> models.loss("resnet50", model(inputs), targets).backward()

Importing this package does not import torch, so that a command line can list the names at once.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dnn_bench.models import libraries
from dnn_bench.models.libraries import FORMS, ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

SENTENCES = ("masked_lm", "masked_tokens", "causal_lm", "sentence")  # tasks whose batches are tokens
HEADS = ("pretraining", "classification")
CLASSIFIER = "_classifier"


def _image(builder: str, batch: int = 32, size: int = 224, classes: int = 1000, **options: Any) -> ModelSpec:
    shape = {"image_size": size, "num_classes": classes}
    return ModelSpec(builder, "image", batch, shape, {"num_classes": classes, **options})


def _text(kind: str, task: str, batch: int, seq_len: int, vocab: int, **options: Any) -> ModelSpec:
    shape = {"seq_len": seq_len, "vocab_size": vocab}
    options = {"kind": kind, "vocab_size": vocab, **options}
    return ModelSpec("transformer.LanguageModel", task, batch, shape, options)


def _vector(batch: int, width: int) -> ModelSpec:
    shape = {"features": width, "num_classes": 10}
    return ModelSpec("convolutional.mlp", "vector", batch, shape, {"width": width})


def _clicks(batch: int, fields: int, vocab: int) -> ModelSpec:
    shape = {"fields": fields, "vocab_size": vocab}
    return ModelSpec("recommendation.ClickModel", "clicks", batch, shape, dict(shape))


RESNET, PLAIN, DENSENET = "convolutional.ResNet", "convolutional.Plain", "convolutional.DenseNet"
INCEPTION, VIT = "convolutional.InceptionV4", "transformer.ViT"
SMALL = {"size": 64, "classes": 500}
LARGE = {"dim": 1024, "depth": 24, "heads": 16}
TINY = {"dim": 256, "depth": 6, "heads": 4}
# Tiny variants keep the depth and the distribution of tensor sizes of their family and shrink widths and
# inputs, so that a schedule meets the same difficulties in a second of one core's time.
_MODELS: dict[str, ModelSpec] = {
    "mlp": _vector(batch=2048, width=1024),
    "mlp_tiny": _vector(batch=512, width=256),
    "resnet18": _image(RESNET, layers=18),
    "resnet50": _image(RESNET, layers=50),
    "resnet101": _image(RESNET, layers=101),
    "resnet152": _image(RESNET, layers=152),
    "resnet_tiny": _image(RESNET, layers=50, width=32, **SMALL),
    "resnext50": _image(RESNET, layers=50, wider=2),
    "resnext101": _image(RESNET, layers=101, wider=4),
    "resnext_tiny": _image(RESNET, layers=50, wider=2, width=32, **SMALL),
    "vgg16": _image(PLAIN, kind="vgg16"),
    "vgg_tiny": _image(PLAIN, 16, size=112, classes=250, kind="vgg16", width=16),
    "alexnet": _image(PLAIN, 128, kind="alexnet"),
    "alexnet_tiny": _image(PLAIN, 64, size=112, classes=250, kind="alexnet", width=16),
    "densenet121": _image(DENSENET, depths=(6, 12, 24, 16)),
    "densenet201": _image(DENSENET, depths=(6, 12, 48, 32)),
    "densenet_tiny": _image(DENSENET, depths=(6, 12, 24, 16), growth=16, **SMALL),
    "inception_v4": _image(INCEPTION, size=299),
    "inception_tiny": _image(INCEPTION, 16, size=139, classes=250, width=8),
    "vit_b_16": _image(VIT),
    "vit_tiny": _image(VIT, image_size=64, patch=8, dim=192, heads=3, **SMALL),
    "bert_base": _text("bert", "masked_lm", 8, seq_len=64, vocab=30522),
    "bert_large": _text("bert", "masked_lm", 8, seq_len=64, vocab=30522, **LARGE),
    "bert_tiny": _text("bert", "masked_lm", 16, seq_len=64, vocab=7680, **TINY),
    "gpt2": _text("gpt2", "causal_lm", 4, seq_len=128, vocab=50257),
    "gpt2_tiny": _text("gpt2", "causal_lm", 16, seq_len=64, vocab=8192, **TINY),
    "gpt2_deep_tiny": _text("gpt2", "causal_lm", 8, seq_len=32, vocab=1024, dim=64, depth=50, heads=4),
    "dlrm_tiny": _clicks(batch=256, fields=26, vocab=400_000),
}
# Each language model with a classification head for sentence pairs (two classes, as in MRPC and QQP).
CLASSES = {"num_classes": 2}
_MODELS |= {
    name + CLASSIFIER: replace(
        entry, task="sentence", shape=entry.shape | CLASSES, options=entry.options | CLASSES
    )
    for name, entry in _MODELS.items()
    if "seq_len" in entry.shape
}


def names() -> list[str]:
    """Every model's name; besides these, there are the models of libraries (`timm/resnet50`)."""
    return list(_MODELS)


def spec(name: str) -> ModelSpec:
    """The model's entry. A library's model has its entry from the library, which is imported."""
    name = spelt(name)
    return libraries.spec(name) if "/" in name else _MODELS[name]


def spelt(name: str) -> str:
    """The name as the registry spells it: `ResNet-50` is found too. Checks that a library is installed."""
    if "/" in name:
        return libraries.checked(name)
    for known in _MODELS:
        if _bare(known) == _bare(name):
            return known
    raise ValueError(f"unknown model {name!r}; choose one of: {', '.join(_MODELS)}, or {FORMS}")


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def with_head(name: str, head: str) -> str:
    """The name of the same model for pre-training or for classification."""
    base = spelt(name).removesuffix(CLASSIFIER)
    if head == "classification":
        # A model without such a variant classifies anyway.
        return base + CLASSIFIER if base + CLASSIFIER in _MODELS else base
    if base + CLASSIFIER not in _MODELS:
        raise ValueError(f"model {name!r} has no pre-training head, only a classification head")
    return base


def build(name: str, **options: Any) -> nn.Module:
    """A new model with fresh weights from torch's global generator.

    `options` override the constructor's arguments (`num_classes=10`, `dropout=0.0`, …).
    """
    builder = (entry := spec(name)).builder
    if isinstance(builder, str):
        module, _, function = builder.partition(".")
        builder = getattr(importlib.import_module(f"dnn_bench.models.{module}"), function)
        known = inspect.signature(builder).parameters
        if unknown := sorted(set(options) - set(known)):
            raise ValueError(f"model {name!r} has no option {', '.join(unknown)}; it has: {', '.join(known)}")
    return builder(**{**entry.options, **options})


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
    from dnn_bench.models import data

    entry = spec(name)
    size = entry.batch if batch_size is None else batch_size
    if size < 1:
        raise ValueError(f"the batch size must be at least 1, not {size}")
    if unknown := sorted(set(shape) - set(entry.shape)):
        known = ", ".join(entry.shape)
        raise ValueError(f"model {name!r} has no input size {', '.join(unknown)}; it has: {known}")
    if data_dir and entry.task not in data.FROM_FILES:
        raise ValueError(
            f"model {name!r} takes inputs that no folder holds ({entry.task}); use it without a data folder"
        )
    inputs, targets = data.TASKS[entry.task][0](data_dir, size, generator, **{**entry.shape, **shape})
    return inputs.to(device), targets.to(device)


def loss(name: str, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """The scalar loss (a mean over the batch) that belongs to the model."""
    from dnn_bench.models import data

    return data.TASKS[spec(name).task][1](outputs, targets)


def unit(name: str) -> str:
    """The name of one element of a batch in a throughput: `img`, `sentence` or `sample`."""
    task = spec(name).task
    return "sentence" if task in SENTENCES else "sample" if task in ("vector", "clicks") else "img"
