"""``DistributedOptimizer``: wraps a torch optimizer so that its gradients are reduced over all ranks.

The package's docstring says which files a gradient passes; ``wrapper.py`` has the resulting methods.
"""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.backends import PLAIN, STREAM, wanted_transport
from commsched.collectives.carrier import carrier_or_none
from commsched.collectives.compression import Compression, block_code
from commsched.collectives.job import ProcessSet, global_process_set
from commsched.collectives.operations import Adasum, Average, Sum
from commsched.optimizer.planner import Options
from commsched.optimizer.session import Session, open_optimizers
from commsched.optimizer.sharded_step import HALVES, ShardedStep
from commsched.optimizer.wrapper import DistributedMethods, Unplanned
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    model: nn.Module | None = None,
    schedule: str | Program = "auto",
    gather: str = "gradients",
    early_step: bool = False,
    master_weights: bool = False,
    transport: str | None = None,
    bucket_mb: float | None = None,
    profile: Profile | str | None = None,
    row_sparse: bool | str = "auto",
) -> Optimizer:
    """Wraps ``optimizer`` so that gradients are reduced over all ranks, in the best order, under compute.

    The positional arguments are Horovod's and mean the same. ``model`` is the module that owns the parameters
    (found among the live objects otherwise). ``schedule`` is ``"auto"`` (measure, then plan), a policy's
    name, or a ``Program``. ``gather="parameters"`` shards the optimizer's state and work over the ranks;
    ``early_step`` then updates inside the backward, ``master_weights`` then keeps float32 weights for half-
    precision parameters in the optimizer's state. ``transport`` is ``direct``, ``ring``, ``tiers`` or
    ``horovod`` (default: the fastest), ``bucket_mb`` fixes the bucket size, ``profile`` is a measured profile
    (or its file) to plan from instead of measuring. ``row_sparse`` sends only the touched rows of embeddings'
    gradients: ``"auto"`` where that takes less time, True always, False never.

    Adasum, compressors of your own and parameters on several devices are reduced at step time, without a
    plan. The result is an instance of ``optimizer``'s class that shares its state and parameter groups.
    """
    if isinstance(optimizer, DistributedMethods):
        raise ValueError("this optimizer is distributed already; wrap the one that it was made from")
    named = list(named_parameters) if named_parameters is not None else None
    if named is None and model is not None:
        named = list(model.named_parameters())
    one_by_one = needs_plain(optimizer, compression, op, transport)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if master_weights:
        check_master_weights(gather, params, not one_by_one, bool(process_set.included()))
    if one_by_one:
        ignored = [f"gather={gather!r}"] * (gather != "gradients") + ["early_step=True"] * early_step
        if ignored:
            warnings.warn(
                f"{' and '.join(ignored)} without effect: {_ONE_BY_ONE}, and every rank keeps all of the"
                " optimizer's state",
                stacklevel=2,
            )
        gather, early_step = "gradients", False
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support process sets; use the global one")
    wire_dtype = getattr(compression, "wire_dtype", None)
    if code := block_code(wire_dtype):
        check_blocks(code, transport, params, one_by_one)
    names = checked_names(optimizer.param_groups, named)
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op must be commsched.Average, Sum or Adasum, got {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(
            f"gradient_predivide_factor is for op=Average, got op={op!r} with a factor of"
            f" {gradient_predivide_factor}"
        )
    if bucket_mb is not None and not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be positive, got {bucket_mb}")
    options = Options(
        process_set=process_set,
        sums=bool(op == Sum),
        predivide=float(gradient_predivide_factor),
        wire_dtype=wire_dtype,
        schedule=schedule,
        gather=gather,
        early_step=early_step,
        master_weights=master_weights,
        transport=transport,
        bucket_bytes=None if bucket_mb is None else round(bucket_mb * 2**20),
        profile=profile,
        groups=group_indices(optimizer.param_groups, groups, num_groups),
        sparse_as_dense=sparse_as_dense,
        row_sparse=row_sparse,
    )
    if row_sparse != "auto" and not isinstance(row_sparse, bool):
        raise ValueError(f"row_sparse must be 'auto', True or False, got {row_sparse!r}")
    if row_sparse is True and one_by_one:
        raise ValueError(f"row_sparse=True needs buckets, but {_ONE_BY_ONE}; use row_sparse='auto'")
    close_earlier(optimizer)
    base = type(optimizer)
    cls = type(base.__name__, (DistributedMethods, base), {"_base": base})
    wrapped: Any = object.__new__(cls)
    wrapped.__dict__ = optimizer.__dict__
    wrapped._parameter_names, wrapped._model, wrapped._options = names, model, options
    wrapped._session, wrapped._unplanned, wrapped._closed, wrapped._released = None, None, False, False
    if one_by_one:
        trained = [p for p in params if p.requires_grad]
        grouped = [[trained[i] for i in group] for group in options.groups] if options.groups else None
        factor = options.predivide
        wrapped._make_unplanned = partial(
            Unplanned, compression, op, factor, sparse_as_dense, process_set, grouped
        )
    wrapped.set_backward_passes_per_step(backward_passes_per_step)
    if not lasting.takes(wrapped):
        wrapped.connect()
    wrapped._patch_step_function()
    _keep_together(wrapped)
    return wrapped


def close_earlier(optimizer: Optimizer) -> None:
    """Close the earlier ``DistributedOptimizer`` of this optimizer: both share all attributes."""
    session = optimizer.__dict__.get("_session")
    if not isinstance(session, Session) or not session.is_open:
        return
    before = session.wrapped
    if before is not None:
        before.close()
    elif isinstance(session.mode, ShardedStep):
        raise ValueError(
            "this optimizer was wrapped before with gather='parameters', and the ranks' parts of its state"
            " are lost with that DistributedOptimizer; keep it, and call its close() on all ranks before the"
            " optimizer is wrapped again"
        )


# -- over the epochs of an elastic job -----------------------------------------------------------------------


class LastingOptimizers:
    """The optimizers that were made outside of ``elastic.run``'s function, and last over its calls.

    In an elastic job a process may make them while the others are in ``elastic.run``, so making them must not
    connect them: ``connect()`` does, where every rank calls it, in the order in which they were made.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self.running = False  # within the user's function
        self.virtual_ranks = 0  # of that function

    def takes(self, wrapped: Any) -> bool:
        """Note a new optimizer; return whether ``connect()`` will connect it, and its maker must not."""
        if self.running and self.virtual_ranks:
            raise ValueError("with virtual ranks, make DistributedOptimizer before elastic.run's function")
        if self.running:
            return False
        self._made[next(self._numbers)] = wrapped
        current = carrier_or_none()
        return current is not None and current.launch.elastic

    def alive(self) -> list[Any]:
        """Return those that somebody uses: the same ones on all ranks, so what it costs (0.1 s) is needed."""
        gc.collect()  # nobody uses those that only the collector knows, on any rank
        return self._known()

    def _known(self) -> list[Any]:
        return [one for reference in self._made.valuerefs() if (one := reference()) is not None]

    def set_virtual_ranks(self, optimizers: Sequence[Any], count: int) -> list[Any]:
        """Let all that are open expect sums over virtual ranks, and return them; 0: none do. Collective."""
        self.virtual_ranks = count
        changed = [one for one in optimizers if not (count and (one._released or one._closed))]
        for one in changed:
            one.set_virtual_ranks(count)
        return changed

    def disconnect(self, wait: bool) -> None:
        """Make plain optimizers of all that are connected, also of those made inside of the function.

        Collective, unless ``wait`` is False.
        """
        for one in [*(self.alive() if wait else self._known()), *open_optimizers()]:
            one.disconnect(wait)


def described(optimizers: Sequence[Any]) -> list[list[Any]]:
    """Return what must be equal on all ranks before ``connect()``."""
    return [
        [type(one).__name__, sum(len(group["params"]) for group in one.param_groups)] for one in optimizers
    ]


def connect(optimizers: Sequence[Any]) -> None:
    """Connect all to the job as it is now. Collective."""
    for one in optimizers:
        if not (one._released or one._closed):
            one.resume()


lasting = LastingOptimizers()


def _keep_together(wrapped: Any) -> None:
    """Make the wrapped optimizer, which shares all state, step on all ranks too.

    Its ``state_dict()`` then shows the state after the last step.
    """
    this = weakref.ref(wrapped)

    def settle(optimizer: Optimizer, *_: Any) -> None:
        owner = this()
        if owner is None or owner._session is None:
            return
        if not isinstance(optimizer, DistributedMethods) and owner._options.gather == "parameters":
            raise ValueError(
                "with gather='parameters' the state is spread over the ranks; call state_dict() and"
                " load_state_dict() on all ranks, of the optimizer that DistributedOptimizer returned"
            )
        owner._settle()

    def step(*args: Any, **kwargs: Any) -> Any:
        owner: Any = this()
        if owner is None:
            raise ValueError(
                "the optimizer that DistributedOptimizer returned does not exist any more; keep it, and call"
                " its step()"
            )
        owner._opt_called = True
        return type(owner).step(owner, *args, **kwargs)

    settle.settles = True  # type: ignore[attr-defined]
    wrapped.register_state_dict_pre_hook(settle)
    wrapped.register_load_state_dict_pre_hook(settle)
    # A scheduler of the wrapped optimizer puts a counting step() around that one's plain step() into the
    # instance, unless it finds one that counts.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    found = wrapped.__dict__.get("step")  # perhaps that of an earlier wrapper, which is gone
    wrapped._plain_step = step._plain = getattr(found, "_plain", found)  # type: ignore[attr-defined]
    wrapped.__dict__["step"] = step


# -- named_parameters=, groups= ------------------------------------------------------------------------------


def checked_names(param_groups: list[dict[str, Any]], named: Sequence[Any] | None) -> dict[Any, str]:
    """Return a name for each parameter; unnamed and duplicate ones are refused, as in Horovod."""
    params = [param for group in param_groups for param in group["params"]]
    if named is None:
        return {param: f"parameter.{number}" for number, param in enumerate(params)}
    for item in named:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ValueError(
                "named_parameters must be pairs of a name and a parameter, such as"
                f" model.named_parameters(), got {item!r}"
            )
    repeated = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if repeated:
        raise ValueError(
            "parameter names must differ from each other, but named_parameters repeats"
            f" {', '.join(sorted(repeated))}"
        )
    names = {param: name for name, param in named}
    unnamed = [param for param in params if param not in names]
    if unnamed:
        shapes = ", ".join(str(tuple(param.shape)) for param in unnamed[:5])
        raise ValueError(
            f"named_parameters must name every parameter of the optimizer, but {len(unnamed)} of"
            f" {len(params)} have no name (shapes {shapes}); pass named_parameters=model.named_parameters()"
            " of the whole model"
        )
    return names


def group_indices(
    param_groups: list[dict[str, Any]], groups: int | Sequence[Sequence[torch.Tensor]] | None, num_groups: int
) -> list[list[int]] | None:
    """Return Horovod's ``groups`` (lists of tensors, or their number) as lists of parameter indices."""
    params = [param for group in param_groups for param in group["params"] if param.requires_grad]
    groups = num_groups if groups is None else groups
    if groups == 0:
        return None
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must not be negative, got {groups}")
        count = min(groups, len(params))
        return [list(range(len(params) * k // count, len(params) * (k + 1) // count)) for k in range(count)]
    index = {id(param): i for i, param in enumerate(params)}
    indices = [[index[id(tensor)] for tensor in group if id(tensor) in index] for group in groups]
    twice = [i for i, count in Counter(i for group in indices for i in group).items() if count > 1]
    if twice:
        raise ValueError(
            f"groups must not share a tensor, but {len(twice)} tensors are in several (first: {twice[0]})"
        )
    return [group for group in indices if group]


# -- what needs buckets --------------------------------------------------------------------------------------

_ONE_BY_ONE = (
    "Adasum, compressors of your own, transport='plain' and parameters on several devices"
    " are reduced one by one"
)


def needs_plain(optimizer: Optimizer, compression: Any, op: Any, transport: str | None) -> bool:
    """Return whether gradients must be reduced one by one at step time, because buckets cannot carry them."""
    own_compressor = compression is not Compression.none and not hasattr(compression, "wire_dtype")
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    elsewhere = len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices)
    return bool(op == Adasum or own_compressor or elsewhere or wanted_transport(transport) == PLAIN)


def check_master_weights(gather: str, params: Sequence[torch.Tensor], planned: bool, included: bool) -> None:
    """Raise for options with which ``master_weights=True`` is not possible."""
    if gather != "parameters":
        raise ValueError(
            "master_weights=True keeps float32 weights for each rank's shards, and with"
            f" gather={gather!r} there are none; use gather='parameters'"
        )
    if not any(param.dtype in HALVES for param in params):
        dtypes = ", ".join(sorted({str(param.dtype) for param in params}))
        raise ValueError(
            "master_weights=True is for float16 and bfloat16 parameters, and these are all"
            f" {dtypes}; leave it out"
        )
    if not planned:
        raise ValueError(f"master_weights=True needs buckets, and {_ONE_BY_ONE}; leave it out")
    if not included:
        raise ValueError("master_weights=True on a rank outside of process_set, which has no shards")


def check_blocks(code: str, transport: Any, params: Sequence[torch.Tensor], one_by_one: bool) -> None:
    """Raise where nothing can move buckets quantised to a code."""
    refused = f"compression=Compression.{code} is not possible"
    kinds = {param.device.type for param in params}
    if elsewhere := sorted(kinds - {"cpu", "cuda"}):
        raise ValueError(
            f"{refused} for parameters on {', '.join(elsewhere)}: gradients are quantised on CPUs and GPUs"
            " only; use Compression.fp16 or bf16"
        )
    if one_by_one:
        raise ValueError(
            f"{refused} without buckets, and Adasum and transport='plain' reduce gradients one by one; use"
            " another compression, or op=Average or Sum over transport='direct'"
        )
    named = transport is None or isinstance(transport, str)  # else it is a backend
    wanted = wanted_transport(transport) if named else transport.name
    if wanted not in (None, "auto", "direct", "tiers", STREAM) and not (named and kinds == {"cuda"}):
        raise ValueError(
            f"{refused} over transport {wanted!r}, which does not bring what is rounded to the owner of its"
            " sum; leave transport= and COMMSCHED_TRANSPORT out, or use transport='direct'"
        )
