"""Hugging Face's ``Trainer`` and ``Accelerator``, with ``commsched.DistributedOptimizer`` in DDP's place.

Every name is imported on first use, because scripts that use Accelerate alone need not have transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commsched.huggingface.accelerator import Accelerator
    from commsched.huggingface.trainer import Seq2SeqTrainer, Trainer, TrainerMixin

__all__ = ["Accelerator", "Seq2SeqTrainer", "Trainer", "TrainerMixin"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'commsched.huggingface' has no attribute {name!r}")
    file = "accelerator" if name == "Accelerator" else "trainer"
    try:
        return getattr(import_module(f"commsched.huggingface.{file}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"commsched.huggingface.{name} needs {error.name}, which is not installed; install it with"
            " pip install 'commsched[huggingface]'"
        ) from error
