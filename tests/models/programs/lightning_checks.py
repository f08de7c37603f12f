"""What Lightning's users do around training: ``python lightning_checks.py CHECK [argument]``."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import commsched as hvd
from commsched.lightning import Strategy

warnings.filterwarnings("ignore", module="lightning")
COUNT = 48
RANKS, NODES = int(os.environ.get("RANKS", "2")), int(os.environ.get("NODES", "1"))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(COUNT, 6, generator=generator), torch.randn(COUNT, 2, generator=generator)
    )


class Regression(L.LightningModule):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 16, bias=False), norm or nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Linear(16, 2)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen.append(torch.cat(batch, 1))
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, _: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, 0.1, momentum=0.9)


def trainer_of(strategy: Any = None, **more: Any) -> L.Trainer:
    settings = {"devices": RANKS, "num_nodes": NODES, "max_epochs": 3, **more}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet["enable_checkpointing"] = False
    return L.Trainer(strategy=strategy or Strategy(), accelerator="cpu", **quiet, **settings)


def loader(batch: int = 4, **more: Any) -> DataLoader:
    return DataLoader(data(), batch, **more)


def commsched_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "commsched" in thread.name]


def around_training(_: str = "") -> None:
    """All the trainer's entry points, twice in one process."""
    for gather in ("gradients", "parameters"):
        L.seed_everything(1, verbose=False)
        module = Regression()
        trainer = trainer_of(Strategy(gather=gather))
        trainer.fit(module, loader(shuffle=True), loader())
        assert trainer.model is module and type(trainer.strategy) is Strategy
        assert isinstance(trainer.train_dataloader.sampler, DistributedSampler)
        assert not hvd.is_initialized() and not commsched_threads(), commsched_threads()
        assert all(type(p) is nn.Parameter for p in module.parameters())
        state = trainer.optimizers[0].state_dict()["state"]
        assert len(state) == len(list(module.parameters()))
        found = {**trainer.validate(module, loader())[0], **trainer.test(module, loader())[0]}
        assert torch.tensor(list(found.values())).isfinite().all()
        mine = torch.cat(trainer.predict(module, loader()))
        assert len(mine) == COUNT // trainer.world_size
        rank = torch.tensor([float(trainer.global_rank)])
        everybody = trainer.strategy.all_gather(rank)
        assert everybody.flatten().tolist() == list(range(trainer.world_size))
        assert trainer.strategy.broadcast(f"from {trainer.global_rank}") == "from 0"
        digests = trainer.strategy.all_gather(torch.cat([p.flatten() for p in module.parameters()]))
        assert all(torch.equal(digests[0], other) for other in digests)
    print("around training: right", flush=True)


def plain_training(module: nn.Module, optimizer: Any, batches: Iterable[torch.Tensor]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        F.mse_loss(module(batch[:, :6]), batch[:, 6:]).backward()
        optimizer.step()


def whole_batches_of(trainer: L.Trainer, module: Regression) -> list[torch.Tensor]:
    """What all ranks trained on, step by step."""
    return list(trainer.strategy.all_gather(torch.stack(module.seen)).transpose(0, 1).flatten(1, 2))


def assert_equal_states(a: nn.Module, b: nn.Module) -> None:
    for (name, value), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(
            value, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def whole_batches(_: str = "") -> None:
    """With synchronised batch normalisation, ranks compute what one process computes on whole batches."""
    L.seed_everything(1, verbose=False)
    module = Regression()
    trainer = trainer_of(sync_batchnorm=True)
    trainer.fit(module, loader(4))
    assert type(module.backbone[1]) is nn.BatchNorm1d
    L.seed_everything(1, verbose=False)
    plain = Regression()
    plain_training(plain, plain.configure_optimizers(), whole_batches_of(trainer, module))
    assert_equal_states(module, plain)
    print("whole batches: right", flush=True)


class Unfreezing(BaseFinetuning):
    """Trains the head alone for two epochs; then the backbone joins the optimizer."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.05)


def finetuning(_: str = "") -> None:
    """Parameters that are unfrozen later are reduced too (DDP leaves them out)."""
    L.seed_everything(1, verbose=False)
    module = Regression(nn.Identity())
    trainer = trainer_of("commsched", max_epochs=4, callbacks=[Unfreezing()])
    trainer.fit(module, loader())
    L.seed_everything(1, verbose=False)
    plain = Regression(nn.Identity())
    plain.backbone.requires_grad_(False)
    optimizer = plain.configure_optimizers()
    batches = whole_batches_of(trainer, module)
    half = len(batches) // 2
    plain_training(plain, optimizer, batches[:half])
    plain.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": list(plain.backbone.parameters()), "lr": 0.05})
    plain_training(plain, optimizer, batches[half:])
    assert_equal_states(module, plain)
    print("finetuning: right", flush=True)


def one_device(_: str = "") -> None:
    ends = []
    for strategy in ("ddp", "commsched"):
        L.seed_everything(1, verbose=False)
        module = Regression()
        trainer_of(strategy, devices=1).fit(module, loader(shuffle=True), loader())
        ends.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    print("one device: right", flush=True)


def failing_rank(where: str) -> None:
    """Rank 1 raises; every rank must end soon."""

    class Failing(Regression):
        def _fail(self, here: str) -> None:
            if here == where and self.global_rank == 1 and self.global_step == 5:
                print("failed at", time.time(), flush=True)
                raise RuntimeError("this rank fails on purpose")

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self._fail("forward")
            return super().training_step(batch, index)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self._fail("update")

    trainer = trainer_of("commsched", max_epochs=20)
    try:
        trainer.fit(Failing(), loader())
    finally:
        print("ended at", time.time(), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
