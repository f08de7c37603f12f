"""Trainers with two changed lines: as with DDP, on two ranks bit for bit."""

from __future__ import annotations

import json

import torch

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.huggingface_scripts import (
    SHARDS,
    accelerates_script,
    alike,
    arguments,
    compare,
    folders,
    run,
)

EVALUATED = (
    "--eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2 --load_best_model_at_end True"
    " --metric_for_best_model accuracy --gradient_accumulation_steps 2 --warmup_steps 2"
).split()


@case()
def classification_with_the_best_checkpoint(me: Me) -> None:
    for ours in ({}, SHARDS):
        alike(me, "text_classification", *EVALUATED, ours=ours)


@case()
def tokens_are_counted_over_all_ranks(me: Me) -> None:
    for more in ((), ("--average_tokens_across_devices", "False")):
        alike(me, "causal_language_model", "--gradient_accumulation_steps", "3", *more)
    for ours in (SHARDS, {"transport": "plain"}):
        alike(me, "causal_language_model", "--gradient_accumulation_steps", "3", ours=ours)


@case()
def epochs_that_do_not_divide(me: Me) -> None:
    """The last accumulation of an epoch has fewer batches. Without clipping, the norm is logged anyway."""
    more = "--max_steps -1 --num_train_epochs 2 --gradient_accumulation_steps 4 --max_grad_norm 0"
    alike(me, "causal_language_model", *more.split(), "--logging_steps", "2")
    alike(me, "causal_language_model", *more.split(), ours=SHARDS)


@case()
def half_precision(me: Me) -> None:
    more = ("--bf16", "True", "--gradient_accumulation_steps", "2")
    for ours in ({}, SHARDS):
        alike(me, "text_classification", *more, ours=ours, tolerance=1e-2)


@case()
def supervised_fine_tuning(me: Me) -> None:
    more = ("--gradient_accumulation_steps", "2", "--bf16", "False")
    alike(me, "supervised_fine_tuning", *more[:2], tolerance=1e-2)  # TRL's default is bf16
    alike(me, "supervised_fine_tuning", *more, ours=SHARDS)


@case()
def batches_from_rank_0(me: Me) -> None:
    config = json.dumps({"dispatch_batches": True, "split_batches": True})
    sizes = [f"--per_device_{kind}_batch_size=6" for kind in ("train", "eval")]
    alike(me, "text_classification", "--accelerator_config", config, *sizes)


@case()
def checkpoints_resume_in_both_directions(me: Me) -> None:
    """Each side goes on from the other's checkpoint, and ends where DDP ends without a break."""
    saving = ("--save_strategy", "steps", "--save_steps", "3", "--gradient_accumulation_steps", "2")
    for ours in ({}, SHARDS):
        tolerance = 0.0 if me.size == 2 and not ours else 1e-5
        with folders(me, 4) as (a, b, c, d):
            whole = run("text_classification", *arguments(a, *saving))["trainer"]
            run("text_classification", *arguments(b, *saving), ours=ours)
            names = [sorted(p.name for p in (f / "checkpoint-3").iterdir()) for f in (a, b)]
            assert names[0] == names[1], names
            from_stock, from_ours = (("--resume_from_checkpoint", str(f / "checkpoint-3")) for f in (a, b))
            mine = run("text_classification", *arguments(c, *from_stock, *saving), ours=ours)["trainer"]
            compare(mine, whole, tolerance, resumed=True)
            stock = run("text_classification", *arguments(d, *from_ours, *saving))["trainer"]
            compare(mine, stock, tolerance)


@case(ranks=(2,))
def a_model_is_trained_again(me: Me) -> None:
    """By the same trainer and by another one, after an evaluation; then nothing of the former is left."""
    from commsched.huggingface import Trainer

    with folders(me, 1) as (a,):
        for ours in ({}, SHARDS):
            trainer = run("text_classification", *arguments(a), ours=ours)["trainer"]
            trainer.evaluate()
            trainer.train()
            assert trainer.optimizer.optimizer._session is None
            other = Trainer(trainer.model, trainer.args, train_dataset=trainer.train_dataset, commsched=ours)
            other.train()
            total = torch.stack([p.detach().double().sum() for p in trainer.model.parameters()])
            assert len(set(me.everybody(str(total.tolist())))) == 1, "the ranks differ"
            assert not any(m._forward_pre_hooks for m in trainer.model.modules())


class Odd(torch.nn.Module):
    """Has running statistics, and parameters that no rank, one rank or every second step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8, bias=False)
        self.norm = torch.nn.BatchNorm1d(8)
        self.branch = torch.nn.ModuleList(torch.nn.Linear(8, 2) for _ in range(3))
        self.steps = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.first(x)).relu()
        self.steps += self.training
        result = self.branch[0](hidden)
        if self.training and (self.steps + hvd.rank()) % 2:
            result = result + self.branch[1](hidden)
        return {"loss": torch.nn.functional.cross_entropy(result, labels), "logits": result}


@case()
def modules_of_ones_own(me: Me) -> None:
    import transformers

    from commsched.huggingface import Trainer

    dice = torch.Generator().manual_seed(5)
    rows = [{"x": torch.randn(6, generator=dice), "labels": i % 2} for i in range(48)]
    more = (
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "2",
        "--weight_decay",
        "0.1",
        "--save_strategy",
        "steps",
    )
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    for ours in ({}, SHARDS):
        with folders(me, 2) as (a, b):
            both = []
            for folder, cls, extra in ((a, transformers.Trainer, {}), (b, Trainer, {"commsched": ours})):
                (args,) = parser.parse_args_into_dataclasses(arguments(folder, *more))
                torch.manual_seed(me.rank)  # the ranks begin with different models: rank 0's counts
                both.append(cls(Odd(), args, train_dataset=rows, eval_dataset=rows[:10], **extra))
                both[-1].train()
            compare(both[1], both[0], 0.0 if me.size == 2 and not ours else 1e-5)


@case(ranks=(2,))
def sequences_to_sequences(me: Me) -> None:
    import transformers
    from transformers import T5Config, T5ForConditionalGeneration

    import commsched.huggingface

    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_ff=16,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        max_new_tokens=4,
    )
    dice = torch.Generator().manual_seed(6)
    rows = [{"input_ids": t, "labels": t[:4]} for t in torch.randint(1, 32, (40, 7), generator=dice)]
    more = ("--eval_strategy", "steps", "--eval_steps", "3", "--predict_with_generate", "True")
    parser = transformers.HfArgumentParser(transformers.Seq2SeqTrainingArguments)
    with folders(me, 2) as (a, b):
        both = []
        for folder, library in ((a, transformers), (b, commsched.huggingface)):
            (args,) = parser.parse_args_into_dataclasses(arguments(folder, *more))
            torch.manual_seed(0)
            model = T5ForConditionalGeneration(config)
            both.append(library.Seq2SeqTrainer(model, args, train_dataset=rows, eval_dataset=rows[:6]))
            both[-1].train()
        compare(both[1], both[0], 0.0)


@case(ranks=(2,))
def accelerates_test_of_synchronisation(me: Me) -> None:
    """Its models have an optimizer, or none: then, too, backwards average gradients or accumulate them."""
    with accelerates_script("test_sync") as script:
        script.main()
        for number in range(8):  # the script does this on GPUs only
            split, dispatch, sync_each_batch = number & 1 > 0, number & 2 > 0, number & 4 > 0
            script.test_gradient_accumulation(split, dispatch, sync_each_batch)
            script.test_gradient_accumulation_with_opt_and_scheduler(split, dispatch, sync_each_batch)


@case(ranks=(2,))
def accelerates_test_of_training(me: Me) -> None:
    with accelerates_script("test_script") as script:
        script.main()


@case(ranks=(2,))
def accelerates_test_of_operations(me: Me) -> None:
    with accelerates_script("test_ops") as script:
        script.Accelerator()
        script.main()


main(__name__)
