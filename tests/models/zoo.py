"""Models of Hugging Face, timm and torchvision with random weights, inputs for each, and a loss.

Small configurations without dropout; the loss is the mean square of the output of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[[int], Any]]
"""A model, and its inputs for so many rows."""

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
WORDS = {"vocab_size": 96, **SIZES}
SEQ2SEQ = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
}


def text(rows: int) -> dict[str, Tensor]:
    """Every second row is padded."""
    mask = torch.ones(rows, 12, dtype=torch.long)
    mask[1::2, 8:] = 0
    return {"input_ids": torch.randint(3, 90, (rows, 12)), "attention_mask": mask}


def pairs(rows: int) -> dict[str, Tensor]:
    return {**text(rows), "decoder_input_ids": torch.randint(3, 90, (rows, 10))}


def pixels(size: int = 32) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {"pixel_values": torch.randn(rows, 3, size, size)}


def hugging_face(
    model: str, config: str, options: dict[str, Any], inputs: Callable[[int], Any], **more: Any
) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        made = getattr(transformers, config)(**{**options, **more})
        return getattr(transformers, model)(made), inputs

    return make


def from_timm(name: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        import timm

        return timm.create_model(name, pretrained=False, **options), lambda rows: torch.randn(
            rows, 3, size, size
        )

    return make


def from_torchvision(name: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, **options)
        return model, lambda rows: torch.randn(rows, 3, size, size)

    return make


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 32}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 3,
    "num_heads": 2,
    "dropout_rate": 0.0,
}
ONE_KEY = {**WORDS, "num_key_value_heads": 1}
IMAGES = {**SIZES, "image_size": 32, "patch_size": 8}

TRAINED: dict[str, Callable[..., Callable[[], Made]]] = {
    "gpt2": lambda **more: hugging_face("GPT2LMHeadModel", "GPT2Config", GPT2, text, **more),
    "bert": lambda **more: hugging_face(
        "BertForSequenceClassification", "BertConfig", {**WORDS, **NO_DROPOUT}, text, **more
    ),
    "roberta": lambda **more: hugging_face(
        "RobertaForSequenceClassification", "RobertaConfig", {**WORDS, **NO_DROPOUT}, text, **more
    ),
    "llama": lambda **more: hugging_face("LlamaForCausalLM", "LlamaConfig", ONE_KEY, text, **more),
    "t5": lambda **more: hugging_face("T5ForConditionalGeneration", "T5Config", T5, pairs, **more),
    "vit": lambda **more: hugging_face(
        "ViTForImageClassification", "ViTConfig", {**IMAGES, **NO_DROPOUT}, pixels(), **more
    ),
    "timm resnet50": lambda: from_timm("resnet50"),
    "timm efficientnet_b0": lambda: from_timm("efficientnet_b0"),
    "timm convnext_atto": lambda: from_timm("convnext_atto"),
    "timm swin_tiny": lambda: from_timm("swin_tiny_patch4_window7_224", 224),
}
"""Trained in pipelines, by every kind of schedule. Options go to the configuration."""

CUT: dict[str, Callable[[], Made]] = {name: make() for name, make in TRAINED.items()} | {
    "distilbert": hugging_face(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": 96, "dim": 32, "n_layers": 4, "n_heads": 2, "hidden_dim": 64},
        text,
    ),
    "albert": hugging_face(
        "AlbertForSequenceClassification", "AlbertConfig", {"embedding_size": 16, **WORDS}, text
    ),
    "electra": hugging_face(
        "ElectraForSequenceClassification", "ElectraConfig", {"embedding_size": 16, **WORDS}, text
    ),
    "deberta": hugging_face(
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"], **WORDS},
        text,
    ),
    "opt": hugging_face(
        "OPTForCausalLM",
        "OPTConfig",
        {**WORDS, "ffn_dim": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
        text,
    ),
    "gpt-neox": hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", WORDS, text),
    "bloom": hugging_face(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 96, "hidden_size": 32, "n_layer": 4, "n_head": 2},
        text,
    ),
    "mistral": hugging_face("MistralForCausalLM", "MistralConfig", {"sliding_window": 4, **ONE_KEY}, text),
    "qwen2": hugging_face("Qwen2ForCausalLM", "Qwen2Config", ONE_KEY, text),
    "gemma2": hugging_face("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 16, **ONE_KEY}, text),
    "phi": hugging_face("PhiForCausalLM", "PhiConfig", WORDS, text),
    "mixtral": hugging_face("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, **ONE_KEY}, text),
    "mamba": hugging_face(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4},
        lambda rows: {"input_ids": text(rows)["input_ids"]},
    ),
    "bart": hugging_face(
        "BartForConditionalGeneration", "BartConfig", {**SEQ2SEQ, "max_position_embeddings": 64}, pairs
    ),
    "whisper": hugging_face(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        lambda rows: {
            "input_features": torch.randn(rows, 8, 40),
            "decoder_input_ids": torch.randint(3, 90, (rows, 9)),
        },
    ),
    "wav2vec2": hugging_face(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **WORDS,
            "conv_dim": (16, 16),
            "conv_stride": (5, 4),
            "conv_kernel": (10, 8),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
        },
        lambda rows: {"input_values": torch.randn(rows, 800)},
    ),
    "dinov2": hugging_face("Dinov2ForImageClassification", "Dinov2Config", IMAGES, pixels()),
    "swin": hugging_face(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        pixels(),
    ),
    "convnext": hugging_face(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]},
        pixels(64),
    ),
    "segformer": hugging_face(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
        },
        pixels(64),
    ),
    "xlnet": hugging_face(
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {"vocab_size": 96, "d_model": 32, "n_layer": 4, "n_head": 2, "d_inner": 64},
        text,
    ),
    "timm regnety_002": from_timm("regnety_002"),
    "timm hrnet_w18_small": from_timm("hrnet_w18_small"),
    "timm vit_tiny": from_timm("vit_tiny_patch16_224", 224),
    "timm mobilenetv3_small": from_timm("mobilenetv3_small_100"),
    "timm maxvit_pico": from_timm("maxvit_pico_rw_256", 256),
    "timm densenet121": from_timm("densenet121"),
    "timm mixer_s16": from_timm("mixer_s16_224", 224),
    "torchvision resnet18": from_torchvision("resnet18"),
    "torchvision swin_t": from_torchvision("swin_t"),
    "torchvision swin_v2_t": from_torchvision("swin_v2_t"),
    "torchvision convnext_tiny": from_torchvision("convnext_tiny"),
    "torchvision efficientnet_b0": from_torchvision("efficientnet_b0"),
    "torchvision vit_b_16": from_torchvision("vit_b_16", 224),
    "torchvision maxvit_t": from_torchvision("maxvit_t", 224),
    "torchvision googlenet": from_torchvision("googlenet", init_weights=False),
    "torchvision inception_v3": from_torchvision("inception_v3", 299, init_weights=False),
    "torchvision fcn_resnet50": from_torchvision("fcn_resnet50", weights_backbone=None),
    "torchvision deeplabv3_resnet50": from_torchvision("deeplabv3_resnet50", weights_backbone=None),
    "torchvision lraspp_mobilenet_v3": from_torchvision("lraspp_mobilenet_v3_large", weights_backbone=None),
}


def made(make: Callable[[], Made], rows: int) -> tuple[nn.Module, Any]:
    """The model, in training where it has batch norms, and a batch: without anything that draws random
    numbers.
    """
    torch.manual_seed(0)
    model, inputs = make()
    for module in model.modules():
        if any(word in type(module).__name__ for word in ("Drop", "StochasticDepth")):
            module.eval()
        for name in ("dropout", "p", "attention_dropout", "drop", "activation_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float) and "Conv" not in type(module).__name__:
                setattr(module, name, 0.0)
    return model, inputs(rows)


def output_of(output: Any) -> Tensor:
    """The tensor that is trained: logits, or the output itself."""
    if isinstance(output, dict) and "out" in output:
        return output["out"]
    found = getattr(output, "logits", output)
    return found if isinstance(found, Tensor) else found[0]


def loss_of(output: Any, targets: Any = None) -> Tensor:
    return output_of(output).float().square().flatten(1).mean(1).mean()
