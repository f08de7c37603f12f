"""Shared by ``commsched.huggingface`` and ``commsched.lightning``; needs neither library.

It checks the arguments of ``DistributedOptimizer``, accumulates gradients without reducing them, and keeps
the ranks' copies of a model equal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from commsched.collectives.job import size
from commsched.collectives.operations import Adasum, allgather_object, broadcast_
from commsched.errors import CommError
from commsched.optimizer.distributed import DistributedOptimizer
from commsched.optimizer.round import inside_a_backward
from commsched.optimizer.wrapper import DistributedMethods

# -- arguments for ``DistributedOptimizer``, and accumulation of gradients by the optimizers it has made -----

# The trainers give these themselves: they know the model and count the accumulated batches.
_DECIDED = {"optimizer", "named_parameters", "model", "backward_passes_per_step"}


def split_options(
    taker: str,
    given: Mapping[str, Any],
    without: AbstractSet[str] = frozenset(),
    others: Sequence[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of ``DistributedOptimizer``, and those named in ``others``.

    ``taker`` is the subject of the error about any other argument and about those in ``without``.
    """
    parameters = inspect.signature(DistributedOptimizer).parameters
    options = [name for name in parameters if name not in _DECIDED | without]
    unknown = sorted(set(given) - {*options, *others})
    if unknown:
        more = f" and the library's {', '.join(others)}" if others else ""
        hint = ""
        if "find_unused_parameters" in unknown:
            hint = "; leave find_unused_parameters out, because unused parameters are always allowed"
        raise ValueError(
            f"{taker} takes arguments of DistributedOptimizer ({', '.join(options)}){more}, but got"
            f" {', '.join(unknown)}{hint}"
        )
    chosen = {name: value for name, value in given.items() if name in options}
    return chosen, {name: value for name, value in given.items() if name in others}


def has_parameters_of(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether the optimizer updates a parameter of the model."""
    owned = {id(param) for param in model.parameters()}
    return any(id(param) in owned for group in optimizer.param_groups for param in group["params"])


@contextmanager
def accumulating(model: nn.Module, optimizers: Iterable[Any], replica: Replica | None) -> Iterator[None]:
    """Accumulate the gradients of the model's parameters on each rank, as in DDP's ``no_sync``.

    ``replica`` is the model's, if there is one.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if isinstance(optimizer, DistributedMethods) and has_parameters_of(model, optimizer):
                stack.enter_context(optimizer.no_sync())
        if replica is not None:
            stack.enter_context(replica.pause())
        yield


def reduce_before_step(optimizers: Iterable[Any], parameters: Iterable[torch.Tensor] | None = None) -> None:
    """Let the gradients that a trainer clips or unscales next be the reduced ones, also in ``step()``.

    ``parameters`` leaves out optimizers that update none of these: their backwards may be unfinished.
    """
    wanted = None if parameters is None else {id(param) for param in parameters}
    for optimizer in optimizers:
        if not isinstance(optimizer, DistributedMethods):
            continue
        if wanted is None or any(
            id(p) in wanted for group in optimizer.param_groups for p in group["params"]
        ):
            optimizer.reduce_before_step()


class UnscalesReduced:
    """Mixed in before a GradScaler's class: all ranks look for infinite values in the same gradients.

    With those of each rank, one rank would leave out the step in which the others wait for it.
    """

    def unscale_(self, optimizer: Any) -> None:
        reduce_before_step([optimizer])
        super().unscale_(optimizer)  # type: ignore[misc]

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        reduce_before_step([optimizer])
        return super().step(optimizer, *args, **kwargs)  # type: ignore[misc]


# -- keeps the ranks' copies of a model equal as ``DistributedDataParallel`` does ----------------------------

# Rank 0's parameters and buffers are sent once, its buffers again later: a forward may write to them.
# Gradients that no distributed optimizer reduces are averaged.

_NAME = "commsched.replica"
_BYTES_AT_ONCE = 250 * 2**20


class Replica:
    """One rank's copy of a model that all ranks train."""

    def __init__(
        self,
        model: nn.Module,
        broadcast_buffers: bool = True,
        *,
        in_evaluation: bool = True,
        only_written: bool = False,
        hold_statistics: bool = False,
        unclaimed: UnclaimedGradients | None = None,
    ) -> None:
        """Overwrite parameters and buffers with rank 0's.

        With ``broadcast_buffers``, ``before_forward`` sends rank 0's buffers before the first forward and
        each that follows a training forward outside of ``pause()``. The other options send them less often:

        - ``in_evaluation=False``: never before forwards without gradients.
        - ``only_written``: only if this rank has written to a buffer. All ranks must write in the same steps.
        - ``hold_statistics``: running statistics of normalisation wait for a forward in evaluation mode. A
          forward in training mode updates them without reading them.

        ``unclaimed`` averages the gradients of the model's parameters that no optimizer updates.
        """
        self.model = model
        self._in_evaluation, self._only_written = in_evaluation, only_written
        self._hold_statistics = hold_statistics
        self._sends = broadcast_buffers and size() > 1
        self._due, self._paused = True, False
        self._held: list[tuple[str, nn.Module]] = []  # modules whose statistics are due and wait
        self._ignored = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        self._unclaimed = unclaimed if size() > 1 else None
        self._hook: Any = None
        if size() > 1:
            named = [*model.named_parameters(), *model.named_buffers()]
            tensors = {name: tensor for name, tensor in named if name not in self._ignored}
            _check_alike(tensors)
            _overwrite(tensors.values())
        self._sent = _versions(self._buffers(model.named_modules()))

    def attach(self) -> None:
        """Call ``before_forward`` before each forward of the model, until ``close()``."""
        if self._sends or self._unclaimed is not None:
            self._hook = self.model.register_forward_pre_hook(self._before_forward)

    @staticmethod
    def of(model: nn.Module) -> Replica | None:
        """Return the replica that is attached to the model."""
        owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
        return next((o for o in owners if isinstance(o, Replica) and o.model is model), None)

    def close(self, wait: bool = True) -> None:
        """End what ``attach`` has begun; after an error, with ``wait=False``, without the other ranks."""
        if self._unclaimed is not None:
            self._unclaimed.close(wait)
        if self._hook is not None:
            self._hook.remove()

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if model is self.model:
            self.before_forward()

    def __deepcopy__(self, memo: dict[int, Any]) -> Replica:
        """Return this: a copy of the model has the hook but is trained, or not, by this rank alone."""
        return self

    def __reduce__(self) -> Any:
        """Leave this out of a pickled model, which has the hook."""
        return _NoReplica, ()

    def before_forward(self) -> None:
        """Overwrite the buffers that are due with rank 0's; look up which gradients no optimizer reduces."""
        if self._unclaimed is not None:
            self._unclaimed.before_forward()
        trains = torch.is_grad_enabled()
        if not self._sends or not (trains or self._in_evaluation):
            return
        modules = list(self.model.named_modules()) if self._due else self._held
        self._held = [(prefix, module) for prefix, module in modules if self._holds(module)]
        buffers = self._buffers((prefix, module) for prefix, module in modules if not self._holds(module))
        if not self._only_written or self._written(buffers):
            _overwrite(buffers.values())
            self._sent.update(_versions(buffers))
        self._due = trains and not self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within this context forwards make no buffers due and their gradients accumulate on each rank.

        As in ``DistributedDataParallel.no_sync``.
        """
        before, self._paused = self._paused, True
        try:
            with nullcontext() if self._unclaimed is None else self._unclaimed.pause():
                yield
        finally:
            self._paused = before

    def reducing(self) -> AbstractContextManager[None]:
        """Backwards within this context reduce what forwards within ``pause()`` have left to accumulate."""
        return nullcontext() if self._unclaimed is None else self._unclaimed.reducing()

    def _holds(self, module: nn.Module) -> bool:
        return self._hold_statistics and module.training and isinstance(module, _NormBase)

    def _buffers(self, modules: Iterable[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
        """Return the modules' own buffers, without those of modules within them."""
        named = (pair for prefix, module in modules for pair in module.named_buffers(prefix, recurse=False))
        return {name: buffer for name, buffer in named if name not in self._ignored}

    def _written(self, buffers: dict[str, torch.Tensor]) -> bool:
        """Return whether a buffer was written to or replaced: most models have constant ones only."""
        for name, (buffer, version) in _versions(buffers).items():
            sent, sent_version = self._sent.get(name, (None, 0))
            if buffer is not sent or version != sent_version:
                return True
        return False


class _NoReplica:
    """Stands for a ``Replica`` in a model that was pickled."""

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        pass


def _versions(buffers: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
    """Return each buffer with the number of times that it was written to."""
    return {name: (b, -1 if b.is_inference() else b._version) for name, b in buffers.items()}


def _check_alike(tensors: dict[str, torch.Tensor]) -> None:
    """Raise on every rank unless all have tensors of the same names, shapes and types. Collective."""
    mine = [f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()]
    everybody = allgather_object(mine, _NAME)
    for rank, theirs in enumerate(everybody):
        for number, (expected, actual) in enumerate(zip_longest(everybody[0], theirs, fillvalue="missing")):
            if actual != expected:
                raise CommError(
                    f"the ranks have different models: parameter or buffer {number} is {expected} on rank 0"
                    f" and {actual} on rank {rank}; build the same model on every rank"
                )


def _overwrite(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors with rank 0's. They travel as bytes, so that any types share a broadcast."""
    for portion in _portions(tensors):
        # The thread that receives could not write to a tensor made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in portion])
            broadcast_(flat, 0, name=_NAME)
            values = flat.split([tensor.nbytes for tensor in portion])
        with torch.no_grad():
            for tensor, value in zip(portion, values, strict=True):
                # As DDP: of two forwards before a backward, the first one's may have saved a buffer.
                kept = torch.autograd._unsafe_preserve_version_counter
                with nullcontext() if tensor.is_inference() else kept(tensor):
                    tensor.copy_(value.view(tensor.dtype).view(tensor.shape))


def _portions(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of tensors on one device, of 250 MB at most or a single tensor.

    Types with large elements come first, which aligns every tensor in the concatenation.
    """
    portion: list[torch.Tensor] = []
    bytes_ = 0
    for tensor in sorted(tensors, key=lambda t: (str(t.device), -t.element_size())):
        bytes_ += tensor.nbytes
        if portion and (bytes_ > _BYTES_AT_ONCE or tensor.device != portion[0].device):
            yield portion
            portion, bytes_ = [], tensor.nbytes
        portion.append(tensor)
    if portion:
        yield portion


# -- averages the gradients that ``DistributedDataParallel`` would and that no distributed optimizer does ----

# The user's options that say what is computed over which ranks; the others say when, or concern the update.
_OF_THE_SUM = ("op", "gradient_predivide_factor", "process_set", "sparse_as_dense", "transport")


def _queue(callback: Callable[[], None]) -> None:
    """Let autograd call this at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _NoUpdate(Optimizer):
    """Updates nothing. Distributed, its ``step()`` waits until all gradients are reduced."""

    shares_parameters = True  # until the next forward, with an optimizer that has claimed some

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any: ...


class UnclaimedGradients:
    """The gradients of a model's trained parameters that no distributed one of ``optimizers()`` updates.

    The user may clip them, or give them to an optimizer of his own, so they are averaged like the others: at
    the end of each backward, by a ``DistributedOptimizer`` whose steps update nothing. Which parameters these
    are is looked up before each forward with gradients, because an optimizer may be wrapped after the model,
    and parameters may be frozen or given to an optimizer later.

    As with DDP, the model's last forward with gradients decides whether a backward reduces them: one within
    ``pause()`` lets them accumulate, wherever the backward runs.
    """

    def __init__(
        self, model: nn.Module, optimizers: Callable[[], Iterable[Any]], options: Mapping[str, Any]
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
        optimizers = [one for one in self._optimizers() if isinstance(one, DistributedMethods)]
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
                _NoUpdate(params), model=self._model, schedule="wfbp", **self._options
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
