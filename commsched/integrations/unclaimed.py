"""Averages the gradients that ``DistributedDataParallel`` would and that no distributed optimizer does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.collectives.reductions import Adasum
from commsched.optimizer.distributed import DistributedOptimizer
from commsched.optimizer.round import inside_a_backward

# The user's options that say what is computed over which ranks; the others say when, or concern the update.
_OF_THE_SUM = ("op", "gradient_predivide_factor", "process_set", "sparse_as_dense", "transport")


def _queue(callback: Callable[[], None]) -> None:
    """Let autograd call this at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _Nothing(Optimizer):
    """Updates nothing. Distributed, its ``step()`` waits until all gradients are reduced."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any: ...


class UnclaimedGradients:
    """The gradients of a model's trained parameters that no optimizer of ``optimizers()`` updates.

    The user may clip them, or give them to an optimizer of his own, so they are averaged like the others: at
    the end of each backward, by a ``DistributedOptimizer`` whose steps update nothing. Which parameters these
    are is looked up before each forward with gradients, because an optimizer may be wrapped after the model,
    and parameters may be frozen or given to an optimizer later.

    As with DDP, the model's last forward with gradients decides whether a backward reduces them: one within
    ``pause()`` lets them accumulate, wherever the backward runs.
    """

    def __init__(
        self, model: nn.Module, optimizers: Callable[[], Iterable[Optimizer]], options: Mapping[str, Any]
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._options = {name: options[name] for name in _OF_THE_SUM if name in options}
        if self._options.get("op") == Adasum:
            del self._options["op"]  # Adasum combines updates, and these parameters have none
        self._claims: Any = None  # the optimizers and their numbers of parameters, when they were last seen
        self._candidates: list[nn.Parameter] = []  # parameters of no optimizer, frozen ones too
        self._params: list[nn.Parameter] = []  # those that the reducer reduces
        self._reducer: Any = None
        self._hooks: list[Any] = []
        self._paused = self._accumulates = self._queued = False
        self._accumulation = ExitStack()

    def before_forward(self) -> None:
        """Look up which gradients to reduce. Collective where these have changed."""
        if not torch.is_grad_enabled():
            return
        self._queued = False  # a backward that raised never ran its callback
        with torch._C.DisableTorchFunctionSubclass():  # a pending gradient stays pending
            params = [param for param in self._find_candidates() if param.requires_grad]
        if len(params) != len(self._params) or any(a is not b for a, b in zip(params, self._params)):
            self._reduce_those_of(params)
        self._accumulate(self._paused)

    def _find_candidates(self) -> list[nn.Parameter]:
        optimizers = list(self._optimizers())
        claims = [(id(one), sum(len(group["params"]) for group in one.param_groups)) for one in optimizers]
        if claims != self._claims:
            claimed = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
            ignored = frozenset(getattr(self._model, "_ddp_params_and_buffers_to_ignore", ()))
            named = [(name, param) for name, param in self._model.named_parameters() if name not in ignored]
            self._candidates = [param for _, param in named if id(param) not in claimed]
            self._claims = claims
        return self._candidates

    def _reduce_those_of(self, params: list[nn.Parameter]) -> None:
        self.close()
        self._params = params
        if params:
            self._reducer = DistributedOptimizer(
                _Nothing(params), model=self._model, schedule="wfbp", **self._options
            )
            # Other parameters have the hook, too: a rank whose backward reaches no unclaimed one must still
            # take part in the sum.
            with torch._C.DisableTorchFunctionSubclass():
                trained = [param for param in self._model.parameters() if param.requires_grad]
            self._hooks = [param.register_post_accumulate_grad_hook(self._on_gradient) for param in trained]

    # -- a backward ------------------------------------------------------------------------------------------

    def _on_gradient(self, param: torch.Tensor) -> None:
        if not self._queued:
            self._queued = True
            _queue(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._queued = False
        # After an inner backward, later gradients of the outer one queue this again. Without any, the first
        # access to a gradient waits for it.
        if not self._accumulates and not inside_a_backward():
            _queue(self._reduce)  # after the reducer's own callback, which ends its part of the backward

    def _reduce(self) -> None:
        if self._reducer is not None:
            self._reducer.step()

    # -- accumulation ----------------------------------------------------------------------------------------

    def _accumulate(self, accumulates: bool) -> None:
        if accumulates and self._reducer is not None and not self._accumulates:
            self._accumulation.enter_context(self._reducer.no_sync())
        elif not accumulates:
            self._accumulation.close()
        self._accumulates = accumulates

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the gradients of forwards within this context accumulate on each rank."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Let backwards within this context reduce, with the gradients that have accumulated until then."""
        before = self._accumulates
        self._accumulate(False)
        try:
            yield
        finally:
            self._accumulate(before)

    def close(self, wait: bool = True) -> None:
        """End the communication; the next forward with gradients begins it again."""
        self._accumulate(False)
        for hook in self._hooks:
            hook.remove()
        if self._reducer is not None:
            self._reducer.release(wait)
        self._hooks, self._params, self._reducer = [], [], None
