"""The methods of a wrapped optimizer that replace or extend those of its own class."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.collectives.reductions import Adasum
from commsched.optimizer.closures import dividing, step_whole
from commsched.optimizer.deferred_updates import is_separable, plain_step
from commsched.optimizer.driver import Driver
from commsched.optimizer.gather_parameters import ParameterGathering
from commsched.optimizer.imitations import forward_to_wrapped
from commsched.optimizer.master_weights import load_unrounded
from commsched.optimizer.options import Options, later_names
from commsched.optimizer.pending import ordinary
from commsched.optimizer.unplanned import Unplanned
from commsched.optimizer.weighted_loss import divide_alone, weighted_loss
from scheduler.ir.profile import Profile


class DistributedMethods(Optimizer):
    """Mixed in before the wrapped optimizer's class.

    Several ranks have a driver or, where gradients are reduced one by one, an ``Unplanned``. Without either
    the methods do what torch does.
    """

    _driver: Driver | None = None
    _unplanned: Unplanned | None = None
    _base: type[Optimizer] = Optimizer
    _model: nn.Module | None
    _options: Options
    _parameter_names: dict[nn.Parameter, str]  # Horovod's attribute
    _skip = False
    _synchronized = False
    _samples = 0  # counted on a rank alone
    _released = False
    backward_passes_per_step = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward_to_wrapped(cls, DistributedMethods)

    # -- the step --------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the reduced gradients; returns the result of ``closure``, if given.

        A parameter whose gradient has not arrived is updated when it is first needed, with the
        hyperparameters of this call. Every access to such a parameter waits for the update.
        """
        if self._synchronized and not self._skip:
            again = "they are reduced again" if self._unplanned else "Horovod would reduce them again"
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize(), but synchronize() has reduced"
                f" the gradients: {again}",
                stacklevel=3,
            )
        self._synchronized = False
        if self._unplanned is not None and self._unplanned.op == Adasum:
            return self._unplanned.adasum_step(self._named_trained(), partial(self._update, closure))
        if self._driver is None and self._unplanned is None:
            divide_alone(self)
            return self._update(*(() if closure is None else (dividing(self, closure),)))
        if closure is not None and not is_separable(self._base):
            return step_whole(self, closure)
        loss = None
        if closure is not None:  # run once, before the update, which may then wait for its gradients
            with torch.enable_grad():
                loss = closure()
            self._synchronized = False
        if self._driver is None:
            if not self._skip:
                self._synchronize()
            result = self._update()
            return result if closure is None else loss
        driver = self._refresh(in_step=True)
        driver.arrivals.mark("enter")
        if not self._skip:
            driver.reducer.require_sent()
        driver.gathering.step(self, driver.synchronous)
        driver.after_step()
        return loss

    def _every_param(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def _updates_frozen(self) -> bool:
        """Return whether a frozen parameter still has a gradient, because plain PyTorch would update it."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(p.grad is not None for p in self._every_param() if not p.requires_grad)

    def _update(self, *closure: Any) -> Any:
        # A closure runs the model, whose compiled graphs know their parameters by the class.
        with ordinary(() if closure else self._every_param()):
            return plain_step(self._base)(self, *closure)

    # -- Horovod's methods -----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every ``p.grad`` holds the reduced gradient, for example to clip it."""
        self._synchronize()
        self._synchronized = self._options.gather == "gradients"

    def _synchronize(self) -> None:
        divide_alone(self)
        if self._unplanned is not None:
            self._unplanned.reduce(self._named_trained())
        elif self._driver is not None:
            driver = self._refresh(in_step=True)
            driver.reducer.require_sent()
            driver.gathering.gather_gradients()

    def _named_trained(self) -> list[tuple[str, torch.Tensor]]:
        """Return the trained parameters: some may have been added, frozen or unfrozen since the wrapping."""
        self._parameter_names = names = later_names(self.param_groups, self._parameter_names)
        return [(names[p], p) for p in self._every_param() if p.requires_grad]

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context ``step()`` uses the gradients as they are, reduced by ``synchronize()``."""
        if self._unplanned is not None and self._unplanned.op == Adasum:
            raise AssertionError("Adasum combines the update itself within step(), which can not be skipped")
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
            self._driver.reducer.state.backward_passes = passes

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
            self._samples = 0
            self._base.zero_grad(self, set_to_none)
            return
        self._driver.reducer.clear_grads(set_to_none)
        known = {id(p) for p in self._driver.reducer.params}
        for param in self._every_param():
            if id(param) not in known and param.grad is not None:
                param.grad = None if set_to_none else param.grad.detach().zero_()

    def weighted(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        """Return a loss for ``backward()`` from the mean loss of this rank's samples.

        The step's gradients become those of the mean over all samples that were counted in it, on all ranks
        and in all accumulated backward passes. ``samples`` may count anything: sequences, tokens, pixels.
        """
        return weighted_loss(self, loss, samples)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients to a total norm of at most ``max_norm``; return the norm they had."""
        if self._unplanned is not None:
            raise ValueError(
                "without a plan, call synchronize() and torch.nn.utils.clip_grad_norm_(), then step() within"
                " skip_synchronize()"
            )
        if self._driver is not None and self._shards is not None:
            self._driver.reducer.require_sent()
            return self._shards.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        self._synchronize()
        return nn.utils.clip_grad_norm_(self._every_param(), max_norm, norm_type, error_if_nonfinite)

    # -- state and profile -----------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        self._settle()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    @property
    def spreads_state(self) -> bool:
        """Whether every rank must call ``state_dict()``, because each has a part of the state only."""
        return self._driver is not None and self._driver.gathering.spreads_state

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

        With ``gather="parameters"``, ``Compression.int8`` or ``fp8`` every rank must call: each has a part.
        """
        self._settle()
        own = self.__dict__["state"]
        if self._driver is not None:
            self.__dict__["state"] = self._driver.gathering.whole_state(own)
        try:
            return self._base.state_dict(self)
        finally:
            self.__dict__["state"] = own

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
            trained = [p for p in self._every_param() if p.requires_grad]
        before = driver.reducer.params
        if len(trained) == len(before) and all(a is b for a, b in zip(trained, before, strict=True)):
            return driver
        if in_step and not self._skip:
            driver.reducer.require_sent()
        driver.gathering.finish_all()
        driver.close()
        self._parameter_names = later_names(self.param_groups, self._parameter_names)
        self._options = self._options.for_other_params(before, trained)
        self._driver = successor = Driver(self)
        successor.reducer.inherit(driver.reducer)
        return successor

    def close(self, wait: bool = True) -> None:
        """Apply the last update (not with ``wait=False``, after an error); end connections and threads."""
        if self._driver is not None:
            self._driver.close(wait)

    def release(self, wait: bool = True) -> None:
        """Apply the last update and step locally from now on, with the whole state. Every rank must call.

        After an error, ``wait=False`` calls no other rank, and the state of other ranks' shards is lost.
        """
        if self._driver is not None:
            if wait:
                self._driver.gathering.finish_all()
            self._driver.close(wait)
            self._driver, self._released = None, True

    def resume(self) -> None:
        """Reduce gradients again after ``release()``. Every rank must call."""
        if self._released:
            self._driver, self._released = Driver(self), False

    def profile(self) -> Profile:
        """Return the measured profile; ``.save(FILE)`` writes it, ``profile=FILE`` plans from it."""
        if self._driver is None or self._driver.profile is None:
            raise ValueError(
                "no profile has been measured yet; it is there after a few steps with schedule='auto' on"
                " several ranks"
            )
        return self._driver.profile.whole()
