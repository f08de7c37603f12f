"""One rank of a job of Hugging Face, Lightning or torch.compile: ``timed_jobs.py JOB WAY``.

The way is `ddp`, as the library ships it, or `commsched`, with the lines changed that docs/integrations.md
names; loops without a library also take `ddp-compiled` and `commsched-compiled`. Rank 0 prints one line of
JSON: bytes of parameters, the median seconds of a step and, with commsched, of exposed communication.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

SETTLE, STEPS = 42, 54  # commsched measures, plans, and tries DDP's way in the first steps
SHARDS = {"gather": "parameters"}


@dataclass(frozen=True)
class Run:
    model: nn.Module
    ends: list[float]  # of the steps
    exposed: float | None


def tokens(count: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))


# -- Hugging Face --------------------------------------------------------------------------------------------


def hugging_face(kind: Any, arguments: Any, ours: bool, **parts: Any) -> Run:
    from transformers import TrainerCallback

    import commsched as hvd
    from commsched.huggingface import TrainerMixin

    ends: list[float] = []
    exposed: list[Any] = [None]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

        def on_train_end(self, *_: Any, optimizer: Any, **__: Any) -> None:
            if ours:
                exposed[0] = hvd.metrics(optimizer.optimizer).exposed

    options = {"max_steps": STEPS, "use_cpu": True, "save_strategy": "no", "report_to": "none"}
    args = arguments(tempfile.mkdtemp(), disable_tqdm=True, **options)
    if ours:
        kind, parts = type("Ours", (TrainerMixin, kind), {}), {**parts, "commsched": SHARDS}
    trainer = kind(args=args, callbacks=[Clock()], **parts)
    trainer.train()
    return Run(parts["model"], ends, exposed[0])


def text_classification(ours: bool) -> Run:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    model = BertForSequenceClassification(BertConfig(vocab_size=2000, **sizes, num_labels=3))
    rows = [{"input_ids": row, "labels": int(row[0]) % 3} for row in tokens(512, 48, 2000)]
    return hugging_face(Trainer, TrainingArguments, ours, model=model, train_dataset=rows)


def causal_language_model(ours: bool) -> Run:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    ends = {"bos_token_id": 1, "eos_token_id": 2}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=2000, n_positions=64, n_embd=256, n_layer=4, n_head=4, **ends)
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens(512, 48, 2000)]
    return hugging_face(Trainer, TrainingArguments, ours, model=model, train_dataset=rows)


def supervised_fine_tuning(ours: bool) -> Run:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = ["<pad>", "</s>", "<unk>", *(f"word{i}" for i in range(1997))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, num_key_value_heads=4, **sizes, **ends))
    texts = [" ".join(words[i] for i in row) for row in tokens(512, 47, 2000)]
    data = Dataset.from_dict({"text": texts})
    parts = {"model": model, "train_dataset": data, "processing_class": processing}
    return hugging_face(SFTTrainer, SFTConfig, ours, **parts)


# -- Lightning -----------------------------------------------------------------------------------------------


def lightning(module: Any, ours: bool, data: torch.utils.data.Dataset[Any], rows: int) -> Run:
    import lightning as L
    from lightning.pytorch.callbacks import Callback

    import commsched as hvd
    import commsched.lightning

    ends: list[float] = []
    exposed: list[Any] = [None]
    # Each of two optimizers' backwards leaves the other's parameters unused.
    stock = "ddp" if module.automatic_optimization else "ddp_find_unused_parameters_true"

    class Clock(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.monotonic())

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            if ours:
                exposed[0] = sum(hvd.metrics(optimizer).exposed for optimizer in trainer.optimizers)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        strategy="commsched" if ours else stock,
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_steps=STEPS if module.automatic_optimization else 2 * STEPS,  # it counts updates
        callbacks=[Clock()],
        logger=False,
        **quiet,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, rows, shuffle=True))
    return Run(module, ends, exposed[0])


def images(count: int, size: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3, size, size, generator=generator)
    return torch.utils.data.TensorDataset(pixels, torch.randint(10, (count,), generator=generator))


def image_classifier(ours: bool) -> Run:
    import lightning as L
    from torchvision.models import resnet18

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = resnet18(num_classes=10)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    return lightning(Classifier(), ours, images(2048, 64), 64)


def gan(ours: bool) -> Run:
    import lightning as L

    def layers(*sizes: int) -> list[nn.Module]:
        pairs = zip(sizes, sizes[1:], strict=False)
        return [part for a, b in pairs for part in (nn.Linear(a, b), nn.LeakyReLU(0.2))][:-1]

    class Gan(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(*layers(100, 256, 512, 1024, 3072), nn.Tanh())
            self.discriminator = nn.Sequential(*layers(3072, 512, 256, 1))

        def loss(self, pixels: torch.Tensor, real: bool) -> torch.Tensor:
            wanted = torch.full((len(pixels), 1), float(real))
            return nn.functional.binary_cross_entropy_with_logits(self.discriminator(pixels), wanted)

        def training_step(self, batch: Any) -> None:
            optimizer_g, optimizer_d = self.optimizers()
            pixels = batch[0].flatten(1)
            z = torch.randn(len(pixels), 100)
            self.toggle_optimizer(optimizer_g)
            self.manual_backward(self.loss(self.generator(z), True))
            optimizer_g.step()
            optimizer_g.zero_grad()
            self.untoggle_optimizer(optimizer_g)
            self.toggle_optimizer(optimizer_d)
            fake = self.generator(z).detach()
            self.manual_backward((self.loss(pixels, True) + self.loss(fake, False)) / 2)
            optimizer_d.step()
            optimizer_d.zero_grad()
            self.untoggle_optimizer(optimizer_d)

        def configure_optimizers(self) -> Any:
            make = torch.optim.Adam
            return make(self.generator.parameters(), 2e-4), make(self.discriminator.parameters(), 2e-4)

    return lightning(Gan(), ours, images(8192, 32), 256)


# -- torch.compile -------------------------------------------------------------------------------------------


def loop(model: nn.Module, inputs: dict[str, torch.Tensor], ours: bool, compiled: bool) -> Run:
    import torch.distributed as dist

    import commsched as hvd

    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wrapped: Any = model
    if ours:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), model=model)
    else:
        dist.init_process_group("gloo")
        wrapped = nn.parallel.DistributedDataParallel(model)
    if compiled:
        wrapped = torch.compile(wrapped)
    ends = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = wrapped(**inputs)
        (out.square().mean() if isinstance(out, torch.Tensor) else out.loss).backward()
        optimizer.step()
        ends.append(time.monotonic())
    found = hvd.metrics(optimizer) if ours else None
    (hvd.shutdown if ours else dist.destroy_process_group)()
    return Run(model, ends, found.exposed if found is not None else None)


def bert(ours: bool, compiled: bool) -> Run:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    ids = tokens(8, 48, 2000)
    return loop(
        BertForMaskedLM(BertConfig(vocab_size=2000, **sizes)),
        {"input_ids": ids, "labels": ids},
        ours,
        compiled,
    )


def gpt2(ours: bool, compiled: bool) -> Run:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=2000, n_positions=64, n_embd=256, n_layer=4, n_head=4, **ends)
    )
    ids = tokens(8, 48, 2000)
    return loop(model, {"input_ids": ids, "labels": ids}, ours, compiled)


def resnet50(ours: bool, compiled: bool) -> Run:
    from torchvision.models import resnet50 as build

    return loop(build(num_classes=10), {"x": torch.randn(8, 3, 64, 64)}, ours, compiled)


TRAINERS: dict[str, Callable[[bool], Run]] = {
    job.__name__: job
    for job in (text_classification, causal_language_model, supervised_fine_tuning, image_classifier, gan)
}
LOOPS: dict[str, Callable[[bool, bool], Run]] = {"bert": bert, "gpt2": gpt2, "resnet50": resnet50}


def main() -> None:
    torch.manual_seed(1)
    job, way = sys.argv[1:]
    compiled, ours = way.endswith("compiled"), way.startswith("commsched")
    done = LOOPS[job](ours, compiled) if job in LOOPS else TRAINERS[job](ours)
    times = [
        after - before for before, after in zip(done.ends[SETTLE:], done.ends[SETTLE + 1 :], strict=False)
    ]
    size = sum(p.numel() * p.element_size() for p in done.model.parameters())
    if os.environ["RANK"] == "0":
        print(json.dumps({"bytes": size, "step": median(times), "exposed": done.exposed}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
