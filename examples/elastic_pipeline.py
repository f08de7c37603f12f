"""A model in as many stages as there are ranks: when one is lost or comes, the others go on in other stages.

horovodrun --gloo -np 3 --min-np 2 --host-discovery-script ./hosts.sh python examples/elastic_pipeline.py
torchrun --nproc-per-node 2 examples/elastic_pipeline.py    # the same, but a lost rank ends the job
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import commsched as hvd
from commsched.pipeline import Pipeline

hvd.init()
inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(inputs, inputs[:, :1].sin())


def make(ranks):
    """Return the pipeline of so many ranks, of a new model: it gets the weights of the last commit."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(7)), nn.Linear(64, 1))
    return Pipeline(
        model,
        schedule="1f1b",
        num_microbatches=4,
        mesh=(ranks, 1),  # stages, replicas
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )


@hvd.elastic.run
def train(state):
    sampler = state.pipeline.sampler(dataset, 32)  # where the last commit was
    loader = DataLoader(dataset, batch_sampler=sampler)
    while sampler.epoch < 4:
        for batch in loader:
            state.losses.append(state.pipeline.step(batch, local=True))
            if sampler.position % 4 == 0:
                state.commit()
        if hvd.rank() == 0:
            print(f"epoch {sampler.epoch}: loss {sum(state.losses[-8:]) / 8:.4f}", flush=True)


state = hvd.elastic.PipelineState(make, losses=[])
train(state)
weights = state.pipeline.state_dict()  # of the whole model, on every rank
if hvd.rank() == 0:
    print("trained:", sum(value.numel() for value in weights.values()), "parameters")
