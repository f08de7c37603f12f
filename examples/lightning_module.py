"""Lightning, with two changed lines.

pip install 'commsched[lightning]'
python examples/lightning_module.py
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import commsched.lightning  # noqa: F401  the first line: it registers the strategy


class Regression(L.LightningModule):
    """Learns a sine."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = F.mse_loss(self.model(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch}: loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(1)
    inputs = torch.randn(512, 8)
    data = DataLoader(TensorDataset(inputs, inputs[:, :1].sin()), batch_size=16, shuffle=True)
    trainer = L.Trainer(
        strategy="commsched",  # the second line
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=2,
        max_epochs=3,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Regression(), data)
