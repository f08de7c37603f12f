"""``Trainer`` and ``Seq2SeqTrainer`` over commsched, and the mixin that does it for other trainers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_utils import IntervalStrategy

from commsched.collectives.job import size
from commsched.huggingface.accelerator import Accelerator, checked_options
from commsched.huggingface.job import LateSum, joined


class TrainerMixin:
    """Stands before a subclass of ``transformers.Trainer``: ``class MyTrainer(TrainerMixin, SFTTrainer)``.

    The constructor takes ``commsched={...}`` besides the trainer's arguments: arguments of
    ``commsched.DistributedOptimizer``.
    """

    accelerator: Any
    args: Any
    state: Any

    def __init__(self, *args: Any, commsched: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._commsched_options = checked_options(commsched)
        super().__init__(*args, **kwargs)

    @property
    def _scheduled(self) -> bool:
        """Whether several ranks train."""
        return isinstance(self.accelerator, Accelerator)

    def create_accelerator_and_postprocess(self) -> None:
        with joined():
            if self.args.world_size != size():
                # The arguments are older than the job, and their launcher is none that Accelerate reads.
                vars(self.args).pop("_setup_devices", None)
                _ = self.args.device
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if size() > 1:
            Accelerator.adopt(self.accelerator, self._commsched_options)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        if self._scheduled:
            self.accelerator.release()  # another trainer may train this model next
        return output

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        # Trainer's own reads every gradient to see whether it is a DTensor; the accelerator refuses those.
        return not self._scheduled and super()._has_mixed_mesh_grads(model)  # type: ignore[misc]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm to log, None in steps that log nothing: whole gradients would be waited for."""
        whole = self._scheduled and not self.accelerator.sharded_optimizers()
        if grad_norm is None and whole and not self._logs_this_step():
            return None
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    def _logs_this_step(self) -> bool:
        if self.args.logging_strategy != IntervalStrategy.STEPS:
            return True
        step = self.state.global_step + 1
        return step % self.state.logging_steps == 0 or (step == 1 and self.args.logging_first_step)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the number of items over all ranks; on CPUs, the forward does not wait for it."""
        averages, args = self.args.average_tokens_across_devices, self.args
        if not self._scheduled or not averages or device.type != "cpu" or args.torch_compile:
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        args.average_tokens_across_devices = False
        try:
            mine = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        finally:
            args.average_tokens_across_devices = averages
        return LateSum.start(mine) if isinstance(mine, torch.Tensor) else mine

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self.accelerator.whole_states() if self._scheduled else nullcontext():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]


class Trainer(TrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` over commsched; see ``TrainerMixin``."""


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` over commsched; see ``TrainerMixin``."""
