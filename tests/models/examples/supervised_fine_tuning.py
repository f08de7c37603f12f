"""Fine-tunes a small Llama on conversations in memory, as TRL's quick start does."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig
from trl import SFTTrainer

words = [f"word{i}" for i in range(40)]
vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
processing_class = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
)
texts = [" ".join(words[(3 * i + j) % 40] for j in range(3 + i % 9)) for i in range(50)]
dataset = Dataset.from_dict({"text": texts})

(training_args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
torch.manual_seed(training_args.seed)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=1,
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=training_args,
    train_dataset=dataset,
    processing_class=processing_class,
)
trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
trainer.save_model()
trainer.save_state()
