"""Models of libraries by name in the benchmark: built, fed, profiled and trained without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dnn_bench import models
from dnn_bench.baselines import trainer as module
from dnn_bench.baselines.peers import Local
from dnn_bench.baselines.trainer import Job, estimate
from dnn_bench.runner.measure import profile_of

pytestmark = pytest.mark.models
TINY = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = SimpleNamespace(rank=lambda: 0, size=lambda: 1, barrier=lambda: None)
    monkeypatch.setattr(module, "connected", lambda library, job: ranks)


@pytest.mark.parametrize(
    ("name", "task", "shape"),
    [
        ("torchvision/resnet18", "image", {"image_size": 224, "num_classes": 1000}),
        ("torchvision/inception_v3", "image", {"image_size": 299, "num_classes": 1000}),
        ("torchvision/swin_t", "image", {"image_size": 224, "num_classes": 1000}),
        ("torchvision/lraspp_mobilenet_v3_large", "pixels", {"image_size": 256, "num_classes": 21}),
        ("timm/efficientnet_b0", "image", {"image_size": 224, "num_classes": 1000}),
        ("timm/tf_efficientnet_b1.ns_jft_in1k", "image", {"image_size": 240, "num_classes": 1000}),
        ("timm/vit_tiny_patch16_224", "image", {"image_size": 224, "num_classes": 1000}),
        ("hf/bert", "masked_tokens", {"seq_len": 128, "vocab_size": 30522}),
        ("hf/gpt2", "causal_lm", {"seq_len": 128, "vocab_size": 50257}),
        ("hf/vit", "image", {"image_size": 224, "num_classes": 2}),
        ("smp/Unet-resnet18", "pixels", {"image_size": 256, "num_classes": 21}),
        ("smp/FPN-timm-efficientnet-b0", "pixels", {"image_size": 256, "num_classes": 21}),
    ],
)
def test_a_step_changes_every_parameter_that_has_a_gradient(
    name: str, task: str, shape: dict[str, int]
) -> None:
    spec = models.spec(name)
    assert (spec.task, spec.shape) == (task, shape)
    rank = Local(Job(name, batch=2, learning_rate=0.1))
    before = rank.parameters()
    batch = rank.job.local_batch(0)
    rank.iteration(*batch)
    assert rank.loss.isfinite()
    moved = [key for key, value in rank.parameters().items() if not torch.equal(value, before[key])]
    used = [
        key for key, value in rank.module.named_parameters() if value.grad is not None and value.grad.any()
    ]
    assert used and len(moved) >= 0.9 * len(used)
    profile = profile_of(rank, 1)
    size = sum(4 * p.numel() for p in rank.module.parameters() if p.grad is not None)
    assert sum(layer["bytes"] for layer in profile["layers"]) == size
    assert estimate(rank.job).parameters == sum(4 * p.numel() for p in rank.module.parameters())


@pytest.mark.parametrize("name", ["torchvision/swin_t", "hf/gpt2", "timm/vit_tiny_patch16_224.augreg_in21k"])
def test_training_is_repeatable(name: str) -> None:
    """Dropout of attention and of whole paths is off as well."""
    model = Job(name).build_model()
    inputs, targets = Job(name).sample(2, 0)
    first, second = (models.loss(name, model(inputs), targets) for _ in range(2))
    assert torch.equal(first, second)


def test_configurations_come_from_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **TINY, "intermediate_size": 32}))
    for path in (tmp_path, tmp_path / "config.json"):
        name = f"hf/{path}"
        assert models.spec(name).shape == {"seq_len": 128, "vocab_size": 64}
        inputs, targets = models.sample_batch(name, 3, seq_len=9)
        assert models.loss(name, models.build(name)(inputs), targets).isfinite()
    text = tmp_path / "words.txt"
    text.write_text("to be or not to be" * 100)
    assert models.sample_batch("hf/gpt2", 3, data_dir=str(text), seq_len=9)[0].shape == (3, 9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision/resnet19", "torchvision has no model 'resnet19'.*Unknown model"),
        ("torchvision/fasterrcnn_resnet50_fpn", "models of detection take no batches"),
        ("timm/resnet19", "timm has no model 'resnet19'"),
        ("hf/berd", "transformers has no model 'berd'"),
        ("hf/t5", "T5Config has none of the heads MaskedLM, CausalLM, ImageClassification"),
        ("smp/Nunet-resnet18", "has no model 'Nunet-resnet18'"),
        ("smp/Unet-resnet19", "Wrong encoder name `resnet19`"),
    ],
)
def test_what_a_library_does_not_have_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.spec(name)
