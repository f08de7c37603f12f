"""Checkpoint files: one for each rank and step; ``latest`` names the step of which all ranks have theirs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import commsched


class Checkpoints:
    """``folder`` may be shared by all ranks, or every machine has its own: a rank reads its own files, and
    rank 0 tells which step counts. Every rank calls ``save`` and ``load``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._rank = folder, commsched.rank()
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08}.rank-{self._rank}.pt"

    def save(self, step: int, state: dict[str, Any]) -> None:
        """A process that is killed here leaves the checkpoint before complete."""
        unfinished = self._path(step).with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, self._path(step))
        commsched.barrier()
        if self._rank == 0:
            unfinished = self._folder / "latest.unfinished"
            unfinished.write_text(f"{step}\n")
            os.replace(unfinished, self._folder / "latest")
        commsched.barrier()
        for path in self._folder.glob(f"step-*.rank-{self._rank}.*"):
            if path != self._path(step):
                path.unlink()

    def load(self) -> dict[str, Any] | None:
        """This rank's state of the latest step, or None where nothing has been saved."""
        latest = self._folder / "latest"
        step = int(latest.read_text()) if self._rank == 0 and latest.exists() else None
        step = commsched.broadcast_object(step)
        if step is None:
            return None
        path = self._path(step)
        if not path.exists():
            raise ValueError(
                f"rank {self._rank} has no {path}, and the latest checkpoint is of step {step}; start as many"
                " ranks on the same machines as before, or choose an empty folder"
            )
        # Files of this program's own, with structures that are no tensors.
        state: dict[str, Any] = torch.load(path, weights_only=False)
        return state
