"""Hugging Face's Trainer, with one changed import.

pip install 'commsched[huggingface]'
torchrun --nproc-per-node 2 examples/trainer.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from commsched.huggingface import Trainer  # was: from transformers import Trainer

set_seed(1)
numbers = torch.arange(40)
sentences = [{"input_ids": row, "labels": row} for row in numbers.unfold(0, 16, 1)] * 8
trainer = Trainer(
    model=GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    ),
    args=TrainingArguments(
        "out",
        max_steps=20,
        logging_steps=10,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=sentences,
    commsched={"gather": "parameters"},  # optional: arguments of DistributedOptimizer
)
trainer.train()
if trainer.is_world_process_zero():
    print("losses:", [round(entry["loss"], 3) for entry in trainer.state.log_history if "loss" in entry])
