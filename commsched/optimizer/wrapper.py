"""The methods of a wrapped optimizer that replace or extend those of its own class."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.optimizer.deferred_updates import plain_step
from commsched.optimizer.driver import Driver
from commsched.optimizer.gather_parameters import ParameterGathering
from commsched.optimizer.master_weights import load_unrounded
from commsched.optimizer.options import Options
from commsched.optimizer.parameter_names import later_names
from commsched.optimizer.shards import swapped
from scheduler.ir.profile import Profile


class DistributedMethods(Optimizer):
    """Mixed in before the wrapped optimizer's class. Without a driver (one rank) they do what torch does."""

    _driver: Driver | None = None
    _base: type[Optimizer] = Optimizer
    _model: nn.Module | None
    _options: Options
    _parameter_names: dict[nn.Parameter, str]  # Horovod's attribute
    _skip = False
    _synchronized = False
    backward_passes_per_step = 1

    # -- the step --------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the reduced gradients; returns the result of ``closure``, if given.

        A parameter whose gradient has not arrived is updated when it is first needed, with the
        hyperparameters of this call. Every access to such a parameter waits for the update.
        """
        if self._synchronized and not self._skip:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize(), but synchronize() has reduced"
                " the gradients: Horovod would reduce again, here step() takes what there is",
                stacklevel=3,
            )
        self._synchronized = False
        if self._driver is None:
            return self._update(*(() if closure is None else (closure,)))
        if closure is not None:
            return self._step_with_closure(closure)
        driver = self._refresh(in_step=True)
        driver.arrivals.mark("enter")
        if not self._skip:
            driver.reducer.require_sent()
        driver.gathering.step(self, driver.synchronous)
        driver.after_step()
        return None

    def _updates_frozen(self) -> bool:
        """Return whether a frozen parameter still has a gradient, because plain PyTorch would update it."""
        with torch._C.DisableTorchFunctionSubclass():
            frozen = [p for group in self.param_groups for p in group["params"] if not p.requires_grad]
            return any(p.grad is not None for p in frozen)

    def _update(self, *args: Any) -> Any:
        return plain_step(self._base)(self, *args)

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        """Reduce the gradients after each backward of the closure, which may run several times."""
        assert self._driver is not None
        if self._shards is not None:
            raise ValueError(
                "step(closure) needs whole gradients each time the closure has run; use gather='gradients'"
            )

        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._synchronize()
            return loss

        result = self._update(reduced)
        driver = self._driver  # another one, where parameters were frozen or added since the last step
        driver.gathering.finish_step()
        driver.after_step()
        return result

    # -- Horovod's methods -----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every ``p.grad`` holds the reduced gradient, for example to clip it."""
        self._synchronize()
        self._synchronized = self._options.gather == "gradients"

    def _synchronize(self) -> None:
        if self._driver is not None:
            driver = self._refresh(in_step=True)
            driver.reducer.require_sent()
            driver.gathering.gather_gradients()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context ``step()`` uses the gradients as they are, reduced by ``synchronize()``."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate this many backward passes locally before the gradients are reduced."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
        self.backward_passes_per_step = passes
        if self._driver is not None:
            self._driver.reducer.backward_passes = passes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context gradients accumulate locally, as in DDP; the next backward reduces the sum."""
        if self._driver is None:
            yield
            return
        before, self._driver.reducer.paused = self._driver.reducer.paused, True
        try:
            yield
        finally:
            self._driver.reducer.paused = before  # another one, where parameters were frozen or added within

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those of pending updates."""
        if self._driver is None:
            self._base.zero_grad(self, set_to_none)
            return
        self._driver.reducer.clear_grads(set_to_none)
        known = {id(p) for p in self._driver.reducer.params}
        for group in self.param_groups:
            for param in group["params"]:
                if id(param) not in known and param.grad is not None:
                    param.grad = None if set_to_none else param.grad.detach().zero_()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients to a total norm of at most ``max_norm``; return the norm they had."""
        if self._driver is not None and self._shards is not None:
            self._driver.reducer.require_sent()
            return self._shards.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        self._synchronize()
        params = [p for group in self.param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        self._settle()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    @property
    def _shards(self) -> ParameterGathering | None:
        gathering = self._driver.gathering if self._driver is not None else None
        return gathering if isinstance(gathering, ParameterGathering) else None

    def _settle(self) -> None:
        """Apply pending updates, before something reads the optimizer's state."""
        if self._driver is not None:
            self._driver.arrivals.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict; either optimizer can load that of the other.

        With ``gather="parameters"`` every rank must call: the state is gathered from all of them.
        """
        self._settle()
        if self._shards is not None:
            with swapped(self, "state", self._shards.whole_state()):
                return self._base.state_dict(self)
        return self._base.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._settle()
        load = partial(self._base.load_state_dict, self, state_dict)
        if self._driver is not None and self._options.master_weights:
            load_unrounded(self, load)
        else:
            load()
        if self._driver is not None:
            self._driver.gathering.take_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch. All ranks must add the same one."""
        self._settle()
        self._base.add_param_group(self, param_group)
        if self._driver is not None:
            self._refresh()

    def _refresh(self, in_step: bool = False) -> Driver:
        """Return the driver; a new one if parameters were added, frozen or unfrozen since it was made."""
        driver = self._driver
        assert driver is not None
        with torch._C.DisableTorchFunctionSubclass():
            trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        before = driver.reducer.params
        if len(trained) == len(before) and all(a is b for a, b in zip(trained, before, strict=True)):
            return driver
        if in_step and not self._skip:
            driver.reducer.require_sent()
        driver.gathering.finish_all()
        driver.close()
        self._parameter_names = later_names(self.param_groups, self._parameter_names)
        self._options = self._options.for_other_params(before, trained)
        self._driver = successor = make_driver(self)
        successor.reducer.inherit(driver.reducer)
        return successor

    def close(self) -> None:
        """Apply the last update and end connections and threads, which otherwise end with the object."""
        if self._driver is not None:
            self._driver.close()

    # -- the profile -----------------------------------------------------------------------------------------

    def profile(self) -> Profile:
        """Return the measured profile; ``.save(FILE)`` writes it, ``profile=FILE`` plans from it."""
        if self._driver is None or self._driver.profile is None:
            raise ValueError(
                "no profile has been measured yet; it is there after a few steps with schedule='auto' on"
                " several ranks"
            )
        return self._driver.profile


def make_driver(optimizer: Any) -> Driver:
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    names = [optimizer._parameter_names[p] for p in params]
    return Driver(optimizer, optimizer._base, params, names, optimizer._model, optimizer._options)


def keep_together(wrapped: Any) -> None:
    """Make the wrapped optimizer, which shares all state, step on all ranks too.

    Its ``state_dict()`` then shows the state after the last step.
    """
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
        # A scheduler that was made earlier has put a counting step() around the plain one into the instance.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        wrapped.__dict__["step"] = step
