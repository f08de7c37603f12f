"""A language model of Hugging Face in two stages, each on its own rank.

pip install transformers
torchrun --nproc-per-node 2 examples/pipeline_huggingface.py
"""

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import commsched
from commsched.pipeline import Pipeline


def loss_of(outputs, labels):
    """Return the mean loss of predicting each token from those before it."""
    logits = outputs.logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


commsched.init()
torch.manual_seed(1)  # the same weights and batches on every rank
config = GPT2Config(
    n_layer=4, n_embd=64, n_head=4, n_positions=32, vocab_size=128, bos_token_id=0, eos_token_id=0
)
config.use_cache, config.loss_type = False, "ForCausalLM"
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
pipeline = Pipeline(
    lambda: GPT2LMHeadModel(config),  # no rank makes the layers of other stages
    schedule="1f1b",
    num_microbatches=4,
    mesh=(commsched.size(), 1),  # stages, replicas
    loss=loss_of,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
)
sentences = torch.randint(0, 128, (64, 32))
for step in range(12):
    batch = sentences[step % 4 * 16 : step % 4 * 16 + 16]
    loss = pipeline.step(({"input_ids": batch}, batch))
    if step % 4 == 3 and commsched.rank() == 0:
        print(f"step {step}: loss {loss:.4f}")
state = pipeline.state_dict()  # of the whole model, on every rank
if commsched.rank() == 0:
    GPT2LMHeadModel(config).load_state_dict(state)
    print("one process can load it:", len(state), "tensors")
