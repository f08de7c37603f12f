"""A GPT-2 of transformers that no rank holds whole: the peak memory of each rank, beside the model's bytes.

    torchrun --nproc-per-node 4 -m tests.models.held_memory --layers 48 --width 1600 --vocabulary 50257

is GPT-2 XL with 1.5 billion parameters (15 GB in all). Ends with an error where a rank holds more than 0.35
of the parameters' bytes before the first step, or of the bytes of parameters and gradients after it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST = 0.35


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--vocabulary", type=int, default=2048)
    return parser.parse_args()


def make(layers: int, width: int, vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "vocab_size": vocabulary}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**shape, **dropouts, use_cache=False))


def loss_of(output: Any, ids: Tensor) -> Tensor:
    logits = output.logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def batch(vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (4, 8), generator=torch.Generator().manual_seed(1))


def most_memory() -> int:
    """The most memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main() -> None:
    import commsched
    from commsched.pipeline import Pipeline
    from commsched.pipeline.factory import Factory

    given = vars(arguments())
    torch.set_num_threads(1)
    commsched.init()
    outline = Factory(lambda: make(**given)).outline()
    model_bytes = sum(p.numel() * p.element_size() for p in outline.parameters())
    del outline
    torch.manual_seed(0)
    before = most_memory()
    pipeline = Pipeline(
        lambda: make(**given),
        num_microbatches=2,
        loss=loss_of,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.01),
    )
    made = (most_memory() - before) / model_bytes
    ids = batch(given["vocabulary"])
    losses = [pipeline.step(({"input_ids": ids}, ids)) for _ in range(2)]
    stepped = (most_memory() - before) / (2 * model_bytes)
    print(
        f"rank {pipeline.rank}: {model_bytes / 1e9:.2f} GB of parameters; at most {made:.3f} of them while"
        f" the pipeline was made, {stepped:.3f} of parameters and gradients in two steps; losses {losses}",
        flush=True,
    )
    pipeline.close()
    commsched.shutdown()
    if max(made, stepped) > MOST:
        raise SystemExit(f"more than {MOST}")


if __name__ == "__main__":
    main()
