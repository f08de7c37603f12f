"""Jobs for Lightning: ``python lightning_jobs.py RUNS.json``; each rank writes the results of each run.

A run is ``{"job": ..., "strategy": ..., "folder": ...}`` with the options of the job.
One process does one run after another.

The models are those of Lightning's documentation, made small.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import commsched as hvd
import commsched.lightning

warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
FOLDER = Path(".")
OPTIONS: dict[str, Any] = {}


def images(seed: int, count: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 1, 8, 8, generator=generator), torch.randint(0, 4, (count,), generator=generator)
    )


class Classifier(L.LightningModule):
    def __init__(self, optimizer: str = "sgd", dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 64)
        )
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(64, 4)
        self.accuracy = MulticlassAccuracy(num_classes=4)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.relu(self.backbone(x))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self(batch[0])
        self.accuracy(scores, batch[1])
        self.log("val_loss", F.cross_entropy(scores, batch[1]), sync_dist=True)
        self.log("val_accuracy", self.accuracy)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        made = {
            "sgd": lambda: torch.optim.SGD(self.parameters(), 0.05, momentum=0.9),
            "adam": lambda: torch.optim.AdamW(self.parameters(), 1e-3),
            "lbfgs": lambda: torch.optim.LBFGS(self.parameters(), 0.1, max_iter=2),
        }[self.hparams.optimizer]()
        schedule = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watched(Classifier):
    """Looks at the gradients between backward and update."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())


class Gan(L.LightningModule):
    """The documentation's example of manual optimization, with toggled optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64)
        )
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.losses: list[float] = []

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.generator(z)

    def loss(self, images: torch.Tensor, real: bool) -> torch.Tensor:
        target = torch.full((len(images), 1), float(real))
        return F.binary_cross_entropy_with_logits(self.discriminator(images), target)

    def training_step(self, batch: Any) -> None:
        images = batch[0].flatten(1)
        optimizer_g, optimizer_d = self.optimizers()
        generator = torch.Generator().manual_seed(1000 * self.global_step + self.global_rank)
        z = torch.randn(len(images), 8, generator=generator)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.loss(self(z), True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        d_loss = (self.loss(images, True) + self.loss(self(z).detach(), False)) / 2
        self.manual_backward(d_loss)
        if OPTIONS.get("manual_clip"):
            self.clip_gradients(optimizer_d, 0.05, "norm")
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)
        self.losses += [g_loss.item(), d_loss.item()]
        assert isinstance(optimizer_g.state, dict)

    def configure_optimizers(self) -> Any:
        make = torch.optim.Adam
        return make(self.generator.parameters(), 2e-3), make(self.discriminator.parameters(), 2e-3)


class Observer(Callback):
    """The plan and its operations while the trainer runs."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        pending = [type(p).__name__ != "Parameter" for p in module.parameters()]
        self.seen.setdefault("pending", []).append(sum(pending))
        plan = hvd.explain(optimizer, show=False)
        if plan is not None:
            self.seen["policy"], self.seen["source"] = plan.policy, plan.profile_source
            self.seen["operations"] = [op.kind for op in hvd.operations(optimizer)]


def strategy_of(name: str) -> Any:
    options = OPTIONS.get("options")
    return commsched.lightning.Strategy(**options) if options and name == "commsched" else name


def plugins() -> list[Any]:
    """Lightning turns ``precision="16-mixed"`` on CPUs into bfloat16; given as a plugin, float16 stays."""
    if not OPTIONS.get("scaler"):
        return []
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))]


def trainer_of(strategy: str, *callbacks: Callback, **more: Any) -> L.Trainer:
    settings = {"max_epochs": 2, "devices": 2, **OPTIONS.get("trainer", {}), **more}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return L.Trainer(
        strategy=strategy_of(strategy),
        accelerator="cpu",
        callbacks=list(callbacks),
        plugins=plugins(),
        default_root_dir=FOLDER,
        **{
            "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
            **quiet,
            **settings,
        },
    )


def save(rank: int, module: nn.Module, **more: Any) -> None:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    found = {"state": state, "losses": getattr(module, "losses", None), **more}
    torch.save(found, FOLDER / f"rank{rank}.pt")


def classifier(strategy: str) -> None:
    L.seed_everything(OPTIONS.get("seed", 1), verbose=False)
    kind = Watched if OPTIONS.get("norms") else Classifier
    module, seen = kind(**OPTIONS.get("module", {})), Observer()
    last = ModelCheckpoint(FOLDER, filename="{epoch}", save_last=True, monitor="val_loss", save_top_k=-1)
    trainer = trainer_of(strategy, seen, last)
    loaders = DataLoader(images(1), 8, shuffle=True), DataLoader(images(2), 8)
    trainer.fit(module, *loaders, ckpt_path=OPTIONS.get("resume"))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.save_checkpoint(FOLDER / "after.ckpt")
    save(trainer.global_rank, module, logged=logged, norms=module.norms, seen=seen.seen)


def fabric(strategy: str) -> None:
    options = OPTIONS.get("options")
    chosen = commsched.lightning.FabricStrategy(**options) if options else strategy
    fabric = L.Fabric(accelerator="cpu", strategy=chosen, **{"devices": 2, **OPTIONS.get("fabric", {})})
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    plain = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), 1e-3))
    loader = fabric.setup_dataloaders(DataLoader(images(1), 8, shuffle=True))
    accumulate, losses = OPTIONS.get("accumulate", 1), []
    for _ in range(2):
        model.train()
        for number, (x, y) in enumerate(loader, 1):
            waits = number % accumulate != 0
            with fabric.no_backward_sync(model, enabled=waits):
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss / accumulate)
            losses.append(loss.item())
            if waits:
                continue
            if "max_norm" in OPTIONS:
                fabric.clip_gradients(model, optimizer, max_norm=OPTIONS["max_norm"])
            if "clip_val" in OPTIONS:
                fabric.clip_gradients(model, optimizer, clip_val=OPTIONS["clip_val"])
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            x, y = images(2).tensors
            losses.append(fabric.all_reduce(F.cross_entropy(model(x), y)).item())
    fabric.save(FOLDER / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    fabric.barrier()
    saved = fabric.load(FOLDER / "fabric.ckpt")
    fabric.load(FOLDER / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    save(
        fabric.global_rank,
        plain,
        losses=losses,
        saved=saved["optimizer"],
        explained=hvd.explain(optimizer, show=False) is not None,
    )


def gan(strategy: str) -> None:
    L.seed_everything(1, verbose=False)
    module = Gan()
    trainer = trainer_of(strategy)
    trainer.fit(module, DataLoader(images(1), 8, shuffle=True))
    save(trainer.global_rank, module)


def main() -> None:
    global FOLDER
    for run in json.loads(Path(sys.argv[1]).read_text()):
        FOLDER = Path(run["folder"])
        FOLDER.mkdir(parents=True, exist_ok=True)
        OPTIONS.clear()
        OPTIONS.update(run)
        globals()[run["job"]](run["strategy"])


if __name__ == "__main__":
    main()
