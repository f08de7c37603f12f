"""Trains GPT-2 on sentences of different lengths, as transformers' guide for the task does."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, TrainingArguments
from transformers import Trainer


def sentences(count: int, seed: int) -> list[torch.Tensor]:
    """Tokens that count upwards from anywhere, modulo 61."""
    dice = torch.Generator().manual_seed(seed)
    starts = torch.randint(61, (count,), generator=dice).tolist()
    lengths = torch.randint(3, 17, (count,), generator=dice).tolist()
    return [(start + torch.arange(length)) % 61 for start, length in zip(starts, lengths)]


def data_collator(features: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence(features, batch_first=True, padding_value=61)
    labels = tokens.masked_fill(tokens == 61, -100)
    return {"input_ids": tokens, "attention_mask": (tokens != 61).long(), "labels": labels}


(training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(training_args.seed)
model = GPT2LMHeadModel(GPT2Config(vocab_size=62, n_positions=16, n_embd=32, n_layer=2, n_head=2))

trainer = Trainer(
    model=model,
    args=training_args,
    data_collator=data_collator,
    train_dataset=sentences(70, 0),
    eval_dataset=sentences(11, 1),
)
trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
eval_results = trainer.evaluate()
trainer.save_model()
trainer.save_state()
