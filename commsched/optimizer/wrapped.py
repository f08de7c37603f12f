"""The optimizer that was wrapped: it shares all state, so using it must not go around the wrapping one."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer


def keep_together(wrapped: Any) -> None:
    """What goes through the object that was wrapped, too, finds the last step done and steps on all ranks."""
    this = weakref.ref(wrapped)

    def settle(optimizer: Optimizer, *_: Any) -> None:
        owner = this()
        if owner is None or owner._driver is None:
            return
        if optimizer is not owner and owner._options.gather == "parameters":
            raise ValueError(
                "with gather='parameters' the state is spread over the ranks; call state_dict() and"
                " load_state_dict() on all ranks, of the optimizer that DistributedOptimizer returned"
            )
        owner._settle()

    def step(*args: Any, **kwargs: Any) -> Any:
        owner: Any = this()
        owner._opt_called = True
        return type(owner).step(owner, *args, **kwargs)

    wrapped.register_state_dict_pre_hook(settle)
    wrapped.register_load_state_dict_pre_hook(settle)
    if hasattr(wrapped.__dict__.get("step"), "_wrapped_by_lr_sched"):
        # A scheduler made before has put a counting step() into the instance, around the plain one.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        wrapped.__dict__["step"] = step
