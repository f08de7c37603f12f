"""``Accelerator`` that wraps the optimizer, where Accelerate's own wraps the model in DDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from commsched.collectives.operations import Adasum
from commsched.huggingface.job import check_ranks, joined
from commsched.integrations import (
    Replica,
    UnclaimedGradients,
    UnscalesReduced,
    accumulating,
    reduce_before_step,
    split_options,
)
from commsched.optimizer.distributed import DistributedOptimizer
from commsched.optimizer.wrapper import DistributedMethods

_DATA_PARALLEL = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_IN_BACKWARD = ("Lomo", "AdaLomo", "LayerWiseDummyOptimizer")  # by name: their libraries are optional


def checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    return split_options("commsched={...}", options or {})[0]


class Accelerator(accelerate.Accelerator):
    """Accelerate's ``Accelerator`` with ``commsched.DistributedOptimizer`` in the place of DDP.

    ``commsched`` holds arguments of ``DistributedOptimizer``, for example ``{"gather": "parameters"}``. All
    other arguments are Accelerate's. With one process it does what Accelerate does.
    """

    _trains_alone = True  # whether this process is the only one, so that nothing differs from Accelerate's

    def __init__(self, *args: Any, commsched: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        options = checked_options(commsched)
        with joined():
            if PartialState._shared_state and PartialState().distributed_type == DistributedType.NO:
                # Made before the job was joined, under a launcher that Accelerate cannot read.
                AcceleratorState._reset_state(reset_partial_state=True)
            super().__init__(*args, **kwargs)
        self._take_over(options, in_evaluation=True)

    @classmethod
    def adopt(cls, stock: accelerate.Accelerator, options: dict[str, Any]) -> None:
        """Turn the ``Accelerator`` that a ``Trainer`` has made into one of this class."""
        if type(stock) is not accelerate.Accelerator:
            raise TypeError(
                f"this trainer makes an Accelerator of its own class ({type(stock).__name__}), which"
                " commsched cannot replace; use the trainer without commsched"
            )
        stock.__class__ = cls
        stock._take_over(options, in_evaluation=False)

    def _take_over(self, options: dict[str, Any], in_evaluation: bool) -> None:
        self._replicas: dict[nn.Module, Replica] = {}
        check_ranks(self.num_processes)
        self._optimizer_options, self._in_evaluation = options, in_evaluation
        self._trains_alone = self.num_processes == 1
        if self._trains_alone:
            return
        kind = self.distributed_type
        if kind not in _DATA_PARALLEL:
            _refuse(f"distributed type {kind.value}", "it replaces DDP only; run accelerate config again")
        if self.parallelism_config is not None and self.parallelism_config.total_size > 1:
            _refuse("a parallelism_config", "every process trains a copy of the whole model; leave it out")
        if self.scaler is not None and options.get("gather") == "parameters":
            _refuse(
                "a GradScaler with gather='parameters'", "use gather='gradients' or mixed_precision='bf16'"
            )
        if self.scaler is not None:
            if options.get("op") == Adasum:
                _refuse("a GradScaler with op=Adasum", "use op=Average or mixed_precision='bf16'")
            kind_of_scaler = type(self.scaler)
            self.scaler.__class__ = type(kind_of_scaler.__name__, (UnscalesReduced, kind_of_scaler), {})
        hook = DDPCommunicationHookType(getattr(self.ddp_handler, "comm_hook", "no"))
        if hook != DDPCommunicationHookType.NO:
            _refuse(f"DDP's comm_hook {hook.value}", "pass commsched={'compression': Compression.fp16}")

    # -- preparing -------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models before optimizers: the optimizer's buckets lie on the device of the parameters."""
        if self._trains_alone or (device_placement is not None and len(device_placement) != len(args)):
            return super().prepare(*args, device_placement=device_placement)
        order = sorted(range(len(args)), key=lambda i: not isinstance(args[i], nn.Module))
        placed = [device_placement[i] for i in order] if device_placement is not None else None
        result = super().prepare(*(args[i] for i in order), device_placement=placed)
        if len(args) == 1:
            return result
        place = {i: number for number, i in enumerate(order)}
        return tuple(result[place[i]] for i in range(len(args)))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        trained = not evaluation_mode and any(p.requires_grad for p in model.parameters())
        if self._trains_alone or not trained:
            return super().prepare_model(model, device_placement, evaluation_mode)
        if any(isinstance(p, DTensor) for p in model.parameters()):
            _refuse(
                "a model of DTensors (a tensor parallel plan or FSDP2)", "load the whole model on every rank"
            )
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if prepared not in self._replicas:
            buffers = self.ddp_handler is None or self.ddp_handler.broadcast_buffers
            self._replicas[prepared] = replica = Replica(
                prepared,
                buffers,
                in_evaluation=self._in_evaluation,
                only_written=True,
                unclaimed=UnclaimedGradients(prepared, self._distributed_optimizers, self._optimizer_options),
            )
            replica.attach()
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        if not self._trains_alone:
            inner = getattr(optimizer, "optimizer", optimizer)  # AcceleratedOptimizer's, where it is prepared
            if isinstance(inner, DistributedMethods):
                inner.resume()
            elif not isinstance(optimizer, AcceleratedOptimizer):
                optimizer = self._distributed(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def _distributed(self, optimizer: Optimizer) -> Optimizer:
        if type(optimizer).__name__ in _IN_BACKWARD:
            _refuse(
                f"{type(optimizer).__name__} (it updates inside the backward)", "choose another optimizer"
            )
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for prepared in self._models:
            model = self.unwrap_model(prepared, keep_torch_compile=False)
            if trained <= {id(p) for p in model.parameters()}:
                return DistributedOptimizer(optimizer, model=model, **self._optimizer_options)
        return DistributedOptimizer(optimizer, **self._optimizer_options)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        for optimizer in self._distributed_optimizers():
            # The wrapped optimizer and the scheduler's share all state; Accelerate compares the objects.
            if vars(optimizer) is getattr(getattr(scheduler, "optimizer", None), "__dict__", None):
                scheduler.optimizer = optimizer
        return super().prepare_scheduler(scheduler)

    def _distributed_optimizers(self) -> list[DistributedMethods]:
        inner = [prepared.optimizer for prepared in self._optimizers]
        return [optimizer for optimizer in inner if isinstance(optimizer, DistributedMethods)]

    # -- gradients -------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Within this context gradients accumulate locally; the next backward reduces the sum."""
        if self._trains_alone:
            with super().no_sync(model):
                yield
            return
        with accumulating(model, self._distributed_optimizers(), self._replicas.get(model)):
            yield

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Within this context a backward reduces the gradients of forwards that ran under ``no_sync()``.

        Optimizers do it anyway: they reduce in the first backward outside of ``no_sync()``.
        """
        replica = Replica.of(model)
        return nullcontext() if replica is None else replica.reducing()

    def sharded_optimizers(self) -> list[DistributedMethods]:
        """Return the optimizers of which no rank has whole gradients."""
        return [o for o in self._distributed_optimizers() if o._shards is not None]

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip like Accelerate's. With ``gather="parameters"`` only the norm's parts travel."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = {id(p) for p in parameters if p.requires_grad}
        for optimizer in self.sharded_optimizers():
            trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
            if given == trained:
                return optimizer.clip_grad_norm_(max_norm, norm_type)
            if given & trained:
                raise ValueError(
                    f"with gather='parameters', clip_grad_norm_ clips all {len(trained)} parameters of one"
                    f" optimizer at once, but got {len(given)} of which {len(given & trained)} are that"
                    " optimizer's; use gather='gradients' to clip some or those of several optimizers"
                )
        self._reduce_before_step(parameters)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._reduce_before_step(parameters)
        super().clip_grad_value_(parameters, clip_value)

    def _reduce_before_step(self, parameters: list[torch.Tensor]) -> None:
        if self.sync_gradients:  # else gradients still accumulate on each rank, as in DDP
            reduce_before_step(self._distributed_optimizers(), parameters)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        if not self._trains_alone:
            _refuse("join_uneven_inputs()", "leave even_batches=True, so that all ranks have as many batches")
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    # -- state and the end -----------------------------------------------------------------------------------

    @contextmanager
    def whole_states(self) -> Iterator[None]:
        """Gather states that are spread over the ranks: one rank alone can call ``state_dict()`` within."""
        changed = [
            prepared for prepared in self._optimizers if getattr(prepared.optimizer, "spreads_state", False)
        ]
        for prepared in changed:
            prepared.state_dict = partial(dict, prepared.state_dict())
        try:
            yield
        finally:
            for prepared in changed:
                del prepared.state_dict

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        return self._separate(super().get_state_dict(model, unwrap))

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        super().save(self._separate(obj), f, safe_serialization)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        def separate(model: nn.Module, state: Any, *_: Any) -> None:
            self._separate(state)

        with ExitStack() as stack:
            for model in self._models:
                stack.callback(model.register_state_dict_post_hook(separate).remove)
            super().load_state(*args, **kwargs)

    def _separate(self, state: Any) -> Any:
        """Copy each tensor of a state dict into memory of its own; tied ones share it.

        With ``gather="parameters"`` parameters lie side by side in one buffer. Accelerate takes them for
        tied ones and saves only the first; safetensors refuses to load them.
        """
        if not isinstance(state, dict) or not self.sharded_optimizers():
            return state
        copies: dict[Any, torch.Tensor] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
                if place not in copies or not value.numel():
                    copies[place] = value.detach().clone()
                state[name] = copies[place]
        return state

    def release(self) -> None:
        """End the communication of the prepared optimizers. Preparing them again starts it again."""
        for optimizer in self._distributed_optimizers():
            optimizer.release()
        for replica in self._replicas.values():
            replica.close()
        self._replicas.clear()

    def free_memory(self, *objects: Any) -> Any:
        self.release()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        self.release()
        super().end_training()


def _refuse(what: str, instead: str) -> NoReturn:
    raise ValueError(f"commsched.huggingface does not support {what}: {instead}")
