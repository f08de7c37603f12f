"""Fine-tunes a BERT classifier and keeps its best checkpoint, as transformers' guide for the task does."""

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, TrainingArguments
from transformers import Trainer


class Sentences(torch.utils.data.Dataset):
    """Sentences of token 1 with a mark of their class somewhere in them."""

    def __init__(self, count: int, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (count,), generator=dice)
        self.tokens = torch.randint(4, 64, (count, 12), generator=dice)
        self.tokens[:, 0] = self.labels + 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    return {"accuracy": float((np.argmax(predictions, axis=1) == labels).mean())}


(training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(training_args.seed)
config = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    num_labels=3,
)
model = BertForSequenceClassification(config)

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=Sentences(74, 0),
    eval_dataset=Sentences(13, 1),
    compute_metrics=compute_metrics,
)
trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
predictions = trainer.predict(Sentences(9, 2))
trainer.save_model()
trainer.save_state()
