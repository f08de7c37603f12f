"""The model registry: published sizes, batches, losses."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dnn_bench import models
from dnn_bench.models import data, libraries
from dnn_bench.settings import read

PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnext50": 25_028_904,
    "resnext101": 88_791_336,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "alexnet": 61_100_840,
    "densenet121": 7_978_856,
    "densenet201": 20_013_928,
    "inception_v4": 42_679_816,
    "vit_b_16": 86_567_656,
    "bert_base": 110_106_428,
    "bert_large": 336_226_108,
    "gpt2": 124_439_808,
    "bert_base_classifier": 109_483_778,
    "bert_large_classifier": 335_143_938,
    "gpt2_classifier": 124_441_344,
    "mlp": 8 * (1024 * 1024 + 1024) + 10 * 1024 + 10,
}
TINY = [name for name in models.names() if "_tiny" in name]


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.few
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        assert count(models.build(name)) == PUBLISHED[name]


@pytest.mark.few
@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_models_take_their_batches(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name)
        inputs, targets = models.sample_batch(name, 2, device="meta")
        assert models.loss(name, model(inputs), targets).shape == ()


def test_every_model_has_a_published_size_or_is_tiny() -> None:
    assert set(models.names()) == set(PUBLISHED) | set(TINY)


@pytest.mark.few
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_learn_their_batch(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name)
    inputs, targets = models.sample_batch(name, 4, generator=torch.Generator().manual_seed(0))
    # The rate at which classifiers are fine-tuned: a larger one overshoots with two classes.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4 if "classifier" in name else 1e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        value = models.loss(name, model(inputs), targets)
        value.backward()
        losses.append(value.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_vgg_tiny_keeps_one_dominating_layer() -> None:
    for name in ("vgg16", "vgg_tiny"):
        with torch.device("meta"):
            model = models.build(name)
        share = max(p.numel() for p in model.parameters()) / count(model)
        assert 0.72 < share < 0.77


def test_bert_tiny_starts_with_its_largest_tensor() -> None:
    for name in ("bert_base", "bert_tiny"):
        with torch.device("meta"):
            model = models.build(name)
        sizes = [p.numel() for p in model.parameters()]
        assert sizes[0] == max(sizes)
        assert 0.2 < sizes[0] / count(model) < 0.3


@pytest.mark.parametrize("name", ["bert_tiny", "gpt2_tiny", "gpt2_tiny_classifier", "mlp_tiny"])
def test_loss_of_a_batch_is_the_mean_over_equal_shards(name: str) -> None:
    model = models.build(name).double().eval()
    inputs, targets = models.sample_batch(name, 6, generator=torch.Generator().manual_seed(1))
    if inputs.is_floating_point():
        inputs = inputs.double()
    whole = models.loss(name, model(inputs), targets)
    shards = [models.loss(name, model(inputs[i : i + 2]), targets[i : i + 2]) for i in (0, 2, 4)]
    torch.testing.assert_close(torch.stack(shards).mean(), whole, rtol=1e-12, atol=0)


def test_batches_repeat_with_the_generator() -> None:
    first = models.sample_batch("bert_tiny", 3, generator=torch.Generator().manual_seed(5))
    second = models.sample_batch("bert_tiny", 3, generator=torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_sizes_can_be_overridden() -> None:
    inputs, targets = models.sample_batch("gpt2", 2, seq_len=17)
    assert inputs.shape == targets.shape == (2, 17)
    assert models.build("ResNet-18", num_classes=7).head.out_features == 7  # type: ignore[union-attr]


def test_units() -> None:
    assert [models.unit(n) for n in ("resnet50", "bert_base", "mlp")] == ["img", "sentence", "sample"]


def test_bad_names_and_sizes_say_what_is_valid() -> None:
    with pytest.raises(ValueError, match="unknown model 'resnet51'.*resnet50"):
        models.build("resnet51")
    with pytest.raises(ValueError, match="no option depht.*depth"):
        models.build("mlp", depht=3)
    with pytest.raises(ValueError, match="no input size seq_len.*image_size"):
        models.sample_batch("resnet50", 2, seq_len=64)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        models.sample_batch("mlp", 0)
    with pytest.raises(ValueError, match="at most 512 tokens, not 600"):
        models.build("bert_tiny")(torch.ones(1, 600, dtype=torch.long))


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "find_spec", lambda package: None)
    message = re.escape("model 'timm/resnet50' needs timm: pip install commsched[models]")
    with pytest.raises(ValueError, match=message):
        models.spelt("timm/resnet50")
    with pytest.raises(ValueError, match="needs segmentation_models_pytorch"):
        read({"dnn": "smp/Unet-resnet18"})


@pytest.mark.parametrize("name", ["keras/resnet50", "timm/", "/resnet50"])
def test_an_unknown_library_lists_the_known(name: str) -> None:
    with pytest.raises(ValueError, match="unknown model.*torchvision/NAME.*smp/ARCH-ENCODER"):
        models.spelt(name)


def test_logits_are_found_in_what_libraries_return() -> None:
    logits = torch.randn(2, 3, 4)
    for outputs in (logits, {"out": logits}, SimpleNamespace(logits=logits)):
        assert data.logits_of(outputs) is logits


def test_listing_names_does_not_import_torch() -> None:
    code = "import sys; from dnn_bench import models; models.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=400).returncode == 0
