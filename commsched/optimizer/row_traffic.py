"""Embeddings whose gradients travel by rows: which ones may, what that sends, and whether it takes less time.

The gradient of an embedding has as many nonzero rows as the batch has tokens. The engine leaves the other
rows of such a bucket out, whatever wrote the gradient, so a wrong choice here costs time and changes no
number. ``docs/decisions/optimizer.md`` has the reasons.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from commsched.backends.interface import Backend
from commsched.optimizer.bucket_layout import Layout
from commsched.optimizer.model_layers import Model, Rows
from commsched.optimizer.options import Options
from commsched.optimizer.quantised import WIRE
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
) -> dict[int, Rows]:
    """Return the embeddings that travel by rows in the first plan, with the bytes of their whole gradients.

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
    found = [] if obstacle else _tables(params, modules)
    if always and not found:
        warnings.warn(
            "row_sparse=True without effect: no trained parameter belongs to an nn.Embedding or"
            " nn.EmbeddingBag with sparse=False, and to no other module",
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
        table = isinstance(module, EMBEDDINGS) and not module.sparse and module.max_norm is None
        (fit if table else unfit).update(mine)
    alone = sorted(fit - unfit)
    return [i for i in alone if params[i].dim() == 2 and params[i].is_contiguous() and params[i].numel()]


def _obstacle(backend: Backend, asked: Options) -> str:
    """Return why no gradient of this optimizer can travel by rows; "" if some may."""
    if asked.gather != "gradients":
        return f"needs gather='gradients', got {asked.gather!r}: parameters have no zero rows"
    if not backend.by_rows:
        return f"needs transport 'direct' or 'gloo' on CPUs, but the transport is {backend.name!r}"
    if asked.wire_dtype is WIRE:
        return "needs gradients that are not quantised, but compression is Compression.int8"
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
        mine = events[np.isin(events["bucket"], layout.slots[i].buckets)]
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
    """
    found = {}
    for i, rows in model.rows.items():
        seen = [sent[i] for sent in by_rank if i in sent]
        whole = 2 * link.beta * model.bytes(i)
        if always or not seen or min(sent.seconds for sent in seen) < whole:
            one = rows.elements * model.dtypes[i].itemsize
            most = round(max((sent.bytes for sent in seen), default=rows.sent))
            found[i] = Rows(rows.elements, min(max(most, one), model.bytes(i)))
    return found
