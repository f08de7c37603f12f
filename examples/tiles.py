"""An image too large for one device: the unedited model runs on tiles, one on each rank.

torchrun --nproc-per-node 4 examples/tiles.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import commsched as hvd
from commsched import spatial


def block(channels: int, wider: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU())


hvd.init()
torch.manual_seed(1)  # the same model and the same image on every rank
model = nn.Sequential(block(3, 8), nn.MaxPool2d(2), block(8, 16), nn.Upsample(scale_factor=2), block(16, 1))
grid = {1: (1, 1), 2: (1, 2), 4: (2, 2)}[hvd.size()]
model = spatial.shard(model, grid=grid)  # the same object, with the same names and state_dict()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)

image = torch.randn(1, 3, 128, 128)
mask = F.avg_pool2d(image.mean(1, keepdim=True), 5, stride=1, padding=2)
for step in range(20):
    tile = spatial.scatter(image)  # or from_local(): read this rank's part only, see tile_bounds()
    optimizer.zero_grad()
    output = model(tile)  # borders travel between neighbours
    loss = F.mse_loss(output, spatial.scatter(mask))  # the loss of the whole image, on every rank
    loss.backward()
    optimizer.step()
    if step % 5 == 0 and hvd.rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}, this rank has {tuple(tile.local.shape)}")

whole = spatial.gather(output)
if hvd.rank() == 0:
    print("the whole output:", tuple(whole.shape))
