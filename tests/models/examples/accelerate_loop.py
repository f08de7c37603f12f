"""A training loop with gradient accumulation and clipping, as Accelerate's documentation writes it."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(12, 33), torch.nn.BatchNorm1d(33), torch.nn.ReLU(), torch.nn.Linear(33, 3)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
dice = torch.Generator().manual_seed(1)
dataset = TensorDataset(torch.randn(66, 12, generator=dice), torch.randint(3, (66,), generator=dice))
dataloader = DataLoader(dataset, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(2))
loss_function = torch.nn.functional.cross_entropy

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)

losses = []
for _ in range(3):
    model.train()
    for inputs, targets in dataloader:
        with accelerator.accumulate(model):
            loss = loss_function(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses += accelerator.gather(loss.detach().reshape(1)).tolist()
    model.eval()
    with torch.no_grad():
        right = [model(inputs).argmax(1) == targets for inputs, targets in dataloader]
        losses += accelerator.gather_for_metrics(torch.cat(right).float().mean().reshape(1)).tolist()
state = accelerator.get_state_dict(model)
rate = scheduler.get_last_lr()
