"""Horovod's operations: start one, poll it, wait for it; on tensors and on Python objects.

``allreduce`` and ``reducescatter`` combine the ranks' tensors; ``allgather``, ``broadcast`` and ``alltoall``
move them unchanged. All five are differentiable. Each has an ``_async`` form, which returns a handle and has
no gradient; most have a ``grouped_`` form, which takes several tensors as one operation.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import Signature, signature
from typing import Any, ParamSpec

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from commsched.collectives.carrier import Collective, ReduceOp, Reduction, carrier
from commsched.collectives.compression import Compression
from commsched.collectives.job import ProcessSet, global_process_set, rank, registered_id


def _start(
    kind: str,
    tensors: torch.Tensor | Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    **arguments: Any,
) -> int:
    """Start a collective of one tensor, or of a list of tensors as one operation; `arguments` are
    ``Collective``'s other fields.
    """
    each, grouped = _tensors_of(kind, tensors), not isinstance(tensors, torch.Tensor)
    return carrier().start(
        Collective(kind, each, name, registered_id(process_set), grouped=grouped, **arguments)
    )


def _tensors_of(kind: str, given: Any) -> list[torch.Tensor]:
    """Return a collective's one tensor, or those of its group; a tile that is whole on every rank is one."""
    several = isinstance(given, Iterable) and not isinstance(given, torch.Tensor)
    each: list[Any] = list(given) if several else [given]
    for thing in each:
        if not isinstance(thing, torch.Tensor):
            raise ValueError(
                f"{kind} takes a tensor, or several as one group, but got a {type(thing).__name__}; pass"
                " torch.as_tensor(value), or use broadcast_object or allgather_object"
            )
    return [thing.local if getattr(thing, "replicated", False) else thing for thing in each]


def poll(handle: int) -> bool:
    """Return whether an asynchronous operation has ended, so that ``synchronize`` will not wait."""
    return carrier().poll(handle)


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an asynchronous operation and return its result; ``CommError`` if it failed.

    Accepts the result of ``sparse_allreduce_async`` too.
    """
    return handle() if callable(handle) else carrier().synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called this."""
    carrier().barrier(registered_id(process_set))


_Arguments = ParamSpec("_Arguments")


def _waiting(start_it: Callable[_Arguments, int], what: str) -> Callable[_Arguments, Any]:
    """Return a function that starts an operation and waits for it; ``what`` is its description."""

    @wraps(start_it)
    def run(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> Any:
        return synchronize(start_it(*arguments, **options))

    run.__name__ = run.__qualname__ = start_it.__name__.replace("_async", "")
    run.__doc__ = what
    return run


def _grouped(single: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a function that does with several tensors, as one operation, what ``single`` does with one."""

    @wraps(single)
    def run(tensors: Sequence[torch.Tensor], *arguments: Any, **options: Any) -> Any:
        return single(tensors, *arguments, **options)

    first, *others = signature(single).parameters.values()
    run.__signature__ = Signature([first.replace(name="tensors"), *others])  # type: ignore[attr-defined]
    run.__name__ = run.__qualname__ = f"grouped_{single.__name__}"
    run.__doc__ = what
    return run


# -- tensors unchanged: allgather, broadcast, alltoall -------------------------------------------------------


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start ``allgather``."""
    return _start("allgather", tensor, name, process_set)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks on the first dimension, whose size may differ; differentiable."""
    if not isinstance(tensor, torch.Tensor):  # the tensors of a group
        return Allgather.apply(name, process_set, True, *_tensors_of("allgather", tensor))
    return Allgather.apply(name, process_set, False, tensor)[0]


grouped_allgather_async = _grouped(allgather_async, "Start ``grouped_allgather``.")
grouped_allgather = _grouped(allgather, "``allgather`` of several tensors as one operation.")


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast``."""
    return _start("broadcast", tensor, name, process_set, root=root_rank)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return rank `root_rank`'s tensor, in a new tensor, on every rank; differentiable."""
    return Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast_``."""
    return _start("broadcast", tensor, name, process_set, root=root_rank, inplace=True)


broadcast_ = _waiting(broadcast_async_, "Overwrite the tensor with rank `root_rank`'s.")


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``alltoall``; its result is always the pair (tensor, received splits)."""
    return _start("alltoall", tensor, name, process_set, splits=_as_tensor(splits))


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[i]`` rows of the tensor to rank i and return the rows that arrive; differentiable.

    Without `splits` every rank gets the same share and the result is one tensor. With it, the result is the
    pair (tensor, number of rows that came from each rank).
    """
    received = Alltoall.apply(tensor, _as_tensor(splits), name, process_set)
    return received[0] if splits is None else received


def _as_tensor(splits: Any) -> torch.Tensor | None:
    if splits is None or isinstance(splits, torch.Tensor):
        return splits
    return torch.tensor(splits, dtype=torch.int32, device="cpu")


# -- tensors combined: allreduce, sparse_allreduce, reducescatter --------------------------------------------

# Plain integers, as in Horovod: scripts compare and store them.
Average, Sum, Adasum, Min, Max, Product = map(int, ReduceOp)


def _reduction(op: int | None, average: bool | None, prescale: float, postscale: float) -> Reduction:
    if average is not None:
        if op is not None:
            raise ValueError("pass either op or average, not both; average is the older one")
        warnings.warn("average= is deprecated, pass op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    try:
        return Reduction(ReduceOp(Average if op is None else op), float(prescale), float(postscale))
    except ValueError:
        raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, but is {op!r}") from None


def _compressed(
    kind: str, tensors: Any, compression: Any, reduction: Reduction, name: str | None, process_set: ProcessSet
) -> Any:
    """Run a differentiable reduction of a compressed tensor, or of several as one operation."""
    several = not isinstance(tensors, torch.Tensor)
    pairs = [compression.compress(tensor) for tensor in _tensors_of(kind, tensors)]
    small = [tensor for tensor, _ in pairs]
    results = Reduce.apply(kind, reduction, name, process_set, several, *small)
    restored = [compression.decompress(result, context) for result, (_, context) in zip(results, pairs)]
    return restored if several else restored[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allreduce``; the result goes to a new tensor."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return _start("allreduce", tensor, name, process_set, reduction=reduction)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Average a tensor over the ranks, or combine it by another `op`; differentiable.

    Inputs are multiplied by `prescale_factor`, results by `postscale_factor`. Shapes and types must be
    equal on all ranks.
    """
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return _compressed("allreduce", tensor, compression, reduction, name, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allreduce_``."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return _start("allreduce", tensor, name, process_set, reduction=reduction, inplace=True)


allreduce_ = _waiting(allreduce_async_, "``allreduce`` into the tensor itself; not differentiable.")


grouped_allreduce_async = _grouped(allreduce_async, "Start ``grouped_allreduce``.")
grouped_allreduce = _grouped(allreduce, "``allreduce`` of several tensors as one operation.")
grouped_allreduce_async_ = _grouped(allreduce_async_, "Start ``grouped_allreduce_``.")
grouped_allreduce_ = _waiting(grouped_allreduce_async_, "``grouped_allreduce`` into the tensors themselves.")


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum (or average) of sparse tensors; call the returned function to get the result."""
    indices = allgather_async(tensor._indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish() -> torch.Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(
            all_indices.transpose(0, 1),
            all_values,
            tensor.size(),
            device=tensor.device,
            check_invariants=False,
        )

    return finish


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``reducescatter``."""
    reduction = _reduction(op, None, prescale_factor, postscale_factor)
    return _start("reducescatter", tensor, name, process_set, reduction=reduction)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """``allreduce``, but every rank gets only its part of the first dimension; differentiable.

    The first ranks get one row more if the number of ranks does not divide the rows.
    """
    reduction = _reduction(op, None, prescale_factor, postscale_factor)
    return _compressed("reducescatter", tensor, compression, reduction, name, process_set)


grouped_reducescatter_async = _grouped(reducescatter_async, "Start ``grouped_reducescatter``.")
grouped_reducescatter = _grouped(reducescatter, "``reducescatter`` of several tensors as one operation.")


# -- Python objects ------------------------------------------------------------------------------------------


def dumps(obj: Any) -> torch.Tensor:
    """Return an object as pickled bytes."""
    try:
        import cloudpickle as pickler  # also pickles lambdas and classes of __main__
    except ModuleNotFoundError:
        pickler = pickle
    return torch.frombuffer(bytearray(pickler.dumps(obj)), dtype=torch.uint8)


def loads(data: torch.Tensor) -> Any:
    """Return the object that ``dumps`` has pickled."""
    return pickle.loads(data.numpy().tobytes())


def _refuse(reason: str) -> None:
    raise ValueError(reason)


class _Unsent(str):
    """Why an object could not be pickled; raises ``ValueError`` on the ranks that unpickle it instead."""

    def __reduce__(self) -> Any:
        return _refuse, (str(self),)


def _pickled(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    """Return an object's bytes; if it cannot be pickled, those of an ``_Unsent``, and the exception."""
    try:
        return dumps(obj), None
    except Exception as error:
        reason = f"rank {rank()} could not pickle the {type(obj).__name__} that it was to send: {error}"
        return dumps(_Unsent(reason)), error


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank `root_rank`'s `obj`, which is pickled, on every rank; the root gets `obj` itself."""
    sends = rank() == root_rank
    data, failure = _pickled(obj if sends else None)
    size = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
    broadcast_(size, root_rank, name and f"{name}.length", process_set)
    if not sends:
        data = data.new_empty(int(size))
    broadcast_(data, root_rank, name and f"{name}.data", process_set)
    if failure is not None:
        raise failure
    return obj if sends else loads(data)


def allgather_object(
    obj: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's `obj`, in rank order."""
    data, failure = _pickled(obj)
    # One collective: ranks may give different numbers of bytes, and a pickle tells where it ends.
    gathered = allgather(data, name, process_set).numpy().tobytes()
    if failure is not None:
        raise failure
    stream, objects = io.BytesIO(gathered), []
    while stream.tell() < len(gathered):
        objects.append(pickle.load(stream))
    return objects


# -- gradients, the same with every carrier ------------------------------------------------------------------
#
# Horovod's convention: a script's loss is the average over the ranks. So if all ranks got one rank's values
# (allgather, broadcast), the backward averages their gradients.

_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)


def _run(
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool,
    reduction: Reduction | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run a collective and return one result per tensor."""
    handle = _start(kind, tensors if grouped else tensors[0], name, process_set, reduction=reduction)
    return tuple(synchronize(handle)) if grouped else (synchronize(handle),)


def _reduced(
    gradients: Sequence[torch.Tensor],
    process_set: ProcessSet,
    grouped: bool,
    reduction: Reduction = Reduction(ReduceOp.AVERAGE),  # noqa: B008 - immutable
) -> tuple[torch.Tensor, ...]:
    contiguous = [gradient.contiguous() for gradient in gradients]
    return _run("allreduce", contiguous, None, process_set, grouped, reduction)


class Reduce(Function):
    """An ``allreduce`` or ``reducescatter`` (``kind``) of one tensor, or of several as one operation.

    The backward of an allreduce reduces the gradients in the same way, that of a reducescatter gathers every
    rank's part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        reduction: Reduction,
        name: str | None,
        process_set: ProcessSet,
        grouped: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (kind, process_set, grouped, reduction)
        return _run(kind, tensors, name, process_set, grouped, reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        kind, process_set, grouped, reduction = ctx.arguments
        if reduction.op not in _LINEAR:
            raise NotImplementedError(
                f"{kind} with op={reduction.op.name.title()} has no gradient here; use Average or Sum, or "
                "pass tensor.detach()"
            )
        if kind == "allreduce":
            found = _reduced(gradients, process_set, grouped, reduction)
        else:
            factor = reduction.prescale * reduction.postscale
            if reduction.op is ReduceOp.SUM:
                factor *= process_set.size() or 1
            scaled = [(gradient * factor).contiguous() for gradient in gradients]
            found = _run("allgather", scaled, None, process_set, grouped)
        return (None, None, None, None, None, *found)


class Allgather(Function):
    """One tensor, or several as one operation; the backward averages each rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (process_set, grouped)
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return _run("allgather", tensors, name, process_set, grouped)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        process_set, grouped = ctx.arguments
        averaged = _reduced(gradients, process_set, grouped)
        rows = torch.tensor([ctx.rows], dtype=torch.int64, device="cpu")
        (all_rows,) = _run("allgather", [rows], None, process_set, grouped=False)
        before = all_rows[: process_set.rank()].sum(dim=0).tolist()
        mine = (
            gradient.narrow(0, start, rows)
            for gradient, start, rows in zip(averaged, before, ctx.rows, strict=True)
        )
        return (None, None, None, *mine)


class Broadcast(Function):
    """The backward gives the averaged gradient to the root, zeros to the other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.arguments = (root, process_set)
        return synchronize(_start("broadcast", tensor, name, process_set, root=root))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        root, process_set = ctx.arguments
        (averaged,) = _reduced(gradients, process_set, grouped=False)
        mine = averaged if rank() == root else torch.zeros_like(averaged)
        return mine, None, None, None


class Alltoall(Function):
    """The backward sends each row's gradient back to the rank that the row came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        result, received = synchronize(_start("alltoall", tensor, name, process_set, splits=splits))
        ctx.received, ctx.process_set, ctx.rows = received, process_set, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        handle = _start("alltoall", gradients[0].contiguous(), None, ctx.process_set, splits=ctx.received)
        sent = synchronize(handle)[0]  # fewer rows than the tensor has, if the splits left some out
        kept = sent.new_zeros(ctx.rows - len(sent), *sent.shape[1:])
        return torch.cat([sent, kept]), None, None, None
