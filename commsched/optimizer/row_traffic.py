"""Embeddings whose gradients travel by rows: which ones may, what that sends, and whether it takes less time.

The gradient of an embedding has as many nonzero rows as the batch has tokens. The engine leaves the other
rows of such a bucket out, whatever wrote the gradient, so a wrong choice here costs time and changes no
number. Of a weight tied to a head, the rows are what corrects the head's part (``corrections``).
``docs/decisions/optimizer.md`` has the reasons.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from commsched.backends.interface import Backend
from commsched.collectives.compression import block_code
from commsched.optimizer.buckets import Layout
from commsched.optimizer.model_layers import Model, Rows
from commsched.optimizer.options import Options
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program

Owner = tuple[nn.Module, tuple[int, ...]]
"""A module, and the indices of the parameters that it owns."""

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_START_UPS = 4  # of a bucket of its own: RS, AG, and the counts of rows before each


@dataclass(frozen=True)
class Sent:
    """What a rank sent of one parameter in a step: the bytes of one RS or AG, and the seconds of both."""

    bytes: float
    seconds: float


def first_rows(
    model: Model,
    params: Sequence[nn.Parameter],
    modules: Sequence[Owner],
    backend: Backend,
    asked: Options,
    link: Link,
    given: Profile | None,
    tied: Iterable[int] = (),
) -> dict[int, Rows]:
    """Return the embeddings that travel by rows in the first plan, with the bytes of their whole gradients.

    ``tied``: weights of embeddings and heads whose parts may be sent one after the other.

    With a profile, those of which it has fewer bytes than the gradient. Without one, every embedding that is
    large enough to gain if no row at all were touched: its rows are counted in the first iterations.
    """
    always = asked.row_sparse is True
    obstacle = _obstacle(backend, asked)
    refusal = obstacle or _max_norm(model, modules)
    if always and refusal:
        raise ValueError(
            f"rank {backend.ranks.rank}: row_sparse=True {refusal}; use row_sparse='auto', which sends the"
            " whole gradient there"
        )
    found = [] if obstacle else sorted({*_tables(params, modules), *tied})
    if always and not found:
        warnings.warn(
            "row_sparse=True without effect: no trained parameter belongs to an nn.Embedding or"
            " nn.EmbeddingBag, and to no other module",
            stacklevel=2,
        )
    if not always and given is not None:
        sizes = {layer.name: layer.bytes for layer in given.layers}
        found = [i for i in found if sizes.get(model.names[i], 0) < model.bytes(i)]
    elif not always:
        found = [i for i in found if 2 * link.beta * model.bytes(i) > _START_UPS * link.alpha]
    return {i: Rows(params[i].shape[1], model.bytes(i)) for i in found}


def _tables(params: Sequence[nn.Parameter], modules: Sequence[Owner]) -> list[int]:
    """Return the parameters of embeddings alone: the gradients of others have few zero rows."""
    fit, unfit = set[int](), set[int]()
    for module, mine in modules:
        (fit if _is_table(module) else unfit).update(mine)
    return [i for i in sorted(fit - unfit) if _has_rows(params[i])]


def _is_table(module: nn.Module) -> bool:
    """Whether most rows of its gradient are zero. Of one with ``sparse=True`` all are: the sparse gradient is
    reduced at step time, unless another rank's is dense.
    """
    return isinstance(module, EMBEDDINGS) and module.max_norm is None


def _has_rows(param: nn.Parameter) -> bool:
    return param.dim() == 2 and param.is_contiguous() and param.numel() > 0


def tied_heads(params: Sequence[nn.Parameter], modules: Sequence[Owner]) -> dict[int, nn.Module]:
    """Return the weights that embeddings share with one other module, and that module, the head."""
    tables, heads = set[int](), dict[int, list[nn.Module]]()
    for module, mine in modules:
        for i in mine:
            dense = _is_table(module) and not module.sparse
            tables.add(i) if dense else heads.setdefault(i, []).append(module)
    tied = {i: heads[i][0] for i in sorted(tables & heads.keys()) if len(heads[i]) == 1}
    return {
        i: head
        for i, head in tied.items()
        if not isinstance(head, EMBEDDINGS)
        and _has_rows(params[i])
        and params[i].dtype in (torch.float32, torch.float64)
    }


def _obstacle(backend: Backend, asked: Options) -> str:
    """Return why no gradient of this optimizer can travel by rows; "" if some may."""
    if asked.gather != "gradients":
        return f"needs gather='gradients', got {asked.gather!r}: parameters have no zero rows"
    if not backend.by_rows:
        return f"needs transport 'direct' or 'gloo' on CPUs, but the transport is {backend.name!r}"
    if code := block_code(asked.wire_dtype):
        return f"needs gradients that are not quantised, but compression is Compression.{code}"
    if isinstance(asked.schedule, Program):
        return "needs the name of a policy as the schedule, but it is a Program, whose buckets are whole"
    return ""


def _max_norm(model: Model, modules: Sequence[Owner]) -> str:
    """Return which embedding has ``max_norm``; "" if none."""
    for module, mine in modules:
        if isinstance(module, EMBEDDINGS) and module.max_norm is not None:
            return (
                f"refuses max_norm, but {model.names[mine[0]]} has max_norm={module.max_norm}: the forward"
                " changes the weight on this rank alone"
            )
    return ""


def sent_by_rows(
    events: npt.NDArray[Any], layout: Layout, rows: Mapping[int, Rows], ranks: int
) -> dict[int, Sent]:
    """Return what this rank sent of each parameter in ``rows``: mean bytes and median seconds of the steps.

    An RS or AG of B bytes sends B * (1 - 1/ranks) from each rank; the mean of both counts.
    """
    found = {}
    for i in rows:
        by_rows = [b for b in layout.slots[i].buckets if layout.slices[b].row]
        mine = events[np.isin(events["bucket"], by_rows)]
        steps = {step: mine[mine["step"] == step] for step in set(mine["step"].tolist())}
        if steps:
            seconds = median(float((op["end"] - op["start"]).sum()) for op in steps.values())
            sent = float(mine["bytes"].sum()) / len(steps) / 2
            found[i] = Sent(sent / (1 - 1 / ranks), seconds)
    return found


def counted_rows(
    model: Model, by_rank: Sequence[Mapping[int, Sent]], always: bool, link: Link
) -> dict[int, Rows]:
    """Return the parameters for which rows pay, with the bytes that were sent of them.

    The rank with the most bytes counts, and the rank with the least time, which waited for no other rank.
    Corrections are sent besides the gradient. They are no gain where they take half as long, or where a rank
    has not sent a part early.
    """
    found = {}
    for i, rows in model.rows.items():
        seen = [sent[i] for sent in by_rank if i in sent]
        whole, tied = 2 * link.beta * model.bytes(i), i in model.heads
        pays = not seen or min(sent.seconds for sent in seen) < (whole / 2 if tied else whole)
        if (always or pays) and not (tied and len(seen) < len(by_rank)):
            one = rows.elements * model.dtypes[i].itemsize
            most = round(max((sent.bytes for sent in seen), default=rows.sent))
            found[i] = Rows(rows.elements, min(max(most, one), model.bytes(i)))
    return found
